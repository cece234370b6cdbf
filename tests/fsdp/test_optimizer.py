"""dmuon.Muon against one process, and as a torch.optim.Optimizer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

import dmuon
from dmuon_core import Muon as ReferenceMuon
from dmuon_fsdp.runtime.layout import local_of
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.models import Toy, Twins, close, is_projection, next_token_loss, world_mesh, wrap


def train_beside_one_process(steps, **options):
    twins = Twins(**options)
    twins.optimizers(weight_decay=0.1)
    for step in range(steps):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        if step == 0:
            twins.check_gradients()
        broadcasts, reduces = twins.traffic()
        twins.step()
        assert twins.traffic() == (broadcasts, reduces), "a step makes no collective"
    twins.check_weights()
    twins.check_at_rest()
    return [member.owner.shard for member in dmuon.dedicated_params(twins.model)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_process_on_all_batches(ranks, world_size):
    owners = ranks(world_size, train_beside_one_process, 5)
    assert all(each == owners[0] for each in owners)
    assert set(owners[0]) == set(range(world_size))


def only_two_matrices(name, parameter):
    return name in ("blocks.0.q.weight", "blocks.1.up.weight")


def train_with_ranks_that_own_nothing():
    return train_beside_one_process(3, predicate=only_two_matrices)


def test_ranks_that_own_nothing_still_join(ranks):
    owners = ranks(4, train_with_ranks_that_own_nothing)
    assert len(set(owners[0])) == 2


def stages_of_a_pipeline():
    """Two stages of two ranks, each with a model of its own: nobody outside a mesh takes part in its groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage, rank = mesh.get_coordinate()
    torch.manual_seed(0)
    model = Toy(depth=1 + stage)
    reference = copy.deepcopy(model)
    wrap(model, mesh["data"])
    optimizer = dmuon.Muon(model, 0.02, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))
    next_token_loss(model, rank).backward()
    optimizer.step()
    for other in range(2):
        (next_token_loss(reference, other) / 2).backward()
    matrices = [q for name, q in reference.named_parameters() if is_projection(name, q)]
    in_fp32 = dmuon.NewtonSchulz(dtype=torch.float32)
    ReferenceMuon(matrices, 0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_backend=in_fp32).step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if is_projection(name, q):
            close(name, p.full_tensor(), q, 5e-3)
    return [member.param.owner for member in dmuon.dedicated_params(model)]


def test_stages_of_a_pipeline_have_models_of_their_own(ranks):
    first, same, second, also = ranks(4, stages_of_a_pipeline)
    assert first == same
    assert second == also
    assert (set(first), set(second)) == ({0, 1}, {2, 3})


def seeded():
    return train_beside_one_process(1)


def test_ranks_with_other_hash_seeds_have_the_same_owners(ranks):
    """An owner map that followed the order of a set once differed between ranks."""
    first, second = ranks(2, seeded, env=[{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}])
    assert first == second


def models_are_let_go():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model)
    for step in range(2):
        next_token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    alive = weakref.ref(model), weakref.ref(model.blocks[0].q)
    del model, optimizer
    gc.collect()
    return [reference() is None for reference in alive]


def test_a_model_that_is_dropped_is_freed(ranks):
    assert ranks(2, models_are_let_go) == [[True, True]] * 2


# --- bit for bit


SHAPES = ((48, 64), (64, 48), (64, 64), (64, 64), (64, 64), (1, 32), (176, 64))


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in SHAPES)


