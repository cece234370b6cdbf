"""Masters: a bf16 parameter whose steps are too small for bf16, against one process that steps in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon_core import Muon as ReferenceMuon
from fsdp.models import world_mesh
from fsdp.test_hsdp import grid

SHAPES = ((48, 64), (64, 48), (64, 64), (32,))
SMALL = 1e-3  # a step moves a weight near 1 by less than half a unit in the last place of bf16


class Weights(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [1 + torch.rand(shape, generator=generator) for shape in SHAPES]
        self.layers = nn.ParameterList([nn.Parameter(values.to(dtype)) for values in drawn])


def policies(master):
    in_fp32 = torch.float32 if master else None
    return [
        dmuon.ParamPolicy("*", master_dtype=in_fp32),
        dmuon.ParamPolicy("layers.3", route="adamw"),
    ]


def wrapped(*, master=True, replicas=1):
    model = Weights(torch.bfloat16)
    mesh = grid(replicas, dist.get_world_size() // replicas, "named")
    names = {"replicate_mesh": mesh["replicate"], "param_policy": policies(master)}
    dmuon.dedicate_params(model, mesh["shard"], lambda name, p: True, **names)
    fully_shard(model, mesh=mesh)
    ns = dmuon.NewtonSchulz(deterministic=True)
    return model, dmuon.Muon(model, SMALL, weight_decay=0.1, adamw_lr=SMALL, adamw_weight_decay=0.1, ns_backend=ns)


def reference():
    """fp32 throughout, from the same bf16 values."""
    model = Weights(torch.bfloat16).float()
    *matrices, vector = model.layers
    muon = {"params": matrices, "lr": SMALL, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"params": [vector], "algorithm": "adamw", "lr": SMALL, "weight_decay": 0.1}
    return model, ReferenceMuon([muon, adamw], ns_backend=dmuon.NewtonSchulz(deterministic=True))


def step_both(model, optimizer, oracle_model, oracle, step):
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(model.layers, oracle_model.layers, strict=True):
        q.grad = torch.randint(-8, 9, q.shape, generator=generator).float()
        p.grad = torch.zeros_like(p)
        p.grad.copy_(q.grad.bfloat16())
    optimizer.step()
    oracle.step()


def check_masters(model, optimizer, oracle_model):
    for p, q in zip(model.layers, oracle_model.layers, strict=True):
        master = optimizer.state[p]["master"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.full_tensor(), q.detach(), rtol=1e-6, atol=0)
        assert torch.equal(p.full_tensor(), master.full_tensor().bfloat16())
        if not p.is_owner:
            assert master.local.numel() == 0
        for key, value in optimizer.state[p].items():
            assert value.dtype == torch.float32, key


def trained_in_masters(replicas):
    model, optimizer = wrapped(replicas=replicas)
    plain_model, plain = wrapped(master=False, replicas=replicas)
    oracle_model, oracle = reference()
    before = [p.full_tensor().clone() for p in model.layers]
    for _ in range(40):
        step_both(model, optimizer, oracle_model, oracle, 0)
    check_masters(model, optimizer, oracle_model)
    for _ in range(5):
        step_both(plain_model, plain, *reference(), 0)
    moved = [not torch.equal(p.full_tensor(), was) for p, was in zip(model.layers, before, strict=True)]
    stuck = [torch.equal(p.full_tensor(), was) for p, was in zip(plain_model.layers, before, strict=True)]
    return moved, stuck


@pytest.mark.parametrize("replicas", [1, 2])
def test_small_steps_add_up_in_the_master(ranks, replicas):
    for moved, stuck in ranks(2 * replicas, trained_in_masters, replicas):
        assert all(moved)
        assert all(stuck), "in bf16 alone they are rounded away, which is what this is about"


def written_outside():
    """A write to the weight goes into the master, digits that were not written stay."""
    model, optimizer = wrapped()
    oracle_model, oracle = reference()
    for step in range(3):
        step_both(model, optimizer, oracle_model, oracle, step)
    with torch.no_grad():
        for p, q in zip(model.layers, oracle_model.layers, strict=True):
            mask = torch.zeros(q.shape)
            mask[::2] = 1
            written = torch.where(mask.bool(), 2 * p.full_tensor(), p.full_tensor())
            p.copy_(written)
            q.copy_(torch.where(mask.bool(), written.float(), q))
    for step in range(3):
        step_both(model, optimizer, oracle_model, oracle, step)
    check_masters(model, optimizer, oracle_model)


def resumed(model_first):
    model, optimizer = wrapped()
    oracle_model, oracle = reference()
    for step in range(3):
        step_both(model, optimizer, oracle_model, oracle, step)
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    state = dmuon.get_optimizer_state_dict(model, optimizer)
    again, other = wrapped()
    for part in ("model", "optimizer") if model_first else ("optimizer", "model"):
        if part == "model":
            again.load_state_dict(weights)
        else:
            dmuon.set_optimizer_state_dict(again, other, state)
    for step in range(3, 6):
        step_both(again, other, oracle_model, oracle, step)
    check_masters(again, other, oracle_model)


def frozen_before_its_first_step():
    """It still has a gradient, which a step takes; torch looks at nothing else."""
    model = Weights(torch.bfloat16).requires_grad_(False)
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: True, param_policy=policies(master=True))
    fully_shard(model, mesh=world_mesh())
    optimizer = dmuon.Muon(model, SMALL)
    assert not optimizer.state
    for p in model.layers:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(optimizer.state[p]["master"].dtype == torch.float32 for p in model.layers)


def write_and_resume():
    frozen_before_its_first_step()
    written_outside()
    for model_first in (True, False):
        resumed(model_first)


def test_masters_follow_writes_and_survive_a_save_in_either_order(ranks):
    """A bf16 model loaded after its optimizer once rounded the masters."""
    ranks(2, write_and_resume)
