"""Case 9 of the public reports: whatever the order of calls, the optimizer trains the model's own parameters, or an
error says what to reorder. And case 18: torch.compile before and after wrapping."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon_fsdp.api import registration_of
from fsdp.models import Toy, Twins, close, is_projection, next_token_loss, tokens, world_mesh, wrap


def built():
    torch.manual_seed(0)
    return Toy()


def sharded(model):
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh())
    return fully_shard(model, mesh=world_mesh())


def optimizer_of(model):
    return dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))


# --- each returns (model, optimizer), ready to train


def usual(model):
    return wrap(model), optimizer_of(model)


def forward_first(model):
    wrap(model)
    model(tokens(dist.get_rank()))
    return model, optimizer_of(model)


def forward_without_grad_first(model):
    wrap(model)
    with torch.no_grad():
        model(tokens(dist.get_rank()))
    return model, optimizer_of(model)


def backward_first(model):
    wrap(model)
    next_token_loss(model, dist.get_rank(), 9).backward()
    model.zero_grad()
    return model, optimizer_of(model)


def root_alone(model):
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    fully_shard(model, mesh=world_mesh())
    return model, optimizer_of(model)


def two_choices(model):
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "blocks.0" in name and p.ndim == 2)
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "blocks.1" in name and p.ndim == 2)
    return sharded(model), optimizer_of(model)


def bound_at_once(model):
    dmuon.dedicate_params(model, world_mesh(), is_projection).bind()
    return sharded(model), optimizer_of(model)


def converted_between(model):
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    sharded(model.to(torch.float64))
    model.to(torch.float32)
    return model, optimizer_of(model)


def assigned_before_sharding(model):
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return sharded(model), optimizer_of(model)


def assigned_before_the_optimizer(model):
    whole = copy.deepcopy(model.state_dict())
    wrap(model)
    with torch.no_grad():
        dedicated = {member.fqn: whole[member.fqn] for member in dmuon.dedicated_params(model)}
        model.load_state_dict(dedicated, assign=True, strict=False)
    return model, optimizer_of(model)


def shared_process_group(model):
    return wrap(model, dedicate={"process_group_policy": "shared"}), optimizer_of(model)


ACCEPTED = (
    forward_first,
    forward_without_grad_first,
    backward_first,
    root_alone,
    two_choices,
    bound_at_once,
    converted_between,
    assigned_before_sharding,
    assigned_before_the_optimizer,
    shared_process_group,
)


def trained(order):
    model = built()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = order(model)
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert in_groups == {id(p) for p in model.parameters()}
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    assert in_groups == {id(p) for p in model.parameters()}
    after = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    for name, value in after.items():
        assert not torch.equal(value, before[name]), f"{name} never moved"
    return after


def every_order():
    want = trained(usual)
    for order in ACCEPTED:
        for name, value in trained(order).items():
            close(f"{order.__name__}: {name}", value, want[name], 5e-3)


def test_every_accepted_order_trains_alike_and_moves_every_parameter(ranks):
    ranks(2, every_order)


def replaced_under_the_optimizer(after_backward):
    whole = built().state_dict()
    model, optimizer = usual(built())
    member = dmuon.dedicated_params(model)[0]
    if after_backward:
        next_token_loss(model, dist.get_rank()).backward()
    model.load_state_dict({member.fqn: whole[member.fqn]}, assign=True, strict=False)
    if not after_backward:
        next_token_loss(model, dist.get_rank()).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("after_backward", [False, True])
def test_parameters_replaced_after_the_optimizer_are_noticed(ranks, after_backward):
    """The optimizer once stepped on what was no longer in the model, or silently on nothing."""
    for message in ranks(2, replaced_under_the_optimizer, after_backward):
        assert "'blocks.0.q.weight'" in message
        assert "dmuon.Muon(model) after that" in message


# --- torch.compile


def compiled_before(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return wrap(model)


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="eager")
    return wrap(model)


def compiled_after(model):
    wrap(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def compiled_whole(model):
    return torch.compile(wrap(model), backend="eager")


def traffic_of(wrapping):
    twins = Twins(wrapping=wrapping)
    twins.optimizers()
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()
    return twins.traffic()


def compiled_trains_as_eager():
    eager = traffic_of(wrap)
    for wrapping in (compiled_before, compiled_in_place, compiled_after, compiled_whole):
        torch._dynamo.reset()
        assert traffic_of(wrapping) == eager, wrapping.__name__
    return eager


def test_compiled_blocks_train_as_eager_ones_with_as_many_collectives(ranks):
    """Hooks traced away would leave stale weights and local gradients."""
    broadcasts, reduces = ranks(2, compiled_trains_as_eager, timeout_s=200)[0]
    assert reduces == 3 * 2
    assert broadcasts == 3 * 4


def compiled_dedicated():
    """The model handed to dedicate_params is the compiled one."""
    model = built()
    compiled = torch.compile(model, backend="eager")
    plan = dmuon.dedicate_params(compiled, world_mesh(), is_projection)
    sharded(model)
    optimizer = optimizer_of(compiled)
    next_token_loss(compiled, dist.get_rank()).backward()
    optimizer.step()
    assert registration_of(model) is registration_of(compiled)
    return sorted(plan)


def test_a_compiled_model_has_the_names_of_the_bare_one(ranks):
    for names in ranks(2, compiled_dedicated):
        assert names[0] == "blocks.0.down.weight"
        assert len(names) == 14


@pytest.mark.parametrize("option", ["fully_shard", "dedicate_params"])
def test_both_kinds_of_lifetime_train_alike(ranks, option):
    """Z2 keeps weights from forward to backward; results are those of Z3, bit for bit."""
    assert ranks(2, z2_equals_z3, option)


def z2_equals_z3(option):
    results = []
    for reshard in (True, False):
        options = {"reshard_after_forward": reshard}
        model = wrap(built(), **options) if option == "fully_shard" else wrap(built(), dedicate=options)
        optimizer = optimizer_of(model)
        for step in range(3):
            optimizer.zero_grad()
            next_token_loss(model, dist.get_rank(), step).backward()
            optimizer.step()
        results.append([p.full_tensor() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