def with_given_gradients(steps, decay):
    """Equal small integers on every rank, as if reduced: what is left is the owners' step itself."""
    torch.manual_seed(0)
    reference = Matrices()
    model = copy.deepcopy(reference)
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: True)
    fully_shard(model, mesh=world_mesh())
    optimizer = dmuon.Muon(
        model, 0.02, weight_decay=decay, ns_backend=dmuon.NewtonSchulz(deterministic=True), adjust_lr_fn="original"
    )
    oracle = ReferenceMuon(
        reference.parameters(), 0.02, weight_decay=decay, ns_backend=dmuon.NewtonSchulz(deterministic=True)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = torch.randint(-8, 9, q.shape, generator=generator).float()
            p.grad = torch.zeros_like(p)
            p.grad.copy_(q.grad)
        optimizer.step()
        oracle.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
        state, theirs = optimizer.state[p]["momentum_buffer"], oracle.state[q]["momentum_buffer"]
        assert torch.equal(state.full_tensor(), theirs)
    return sum(isinstance(p, OwnedTensor) and p.is_owner for p in model.parameters())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_owners_step_is_bitwise_that_of_one_process(ranks, world_size):
    """Batches differ between owners and one process; deterministic=True must make that invisible."""
    assert sum(ranks(world_size, with_given_gradients, 3, 0.1)) == len(SHAPES)


# --- AdamW, clipping, scaling


def adamw_side():
    twins = Twins()
    twins.optimizers()
    oracle = torch.optim.AdamW(
        [q for name, q in twins.reference.named_parameters() if not is_projection(name, q)], lr=1e-3, weight_decay=0.01
    )
    for step in range(3):
        twins.zero_grad()
        for (_, p, q), seed in zip(twins.pairs(), range(1000), strict=False):
            generator = torch.Generator().manual_seed(100 * step + seed)
            q.grad = torch.randn(q.shape, generator=generator)
            p.grad = torch.zeros_like(p)
            p.grad.copy_(q.grad if isinstance(p, OwnedTensor) else _sharded(q.grad, p))
        twins.optimizer.step()
        oracle.step()
    for name, p, q in twins.pairs():
        if not is_projection(name, q):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-6, atol=1e-7)


def _sharded(whole, like):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def test_the_rest_is_adamw_as_torch_has_it(ranks):
    ranks(3, adamw_side)


def clip_with_torch(norm_type, foreach):
    for max_norm in (0.05, 1e9):
        twins = Twins()
        twins.backward()
        before = [p.grad.full_tensor().clone() for p in twins.model.parameters()]
        got = nn.utils.clip_grad_norm_(twins.model.parameters(), max_norm, norm_type, foreach=foreach)
        want = nn.utils.clip_grad_norm_(twins.reference.parameters(), max_norm, norm_type)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        twins.check_gradients()
        if max_norm > 1:
            for p, g in zip(twins.model.parameters(), before, strict=True):
                assert torch.equal(p.grad.full_tensor(), g)
    return got.item()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_torchs_own_clipping_is_right_on_all_ranks(ranks, norm_type, foreach):
    norms = ranks(3, clip_with_torch, norm_type, foreach)
    assert len(set(norms)) == 1


def another_optimizer(fused, foreach):
    """Dedicated parameters in a list of FSDP2's, with a plain one and a frozen one between."""
    torch.manual_seed(0)
    model = Toy()
    model.blocks[0].norm1.weight.requires_grad_(False)
    model.blocks[1].q.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    bias = model.norm.bias
    fully_shard(model, mesh=mesh, ignored_params={bias})
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p is not bias], lr=1e-2, fused=fused, foreach=foreach
    )
    oracle = torch.optim.AdamW([q for n, q in reference.named_parameters() if n != "norm.bias"], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        oracle.zero_grad()
        next_token_loss(model, dist.get_rank(), step).backward()
        for rank in range(dist.get_world_size()):
            (next_token_loss(reference, rank, step) / dist.get_world_size()).backward()
        optimizer.step()
        oracle.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        close(name, whole, q, 5e-3)
    assert model.blocks[1].q.weight.grad is None


@pytest.mark.parametrize(("fused", "foreach"), [(None, None), (None, True), (None, False), (True, None)])
def test_torchs_adamw_takes_dedicated_sharded_and_frozen_parameters_in_one_list(ranks, fused, foreach):
    ranks(2, another_optimizer, fused, foreach)


def mixed_kinds():
    """A plain parameter of the user's ignored_params, a frozen dedicated and a frozen sharded one."""
    twins = Twins(wrapping=_wrap_with_ignored_bias)
    reference_groups = {"muon": [], "adamw": []}
    for name, q in twins.reference.named_parameters():
        reference_groups["muon" if is_projection(name, q) else "adamw"].append(q)
    twins.optimizer = dmuon.Muon(
        twins.model, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32), unsynchronized="average"
    )
    twins.reference_optimizer = ReferenceMuon(
        [
            {"params": reference_groups["muon"], "lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
            {"params": reference_groups["adamw"], "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        ],
        ns_backend=dmuon.NewtonSchulz(dtype=torch.float32),
    )
    frozen = ("blocks.0.q.weight", "blocks.0.norm1.weight")
    before = {}
    for name, p, q in twins.pairs():
        if name in frozen:
            p.requires_grad_(False)
            q.requires_grad_(False)
            before[name] = q.clone()
    twins.train(3)
    for name, p, q in twins.pairs():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        close(name, whole, q, 5e-3)
        if name in frozen:
            assert torch.equal(whole, before[name])
            state = twins.optimizer.state[p].values()
            assert not any(local_of(value).any() for value in state), "as it began"


def _wrap_with_ignored_bias(model):
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.norm.bias})


def test_plain_sharded_dedicated_and_frozen_parameters_in_one_step(ranks):
    """foreach lists of mixed kinds fail inside torch."""
    ranks(2, mixed_kinds)


# --- groups and options


def groups_by_names():
    model = wrap(Toy())
    norm = model.norm.weight
    optimizer = dmuon.Muon(
        model,
        0.02,
        adamw_lr=1e-3,
        param_groups=[
            {"params": "blocks.0.*", "group_name": "first", "lr": 0.5, "muon_lr": 0.25, "adamw_weight_decay": 0.0},
            {"params": ["*.q.weight", norm], "group_name": "some", "momentum": 0.5, "tag": "kept"},
        ],
    )
    shown = {}
    for group in optimizer.param_groups:
        keys = ("lr", "momentum", "weight_decay", "algorithm")
        shown[group["group_name"]] = (sorted(group["param_names"]), *[group[key] for key in keys], group.get("tag"))
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}
    assert len(everything) == len(list(model.parameters()))
    return shown


