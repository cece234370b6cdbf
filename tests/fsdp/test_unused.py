"""Parameters, layers and backwards that some ranks, or all, do without."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from fsdp.models import WIDTH, Block, Toy, Twins, next_token_loss, on_all_cells, world_mesh


class ExpertBlock(Block):
    """Has a matrix beside the others that a forward may leave out."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD, use=True):
        x_BTD = super().forward(x_BTD)
        return x_BTD + self.expert(x_BTD) if use else x_BTD


class Experts(Toy):
    def __init__(self):
        super().__init__(ExpertBlock)

    def forward(self, tokens_BT, use=(True, True)):
        x_BTD = self.embed(tokens_BT)
        for block, used in zip(self.blocks, use, strict=True):
            x_BTD = block(x_BTD, used)
        return self.lm_head(self.norm(x_BTD))


USERS = {
    "none": lambda rank, owner, step: False,
    "rank 0": lambda rank, owner, step: rank == 0,
    "owner": lambda rank, owner, step: rank == owner,
    "non-owner": lambda rank, owner, step: rank != owner,
    "alternating": lambda rank, owner, step: rank == step % 2,
    "every other step": lambda rank, owner, step: step % 2 == 0,
}


def experts_of(twins):
    return [block.expert.weight for block in twins.model.blocks]


def check_expert(*, users, set_to_none, steps=5, **options):
    twins = Twins(Experts, **options)
    twins.optimizers(weight_decay=0.1)
    owners = [weight.owner for weight in experts_of(twins)]
    before = [weight.full_tensor() for weight in experts_of(twins)]

    def loss(model, rank, step):
        use = [USERS[users](rank, owner, step) for owner in owners]
        return next_token_loss(model, rank, step, use=use)

    for step in range(steps):
        twins.zero_grad(set_to_none=set_to_none)
        twins.backward(lambda model, rank, step=step: loss(model, rank, step))
        twins.check_gradients()
        twins.step()
    twins.check_weights()
    assert twins.traffic()[1] == steps * len(twins.registration.state.groups)
    if users == "none":
        check_untouched(twins, before)


def check_untouched(twins, before):
    for weight, was in zip(experts_of(twins), before, strict=True):
        assert torch.equal(weight.full_tensor(), was)
        assert not twins.optimizer.state[weight]["momentum_buffer"].full_tensor().any()


def run_experts(set_to_none, users):
    on_all_cells(({"users": u, "set_to_none": set_to_none} for u in users), check_expert)


@pytest.mark.parametrize(
    ("world_size", "set_to_none", "users"),
    [
        (2, True, list(USERS)),
        (2, False, ["none", "alternating", "every other step"]),
        (3, True, ["owner", "non-owner"]),
    ],
)
def test_an_expert_that_some_ranks_use(ranks, world_size, set_to_none, users):
    """Skipping a collective for a missing gradient hangs; filling it with zeros decays what nobody used."""
    ranks(world_size, run_experts, set_to_none, users)


class RoutedBlock(Block):
    """Sends every sequence through one expert of a list, as the experts of transformers are; the caller routes."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48, bias=False), nn.SiLU(), nn.Linear(48, WIDTH, bias=False))
            for _ in range(4)
        )

    def forward(self, x_BTD, routes):
        x_BTD = super().forward(x_BTD)
        return torch.stack([x_TD + self.experts[route](x_TD) for x_TD, route in zip(x_BTD, routes, strict=True)])


def routed_loss(model, rank, step):
    """Even ranks never use expert 2, odd ones never expert 0, nobody expert 3; their order differs between steps."""
    return next_token_loss(model, rank, step, routes=[(0, 1), (2, 1)][rank % 2][:: 1 if step % 2 else -1])


def check_routed(*, reshard, **mesh):
    twins = Twins(functools.partial(Toy, RoutedBlock), reshard_after_forward=reshard, **mesh)
    assert {spec.boundary for spec in twins.registration.specs} == {"blocks.0", "blocks.1"}
    twins.optimizers(weight_decay=0.1)
    nobodys = [parameter for name, parameter in twins.model.named_parameters() if "experts.3" in name]
    before = [parameter.full_tensor() for parameter in nobodys]
    for step in range(4):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: routed_loss(model, rank, step))
        twins.check_gradients()
        twins.step()
    twins.check_weights()
    assert all(torch.equal(p.full_tensor(), was) for p, was in zip(nobodys, before, strict=True))


class RoutedContainers(nn.Module):
    """Layers without a forward, and in them a list of experts without one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, WIDTH, bias=False),
                    "experts": nn.ModuleList(
                        nn.Sequential(nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH, bias=False))
                        for _ in range(3)
                    ),
                }
            )
            for _ in range(2)
        )

    def forward(self, x, route):
        for layer in self.layers:
            h = layer["up"](layer["norm"](x))
            x = x + layer["experts"][route](h)
        return x


def wrap_containers(model, **shard):
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, lambda name, parameter: parameter.ndim == 2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **shard)
    return fully_shard(model, mesh=mesh, **shard)


def check_routed_containers(*, reshard):
    twins = Twins(RoutedContainers, wrapping=wrap_containers, reshard_after_forward=reshard)
    twins.optimizers(weight_decay=0.1)

    def loss(model, rank, step):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x, route=(rank + step) % 2).square().mean()

    for step in range(3):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: loss(model, rank, step))
        twins.check_gradients()
        twins.check_at_rest()
        twins.step()
    twins.check_weights()


def run_routed():
    on_all_cells(({"reshard": reshard} for reshard in (True, False)), check_routed)
    on_all_cells(({"reshard": reshard} for reshard in (True, False)), check_routed_containers)


