"""Clipping: cases 15 and 16 of the public reports. One norm, the same on every rank, each element counted once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from fsdp.models import Toy, Twins, close, is_projection, next_token_loss, on_all_cells, world_mesh, wrap
from fsdp.test_hsdp import wrap_hsdp

NORM = {"rel": 1e-5}  # fp32: the order of a sum


def wrap_with_ignored_bias(model):
    """Dedicated, sharded and plain parameters in one model."""
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.norm.bias})


def whole_gradients(model):
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def compare_gradients(twins):
    got = whole_gradients(twins.model)
    for name, _, reference in twins.pairs():
        close(f"gradient of {name}", got[name], reference.grad, 1e-5)


def check_clip(*, wrapping, options, norm_type, max_norm, through):
    twins = Twins(wrapping=wrapping, **options)
    optimizer = dmuon.Muon(twins.model, unsynchronized="average")
    twins.backward()
    dmuon.clip_grad_norm_(optimizer, math.inf)  # averages the plain one, changes nothing else
    before = whole_gradients(twins.model)
    target = optimizer if through == "optimizer" else twins.model
    got = dmuon.clip_grad_norm_(target, max_norm, norm_type)
    want = nn.utils.clip_grad_norm_(twins.reference.parameters(), max_norm, norm_type)
    assert type(got) is torch.Tensor
    assert got.shape == ()
    assert got.item() == pytest.approx(want.item(), **NORM)
    compare_gradients(twins)
    if max_norm >= 1e9:
        after = whole_gradients(twins.model)
        assert all(torch.equal(after[name], grad) for name, grad in before.items()), "within the norm, so as it was"
    else:
        again = dmuon.clip_grad_norm_(target, max_norm, norm_type)
        assert again.item() == pytest.approx(max_norm, rel=1e-4)
    return got.item()


def run_clips():
    """Every order, limit and target once on one mesh, with plain parameters beside."""
    norms = []
    for norm_type in (1.0, 2.0, 2.5, math.inf):
        for max_norm, through in ((0.1, "model"), (1e9, "optimizer"), (math.inf, "model")):
            options = {"wrapping": wrap_with_ignored_bias, "options": {}}
            cell = {**options, "norm_type": norm_type, "max_norm": max_norm, "through": through}
            on_all_cells([cell], lambda **cell: norms.append(check_clip(**cell)))
    return norms


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_and_what_it_scales_are_those_of_one_process(ranks, world_size):
    """A norm of this rank's part alone once clipped every rank by another factor."""
    first, *others = ranks(world_size, run_clips)
    assert all(other == first for other in others), "not the same number on all ranks"


def run_clips_on_a_grid():
    rows = [
        (2.0, 0.1, "model", "named"),
        (1.0, 1e9, "optimizer", "named"),
        (math.inf, 0.01, "model", "named"),
        (2.0, 0.1, "model", "unnamed"),
    ]
    norms = []
    for order, limit, through, kind in rows:
        grid = {"wrapping": wrap_hsdp, "options": {"replicas": 2, "shards": 2, "kind": kind}}
        cell = {**grid, "norm_type": order, "max_norm": limit, "through": through}
        on_all_cells([cell], lambda **cell: norms.append(check_clip(**cell)))
    return norms


def test_on_two_dimensions_too(ranks):
    first, *others = ranks(4, run_clips_on_a_grid)
    assert all(other == first for other in others)


