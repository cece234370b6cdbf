"""HSDP beside the cases of one mesh: the same checks with two replicas of two shards, many in one start of ranks."""

from __future__ import annotations

import functools
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import dmuon
from dmuon_fsdp.api import registration_of
from fsdp.models import Toy, on_all_cells, world_mesh, wrap
from fsdp.test_checkpointing import CELLS, TwiceBlock, check_cell, check_containers, check_used_twice, live_bytes
from fsdp.test_hooks import (
    METHODS,
    PACKINGS,
    UNUSUAL_INPUTS,
    Slicing,
    check_method,
    check_model,
    check_packing,
    run_evaluation_between,
    run_generation,
)
from fsdp.test_hsdp import wrap_hsdp
from fsdp.test_module_life import (
    check_accumulation,
    check_failure,
    check_two_backwards,
    run_accumulation_with_sync,
    run_resident_between_micro_batches,
    two_forwards,
    two_losses,
)
from fsdp.test_unused import USERS, check_expert, check_layer_drop, check_routed, run_after_junk

REPLICAS = {"replicas": 2}
BOTH = (True, False)


def cells(**axes):
    """Every combination, under HSDP."""
    return [{**dict(zip(axes, values, strict=True)), **REPLICAS} for values in itertools.product(*axes.values())]


# --- hooks


def run_checkpointing():
    on_all_cells(({**cell, **REPLICAS} for cell in CELLS if cell["prefetch"]), check_cell)
    on_all_cells(cells(model=(TwiceBlock,), checkpoint=("none",), reshard=BOTH, forwards=(2,)), check_used_twice)
    on_all_cells(cells(reentrant=(None, False), forwards=(2,), reshard=BOTH), check_containers)


def test_checkpointing_and_two_forwards(ranks):
    """The second stage of a reduction once had one state for all uses of a group."""
    ranks(4, run_checkpointing)


def run_forms_of_forward():
    on_all_cells(cells(packing=tuple(PACKINGS), reshard=BOTH), check_packing)
    on_all_cells(cells(model=(*UNUSUAL_INPUTS, functools.partial(Toy, Slicing)), reshard=BOTH), check_model)
    on_all_cells(({**method, **REPLICAS} for method in METHODS), check_method)
    run_generation([2, 3, 1, 3], forwards=3, **REPLICAS)
    with_it, without = (run_evaluation_between(evaluate, **REPLICAS) for evaluate in BOTH)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_outputs_inputs_methods_and_generation(ranks):
    """A publish that only a training forward takes leaves evaluation with the weights of the step before."""
    ranks(4, run_forms_of_forward)


# --- gradients


def run_what_is_unused():
    some = {"set_to_none": (True,), "steps": (3,)}
    on_all_cells(cells(users=tuple(USERS), reshard_after_forward=(True,), **some), check_expert)
    on_all_cells(cells(users=("alternating",), reshard_after_forward=(False,), **some), check_expert)
    on_all_cells(cells(reshard=BOTH), check_routed)
    on_all_cells(cells(reshard=BOTH, checkpoint=("none",)), check_layer_drop)


def test_experts_and_layers_that_some_ranks_or_all_do_without(ranks):
    """A gradient that one replica alone has is the mean over all ranks, with zeros for the others."""
    ranks(4, run_what_is_unused)


def run_accumulation_and_failures():
    on_all_cells(cells(how=("no_sync", "switch"), reshard=BOTH, checkpoint=("none",)), check_accumulation)
    run_accumulation_with_sync(**REPLICAS)
    run_resident_between_micro_batches(**REPLICAS)
    on_all_cells(cells(losses=(two_losses, two_forwards), reshard=BOTH, checkpoint=("none",)), check_two_backwards)
    failures = cells(where=("forward", "backward"), block=(0, 1), checkpoint=("none",), reshard=BOTH)
    failures += cells(where=("backward",), block=(0,), checkpoint=("non-reentrant",), reshard=(True,))
    on_all_cells(failures, check_failure)


def test_accumulation_and_exceptions_on_every_rank(ranks):
    """What a replica had summed before an exception must be gone after the reset, and nothing else."""
    ranks(4, run_accumulation_and_failures)


