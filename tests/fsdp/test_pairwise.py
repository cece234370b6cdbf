"""Every pair of settings that meet in a training step, against one process."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from fsdp.models import Twins, checkpoint_blocks, close, next_token_loss, on_all_cells, wrap
from fsdp.test_hsdp import wrap_hsdp

FACTORS = {
    "reshard": (False, True),
    "mesh": ("1-D", "HSDP"),
    "dtype": ("fp32", "bf16"),
    "checkpointing": ("none", "reentrant", "non-reentrant"),
    "accumulate": (1, 4),
    "compiled": (False, True),
}
ROWS = [
    (False, "1-D", "fp32", "non-reentrant", 4, True),
    (False, "1-D", "bf16", "none", 4, False),
    (True, "1-D", "bf16", "reentrant", 1, True),
    (True, "HSDP", "bf16", "non-reentrant", 1, False),
    (True, "HSDP", "fp32", "none", 1, True),
    (False, "HSDP", "fp32", "reentrant", 1, False),
    (True, "HSDP", "bf16", "reentrant", 4, False),
]
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
# Relative error of gradients and of weights after two steps; in bf16 that of the compute, against fp32.
TOLERANCES = {"fp32": (1e-5, 5e-3), "bf16": (5e-2, 3e-2)}


def test_the_rows_hold_every_pair():
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        held = {(row[i], row[j]) for row in ROWS}
        assert held == set(itertools.product(first, second)), f"{list(FACTORS)[i]} × {list(FACTORS)[j]}"


def wrap_as_told(model, *, mesh, checkpointing, compiled, **shard):
    if compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    if mesh == "1-D":
        return wrap(model, checkpoint=checkpointing, **shard)
    checkpoint_blocks(model, checkpointing)
    return wrap_hsdp(model, replicas=2, shards=2, **shard)


def check(*, reshard, mesh, dtype, checkpointing, accumulate, compiled):
    torch._dynamo.reset()
    twins = Twins(
        wrapping=wrap_as_told,
        mesh=mesh,
        checkpointing=checkpointing,
        compiled=compiled,
        reshard_after_forward=reshard,
        mp_policy=POLICIES[dtype],
    )
    twins.optimizers(weight_decay=0.1, lr=0.01)
    in_gradients, in_weights = TOLERANCES[dtype]
    for step in range(2):
        twins.zero_grad()
        reduced = twins.traffic()[1]
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else dmuon.no_sync(twins.model):
                twins.backward(
                    lambda model, rank, i=accumulate * step + micro: next_token_loss(model, rank, i) / accumulate
                )
        assert twins.traffic()[1] - reduced == len(twins.registration.state.groups), "one reduction a group and step"
        if step == 0:
            check_dedicated(twins, lambda p: p.grad, in_gradients)
        twins.step()
    check_dedicated(twins, lambda p: p, in_weights)
    twins.check_at_rest()
    dmuon.wait_for_publish(twins.model)


def check_dedicated(twins, of, tolerance):
    """All parameters in fp32; in bf16 the matrices, whose gradients are no sums of few numbers."""
    for name, parameter, reference in twins.pairs():
        if tolerance < 1e-2 or name in twins.registration.params:
            close(name, of(parameter).full_tensor(), of(reference), tolerance)


def run_rows(mesh):
    cells = [dict(zip(FACTORS, row, strict=True)) for row in ROWS]
    on_all_cells([cell for cell in cells if cell["mesh"] == mesh], check)
    return dist.get_world_size()


@pytest.mark.parametrize(("mesh", "world_size"), [("1-D", 2), ("HSDP", 4)])
def test_every_pair_of_settings_trains_as_one_process(ranks, mesh, world_size):
    ranks(world_size, run_rows, mesh, timeout_s=170)
