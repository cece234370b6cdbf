"""FSDP2's controls act on dedicated groups: its setters, prefetching by hand, registered forward methods."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import dmuon
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.models import Toy, Twins, groups_of, tokens, world_mesh, wrap


def setters_reach_dedicated_groups():
    model = wrap(Toy())
    groups = groups_of(model)
    seen = {}

    def note(what):
        names = ("reduce_grads", "reshard_after_forward", "reshard_after_backward", "unshard_in_backward", "divisor")
        seen[what] = [[getattr(group, name) for name in names] for group in groups.values()]

    note("at first")
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    note("on the model")
    model.set_requires_gradient_sync(True, recurse=False)
    note("on the root alone")
    model.blocks[0].set_requires_gradient_sync(True)
    model.blocks[0].set_reshard_after_backward(True, recurse=False)
    model.blocks[0].set_unshard_in_backward(False)
    model.blocks[1].set_gradient_divide_factor(7.0)
    note("on blocks")
    model.blocks[0].set_unshard_in_backward(True)
    model.blocks[0].unshard()
    assert model.blocks[0].q.weight.shape == (64, 64)
    assert type(model.blocks[0].q.weight.data) is torch.Tensor
    assert isinstance(model.blocks[1].q.weight, OwnedTensor)
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].q.weight, OwnedTensor)
    return seen


def test_setters_reach_dedicated_groups_and_only_those_they_are_about(ranks):
    seen = ranks(2, setters_reach_dedicated_groups)[0]
    assert seen["at first"] == [[True, None, True, True, None]] * 2
    assert seen["on the model"] == [[False, False, False, True, None]] * 2
    assert seen["on the root alone"] == seen["on the model"]
    assert seen["on blocks"] == [[True, False, True, False, None], [False, False, False, True, 7.0]]


def divides_by_a_factor():
    twins = Twins()
    for module in (*twins.model.blocks, twins.model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    twins.backward()
    for _, _, reference in twins.pairs():
        reference.grad.mul_(dist.get_world_size() / 3.0)
    twins.check_gradients()


def test_a_gradient_divide_factor_means_the_same_to_both(ranks):
    ranks(2, divides_by_a_factor)


def prefetch_by_hand():
    twins = Twins(lambda: Toy(depth=3))
    blocks = twins.model.blocks
    twins.model.set_modules_to_forward_prefetch([blocks[0], blocks[1]])
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    twins.optimizers()
    twins.train(2)
    twins.check_weights()
    twins.check_at_rest()


def test_prefetching_by_hand_changes_no_result(ranks):
    ranks(2, prefetch_by_hand)


class Encoding(Toy):
    """Parameters of the root's own are used outside of forward."""

    def encode(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def another_forward_method():
    twins = Twins(Encoding)
    register_fsdp_forward_method(twins.model, "encode")
    batch = tokens(dist.get_rank())
    torch.testing.assert_close(twins.model.encode(batch), twins.reference.encode(batch), rtol=1e-5, atol=1e-5)
    twins.backward(lambda model, rank: model.encode(tokens(rank)).square().mean())
    for name, parameter, reference in twins.pairs():
        if reference.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, rtol=1e-4, atol=1e-6, msg=name)
    twins.check_at_rest()


def test_a_registered_forward_method_works_with_dedicated_blocks(ranks):
    ranks(2, another_forward_method)


class Reading(nn.Module):
    """Reads a dedicated weight of its own in a method that is not forward."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.score(x)

    def score(self, x):
        return self.proj.weight @ x + self.bias


def a_method_of_the_boundary_itself():
    torch.manual_seed(0)
    model = Reading()
    weight = model.proj.weight.detach().clone()
    dmuon.dedicate_params(
        model, world_mesh(), lambda name, p: p.ndim == 2, hook_boundary_predicate=lambda m: isinstance(m, Reading)
    )
    fully_shard(model, mesh=world_mesh())
    register_fsdp_forward_method(model, "score")
    x = torch.ones(8)
    torch.testing.assert_close(model.score(x), weight @ x)
    model.score(x).sum().backward()
    torch.testing.assert_close(model.proj.weight.grad.full_tensor(), torch.ones(8, 8))


def test_a_registered_method_of_the_boundary_itself_works(ranks):
    """FSDP2 runs its own hooks around such a method, and nobody else's."""
    ranks(2, a_method_of_the_boundary_itself)