def test_groups_take_names_patterns_and_parameters_first_match_wins(ranks):
    got = ranks(2, groups_by_names)
    assert got[0] == got[1]
    groups = got[0]
    assert list(groups) == ["first/muon", "first/adamw", "some/muon", "some/adamw", "muon", "adamw"]
    assert groups["first/muon"][0] == sorted(f"blocks.0.{n}.weight" for n in ("q", "k", "v", "o", "gate", "up", "down"))
    assert groups["first/muon"][1:] == (0.25, 0.95, 0.0, "muon", None)
    assert groups["first/adamw"][1:] == (0.5, 0.95, 0.0, "adamw", None)
    assert groups["some/muon"] == (["blocks.1.q.weight"], 0.02, 0.5, 0.0, "muon", "kept")
    assert groups["some/adamw"][0] == ["norm.weight"]
    assert len(groups["muon"][0]) == 6
    assert "embed.weight" in groups["adamw"][0]


def changes_are_proportional_to_lr():
    moved = []
    for factor in (1.0, 0.5):
        torch.manual_seed(0)
        model = wrap(Toy())
        optimizer = dmuon.Muon(model, 0.02, param_groups=[{"params": "blocks.0.*", "group_name": "first"}])
        LambdaLR(optimizer, lambda step, factor=factor: factor)
        before = {member.fqn: member.param.full_tensor() for member in dmuon.dedicated_params(model)}
        next_token_loss(model, dist.get_rank()).backward()
        optimizer.step()
        moved.append({m.fqn: (m.param.full_tensor() - before[m.fqn]).norm() for m in dmuon.dedicated_params(model)})
    for name, whole in moved[0].items():
        assert whole > 0
        torch.testing.assert_close(moved[1][name], whole / 2, rtol=1e-3, atol=0)


def test_the_owners_step_takes_the_learning_rate_of_the_group(ranks):
    ranks(2, changes_are_proportional_to_lr)


def schedulers():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model, 0.02, adamw_lr=1e-3)
    next_token_loss(model, dist.get_rank()).backward()
    rates = []
    for make in (
        lambda: LambdaLR(optimizer, [lambda s: 0.5, lambda s: 0.5]),
        lambda: CosineAnnealingLR(optimizer, 10),
        lambda: OneCycleLR(optimizer, [0.02, 1e-3], total_steps=10),
        lambda: ReduceLROnPlateau(optimizer),
        lambda: SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda s: 0.1), LambdaLR(optimizer, lambda s: 1.0)], milestones=[2]
        ),
    ):
        for group, lr in zip(optimizer.param_groups, (0.02, 1e-3), strict=True):
            group["lr"] = lr
            group.pop("initial_lr", None)
        scheduler = make()
        for _ in range(3):
            optimizer.step()
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def test_schedulers_keep_the_ratio_of_the_groups(ranks):
    got = ranks(2, schedulers)
    assert got[0] == got[1]
    for muon, adamw in got[0]:
        assert muon == pytest.approx(20 * adamw)


