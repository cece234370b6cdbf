"""Models of the transformers library, built from configurations, train as they do in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import dmuon
from fsdp.models import Twins, close, on_all_cells
from fsdp.transformer_models import LR, MODELS, SEES_MODEL_OUTPUTS, STEPS, needs_transformers, wrap_blocks

LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 5e-3  # fp32: the order of reductions, which every step's Newton-Schulz amplifies


def train(kind):
    make, loss, _ = MODELS[kind]
    twins = Twins(make, wrapping=wrap_blocks, kind=kind)
    twins.optimizers(weight_decay=0.1, lr=LR)
    losses = []
    for step in range(STEPS):
        twins.zero_grad()
        mine = loss(twins.model, twins.rank, step)
        mine.backward()
        theirs = [loss(twins.reference, rank, step) for rank in range(twins.world_size)]
        (sum(theirs) / twins.world_size).backward()
        close(f"loss of step {step}", mine.detach(), theirs[twins.rank].detach(), LOSS_TOLERANCE)
        if step == 0:
            twins.check_gradients()
        twins.step()
        losses.append(sum(theirs).item())
    twins.check_weights(WEIGHT_TOLERANCE)
    twins.check_at_rest()
    assert sum(losses[-3:]) < sum(losses[:3]), "it learns nothing"
    assert len({member.owner for member in dmuon.dedicated_params(twins.model)}) == dist.get_world_size()


def train_all():
    on_all_cells(({"kind": kind} for kind in MODELS), train)


@needs_transformers
@pytest.mark.skipif(not SEES_MODEL_OUTPUTS, reason="FSDP2 before torch 2.13 looks into no ModelOutput")
def test_models_of_transformers_train_as_in_one_process(ranks):
    ranks(2, train_all)
