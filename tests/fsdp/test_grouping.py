"""Cases 2, 3 and 4 of the public reports: scalar-like matrices, tied weights, models built on meta."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_core import Muon as ReferenceMuon
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.models import VOCABULARY, Toy, Twins, close, is_projection, next_token_loss, world_mesh, wrap


def whole(parameter):
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


# --- scalar-like matrices


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(256, 128, bias=False)
        self.wide = nn.Linear(128, 512, bias=False)
        self.row = nn.Linear(512, 1, bias=False)
        self.column = nn.Linear(1, 512, bias=False)
        self.one = nn.Linear(1, 1, bias=False)
        self.norm = nn.LayerNorm(512)

    def forward(self, x):
        x = self.row(torch.tanh(self.wide(self.body(x))))
        return self.one(x).square().mean() + self.norm(self.column(x)).square().mean()


def inputs(rank, step):
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(10 * step + rank))


def scalar_like(dedicated):
    def predicate(name, p):
        return p.ndim == 2 and (dedicated or 1 not in p.shape)

    def wrapping(model):
        dmuon.dedicate_params(model, world_mesh(), predicate)
        return fully_shard(model, mesh=world_mesh())

    twins = Twins(Scalars, wrapping=wrapping)
    twins.optimizers(weight_decay=0.1)
    twins.train(3, lambda model, rank, step=0: model(inputs(rank, step)))
    twins.check_weights()
    twins.check_at_rest()
    return {name: type(p).__name__ for name, p, _ in twins.pairs()}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dedicated", [True, False])
def test_scalar_like_matrices_train_dedicated_or_left(ranks, world_size, dedicated):
    """A head of one row once crashed in the first step: its update had another placement than the weight."""
    kinds = ranks(world_size, scalar_like, dedicated)[0]
    for name in ("row.weight", "column.weight", "one.weight"):
        assert kinds[name].endswith("OwnedTensor" if dedicated else "DTensor") or kinds[name] == "Parameter"


def save_load_and_go_on(folder):
    """One step more after a plain save and load, beside the run that went straight on."""

    def wrapping(model):
        dmuon.dedicate_params(model, world_mesh(), lambda name, p: p.ndim == 2)
        return fully_shard(model, mesh=world_mesh())

    def loss(model, rank, step=0):
        return model(inputs(rank, step))

    twins = Twins(Scalars, wrapping=wrapping)
    twins.optimizers()
    twins.train(3, loss)
    dcp.save({"model": twins.model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for member in dmuon.owned_params(twins.model):
            member.param.local.zero_()
    state = {"model": twins.model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    twins.model.load_state_dict(state["model"])
    twins.train(1, loss)
    twins.check_weights()


def test_scalar_like_matrices_survive_a_plain_save(ranks, tmp_path):
    ranks(2, save_load_and_go_on, str(tmp_path))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Linear(8, 0, bias=False)
        self.full = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.full(x).square().sum() + self.empty(x).sum()


def without_elements():
    model = Empty()
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: True)
    fully_shard(model, mesh=world_mesh())
    optimizer = dmuon.Muon(model)
    before = whole(model.full.weight).clone()
    model(torch.ones(2, 8)).backward()
    optimizer.step()
    assert not torch.equal(whole(model.full.weight), before)
    assert model.empty.weight.shape == (0, 8)


def test_a_matrix_without_elements_is_carried_along(ranks):
    """An expert slice can be empty."""
    ranks(2, without_elements)


def update_of_a_row():
    """Newton-Schulz of one row is the row, normalised."""
    torch.manual_seed(0)
    model = Scalars()
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: p.ndim == 2)
    fully_shard(model, mesh=world_mesh())
    optimizer = dmuon.Muon(model, 1.0, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32), adjust_lr_fn="original")
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    grads = {}
    for name, p in model.named_parameters():
        if isinstance(p, OwnedTensor):
            grads[name] = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            if name == "body.weight":  # rank 2
                left, right = torch.randn(128, 2), torch.randn(2, 256)
                grads[name] = left @ right
                dist.broadcast(grads[name], 0)
            p.grad = torch.zeros_like(p)
            p.grad.copy_(grads[name])
    optimizer.step()
    moved = {name: before[name] - whole(p) for name, p in model.named_parameters()}
    for name in ("row.weight", "column.weight", "one.weight"):
        assert F.cosine_similarity(moved[name].flatten(), grads[name].flatten(), dim=0) > 0.9999
        norm = moved[name].norm() / math.sqrt(max(1, moved[name].shape[0] / moved[name].shape[1]))
        assert 0.6 < norm < 1.3
    values = torch.linalg.svdvals(moved["body.weight"])
    assert (values[:2] > 0.5).all()
    assert values[2] < 1e-4


def test_updates_of_rows_are_parallel_to_the_gradient_and_keep_the_rank(ranks):
    ranks(2, update_of_a_row)


# --- matrices outside of the blocks


def train_every_matrix():
    twins = Twins(predicate=lambda name, p: p.ndim == 2)
    twins.optimizers()
    twins.train(3)
    twins.check_weights()
    return {member.fqn: member.spec.boundary for member in dmuon.dedicated_params(twins.model)}


def test_a_dedicated_head_and_embedding_train_like_one_process(ranks):
    """Each is a boundary of its own: gathered around one module, not around the whole model."""
    boundaries = ranks(2, train_every_matrix)[0]
    assert (boundaries["lm_head.weight"], boundaries["embed.weight"]) == ("lm_head", "embed")


# --- tied weights


class Tied(Toy):
    def __init__(self, embedding="embed"):
        super().__init__()
        if embedding != "embed":
            setattr(self, embedding, self.embed)
        self.lm_head.weight = self.embed.weight


PREDICATES = {
    "every matrix": lambda name, p: p.ndim == 2,
    "one alias": lambda name, p: "head" in name,
    "projections": is_projection,
    "two aliases, one excluded": lambda name, p: p.ndim == 2 and "embed" not in name,
}


class TiedWte(Tied):
    def __init__(self):
        super().__init__("wte")


def tied(make, predicate):
    twins = Twins(make, predicate=PREDICATES[predicate])
    twins.optimizers()
    twins.train(3)
    twins.check_weights()
    model = twins.model
    assert model.lm_head.weight is model.embed.weight
    shared = [p for group in twins.optimizer.param_groups for p in group["params"] if p is model.embed.weight]
    assert len(shared) == 1
    assert len(model.state_dict()) == len(twins.reference.state_dict())
    plan = [member for member in dmuon.dedicated_params(model) if member.param is model.embed.weight]
    return [(member.fqn, member.spec.aliases) for member in plan]


@pytest.mark.parametrize("predicate", PREDICATES)
def test_a_tied_weight_has_one_owner_and_one_state_whatever_alias_matched(ranks, predicate):
    """Classified by one alias only, one copy once went to Muon and the other to Adam."""
    found = ranks(2, tied, Tied, predicate)[0]
    assert found == ([] if predicate == "projections" else [("embed.weight", ("lm_head.weight",))])


def test_a_tied_weight_under_three_names(ranks):
    assert ranks(2, tied, TiedWte, "one alias")[0] == [("embed.weight", ("lm_head.weight", "wte.weight"))]


class AcrossBlocks(Toy):
    """One matrix used by two blocks."""

    def __init__(self):
        super().__init__(depth=3)
        self.blocks[2].q.weight = self.blocks[0].q.weight


def shared_across_blocks():
    twins = Twins(AcrossBlocks)
    twins.optimizers()
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()
    assert twins.model.blocks[2].q.weight is twins.model.blocks[0].q.weight
    return {member.fqn: member.spec.boundary for member in dmuon.dedicated_params(twins.model)}


def test_a_matrix_shared_by_blocks_is_gathered_around_all_of_them(ranks):
    boundaries = ranks(2, shared_across_blocks)[0]
    assert boundaries["blocks.0.q.weight"] == "blocks"
    assert boundaries["blocks.0.k.weight"] == "blocks.0"


class ListedExperts(nn.Module):
    """Matrices in a ParameterList, in a model without a stack."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList([torch.randn(64, 64) / 8 for _ in range(3)])
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        self.embed = nn.Embedding(VOCABULARY, 64)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for matrix in self.experts:
            x_BTD = x_BTD + torch.tanh(x_BTD @ matrix)
        return self.lm_head(x_BTD)


