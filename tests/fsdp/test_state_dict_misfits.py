"""State dicts with something missing, too much or elsewhere: paired by name, or refused with nothing written."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuon
from fsdp.models import Block, Toy
from fsdp.resuming import Run, assert_same
from fsdp.test_state_dicts import FULL, ON_ALL, TWO_STEPS


class Reordered(Block):
    """The block with its parameters registered in another order."""

    def __init__(self):
        super().__init__()
        for name in ("down", "q", "norm2"):
            self._modules[name] = self._modules.pop(name)


def reordered():
    return Toy(block=Reordered)


def by_name():
    source = Run()
    source.train(TWO_STEPS)
    state = dmuon.get_optimizer_state_dict(source.model, source.optimizer)
    packed = source.optimizer.state_dict()
    for load in (
        lambda run: dmuon.set_optimizer_state_dict(run.model, run.optimizer, state),
        lambda run: run.optimizer.load_state_dict(packed),
    ):
        target = Run(make=reordered)
        load(target)
        for key, value in source.state().items():
            assert torch.equal(target.state()[key], value), key


def frozen_unused_and_empty():
    """A parameter frozen after some steps keeps its momentum; an empty group its options."""
    source = Run()
    source.optimizer.add_param_group({"params": [], "lr": 0.125, "group_name": "empty", "mine": [1, 2]})
    source.train(TWO_STEPS)
    frozen = source.model.blocks[0].q.weight
    frozen.requires_grad_(False)
    source.train([2])
    state = dmuon.get_optimizer_state_dict(source.model, source.optimizer)
    for freeze in (False, True):
        target = Run(seed=4)
        target.optimizer.add_param_group({"params": [], "lr": 1.0, "group_name": "empty"})
        target.model.blocks[0].q.weight.requires_grad_(not freeze)
        dmuon.set_optimizer_state_dict(target.model, target.optimizer, state)
        assert_same(target.state(), source.state())
        assert target.optimizer.state[target.model.blocks[0].q.weight]["momentum_buffer"].full_tensor().any()
        group = target.optimizer.param_groups[-1]
        assert (group["lr"], group["mine"], group["params"]) == (0.125, [1, 2], [])


class SpareBlock(Block):
    """The block with a matrix that some steps do not use."""

    spare_used = True

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(64, 64, bias=False)

    def forward(self, x_BTD):
        x_BTD = super().forward(x_BTD)
        return x_BTD + self.spare(x_BTD) if self.spare_used else x_BTD


def steps_of_an_owners_adamw():
    """Only the owner knows that nobody used a parameter: the count that is saved is the owner's."""
    policy = [dmuon.ParamPolicy("blocks.*.spare.weight", route="adamw")]
    run = Run(make=lambda: Toy(block=SpareBlock, depth=1), dedicate={"param_policy": policy})
    for step, used in enumerate((True, False, False)):
        run.model.blocks[0].spare_used = used
        run.train([step])
    whole = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    if whole:
        assert whole["state"]["blocks.0.spare.weight"]["step"] == 1
        assert whole["state"]["norm.weight"]["step"] == 3
    target = Run(make=lambda: Toy(block=SpareBlock, depth=1), dedicate={"param_policy": policy}, seed=5)
    dmuon.set_optimizer_state_dict(target.model, target.optimizer, whole)
    assert_same(target.state(), run.state())


def other_groups():
    """Groups are paired by the names in them; where that is not clear, an error says so."""
    wanted = [{"params": "blocks.0.*", "group_name": "first", "lr": 0.3}]
    source, target = Run(param_groups=wanted), Run(seed=2)
    source.train([0])
    state = dmuon.get_optimizer_state_dict(source.model, source.optimizer)
    before = target.everything()
    with pytest.raises(ValueError, match=r"the parameters of group 'muon' were in the groups \[None, None\]"):
        dmuon.set_optimizer_state_dict(target.model, target.optimizer, regrouped(state))
    assert_same(target.everything(), before)


