"""dmuon.Muon's groups and options, and dmuon.Muon as a torch.optim.Optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

import dmuon
from fsdp.models import Toy, close, next_token_loss, wrap


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