def tensor_lr():
    weights = []
    for lr, adamw_lr in ((0.02, 1e-3), (torch.tensor(0.02), torch.tensor(1e-3))):
        torch.manual_seed(0)
        model = wrap(Toy())
        optimizer = dmuon.Muon(model, lr, adamw_lr=adamw_lr, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(5):
            optimizer.zero_grad()
            next_token_loss(model, dist.get_rank(), step).backward()
            optimizer.step()
            scheduler.step()
        weights.append([p.full_tensor() for p in model.parameters()])
        assert all(isinstance(group["lr"], type(lr)) for group in optimizer.param_groups)
    for a, b in zip(*weights, strict=True):
        close("weight", b, a, 1e-5)


def test_a_tensor_for_lr_equals_a_number(ranks):
    ranks(2, tensor_lr)


def as_an_optimizer():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = next_token_loss(model, dist.get_rank())
        loss.backward()
        calls.append("closure")
        return loss

    first, second = optimizer.step(closure).item(), optimizer.step(closure).item()
    assert second < first
    assert calls == ["pre", "closure", "post"] * 2
    for p in model.parameters():
        assert optimizer.state[p], "on every rank, also where nothing is owned"
    buffers = [optimizer.state[m.param]["momentum_buffer"] for m in dmuon.dedicated_params(model)]
    assert all(b.dtype == torch.float32 and b.shape == torch.Size(b.shape) for b in buffers)
    foreign = sum(b.local.untyped_storage().nbytes() for b in buffers if not b.is_owner)
    assert foreign == 0
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and p.grad.full_tensor().abs().max() == 0 for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = [p.full_tensor().clone() for p in model.parameters()]
    optimizer.step()  # no gradient at all: as torch, nothing happens
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    next_token_loss(model, dist.get_rank()).backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return sorted(optimizer.state_dict()["param_groups"][0]["param_names"])


def test_it_is_a_torch_optimizer_with_closure_hooks_and_state_on_every_rank(ranks):
    first, second, third = ranks(3, as_an_optimizer)
    assert first == second == third


def adds_a_group():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model, adamw_lr=1e-3, adamw_weight_decay=0.3)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    group = optimizer.param_groups[-1]
    assert (group["algorithm"], group["lr"], group["weight_decay"]) == ("adamw", 0.1, 0.3)
    extra.grad = torch.ones(3)
    optimizer.step()
    assert (extra < 1).all()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.norm.weight]})
    other = wrap(Toy())
    dedicated = dmuon.dedicated_params(other)[0].param
    with pytest.raises(ValueError, match="no dedicated parameter of the model"):
        optimizer.add_param_group({"params": [dedicated], "algorithm": "muon"})
    assert len(optimizer.param_groups) == 3
    other_optimizer = dmuon.Muon([model, other])  # one optimizer over two models
    assert len(other_optimizer.param_groups[0]["params"]) == 28


def test_groups_can_be_added_and_several_models_given(ranks):
    ranks(2, adds_a_group)


def accumulated_and_not_reduced():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model)
    with dmuon.no_sync(model):
        next_token_loss(model, dist.get_rank()).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_step_on_gradients_that_were_not_reduced_is_refused(ranks):
    for message in ranks(2, accumulated_and_not_reduced):
        assert "no_sync" in message
        assert "blocks.0" in message


def kernel_line():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model)
    before = dmuon.get_ns_backend(optimizer)
    next_token_loss(model, dist.get_rank()).backward()
    optimizer.step()
    return before, dmuon.get_ns_backend(optimizer)


def test_the_line_on_the_kernel_and_its_launches(ranks):
    for before, after in ranks(2, kernel_line):
        assert before.startswith("Gram NS · kernel=torch (CPU, reference)")
        assert after.startswith("Gram NS · kernel=torch (CPU, reference)")
        assert after != before
        assert "torch" in after[len(before) :]