class Narrow(nn.Module):
    """FSDP2 has two rows of its last matrix for three ranks."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)))


def wrap_narrow(model):
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "wide" in name)
    return fully_shard(model, mesh=world_mesh())


def clips_without_rows():
    twins = Twins(Narrow, wrapping=wrap_narrow)
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(3, 4, 8, generator=generator)
    twins.backward(lambda model, rank: model(batches[rank]).square().mean())
    for order in (math.inf, 1.0):
        got = dmuon.clip_grad_norm_(twins.model, 0.01, order).item()
        assert got == pytest.approx(nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.01, order).item(), **NORM)
    twins.check_gradients()


def test_a_rank_that_has_no_rows_joins(ranks):
    """The largest of no numbers is an error, on that rank alone."""
    ranks(3, clips_without_rows)


# --- each physical gradient once


def set_gradient(parameter, norm):
    """A gradient of this norm, all of it in one element."""
    whole = torch.zeros(parameter.shape)
    whole.view(-1)[-1] = norm
    if isinstance(parameter, DTensor):
        parameter.grad = torch.zeros_like(parameter)
        if hasattr(parameter.grad, "home"):
            parameter.grad.copy_(whole)
        else:
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    else:
        parameter.grad = whole


def three_four_and_five(replicas, shards):
    model = wrap_hsdp(Toy(), replicas=replicas, shards=shards)
    dedicated, sharded = model.blocks[1].up.weight, model.lm_head.weight
    found = []
    for norms in ((3.0, 4.0), (3.0, None), (None, 4.0), (None, None)):
        for parameter, norm in zip((dedicated, sharded), norms, strict=True):
            parameter.grad = None
            if norm is not None:
                set_gradient(parameter, norm)
        found.append(dmuon.clip_grad_norm_(model, 1e9).item())
    return found


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (4, 1), (1, 4)])
def test_replicas_count_once(ranks, replicas, shards):
    """Summed over the whole grid, a part that replicas repeat is √2 or 2 times too large."""
    for found in ranks(4, three_four_and_five, replicas, shards):
        assert found == pytest.approx([5.0, 3.0, 4.0, 0.0], **NORM)


def plain_gradients_that_differ():
    """Local gradients of a plain parameter: averaged with an optimizer, else measured by their mean over ranks."""
    model = wrap_with_ignored_bias(Toy())
    set_gradient(model.norm.bias, 1.0 if dist.get_rank() == 0 else 7.0)
    without = dmuon.clip_grad_norm_(model, 1e9).item()
    optimizer = dmuon.Muon(model, unsynchronized="average")
    by_model = dmuon.clip_grad_norm_(model, 1e9).item()
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.tensor([0.0, 3.0])
    return without, by_model, dmuon.clip_grad_norm_(optimizer, 1e9).item(), model.norm.bias.grad.max().item()


def test_plain_gradients_never_give_a_norm_of_one_rank_alone(ranks):
    for found in ranks(2, plain_gradients_that_differ):
        assert found == pytest.approx((5.0, 4.0, 5.0, 4.0), **NORM)  # √((1 + 49) / 2); (1 + 7) / 2; √(16 + 9)


def a_pipeline():
    """Two stages of two ranks: 3 and 4 in norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage, _ = mesh.get_coordinate()
    model = wrap(Toy(depth=1 + stage), mesh["data"])
    set_gradient(model.blocks[0].q.weight if stage == 0 else model.lm_head.weight, 3.0 + stage)
    alone = dmuon.clip_grad_norm_(model, 1e9).item()
    limits = {"buckets": {"muon": 1.5}, "process_groups": [mesh["pipeline"].get_group()]}
    whole = dmuon.clip_grad_norm_(model, 1e9, **limits).item()
    return alone, whole, dmuon.clip_grad_norm_(model, 1e9).item()


def test_stages_of_a_pipeline_have_one_norm(ranks):
    found = ranks(4, a_pipeline)
    for stage, (alone, whole, after) in zip((0, 0, 1, 1), found, strict=True):
        assert alone == pytest.approx(3.0 + stage, **NORM)
        assert whole == pytest.approx(5.0, **NORM)
        assert after == pytest.approx(1.5 if stage == 0 else 4.0, **NORM)


# --- buckets


def clip_by_buckets():
    twins = Twins()
    groups = [{"params": "blocks.0.*", "group_name": "first"}]
    optimizer = dmuon.Muon(twins.model, param_groups=groups)
    twins.backward()
    total = dmuon.clip_grad_norm_(optimizer, 0.4, buckets={"first/muon": 0.1, "muon": 0.2}).item()
    everything = list(twins.reference.parameters())
    assert total == pytest.approx(nn.utils.get_total_norm([q.grad for q in everything]).item(), **NORM)
    muon = {name for name, q in twins.reference.named_parameters() if is_projection(name, q)}
    first = {name for name in muon if name.startswith("blocks.0.")}
    rest = {name for name, _ in twins.reference.named_parameters()} - muon
    named = dict(twins.reference.named_parameters())
    for names, limit in ((first, 0.1), (muon - first, 0.2), (rest, 0.4)):
        nn.utils.clip_grad_norm_([named[name] for name in sorted(names)], limit)
    twins.check_gradients()
    by_model = dmuon.clip_grad_norm_(twins.model, math.inf, buckets={"muon": 0.01, "adamw": 0.02})
    left = {kind: [p.grad.full_tensor() for n, p in twins.model.named_parameters() if (n in muon) is kind]
            for kind in (True, False)}  # fmt: skip
    assert nn.utils.get_total_norm(left[True]).item() == pytest.approx(0.01, rel=1e-3)
    assert nn.utils.get_total_norm(left[False]).item() == pytest.approx(0.02, rel=1e-3)
    return by_model.item()


def test_each_bucket_is_clipped_by_its_own_norm(ranks):
    first, second = ranks(2, clip_by_buckets)
    assert first == second


# --- what is not a number, or not there