def without_names():
    """A dict that has positions only, as torch's optimizers have, must have the same groups."""
    source, target = Run(), Run(seed=2)
    source.train([0])
    packed = source.optimizer.state_dict()
    for group in packed["param_groups"]:
        del group["param_names"]
    target.optimizer.load_state_dict(packed)
    assert_same(target.state(), source.state())
    packed["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"has groups of \[13, 12\] parameters without names, this one of \[14, 12\]"):
        target.optimizer.load_state_dict(packed)
    assert_same(target.state(), source.state())


def values_that_are_none():
    """Found before the first parameter is replaced."""
    run = Run()
    run.train([0])
    before = run.everything()
    good = run.optimizer.state_dict()
    last = max(good["state"])  # by then all others would be new
    shape = good["state"][last]["exp_avg"].shape
    for index, key, value, said in (
        (0, "momentum_buffer", torch.empty(64, 64, device="meta"), "momentum_buffer of blocks.0.q.weight is on meta"),
        (20, "step", torch.zeros(2), r"step of \S+ is \(2,\), not a number"),
        (20, "step", "two", r"step of \S+ is 'two', not a number"),
        (last, "step", 10**400, "not a number of steps"),
        (last, "step", float("nan"), "not a number of steps"),
        (last, "step", True, "not a number of steps"),
        (last, "step", torch.tensor(-1.0), "not a number of steps"),
        (last, "step", torch.ones(1).to_sparse(), "dense and real"),
        (last, "exp_avg", torch.zeros(shape).to_sparse(), "exp_avg of .* dense and real"),
        (last, "exp_avg", torch.zeros(shape, dtype=torch.complex64), "exp_avg of .* dense and real"),
        (last, "exp_avg", without_memory(shape), "have its memory"),
    ):
        damaged = {**good, "state": {**good["state"], index: {**good["state"][index], key: value}}}
        with pytest.raises(ValueError, match=said):
            run.optimizer.load_state_dict(damaged)
        assert_same(run.everything(), before)


def without_memory(shape):
    value = torch.zeros(shape)
    value.untyped_storage().resize_(0)
    return value


def backups():
    """A deep copy brings back what was; the dict itself is live, before a load and after, all of it alike."""
    run = Run()
    run.train([0])
    then, live = run.state(), run.optimizer.state_dict()
    backup = copy.deepcopy(live)
    run.optimizer.load_state_dict(live)
    run.train([1, 2])
    now = run.state()
    run.optimizer.load_state_dict(live)
    assert_same(run.state(), now)
    run.optimizer.load_state_dict(backup)
    assert_same(run.state(), then)


def regrouped(state):
    """Without names of groups, which would say what belongs together."""
    groups = [{k: v for k, v in group.items() if k != "group_name"} for group in state.get("param_groups", [])]
    return {**state, "param_groups": groups} if state else {}


def what_does_not_fit(kind):
    """What each rank is told about a wrong dict, and whether anything was written."""
    run = Run()
    run.train([0])
    before = run.everything()
    first = dist.get_rank() == 0
    said = {}

    def attempt(what, setter, *args, **options):
        try:
            setter(*args, **options)
            said[what] = "accepted"
        except (KeyError, ValueError) as error:
            said[what] = f"{type(error).__name__}: {error}"
        assert_same(run.everything(), before)

    options = None if kind == "from rank 0" else ON_ALL
    get = FULL if options is None else ON_ALL
    model = dmuon.get_model_state_dict(run.model, options=get)
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=get)
    here = first or options is not None
    lacking = {k: v for k, v in model.items() if k not in ("norm.bias", "blocks.1.q.weight")}
    more = {**model, "old.weight": torch.zeros(2)} if here else {}
    other = {**model, "blocks.1.q.weight": torch.zeros(3, 64), "norm.bias": torch.zeros(7)} if here else {}
    for what, values in (("lacks", lacking), ("more", more), ("shape", other)):
        attempt(what, dmuon.set_model_state_dict, run.model, values, options=options)
    damaged = copy.deepcopy(state) if here else state
    if here:
        del damaged["state"]["blocks.1.q.weight"]
        damaged["state"]["old.weight"] = {"step": torch.tensor(1.0)}
    attempt("state", dmuon.set_optimizer_state_dict, run.model, run.optimizer, damaged, options=options)
    damaged = copy.deepcopy(state) if here else state
    if here:
        damaged["state"]["blocks.1.q.weight"]["momentum_buffer"] = torch.zeros(3, 64)
    attempt("state shape", dmuon.set_optimizer_state_dict, run.model, run.optimizer, damaged, options=options)
    damaged = copy.deepcopy(state) if here else state
    if here:
        damaged["state"]["blocks.1.q.weight"] = damaged["state"]["norm.bias"]
        damaged["state"]["blocks.1.q.weight"] = {k: torch.zeros(64, 64) for k in ("step", "exp_avg", "exp_avg_sq")}
    attempt("state kind", dmuon.set_optimizer_state_dict, run.model, run.optimizer, damaged, options=options)
    empty = {**model, "norm.bias": torch.empty(64, device="meta")} if here else {}
    attempt("meta", dmuon.set_model_state_dict, run.model, empty, options=options)
    damaged = copy.deepcopy(state) if here else state
    if here:
        damaged["state"]["blocks.1.q.weight"]["momentum_buffer"] = torch.empty(64, 64, device="meta")
        damaged["param_groups"][0]["lr"] = torch.empty((), device="meta")
    attempt("state on meta", dmuon.set_optimizer_state_dict, run.model, run.optimizer, damaged, options=options)
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=options is None, strict=False)
    result = dmuon.set_model_state_dict(run.model, lacking, options=lenient)
    assert sorted(result.missing_keys) == ["blocks.1.q.weight", "norm.bias"]
    return said


@pytest.mark.parametrize("kind", ["from rank 0", "on all"])
def test_what_does_not_fit_is_named_on_all_ranks_and_nothing_is_written(ranks, kind):
    first, second = ranks(2, what_does_not_fit, kind)
    assert first == second
    assert "CheckpointKeyError" in first["lacks"]
    assert "lacks 'blocks.1.q.weight', 'norm.bias'" in first["lacks"]
    assert "has 'old.weight'" in first["more"]
    assert "'blocks.1.q.weight' (3, 64) for (64, 64)" in first["shape"]
    assert "'norm.bias' (7,) for (64,)" in first["shape"]
    assert "lacks 'blocks.1.q.weight'" in first["state"]
    assert "has 'old.weight'" in first["state"]
    assert "'blocks.1.q.weight.momentum_buffer' (3, 64) for (64, 64)" in first["state shape"]
    assert "blocks.1.q.weight has 'step', 'exp_avg', 'exp_avg_sq' where 'momentum_buffer' belong" in first["state kind"]
    assert "the model state dict has tensors on meta, without values: 'norm.bias'" in first["meta"]
    assert "on meta, without values: 'blocks.1.q.weight.momentum_buffer', 'param_groups.0.lr'" in first["state on meta"]


def names_and_groups():
    by_name()
    frozen_unused_and_empty()
    steps_of_an_owners_adamw()
    backups()
    other_groups()
    without_names()
    values_that_are_none()


def test_state_is_found_by_name_and_kept_for_frozen_parameters_and_empty_groups(ranks):
    """Position for name moved a momentum to another matrix of the same shape."""
    ranks(2, names_and_groups)
