"""State dicts by name, whole and in parts: ours and torch's, on the mesh they came from and in one process."""

from __future__ import annotations

import copy
import io
import math
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuon
from dmuon_fsdp.runtime.layout import local_of
from fsdp.models import Block, Toy, close, is_projection
from fsdp.resuming import Run, assert_same, reference, reference_optimizer, train_reference

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
PARTS = StateDictOptions()
TWO_STEPS = range(2)


class Awkward(Toy):
    """The toy with a tied head, buffers of both kinds, and a matrix that nothing uses."""

    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.embed.weight
        self.unused = nn.Linear(63, 63, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def dedicate_awkward(name, parameter):
    return is_projection(name, parameter) or name.startswith("unused")


# --- reading


def awkward_and_reference():
    run = Run(make=Awkward, predicate=dedicate_awkward)
    return run, *reference(Awkward, dedicate_awkward)


def check_full(run, plain):
    """In the unwrapped model, strictly; on the other ranks nothing."""
    got = dmuon.get_model_state_dict(run.model)
    if dist.get_rank():
        assert got == {}
        return
    assert list(got) == list(plain.state_dict())
    with torch.random.fork_rng():
        empty = Awkward()
    empty.load_state_dict(got, strict=True)
    for name, value in plain.state_dict().items():
        close(name, empty.state_dict()[name], value, 5e-3)
    assert got["embed.weight"].shape == (97, 64)
    torch.save(got, io.BytesIO())


def check_optimizer_in_one_process(run, plain, oracle):
    """torch's setter puts it into dmuon_core.Muon, which goes on as the single process does."""
    got = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    if dist.get_rank():
        assert got == {}
        return
    model = copy.deepcopy(plain)
    optimizer = reference_optimizer(model, dedicate_awkward)
    dsd.set_optimizer_state_dict(model, optimizer, copy.deepcopy(got))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            close(f"{key} of {name}", value, oracle.state[q].get(key, torch.zeros_like(value)), 5e-3)
    train_reference(model, optimizer, range(2, 4))
    want = copy.deepcopy(plain)
    continued = reference_optimizer(want, dedicate_awkward)
    continued.load_state_dict(copy.deepcopy(oracle.state_dict()))
    train_reference(want, continued, range(2, 4))
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        close(name, p, q, 5e-3)


def check_torchs_getters(run):
    """The same keys and bits as torch's own, in every form."""
    for options in (
        PARTS,
        FULL,
        StateDictOptions(full_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    ):
        pairs = (
            (
                dmuon.get_model_state_dict(run.model, options=options),
                dsd.get_model_state_dict(run.model, options=options),
            ),
            (
                dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=options),
                dsd.get_optimizer_state_dict(run.model, run.optimizer, options=options),
            ),
        )
        for ours, theirs in pairs:
            assert_same_tree(ours, theirs)


def assert_same_tree(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same_tree(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same_tree(one, other)
    elif isinstance(ours, torch.Tensor):
        local, other = (t.to_local() if hasattr(t, "to_local") else t for t in (ours, theirs))
        assert torch.equal(local, other)
    else:
        assert ours == theirs


def check_handed_out_values_stay(run):
    """What was handed out does not change with the model, on one rank either."""
    model, state = dmuon.get_model_state_dict(run.model), dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    before = copy.deepcopy((model, state))
    run.train([7])
    assert_same_tree((model, state), before)


def read_before_and_after_steps():
    run, plain, oracle = awkward_and_reference()
    random, weights = torch.get_rng_state(), run.weights()
    for getter in (dmuon.get_optimizer_state_dict, dsd.get_optimizer_state_dict):
        first = getter(run.model, run.optimizer, options=PARTS)
    assert_same(run.weights(), weights)
    assert all(p.grad is None for p in run.model.parameters())
    assert not any(value.any() for value in run.state().values())
    run.train(TWO_STEPS)
    train_reference(plain, oracle, TWO_STEPS)
    check_full(run, plain)
    check_optimizer_in_one_process(run, plain, oracle)
    check_torchs_getters(run)
    check_handed_out_values_stay(run)
    assert torch.equal(torch.get_rng_state(), random)
    last = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=PARTS)
    assert {n: list(entry) for n, entry in first["state"].items()} == {n: list(e) for n, e in last["state"].items()}
    assert last["state"]["unused.weight"]["momentum_buffer"].full_tensor().abs().max() == 0
    return [*last["state"]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_and_partial_dicts_before_and_after_steps(ranks, world_size):
    """State was there only for parameters that had seen a gradient, and torch made a step to get it."""
    keys = ranks(world_size, read_before_and_after_steps)
    assert all(each == keys[0] for each in keys)
    assert "unused.weight" in keys[0]
    assert "lm_head.weight" not in keys[0]  # shared: one parameter, one state


# --- writing, on the same mesh: bitwise


def ours(options_to_get, options_to_set):
    def move(source, target):
        model = dmuon.get_model_state_dict(source.model, options=options_to_get)
        state = dmuon.get_optimizer_state_dict(source.model, source.optimizer, options=options_to_get)
        dmuon.set_model_state_dict(target.model, model, options=options_to_set)
        dmuon.set_optimizer_state_dict(target.model, target.optimizer, state, options=options_to_set)

    return move


def torchs(options_to_get, options_to_set):
    def move(source, target):
        model, state = dsd.get_state_dict(source.model, source.optimizer, options=options_to_get)
        # One by one: the setter of both takes an empty model dict, as the other ranks have, for none wanted.
        dsd.set_model_state_dict(target.model, copy_tree(model), options=options_to_set)
        dsd.set_optimizer_state_dict(target.model, target.optimizer, copy_tree(state), options=options_to_set)

    return move


def copy_tree(tree):
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    return [copy_tree(value) for value in tree] if isinstance(tree, list) else tree


def plain_dicts(source, target):
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())


ON_ALL = StateDictOptions(full_state_dict=True)
FLAT = {"flatten_optimizer_state_dict": True}
WAYS = {
    "ours, from rank 0": ours(None, None),
    "ours, whole on all": ours(ON_ALL, ON_ALL),
    "ours, in parts": ours(PARTS, PARTS),
    "ours, flat": ours(StateDictOptions(full_state_dict=True, cpu_offload=True, **FLAT), None),
    "torch's, from rank 0": torchs(FULL, FROM_FIRST),
    "torch's, whole on all": torchs(ON_ALL, ON_ALL),
    "torch's, in parts": torchs(PARTS, PARTS),
    "torch's, flat": torchs(StateDictOptions(**FLAT), StateDictOptions(**FLAT)),
    "plain": plain_dicts,
}


def move_every_way(sizes, ways):
    source = Run(*sizes)
    source.train(TWO_STEPS)
    # Right after a step, with its publish under way.
    moved = {}
    for way in ways:
        target = Run(*sizes, seed=9, momentum_dtype=torch.float32, lr=0.5)
        target.train([5])
        WAYS[way](source, target)
        assert_same(target.everything(), source.everything())
        assert [g["lr"] for g in target.optimizer.param_groups] == [g["lr"] for g in source.optimizer.param_groups]
        moved[way] = target
    source.train([2])
    for way, target in moved.items():
        target.train([2])
        try:
            assert_same(target.everything(), source.everything())
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error


@pytest.mark.parametrize(
    ("sizes", "ways"),
    [((2,), list(WAYS)), ((2, 2), ["ours, from rank 0", "ours, in parts", "torch's, whole on all", "plain"])],
    ids=["2", "2x2"],
)
def test_every_way_back_onto_the_same_mesh_is_bitwise(ranks, sizes, ways):
    """Under HSDP what is loaded must reach the replicas too."""
    ranks(math.prod(sizes), move_every_way, sizes, ways)


# --- dtypes


class OddBlock(Block):
    """The block with a square matrix of odd size."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Linear(63, 63, bias=False)

    def forward(self, x_BTD):
        return super().forward(x_BTD) + self.odd(x_BTD[..., :63]).mean()


class Odd(Toy):
    def __init__(self, dtype):
        super().__init__(OddBlock, depth=1)
        self.to(dtype)


class Bf16Odd(Odd):
    def __init__(self):
        super().__init__(torch.bfloat16)


class Fp32Odd(Odd):
    def __init__(self):
        super().__init__(torch.float32)


def momentum_after_loading():
    for make, momentum in ((Bf16Odd, torch.float32), (Fp32Odd, torch.float32), (Fp32Odd, torch.bfloat16)):
        source = Run(make=make, momentum_dtype=momentum)
        source.train(range(3))
        whole = dmuon.get_optimizer_state_dict(source.model, source.optimizer)
        weights = dmuon.get_model_state_dict(source.model)
        saved, targets = source.state(), []
        assert all(v.dtype == momentum for k, v in saved.items() if k.endswith("momentum_buffer"))
        for load in (
            lambda run, s=whole: dmuon.set_optimizer_state_dict(run.model, run.optimizer, s),
            lambda run, s=source: run.optimizer.load_state_dict(s.optimizer.state_dict()),
        ):
            target = Run(make=make, momentum_dtype=momentum, seed=3)
            dmuon.set_model_state_dict(target.model, weights)
            load(target)
            assert_same(target.state(), saved)
            target.train([3])
            targets.append(target)
        source.train([3])
        for target in targets:
            assert_same(target.everything(), source.everything())
        # Other dtypes than those that were saved: values rounded once, in the dtype that was asked for.
        narrow = Run(make=Bf16Odd, momentum_dtype=torch.float32, seed=3)
        dmuon.set_optimizer_state_dict(narrow.model, narrow.optimizer, whole)
        for key, value in narrow.state().items():
            kind = torch.bfloat16 if "exp_avg" in key else torch.float32
            assert value.dtype == kind
            assert torch.equal(value, saved[key].to(kind))
        narrow.train([3])


def test_momentum_keeps_its_dtype_and_values(ranks):
    """torch's load_state_dict casts state to the parameter's dtype: fp32 momentum of bf16 weights lost 16 bits."""
    ranks(2, momentum_after_loading)


class Watched(dict):
    """State of a parameter that counts, when a value is taken from it, how much of the old state is there."""

    def __getitem__(self, key):
        self.counts.append(sum(old() is not None for old in self.old))
        return super().__getitem__(key)


def replaced_one_by_one():
    run = Run()
    run.train([0])
    before = run.state()
    given = {
        index: Watched({key: value.clone() for key, value in run.optimizer.state[parameter].items()})
        for index, parameter in enumerate(p for group in run.optimizer.param_groups for p in group["params"])
    }
    Watched.counts = []
    moments = (value for entry in run.optimizer.state.values() for value in entry.values() if value.ndim)
    Watched.old = [weakref.ref(local_of(value)) for value in moments]
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": given})
    assert_same(run.state(), before)
    assert Watched.counts[0] == len(Watched.old)
    assert Watched.counts[-1] <= 2  # the moments of the last one


def given_back():
    run = Run()
    run.train([0])
    before = run.state()
    places = [local_of(value).data_ptr() for entry in run.optimizer.state.values() for value in entry.values()]
    _, state = dsd.get_state_dict(run.model, run.optimizer)
    dsd.set_optimizer_state_dict(run.model, run.optimizer, state)
    assert_same(run.state(), before)
    moments = [v for entry in run.optimizer.state.values() for v in entry.values() if v.ndim and local_of(v).numel()]
    assert moments
    assert {local_of(value).data_ptr() for value in moments} <= set(places)
    # What another optimizer goes on with is a copy.
    other = Run(seed=3)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    run.train([1])
    assert_same(other.state(), before)


def once_and_not_twice():
    replaced_one_by_one()
    given_back()


def test_loading_never_holds_the_state_twice(ranks):
    """Old and new state side by side took 2 GB of a GPU for a model of 1 B parameters on two of them."""
    ranks(2, once_and_not_twice)


# --- some ranks only


def on_one_rank_only():
    run = Run()
    run.train([0])
    packed = run.optimizer.state_dict()
    keys = [(key, list(entry)) for key, entry in packed["state"].items()]
    said = []
    try:
        torch.save(packed, io.BytesIO())
        said.append("accepted")
    except ValueError as error:
        said.append(str(error))
    patient = dist.new_group(timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        assert len(run.model.state_dict()) == len(Toy().state_dict())  # no collective: the other rank is elsewhere
        try:
            dmuon.get_optimizer_state_dict(run.model, run.optimizer)
        except RuntimeError as error:
            said.append(str(error))
    dist.barrier(patient)
    run.train([1])
    return keys, said


def test_a_call_on_rank_0_only_ends_and_names_the_other(ranks):
    (keys, first), (other_keys, second) = ranks(2, on_one_rank_only, group_timeout_s=3)
    assert keys == other_keys
    assert len(keys) == len(list(Toy().parameters()))
    assert "torch.distributed.checkpoint" in first[0]
    assert "torch.distributed.checkpoint" in second[0]
    assert "dmuon.get_optimizer_state_dict" in first[1]
    assert "ranks [1] did not come" in first[1]


# --- a model on meta


def load_onto_meta():
    source = Run()
    source.train(TWO_STEPS)
    weights, state = (
        dmuon.get_model_state_dict(source.model),
        dmuon.get_optimizer_state_dict(source.model, source.optimizer),
    )

    def on_meta():
        with torch.device("meta"):
            return Toy()

    target = Run(make=on_meta)
    dmuon.set_model_state_dict(target.model, weights)
    dmuon.set_optimizer_state_dict(target.model, target.optimizer, state)
    assert_same(target.everything(), source.everything())
    source.train([2])
    target.train([2])
    assert_same(target.everything(), source.everything())


def test_a_model_on_meta_is_filled(ranks):
    ranks(2, load_onto_meta)
