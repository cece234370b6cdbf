"""What is a warning or no mistake, and what ranks do differently: in choosing, in grouping, in what they lack."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_fsdp.api import registration_of
from fsdp.models import Toy, is_projection, next_token_loss, world_mesh, wrap


def nothing_matches():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrap(Toy(), predicate=lambda name, p: "proj" in name)
    texts = [str(w.message) for w in caught if "predicate matches no parameter" in str(w.message)]
    optimizer = dmuon.Muon(model)
    next_token_loss(model, dist.get_rank()).backward()
    optimizer.step()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [group["group_name"] for group in optimizer.param_groups] == ["adamw"]
    return texts


def test_a_predicate_that_matches_nothing_warns_with_the_names_there_are(ranks):
    for (text,) in ranks(2, nothing_matches):
        assert "blocks.0.q.weight" in text
        assert "embed.weight" in text
        assert "norm" not in text


ODD_OPTIONS = {
    "groups": {"process_group_policy": "shared"},
    "dtypes": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}


def ranks_choose_differently(kind):
    rank = dist.get_rank()
    predicates = {
        "another": lambda name, p: is_projection(name, p) and not (rank == 1 and "blocks.1.up" in name),
        "nothing": lambda name, p: rank != 1 and is_projection(name, p),
    }
    with contextlib.suppress(UserWarning), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Toy()
        if kind == "order" and rank == 1:
            first = model.blocks[0].q
            del model.blocks[0].q
            model.blocks[0].q = first  # the last child now
        options = ODD_OPTIONS.get(kind, {}) if rank == 1 else {}
        dmuon.dedicate_params(model, world_mesh(), predicates.get(kind, is_projection), **options)
    try:
        fully_shard(model.blocks[0], mesh=world_mesh())
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("kind", "parts"), [
    ("another", ["rank 1 has", "blocks.1.up.weight [176, 64]", "blocks.1.down.weight [64, 176]"]),
    ("order", ["blocks.0.k.weight [64, 64]", "blocks.0.q.weight [64, 64]"]),
    ("nothing", ["rank 1 has '0 dedicated parameters", "blocks.0.q.weight [64, 64]"]),
    ("groups", ["rank 0 has \"process_group_policy='isolated'", "rank 1 has \"process_group_policy='shared'"]),
    ("dtypes", ["mp_policy=None", "param_dtype=torch.bfloat16"]),
])  # fmt: skip
def test_ranks_that_choose_differently_all_hear_of_the_first_difference(ranks, kind, parts):
    """A rank whose predicate matched nothing once went on alone, and the others waited for it; so they do for one that
    makes no process group, or whose buffers have another size."""
    messages = ranks(3, ranks_choose_differently, kind)
    assert len(set(messages)) == 1
    for part in ("the ranks disagree on what is dedicated", *parts):
        assert part in messages[0]


def ranks_group_differently():
    model, said = wrap(Toy()), []
    mine = 0.01 if dist.get_rank() == 0 else 0.02
    clips = 1.0 if dist.get_rank() == 0 else None
    for options in ({"param_groups": [{"params": "blocks.1.*", "muon_lr": mine}]}, {"max_grad_norm": clips}):
        with pytest.raises(ValueError, match="the optimizer's options or groups") as error:
            dmuon.Muon(model, **options)
        said.append(str(error.value))
    return said


def test_ranks_that_group_or_clip_differently_hear_of_it(ranks):
    """A rank that clips waits in its step for one that does not."""
    for groups, clips in ranks(2, ranks_group_differently):
        assert "blocks.1.q.weight" in groups
        assert "lr=0.01" in groups
        assert "rank 0 has 'max_grad_norm=1.0" in clips
        assert "rank 1 has 'max_grad_norm=None" in clips


def averages_what_nobody_synchronizes():
    torch.manual_seed(0)
    model = Toy()
    twin = Toy()
    twin.load_state_dict(model.state_dict())
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    optimizer = dmuon.Muon(model, unsynchronized="average", adamw_lr=1e-2, adamw_weight_decay=0.1)
    rank, size = dist.get_rank(), dist.get_world_size()
    next_token_loss(model, rank).backward()
    if rank == 1:
        model.norm.weight.grad = None  # missing here: zero in the mean
    model.norm.bias.grad = None  # missing everywhere
    for other in range(size):
        next_token_loss(twin, other).backward()
        if other == 0:
            first = twin.norm.weight.grad.clone()
    for p in twin.parameters():
        p.grad.div_(size)
    twin.norm.weight.grad = first / size
    loose = [name for name, p in twin.named_parameters() if not is_projection(name, p) and name != "norm.bias"]
    theirs = dict(twin.named_parameters())
    torch.optim.AdamW([theirs[name] for name in loose], lr=1e-2, weight_decay=0.1).step()
    before = model.norm.bias.detach().clone()
    optimizer.step()
    for name, p in model.named_parameters():
        if name in loose:
            torch.testing.assert_close(p, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(model.norm.bias, before)
    return [p.detach().clone() for name, p in model.named_parameters() if name in loose]


def test_what_nobody_synchronizes_is_averaged_on_request_whatever_is_missing(ranks):
    first, second = ranks(2, averages_what_nobody_synchronizes)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def outside_the_mesh():
    mesh = DeviceMesh("cpu", [0])
    try:
        dmuon.dedicate_params(Toy(), mesh, is_projection)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_rank_outside_the_mesh_is_told_so(ranks):
    first, second = ranks(2, outside_the_mesh)
    assert first == "accepted"
    assert "rank 1 is not in the mesh over ranks [0]" in second


def thawed():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh())
    for p in (*model.embed.parameters(), *model.norm.parameters(), *model.lm_head.parameters()):
        p.requires_grad_(False)
    optimizer = dmuon.Muon(model)
    next_token_loss(model, dist.get_rank()).backward()
    optimizer.step()
    model.norm.bias.requires_grad_(True)
    next_token_loss(model, dist.get_rank()).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_parameter_thawed_later_that_nobody_synchronizes_is_noticed(ranks):
    for message in ranks(2, thawed):
        assert "nobody averages the gradients of 'norm.bias' over the 2 ranks" in message


def registered_again():
    """A layer taken out of a model that is gone, into a new one."""
    first = Toy()
    dmuon.dedicate_params(first, world_mesh(), is_projection)
    block = first.blocks[0]
    del first
    second = Toy()
    second.blocks[0] = block
    wrap(second)
    return len(registration_of(second).params)


def test_a_layer_of_a_model_that_is_gone_can_be_dedicated_in_another(ranks):
    assert ranks(1, registered_again) == [14]


def set_up_on_some_ranks_only():
    plan = dmuon.dedicate_params(Toy(), world_mesh(), is_projection)
    if dist.get_rank() == 1:
        return "stayed away"
    with pytest.raises(RuntimeError) as caught:
        plan.bind()
    return str(caught.value)


def test_a_rank_that_does_not_set_up_is_named(ranks):
    """A collective that one rank never reaches must not wait for minutes and name nobody."""
    said = ranks(3, set_up_on_some_ranks_only, group_timeout_s=2)
    assert said[1] == "stayed away"
    for message in (said[0], said[2]):
        assert "plan.bind()) is collective: ranks [1] did not come to it within 2 s" in message
        assert "every rank of the mesh" in message