def odd_gradients():
    twins = Twins()
    found = {"nothing": dmuon.clip_grad_norm_(twins.model, 1.0, error_if_nonfinite=True).item()}
    with dmuon.no_sync(twins.model):
        twins.backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_.*'blocks\.0'.*no_sync"):
        dmuon.clip_grad_norm_(twins.model, 1.0)
    twins.backward()
    if twins.rank == 1:
        dmuon.owned_params(twins.model)[0].param.grad.local[0, 0] = math.inf
    kept = whole_gradients(twins.model)
    found["infinite"] = dmuon.clip_grad_norm_(twins.model, math.inf, buckets={"adamw": 1e9}).item()
    again = whole_gradients(twins.model)
    found["left alone"] = all(torch.equal(again[name], grad) for name, grad in kept.items())
    if twins.rank == 1:
        dmuon.owned_params(twins.model)[0].param.grad.local[0, 0] = math.nan
    kept = whole_gradients(twins.model)
    for p in (1.0, 2.0, math.inf):
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            dmuon.clip_grad_norm_(twins.model, 0.1, p, error_if_nonfinite=True)
    again = whole_gradients(twins.model)
    assert all(torch.equal(again[name].nan_to_num(), grad.nan_to_num()) for name, grad in kept.items())
    found["nan"] = dmuon.clip_grad_norm_(twins.model, 0.1).item()
    found["all nan"] = all(bool(grad.isnan().all()) for grad in whole_gradients(twins.model).values())
    return found


def test_nothing_and_not_a_number(ranks):
    for found in ranks(2, odd_gradients):
        assert found["nothing"] == 0.0
        assert math.isinf(found["infinite"])
        assert found["left alone"], "an infinite limit over an infinite norm is not a number, and clips nothing"
        assert math.isnan(found["nan"])
        assert found["all nan"], "as torch's: not-a-number reaches every gradient, on all ranks alike"


# --- inside the step


def step_that_clips(replicas, shards):
    twins = Twins(wrapping=wrap_hsdp, replicas=replicas, shards=shards)
    twins.optimizers()
    lr = {"lr": 0.02, "ns_backend": dmuon.NewtonSchulz(dtype=torch.float32)}
    twins.optimizer = dmuon.Muon(twins.model, max_grad_norm=0.05, **lr)
    for step in range(3):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.05)
        twins.step()
        twins.check_gradients()
    twins.check_weights()


def test_max_grad_norm_clips_once_in_every_step(ranks):
    ranks(4, step_that_clips, 2, 2)
    ranks(2, step_that_clips, 1, 2)


def refusals():
    model = wrap(Toy())
    said = []
    for call in (
        lambda: dmuon.clip_grad_norm_(model, -1.0),
        lambda: dmuon.clip_grad_norm_(model, math.nan),
        lambda: dmuon.clip_grad_norm_(model, 1.0, 0.0),
        lambda: dmuon.clip_grad_norm_(model, 1.0, buckets={"moun": 1.0}),
        lambda: dmuon.clip_grad_norm_(model, 1.0, buckets={"muon": "1"}),
        lambda: dmuon.clip_grad_norm_(Toy(), 1.0),
        lambda: dmuon.Muon(model, max_grad_norm=-1.0),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            call()
        said.append(str(error.value))
    return said


def test_limits_that_make_no_sense(ranks):
    (said,) = ranks(1, refusals)
    for text, words in zip(
        said,
        ("max_norm", "max_norm", "norm_type", "'moun'", "buckets['muon']", "dedicate_params", "max_grad_norm"),
        strict=True,
    ):
        assert words in text


# --- parameters that are sharded over a further dimension


def beside_tensor_parallel():
    """Feed-forwards over data and tensor parallel ranks, attention dedicated, the rest under FSDP2 alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Toy()
    reference = copy.deepcopy(model)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    attention = tuple(f"{name}.weight" for name in "qkvo")
    dmuon.dedicate_params(model, mesh["data"], lambda name, p: "blocks." in name and name.endswith(attention))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    next_token_loss(model, mesh.get_local_rank("data")).backward()
    for rank in range(2):
        (next_token_loss(reference, rank) / 2).backward()
    found = []
    for max_norm, order in ((1e9, 2.0), (1e9, 1.0), (1e9, math.inf), (0.1, 2.0)):
        got = dmuon.clip_grad_norm_(model, max_norm, order).item()
        assert got == pytest.approx(nn.utils.clip_grad_norm_(reference.parameters(), max_norm, order).item(), **NORM)
        found.append(got)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(f"gradient of {name}", p.grad.full_tensor(), q.grad, 1e-5)
    return found


def test_tensor_parallel_shards_count_once(ranks):
    """torch's own clip stacks norms of two meshes, which raises."""
    first, *others = ranks(4, beside_tensor_parallel)
    assert all(other == first for other in others)