class Scaled(nn.Module):
    """Matrices of which a forward uses some; the gradient of each is the scale that it is given, everywhere."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.ones(8, 8) for name in "abcd"})

    def forward(self, scales):
        return sum((self.weights[name] * scale).sum() for name, scale in scales.items())


class ScaledToy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scaled()])

    def forward(self, scales):
        return self.blocks[0](scales)


# A parameter used always, one first in the last micro-batch, one in the first alone, and one never.
MICRO_BATCHES = [{"a": 256.0, "c": 256.0}, {"a": 1.0}, {"a": 1.0}, {"a": 1.0, "b": 3.0}]
SUMS = {"a": 259.0, "b": 3.0, "c": 256.0, "d": 0.0}


def check_first_used_last(*, control, reshard_after_forward, **options):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap(ScaledToy(), mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    optimizer = dmuon.Muon(model)
    for index, scales in enumerate(MICRO_BATCHES):
        getattr(model, control)(index == len(MICRO_BATCHES) - 1)
        model({name: torch.tensor(scale) for name, scale in scales.items()}).backward()
        if index == 1 and (control == "set_requires_gradient_sync" or "replicas" in options):
            with pytest.raises(RuntimeError, match="not reduced"):
                optimizer.step()
    for name, parameter in model.blocks[0].weights.items():
        grad = parameter.grad.full_tensor()
        assert grad.dtype == torch.float32
        assert (grad == SUMS[name]).all(), f"{name}: {grad[0, 0]}"
    before = model.blocks[0].weights["d"].full_tensor()
    optimizer.step()
    assert torch.equal(model.blocks[0].weights["d"].full_tensor(), before)


def run_first_used_last(**options):
    for control in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for reshard in BOTH:
            check_first_used_last(control=control, reshard_after_forward=reshard, **options)


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, {}), (4, REPLICAS)])
def test_a_parameter_first_used_on_the_last_micro_batch(ranks, world_size, options):
    """Its gradient is fresh from autograd, in bf16, beside sums in fp32, of which 257 is no bf16 number."""
    ranks(world_size, run_first_used_last, **options)


# --- clipping


def check_norms(*, replicas, shards):
    torch.manual_seed(0)
    model = wrap_hsdp(Toy(), replicas=replicas, shards=shards)
    dedicated = dmuon.dedicated_params(model)[0]
    theirs = model.lm_head.weight
    for ours_norm, theirs_norm, total in ((3.0, 4.0, 5.0), (3.0, None, 3.0), (None, 4.0, 4.0)):
        dedicated.param.grad = theirs.grad = None
        if ours_norm is not None:
            whole = _of_norm(dedicated.shape, ours_norm)
            dedicated.param.grad = dedicated.owned.like(whole if dedicated.is_owner else whole[:0])
        if theirs_norm is not None:
            theirs.grad = distribute_tensor(_of_norm(theirs.shape, theirs_norm), theirs.device_mesh, theirs.placements)
        for limit in (1e9, total / 2):
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            assert found.full_tensor().item() == pytest.approx(total, rel=1e-5)
        for parameter, norm in ((dedicated.param, ours_norm), (theirs, theirs_norm)):
            if norm is not None:
                assert parameter.grad.full_tensor().norm().item() == pytest.approx(norm / 2, rel=1e-5)


def _of_norm(shape, norm):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return grad * (norm / grad.norm())


def run_norms():
    on_all_cells(({"replicas": r, "shards": 4 // r} for r in (1, 2, 4)), check_norms)


def test_every_gradient_counts_once_in_torchs_norm(ranks):
    """Summed over replicas too, a part of the norm is off by the square root of their number."""
    ranks(4, run_norms)


# --- lifetimes and disorder


class Matrices(nn.Module):
    """24 matrices of one size in six blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def stressed(steps, replicate_async):
    """Steps from random gradients, with garbage of the buffers' size between each and the forward that follows.

    Returns:
        The weights; bytes of all live tensors after the tenth and the last step.
    """
    torch.manual_seed(0)
    model, mesh = Matrices(), world_mesh(**REPLICAS)
    dmuon.dedicate_params(model, mesh["shard"], lambda name, p: True, replicate_mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, ns_steps=2, replicate_async=replicate_async)
    members, sizes = dmuon.dedicated_params(model), []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for member in members:
            grad = torch.randn(member.shape, generator=generator)
            member.param.grad = member.owned.like(grad if member.is_owner else grad[:0])
        optimizer.step()
        optimizer.zero_grad()
        junk = [torch.full((32 * 32 * count,), float("nan")) for count in (1, 2, 3, 4) for _ in range(8)]
        del junk, grad
        if step % 10 == 3:
            gc.collect()
            assert len(model.state_dict()) == len(members)
        check_the_same_on_all_ranks(model)
        if step in (9, steps - 1):
            sizes.append(live_bytes())
    weights = [member.owned.full_tensor().detach() for member in members]
    for member in members:
        member.param.grad = member.owned.like(torch.ones_like(member.owned.local))
    optimizer.step()  # and leave with its publishes under way
    return weights, sizes


def check_the_same_on_all_ranks(model):
    """What a forward computes with, bit for bit."""
    seen = []
    for group in registration_of(model).state.groups:
        group.make_ready()
        seen += [member.unsharded.detach().flatten() for member in group.members]
    mine = torch.cat(seen)
    model.reshard()
    registration_of(model).rest()
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    assert all(torch.equal(other, mine) for other in everybodys)
    assert mine.isfinite().all()


def run_stress():
    one, (early, late) = stressed(40, replicate_async=True)
    assert early == late, f"live tensors took {early} bytes after ten steps, {late} at the end"
    other, _ = stressed(40, replicate_async=False)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_garbage_between_a_step_and_the_next_forward(ranks):
    """The input of an asynchronous publish, freed too early, is garbage on the other replicas."""
    ranks(4, run_stress)


def test_hash_seeds_and_addresses_decide_nothing(ranks):
    """What is in the order of a set or of addresses is in another order on every rank: owners, buckets, collectives."""
    seeds = [{"PYTHONHASHSEED": seed} for seed in ("1", "12345", "77", "4")]
    first, *others = ranks(4, run_after_junk, env=seeds, **REPLICAS)
    assert all(other == first for other in others)
