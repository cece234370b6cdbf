"""One and two forwards before a backward, with and without activation checkpointing, and modules used twice."""

from __future__ import annotations

import functools
import gc
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as activation_checkpoint

from fsdp.models import FEED_FORWARD, VOCABULARY, WIDTH, Block, Toy, Twins, next_token_loss, on_all_cells, tokens


def one_forward(model, rank):
    return next_token_loss(model, rank)


def two_forwards(model, rank):
    """As in DPO: f(x1) - f(x2)."""
    first, second = (model(tokens(rank, step)).square().mean() for step in (1, 2))
    return first - second


LOSSES = {1: one_forward, 2: two_forwards}
# Reentrant checkpointing around fully_shard with two forwards is wrong in FSDP2 2.13 itself, so there is nothing to
# compose with: its post-backward of the first recompute frees what the second has just gathered.
CELLS = [
    {"forwards": forwards, "checkpoint": checkpoint, "outside": outside, "reshard": reshard, "prefetch": prefetch}
    for forwards, checkpoint, outside, reshard, prefetch in itertools.product(
        (1, 2), ("none", "non-reentrant", "reentrant"), (False, True), (True, False), (True, False)
    )
    if not (checkpoint == "none" and outside) and not (checkpoint == "reentrant" and outside and forwards == 2)
]


def check_cell(*, forwards, checkpoint, outside, reshard, prefetch, **mesh):
    twins = Twins(checkpoint=checkpoint, outside=outside, reshard_after_forward=reshard, **mesh)
    if not prefetch:
        for conductor in twins.registration.state.conductors:
            conductor.forward_prefetch = conductor.backward_prefetch = ()
    groups = len(twins.registration.state.groups)
    for _ in range(2):
        twins.model.zero_grad()
        twins.reference.zero_grad()
        before = twins.traffic()[1]
        twins.backward(LOSSES[forwards])
        twins.check_gradients()
        twins.check_at_rest()
        reduces = groups * (forwards if checkpoint == "reentrant" and outside else 1)
        assert twins.traffic()[1] - before == reduces, f"{twins.traffic()[1] - before} reductions, not {reduces}"


def run_cells(cells):
    on_all_cells(cells, check_cell)


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
def test_gradients_under_checkpointing(ranks, checkpoint):
    """A state machine for one forward per backward loses a gradient, or frees what a recompute needs."""
    ranks(2, run_cells, [cell for cell in CELLS if cell["checkpoint"] == checkpoint])


class TwiceLinear(Block):
    """Calls one projection twice in a forward."""

    def attend(self, h_BTD):
        return super().attend(h_BTD) + self.q(self.q(h_BTD))


class TwiceBlock(Toy):
    """Calls every block twice in a forward."""

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(block(x_BTD))
        return self.lm_head(self.norm(x_BTD))


def check_used_twice(*, model, checkpoint, reshard, forwards, **mesh):
    twins = Twins(model, checkpoint=checkpoint, reshard_after_forward=reshard, **mesh)
    twins.backward(LOSSES[forwards])
    twins.check_gradients()
    twins.check_at_rest()
    broadcasts, reduces = twins.traffic()
    assert reduces == len(twins.registration.state.groups)
    if not reshard:
        assert broadcasts == reduces, "resident weights are broadcast once"


def run_used_twice():
    cells = itertools.product(
        (functools.partial(Toy, TwiceLinear), TwiceBlock), ("none", "non-reentrant"), (True, False), (1, 2)
    )
    keys = ("model", "checkpoint", "reshard", "forwards")
    on_all_cells((dict(zip(keys, cell, strict=True)) for cell in cells), check_used_twice)


def test_a_module_used_twice(ranks):
    """A flag instead of a count of uses reduces after the first of two backwards, or frees between the two."""
    ranks(2, run_used_twice)


def measure_memory(checkpoint):
    """Bytes of all live tensors after the 3rd and after the 20th iteration."""
    twins = Twins(checkpoint=checkpoint)
    sizes = []
    for iteration in range(20):
        twins.model.zero_grad()
        two_forwards(twins.model, twins.rank).backward()
        twins.check_at_rest()
        if iteration in (2, 19):
            sizes.append(live_bytes())
    return sizes


def live_bytes():
    """Of all tensors that Python sees. Threads of gloo let go of a collective's a moment after it has ended."""
    dist.barrier()
    time.sleep(0.05)
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if plain(t)}
    return sum(storages.values())


def plain(tensor):
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
def test_memory_is_flat(ranks, checkpoint):
    """A pass that its own tensor hooks keep alive keeps every activation alive with it."""
    for early, late in ranks(2, measure_memory, checkpoint):
        assert early == late


class Containers(nn.Module):
    """Layers are ModuleDicts, which have no forward: their children are called one by one, from a function."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "gate": nn.Linear(WIDTH, FEED_FORWARD, bias=False),
                    "up": nn.Linear(WIDTH, FEED_FORWARD, bias=False),
                    "down": nn.Linear(FEED_FORWARD, WIDTH, bias=False),
                }
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def layer(self, block, x_BTD):
        h_BTD = block["norm"](x_BTD)
        return x_BTD + block["down"](block["gate"](h_BTD) * block["up"](h_BTD))

    def forward(self, x_BTD, reentrant=None):
        for block in self.blocks:
            if reentrant is None:
                x_BTD = self.layer(block, x_BTD)
            else:
                x_BTD = activation_checkpoint.checkpoint(self.layer, block, x_BTD, use_reentrant=reentrant)
        return self.head(x_BTD)


def check_containers(*, reentrant, forwards, reshard, **mesh):
    twins = Twins(Containers, reshard_after_forward=reshard, **mesh)

    def loss(model, rank):
        inputs = (torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(rank + i)) for i in range(forwards))
        return sum(model(x.requires_grad_(), reentrant=reentrant).square().mean() for x in inputs)

    for _ in range(2):
        twins.backward(loss)
        twins.check_gradients()
        twins.check_at_rest()
    assert reentrant or twins.traffic()[1] == 2 * 3


def run_containers():
    cells = [
        {"reentrant": reentrant, "forwards": forwards, "reshard": reshard}
        for reentrant in (None, False, True)
        for forwards in (1, 2)
        for reshard in (True, False)
        if not (reentrant and forwards == 2)
    ]
    on_all_cells(cells, check_containers)


def test_containers_without_a_forward(ranks):
    """No hook of a ModuleDict ever fires; its children's have to do, in a recompute too."""
    ranks(2, run_containers)