def test_experts_in_a_list_that_some_ranks_route_nothing_to(ranks):
    """With a boundary at every expert a rank waits for one that another never enters."""
    ranks(2, run_routed, group_timeout_s=20)


def run_frozen_expert():
    twins = Twins(Experts)
    twins.optimizers(weight_decay=0.1)
    for model in (twins.model, twins.reference):
        for block in model.blocks:
            block.expert.weight.requires_grad_(False)
    before = [weight.full_tensor() for weight in experts_of(twins)]
    twins.train(5)
    twins.check_weights()
    for weight, was in zip(experts_of(twins), before, strict=True):
        assert weight.grad is None
        assert torch.equal(weight.full_tensor(), was)
        assert not twins.optimizer.state[weight]["momentum_buffer"].full_tensor().any()


def test_a_frozen_expert(ranks):
    ranks(2, run_frozen_expert)


def run_toggled_requires_grad():
    """q of the first block is frozen in steps 1 and 2, the whole second block in step 3."""
    twins = Twins()
    twins.optimizers(weight_decay=0.1)
    for step in range(5):
        for model in (twins.model, twins.reference):
            model.blocks[0].q.weight.requires_grad_(step not in (1, 2))
            for name in ("q", "k", "v", "o", "gate", "up", "down"):
                model.blocks[1].get_submodule(name).weight.requires_grad_(step != 3)
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        twins.check_gradients()
        assert (twins.model.blocks[0].q.weight.grad is None) == (step in (1, 2))
        twins.step()
        twins.check_at_rest()
    twins.check_weights()
    assert twins.traffic()[1] == 2 * 5 - 1


def test_requires_grad_is_read_in_every_forward(ranks):
    ranks(2, run_toggled_requires_grad)


# --- whole layers


class LayerDrop(Toy):
    """Leaves out the layers of ``skip``."""

    def __init__(self):
        super().__init__(depth=4)

    def forward(self, tokens_BT, skip=()):
        x_BTD = self.embed(tokens_BT)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD))


SKIPS = [(), (1,), (0, 3), (2, 3), (0, 1, 2, 3), ()]


def check_layer_drop(*, reshard, checkpoint, **mesh):
    twins = Twins(LayerDrop, reshard_after_forward=reshard, checkpoint=checkpoint, **mesh)
    twins.optimizers(weight_decay=0.1)
    for step, skip in enumerate(SKIPS):
        twins.zero_grad()
        before = twins.traffic()[1]
        twins.backward(lambda model, rank, step=step, skip=skip: next_token_loss(model, rank, step, skip=skip))
        assert twins.traffic()[1] - before == 4 - len(skip)
        twins.check_at_rest()
        twins.step()
        twins.optimizer.step()  # twice in a row, as torch allows
        twins.reference_optimizer.step()
    for index, (_, parameter, reference) in enumerate(twins.pairs()):
        assert (parameter.grad is None) == (reference.grad is None), index
    twins.check_weights()


def run_layer_drop():
    cells = ({"reshard": r, "checkpoint": c} for r in (True, False) for c in ("none", "non-reentrant"))
    on_all_cells(cells, check_layer_drop)


def test_layers_that_every_rank_skips(ranks):
    """A layer that did not run must break neither the next forward nor a step, nor be prefetched for ever."""
    ranks(2, run_layer_drop)


# --- fewer matrices than ranks, and what differs between ranks without being a difference


def is_query(name, parameter):
    return name in ("blocks.0.q.weight", "blocks.1.q.weight")


def run_fewer_matrices_than_ranks():
    twins = Twins(predicate=is_query)
    twins.optimizers()
    twins.train(3)
    twins.check_weights()
    return len(dmuon.owned_params(twins.model)), twins.optimizer.state_dict()["param_groups"]


def test_a_rank_that_owns_nothing_trains_along(ranks):
    got = ranks(3, run_fewer_matrices_than_ranks)
    assert sorted(owned for owned, _ in got) == [0, 1, 1]
    assert all(groups == got[0][1] for _, groups in got)


def run_after_junk(**options):
    """Addresses, and with them the order of sets, differ between the ranks."""
    rank = torch.distributed.get_rank()
    junk = [torch.empty(1000 * (rank + 1) + i) for i in range(50 * (rank + 1))]
    del junk[:: rank + 2]
    twins = Twins(Experts, **options)
    twins.optimizers()
    twins.train(2, lambda model, rank, step: next_token_loss(model, rank, step, use=(rank == 0, rank == 1)))
    twins.check_weights()
    return {member.fqn: member.owned.owner for member in dmuon.dedicated_params(twins.model)}


# --- what a rank may not skip


class Linears(nn.Module):
    """Nothing but dedicated matrices, so that no other collective notices first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(2)
        )

    def forward(self, x, skip=()):
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return x


def linears():
    model = Linears()
    dmuon.dedicate_params(model, world_mesh(), lambda name, parameter: True).bind()
    return model


def run_skipped_backward():
    loss = linears()(torch.ones(3, WIDTH)).sum()
    if torch.distributed.get_rank() == 0:
        loss.backward()


def run_skipped_boundary():
    rank = torch.distributed.get_rank()
    for _ in range(2):
        linears_loss = linears()(torch.ones(3, WIDTH), skip=(1,) if rank else ()).sum()
        linears_loss.backward()


@pytest.mark.parametrize("skip", [run_skipped_backward, run_skipped_boundary])
def test_a_rank_that_skips_is_reported(ranks, skip):
    """In bounded time, with the boundary and the rank that waits."""
    with pytest.raises(AssertionError, match=r"rank \d, the (weights|gradients) of 'blocks\.\d'.*the same hook"):
        ranks(2, skip, group_timeout_s=2)
