"""What training loops do with an optimizer: GradScaler, schedulers, copies, accumulation. Cases 17, 18 a and 19."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import dmuon
from fsdp.models import Toy, Twins, close, next_token_loss, on_all_cells, wrap
from fsdp.test_hsdp import wrap_hsdp
from fsdp.test_module_life import micro_batch
from fsdp.test_unused import Experts

# --- GradScaler


def scaled_steps(replicas, shards):
    twins = Twins(wrapping=wrap_hsdp, replicas=replicas, shards=shards)
    twins.optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(3):
        twins.zero_grad()
        scaler.scale(next_token_loss(twins.model, twins.rank, step)).backward()
        twins.reference_backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        scaler.unscale_(twins.optimizer)
        dmuon.clip_grad_norm_(twins.optimizer, 0.5)
        nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.5)
        twins.check_gradients()
        scaler.step(twins.optimizer)
        twins.reference_optimizer.step()
        scaler.update()
    twins.check_weights()
    before = {name: p.full_tensor().clone() for name, p in twins.model.named_parameters()}
    found = {}
    for kind in ("dedicated", "sharded"):
        twins.optimizer.zero_grad()
        scaler.scale(next_token_loss(twins.model, twins.rank, 9)).backward()
        owned, sharded = dmuon.owned_params(twins.model)[0].param, twins.model.lm_head.weight
        spoil = owned.grad.local if kind == "dedicated" else sharded.grad.to_local()
        if twins.rank == 1:
            spoil[0, 0] = torch.inf
        scale = scaler.get_scale()
        scaler.step(twins.optimizer)
        scaler.update()
        found[kind] = scaler.get_scale() / scale
    for name, p in twins.model.named_parameters():
        assert torch.equal(p.full_tensor(), before[name]), f"{name} was stepped"
    return found


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 2)])
def test_a_grad_scaler_steps_or_skips_on_all_ranks_alike(ranks, replicas, shards):
    """An infinity that one rank alone has would let the others step."""
    for found in ranks(replicas * shards, scaled_steps, replicas, shards):
        assert found == {"dedicated": 0.5, "sharded": 0.5}


# --- schedulers


def schedules():
    model = wrap(Toy())
    groups = [{"params": "blocks.0.*", "group_name": "first", "muon_lr": torch.tensor(0.04), "adamw_lr": 2e-3}]
    optimizer = dmuon.Muon(model, 0.02, adamw_lr=1e-3, param_groups=groups)
    names = [group["group_name"] for group in optimizer.param_groups]
    initial = [float(group["lr"]) for group in optimizer.param_groups]
    next_token_loss(model, dist.get_rank()).backward()
    scheduler = LambdaLR(optimizer, [lambda step, f=f: f**step for f in (0.5, 0.25, 0.5, 0.25)])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    for make in (
        lambda: OneCycleLR(optimizer, [0.1] * 4, total_steps=10),
        lambda: CyclicLR(optimizer, [1e-3] * 4, [0.1] * 4, cycle_momentum=True),
        lambda: ReduceLROnPlateau(optimizer, patience=0),
    ):
        optimizer.param_groups[0]["lr"] = 0.04
        scheduler = make()
        for _ in range(3):
            optimizer.step()
            scheduler.step(1.0)
    momenta = [group["momentum"] for group in optimizer.param_groups if group["algorithm"] == "muon"]
    betas = [group["betas"][0] for group in optimizer.param_groups if group["algorithm"] == "adamw"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "group_name": "extra"})
    return names, initial, rates, momenta, betas, optimizer.param_groups[-1]["lr"]


def test_schedulers_see_every_group_as_it_is(ranks):
    first, second = ranks(2, schedules)
    assert first == second
    names, initial, rates, momenta, betas, extra = first
    assert names == ["first/muon", "first/adamw", "muon", "adamw"]
    assert initial == pytest.approx([0.04, 2e-3, 0.02, 1e-3])
    factors = [0.25, 0.0625, 0.25, 0.0625]
    assert rates == pytest.approx([a * b for a, b in zip(initial, factors, strict=True)])
    assert momenta == [0.95, 0.95], "what cycles is AdamW's beta: torch decides by the optimizer's defaults"
    assert all(beta != 0.9 for beta in betas)
    assert extra == 1e-3


def halving(optimizer, last_epoch=-1):
    return LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.25**step], last_epoch)


def begin():
    torch.manual_seed(0)
    model = wrap(Toy())
    return model, dmuon.Muon(model, 0.02, adamw_lr=1e-3)


def advance(model, optimizer, scheduler, steps):
    rates = []
    for step in steps:
        optimizer.zero_grad()
        next_token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def resumes(how, before_loading):
    model, optimizer = begin()
    scheduler = halving(optimizer)
    advance(model, optimizer, scheduler, range(3))
    saved = {
        "model": dmuon.get_model_state_dict(model),
        "whole": dmuon.get_optimizer_state_dict(model, optimizer),
        "plain": copy.deepcopy(optimizer.state_dict()),
        "scheduler": copy.deepcopy(scheduler.state_dict()),
    }
    expected = advance(model, optimizer, scheduler, range(3, 5))
    again, other = begin()
    dmuon.set_model_state_dict(again, saved["model"])
    resumed = halving(other) if before_loading else None
    if how == "whole":
        dmuon.set_optimizer_state_dict(again, other, saved["whole"])
    else:
        other.load_state_dict(saved["plain"])
    assert [group["initial_lr"] for group in other.param_groups] == [0.02, 1e-3]
    resumed = resumed or halving(other, last_epoch=2)  # its constructor makes a step
    resumed.load_state_dict(saved["scheduler"])
    assert advance(again, other, resumed, range(3, 5)) == expected
    for (name, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor()), name


def run_resumes():
    cells = [{"how": how, "before_loading": before} for how in ("whole", "plain") for before in (True, False)]
    on_all_cells(cells, resumes)


def test_a_schedule_goes_on_where_it_was_saved(ranks):
    """Rates by group, ``initial_lr`` among them, whether the scheduler was made before loading or after."""
    ranks(2, run_resumes)


# --- copies and text


def copies_and_text():
    model = wrap(Toy())
    optimizer = dmuon.Muon(model, torch.tensor(0.02))
    said = []
    for act in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(ValueError, match=r"cannot be pickled or copied.*torch\.distributed\.checkpoint"):
            act(optimizer)
    said.append(repr(optimizer))
    return said


def test_an_optimizer_is_not_pickled_and_says_in_short_what_it_is(ranks):
    for (text,) in ranks(2, copies_and_text):
        lines = text.splitlines()
        assert lines[0] == "Muon ("
        assert lines[1].startswith("    muon: muon, 14 parameters, adjust_lr_fn='match_rms_adamw', lr=0.0")
        assert "betas" not in lines[1]
        assert "blocks.0" not in text
        assert "eps=1e-08" in lines[2]
        assert "momentum" not in lines[2]


# --- accumulation


def first_used_at_the_end():
    """bf16 compute, fp32 reduction: one matrix only in the first micro-batch, another only in the last."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twins = Twins(Experts, mp_policy=policy)
    twins.optimizers()
    for index in range(4):
        with dmuon.no_sync(twins.model) if index < 3 else contextlib.nullcontext():
            twins.backward(lambda model, rank, index=index: micro_batch(model, rank, index))
    for name, parameter, reference in twins.pairs():
        assert parameter.grad.dtype == torch.float32
        if name in twins.registration.params:
            close(f"gradient of {name}", parameter.grad.full_tensor(), reference.grad, 3e-2)  # bf16 compute
    twins.step()
    twins.check_at_rest()


def test_a_matrix_that_only_the_last_micro_batch_uses(ranks):
    """Accumulated in fp32 the others are, and its fresh gradient is bf16: FSDP2 refuses such a mixture."""
    ranks(2, first_used_at_the_end)
