"""AdamW of what owners hold, each parameter by its own presence, against torch.optim.AdamW."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmuon_fsdp.optim import adamw as module

SHAPES = [(8,), (3, 5), (), (300, 300), (64,), (1,)]  # the fourth is stepped alone
PRESENT = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gaussian(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(dtype, lr, grads, presence):
    parameters = [nn.Parameter(gaussian(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]
    state = {
        p: {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
        }
        for p in parameters
    }
    with torch.no_grad():
        for each in grads:
            for parameter, grad in zip(parameters, each, strict=True):
                parameter.grad = grad.to(dtype)
            there = {p: torch.tensor(present) for p, present in zip(parameters, presence, strict=True)}
            module._step_if(there, {"lr": lr, **OPTIONS}, state, lambda tensor: tensor.detach())
    return parameters, state


@pytest.mark.parametrize(
    "lr", [0.01, torch.tensor(0.01), torch.tensor([0.01])], ids=["number", "scalar", "one element"]
)
def test_equals_torchs_where_there_are_gradients_and_changes_nothing_else(lr):
    grads = [[gaussian(*shape, seed=100 * step + i) for i, shape in enumerate(SHAPES)] for step in range(4)]
    parameters, state = stepped(torch.float32, lr, grads, PRESENT)
    references = [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    before = copy.deepcopy(references)
    optimizer = torch.optim.AdamW(references, lr=0.01, **OPTIONS)
    for each in grads:
        for reference, grad, present in zip(references, each, PRESENT, strict=True):
            reference.grad = grad if present else None
        optimizer.step()
    for parameter, reference, start, present in zip(parameters, references, before, PRESENT, strict=True):
        assert float(state[parameter]["step"]) == (4 if present else 0)
        if present:
            assert torch.allclose(parameter, reference, rtol=1e-6, atol=1e-7)
            theirs = optimizer.state[reference]
            assert torch.allclose(state[parameter]["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-5, atol=1e-9)
        else:
            assert torch.equal(parameter, start)
            assert not state[parameter]["exp_avg"].any()


def test_half_precision_is_computed_in_single():
    """Steps of 1e-3 on weights around 1 vanish in bfloat16 arithmetic, one rounding away from the right result here."""
    grads = [[torch.ones(shape) for shape in SHAPES]]
    parameters, _ = stepped(torch.bfloat16, 0.01, grads, [1.0] * len(SHAPES))
    for i, (parameter, shape) in enumerate(zip(parameters, SHAPES, strict=True)):
        start = gaussian(*shape, seed=i).bfloat16().float()
        want = start * (1 - 0.001) - 0.01
        assert torch.allclose(parameter.float(), want, rtol=2**-8, atol=1e-6)


def test_an_infinite_gradient_that_nobody_has_changes_nothing():
    grads = [[torch.full(shape, float("inf")) for shape in SHAPES]]
    parameters, _ = stepped(torch.float32, 0.01, grads, [0.0] * len(SHAPES))
    for i, (parameter, shape) in enumerate(zip(parameters, SHAPES, strict=True)):
        assert torch.equal(parameter, gaussian(*shape, seed=i))


def test_small_parameters_are_stepped_together(monkeypatch):
    """One launch after the other for every norm of a model costs the host more than all its matrices."""
    calls = []
    together, alone = module._step_together, module._step_alone
    monkeypatch.setattr(
        module, "_step_together", lambda batch, group: calls.append(len(batch)) or together(batch, group)
    )
    monkeypatch.setattr(module, "_step_alone", lambda each, group: calls.append("alone") or alone(each, group))
    stepped(torch.float32, 0.01, [[torch.ones(shape) for shape in SHAPES]], PRESENT)
    assert calls == ["alone", len(SHAPES) - 1]
