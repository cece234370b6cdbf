"""What fine-tuning does to a model: adapters on frozen weights, thawed ones, spare modules, offloaded rests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import dmuon
from fsdp.models import WIDTH, Block, Toy, Twins, is_projection, next_token_loss, on_all_cells, world_mesh, wrap
from fsdp.test_hsdp import wrap_hsdp

RANK = 4


class Adapted(nn.Module):
    """A frozen matrix and a trained product of two small ones, the second zero at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class AdaptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "v", "down"):
            setattr(self, name, Adapted(self.get_submodule(name)))


class AdaptedToy(Toy):
    """Only adapters and norms train."""

    def __init__(self) -> None:
        super().__init__(AdaptedBlock)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")) or "norm" in name)


def thaw(model):
    for name, parameter in model.named_parameters():
        if is_projection(name, parameter):
            parameter.requires_grad_(True)


def check_adapters(*, wrapping, options):
    twins = Twins(AdaptedToy, wrapping=wrapping, **options)
    twins.optimizers(weight_decay=0.1)
    frozen = {name: p.full_tensor() for name, p, _ in twins.pairs() if not p.requires_grad}
    assert "blocks.1.q.base.weight" in frozen
    twins.backward()
    twins.check_gradients()
    twins.train(2)
    for name, parameter, _ in twins.pairs():
        if name in frozen:
            assert torch.equal(parameter.full_tensor(), frozen[name]), f"{name} was stepped"
            assert not twins.optimizer.state[parameter], f"{name} has state"
    twins.zero_grad()
    thaw(twins.model)
    thaw(twins.reference)
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()
    member = twins.registration.params["blocks.1.q.base.weight"]
    assert not torch.equal(member.param.full_tensor(), frozen[member.fqn])
    assert twins.optimizer.state[member.param]["momentum_buffer"].dtype == torch.float32


def run_adapters():
    cells = [{"wrapping": wrap, "options": {"reshard_after_forward": reshard}} for reshard in (True, False)]
    on_all_cells(cells, check_adapters)


def run_adapters_on_a_grid():
    check_adapters(wrapping=wrap_hsdp, options={"replicas": 2, "shards": 2})


@pytest.mark.parametrize(("world_size", "run"), [(2, run_adapters), (4, run_adapters_on_a_grid)])
def test_adapters_on_frozen_weights_that_are_thawed_later(ranks, world_size, run):
    """State that exists for trained parameters alone must come when a frozen one is thawed."""
    ranks(world_size, run)


def thawed_with_a_master():
    model = AdaptedToy().to(torch.bfloat16)
    policy = [dmuon.ParamPolicy("*", master_dtype=torch.float32), dmuon.ParamPolicy("*.down.base.*", route="adamw")]
    wrap(model, dedicate={"param_policy": policy})
    optimizer = dmuon.Muon(model)
    next_token_loss(model, 0).backward()
    optimizer.step()
    thaw(model)
    next_token_loss(model, 0).backward()
    optimizer.step()
    return {member.fqn: "master" in optimizer.state[member.param] for member in dmuon.dedicated_params(model)}


def test_a_thawed_parameter_gets_its_master(ranks):
    for found in ranks(2, thawed_with_a_master):
        assert all(found.values()), found


class WithSpares(Toy):
    """Modules that no forward ever calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spare_norm = nn.LayerNorm(WIDTH)


def spares_stay():
    twins = Twins(WithSpares, predicate=lambda name, p: is_projection(name, p) or name == "spare.weight")
    twins.optimizers(weight_decay=0.1)
    before = twins.reference.spare.weight.detach().clone()
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()
    assert torch.equal(twins.model.spare.weight.full_tensor(), before)
    assert twins.model.spare.weight.grad is None
    dmuon.clip_grad_norm_(twins.model, 1.0)
    assert {group.name for group in twins.registration.state.groups} == {"blocks.0", "blocks.1", "spare"}


def test_modules_that_never_run_stay_as_they_are(ranks):
    ranks(2, spares_stay)


def wrap_with_the_rest_offloaded(model):
    """FSDP2 keeps its root's shards on the CPU; the blocks, which hold what is dedicated, stay where they are."""
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def rest_offloaded():
    twins = Twins(wrapping=wrap_with_the_rest_offloaded)
    twins.optimizers()
    for step in range(3):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        norm = dmuon.clip_grad_norm_(twins.optimizer, 0.5).item()
        expected = nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.5).item()
        assert norm == pytest.approx(expected, rel=1e-5)
        twins.step()
    twins.check_weights()


def test_the_rest_may_be_offloaded(ranks):
    ranks(2, rest_offloaded)


def alone(model):
    """Without FSDP2, which does not follow a change of dtype once it has computed."""
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: True).bind()
    return model


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.to(block[0].weight.dtype))
        return x


def matrices_loss(model, rank, step=0):
    return model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def converted_between_backward_and_step():
    twins = Twins(Matrices, wrapping=alone)
    twins.optimizers()
    twins.train(1, matrices_loss)
    twins.zero_grad()
    twins.backward(matrices_loss)
    for model in (twins.model, twins.reference):
        model.to(torch.float64)
    twins.check_gradients()
    twins.step()
    twins.train(2, matrices_loss)
    twins.check_gradients(5e-3)
    twins.check_weights()
    twins.check_at_rest()
    assert {p.dtype for p in twins.model.parameters()} == {torch.float64}


def test_a_model_with_gradients_may_change_its_dtype(ranks):
    """``module.to`` exchanges gradients as well, which a weak reference to one forbids."""
    ranks(2, converted_between_backward_and_step)