def dedicate_listed(model):
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "experts" in name)
    return fully_shard(model, mesh=world_mesh())


def listed_experts():
    twins = Twins(ListedExperts, wrapping=dedicate_listed)
    twins.optimizers()
    twins.backward()
    twins.check_gradients()
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()


def test_matrices_of_a_parameter_list_train_as_in_one_process(ranks):
    """Hooks on the list itself never fire, since nobody calls it."""
    ranks(2, listed_experts)


# --- models built on meta


def initialised(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.1)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def through_data(module):
    """As many models write: no version counter sees it."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.data.normal_(std=0.1)
    elif isinstance(module, nn.LayerNorm):
        module.weight.data.fill_(1.0)
        module.bias.data.zero_()


def from_meta(fn):
    with torch.device("meta"):
        model = Toy()
    wrap(model)
    if dist.get_rank() == 0:
        assert all(p.device.type == "meta" for p in model.parameters())
    torch.manual_seed(7)
    dmuon.init_weights(model, fn)
    torch.manual_seed(7)
    reference = Toy()
    torch.manual_seed(7)
    for module in reference.modules():
        if fn is not None:
            fn(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    after = torch.rand(3)
    torch.manual_seed(7)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q), name
        assert not isinstance(p, OwnedTensor) or p.is_owner or p.local.numel() == 0
    optimizer = dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))
    oracle = oracle_of(reference, [member.fqn for member in dmuon.dedicated_params(model)])
    next_token_loss(model, dist.get_rank()).backward()
    optimizer.step()
    for rank in range(dist.get_world_size()):
        (next_token_loss(reference, rank) / dist.get_world_size()).backward()
    oracle.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(name, whole(p), q, 5e-3)
    return after


def oracle_of(reference, dedicated):
    named = dict(reference.named_parameters())
    return ReferenceMuon(
        [
            {"params": [named[name] for name in dedicated], "lr": 0.02, "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if n not in dedicated], "algorithm": "adamw", "weight_decay": 0.01},
        ],
        adjust_lr_fn="match_rms_adamw",
        ns_backend=dmuon.NewtonSchulz(dtype=torch.float32),
    )


@pytest.mark.parametrize("fn", [None, initialised, through_data])
def test_weights_from_meta_are_those_of_one_process_that_draws_in_the_same_order(ranks, fn):
    """A model built on meta was once sharded without running its initialisers."""
    ranks(3, from_meta, fn)


def half_initialised(module):
    """Leaves embeddings and norms as they are."""
    if isinstance(module, nn.Linear):
        module.weight.mul_(0.5)


def anew():
    twins = Twins()
    dmuon.init_weights(twins.model, half_initialised)
    for module in twins.reference.modules():
        with torch.no_grad():
            half_initialised(module)
    for name, p, q in twins.pairs():
        assert torch.equal(whole(p), q), name
    twins.backward()
    twins.check_gradients()


def test_what_the_initialiser_leaves_alone_keeps_its_value(ranks):
    """Norms once came out as zeros."""
    ranks(2, anew)


def loaded_onto_meta():
    torch.manual_seed(3)
    reference = Toy()
    with torch.device("meta"):
        model = Toy()
    wrap(model)
    model.to_empty(device="cpu")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q), name
    loss, want = next_token_loss(model, 0), next_token_loss(reference, 0)
    torch.testing.assert_close(loss, want)
    return len(dmuon.dedicated_params(model))


def test_a_state_dict_loads_into_a_model_from_meta(ranks):
    assert ranks(2, loaded_onto_meta) == [14, 14]


def routes():
    """On every rank the routes of the unwrapped model, and one orthogonalisation per matrix over all ranks."""
    model = wrap(Toy())
    newton_schulz = dmuon.NewtonSchulz(dtype=torch.float32)
    counted = 0
    original = newton_schulz.factors

    def counting(stacks, schedule):
        nonlocal counted
        counted += sum(stack.shape[0] for stack in stacks)
        return original(stacks, schedule)

    newton_schulz.factors = counting
    optimizer = dmuon.Muon(model, ns_backend=newton_schulz)
    next_token_loss(model, dist.get_rank()).backward()
    optimizer.step()
    by_route = {g["group_name"]: sorted(g["param_names"]) for g in optimizer.param_groups}
    return by_route, counted


def test_routes_are_those_of_the_unwrapped_model_and_every_matrix_is_orthogonalised_once(ranks):
    """A rule that read empty placeholders once sent everything to AdamW, and the loss still fell."""
    got = ranks(3, routes)
    want = sorted(name for name, p in Toy().named_parameters() if is_projection(name, p))
    for by_route, _ in got:
        assert by_route["muon"] == want
    assert sum(counted for _, counted in got) == len(want)
    assert VOCABULARY % 3 != 0  # and FSDP2's shards are uneven
