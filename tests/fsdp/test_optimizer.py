"""dmuon.Muon against one process, and torch's own clipping and AdamW on its parameters."""

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
