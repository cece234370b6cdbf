"""Models whose blocks have other names than ours, trained against one process, and what clipping says of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from fsdp.models import VOCABULARY, WIDTH, Block, Twins, next_token_loss, world_mesh


class Gpt2(nn.Module):
    """`transformer.h.N`, and a head that is dedicated too."""

    def __init__(self):
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(3))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    @property
    def stack(self):
        return self.transformer["h"]

    def forward(self, tokens_BT):
        x_BTD = self.transformer["wte"](tokens_BT)
        for block in self.stack:
            x_BTD = block(x_BTD)
        return self.lm_head(x_BTD)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x_BTD):
        for block in self.layer:
            x_BTD = block(x_BTD)
        return x_BTD


class Bert(nn.Module):
    """`encoder.layer.N`."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Encoder()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    @property
    def stack(self):
        return self.encoder.layer

    def forward(self, tokens_BT):
        return self.lm_head(self.encoder(self.embeddings(tokens_BT)))


MODELS = {"gpt2": (Gpt2, "transformer.h."), "bert": (Bert, "encoder.layer.")}


def wrap_stack(model):
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, lambda name, p: p.ndim == 2 and "emb" not in name and "wte" not in name)
    for block in model.stack:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_stack(kind):
    make, prefix = MODELS[kind]
    twins = Twins(make, wrapping=wrap_stack)
    twins.optimizers(weight_decay=0.1)
    twins.backward()
    twins.check_gradients()
    twins.train(5)
    twins.check_weights()
    twins.check_at_rest()
    groups = [group.name for group in twins.registration.state.groups]
    assert groups == [*(f"{prefix}{i}" for i in range(3)), "lm_head"]
    return {member.owner.shard for member in dmuon.dedicated_params(twins.model)}


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_of_any_name_are_boundaries_and_train(ranks, kind):
    """Names other than `layers.N` once put a whole model on one rank."""
    owners = ranks(2, train_stack, kind)
    assert owners == [{0, 1}, {0, 1}]


def clip_cases():
    twins = Twins(Gpt2, wrapping=wrap_stack)
    parameters = list(twins.model.parameters())
    none = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    twins.backward()
    norms = [whole_norm(torch.nn.utils.clip_grad_norm_(iter(parameters), 0.1)) for _ in range(2)]
    expected = float(torch.nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.1))
    twins.check_gradients()
    owned = dmuon.owned_params(twins.model)
    if twins.rank == 1:
        owned[0].param.grad.local[0, 0] = float("nan")
    try:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        raised = False
    except RuntimeError:
        raised = True
    return none, norms, expected, raised


def whole_norm(norm):
    return float(norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm)


def test_clipping_twice_with_nothing_and_with_nan(ranks):
    for none, (first, second), expected, raised in ranks(2, clip_cases):
        assert none == 0.0
        assert first == pytest.approx(expected, rel=1e-5)
        assert second == pytest.approx(0.1, rel=1e-4)
        assert raised
        assert math.isfinite(first)


def loss_of_one_step():
    twins = Twins(Gpt2, wrapping=wrap_stack)
    twins.optimizers()
    return next_token_loss(twins.model, twins.rank).item(), next_token_loss(twins.reference, twins.rank).item()


def test_forward_alone_equals_one_process(ranks):
    for got, expected in ranks(3, loss_of_one_step):
        assert got == pytest.approx(expected, rel=1e-5)
