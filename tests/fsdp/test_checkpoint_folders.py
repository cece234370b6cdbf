"""Checkpoint folders: saved on four ranks, loaded on other worlds and meshes; damaged ones; a rank that dies."""

from __future__ import annotations

import functools
import os
import pickle
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard

import dmuon
from fsdp.models import Toy, close, is_projection, world_mesh
from fsdp.resuming import Run, assert_same, global_loss, uninterrupted, whole
from ranks.harness import run_ranks

PARTS = StateDictOptions()
REGROUPED = dmuon.PlanningOptions(pack_below=9000)  # other owners than the default


def three(name, parameter):
    """Three matrices: of eight ranks five own nothing."""
    return name in ("blocks.0.q.weight", "blocks.0.gate.weight", "blocks.1.down.weight")


PREDICATES = {"all": is_projection, "three": three}


# --- saved on four ranks


def train_and_save(folder):
    """Three steps, then saved in every way, then two more steps: the run that was never interrupted."""
    ends = {}
    for name, predicate in PREDICATES.items():
        run = Run(predicate=predicate)
        run.train(range(3))
        random, before = torch.get_rng_state(), run.everything()
        dmuon.save_checkpoint(run.model, run.optimizer, f"{folder}/{name}", extra={"step": 3, "seen": torch.arange(3)})
        if name == "all":
            plain = {"model": dsd.get_model_state_dict(run.model), "optimizer": run_state(run)}
            dcp.save(plain, checkpoint_id=f"{folder}/plain")
            full = dmuon.get_model_state_dict(run.model), dmuon.get_optimizer_state_dict(run.model, run.optimizer)
            if dist.get_rank() == 0:
                torch.save(full, f"{folder}/full.pt")
            save_asynchronously(run, f"{folder}/async")
        else:
            run.train(range(3, 5))
        assert name == "all" or torch.equal(torch.get_rng_state(), random)
        ends[name] = run.everything(), before, run.owners()
    return ends


def run_state(run):
    return dsd.get_optimizer_state_dict(run.model, run.optimizer)


def save_asynchronously(run, folder):
    """What is trained while it is written is not in it."""
    parts = {
        "model": dmuon.get_model_state_dict(run.model, options=PARTS),
        "optimizer": dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=PARTS),
    }
    # A group of its own: the thread that writes has collectives, and so has training.
    pending = dcp.async_save(parts, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    run.train(range(3, 5))
    pending.result()


def save_fsdp2_alone(folder):
    """FSDP2 with AdamW, as torch saves it, under ``model.`` and without."""
    model, optimizer = fsdp2_alone(seed=5)
    global_loss(model, 0, dist.get_rank(), dist.get_world_size()).backward()
    optimizer.step()
    both = {"model": dsd.get_model_state_dict(model), "optimizer": dsd.get_optimizer_state_dict(model, optimizer)}
    dcp.save(both, checkpoint_id=f"{folder}/fsdp2")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/bare")
    dmuon.save_checkpoint(model, optimizer, f"{folder}/ours")
    return weights_and_moments(model, optimizer)


def fsdp2_alone(seed):
    torch.manual_seed(seed)
    model = Toy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=world_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * seed)


def weights_and_moments(model, optimizer):
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    state = [{key: whole(value) for key, value in entry.items()} for entry in optimizer.state.values()]
    return weights, state, optimizer.param_groups[0]["lr"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ends = run_ranks(4, train_and_save, str(folder))
    fsdp2 = run_ranks(2, save_fsdp2_alone, str(folder))[0]
    return folder, ends, fsdp2


# --- loaded elsewhere


def load_and_go_on(folder, sizes, names, planning, sources=("",)):
    ended = {}
    for name in names:
        for source in sources:
            run = Run(*sizes, seed=7, predicate=PREDICATES[name], planning=planning)
            run.train([11])
            random = torch.get_rng_state()
            extra = load(run, Path(folder), name, source)
            assert torch.equal(torch.get_rng_state(), random)
            loaded = run.everything()
            run.train(range(3, 5))
            ended[name, source] = run.everything(), loaded, run.owners(), extra
    return ended


def load(run, folder, name, source):
    if source == "full":
        model, state = torch.load(folder / "full.pt") if dist.get_rank() == 0 else ({}, {})
        dmuon.set_model_state_dict(run.model, model)
        dmuon.set_optimizer_state_dict(run.model, run.optimizer, state)
        return None
    if source == "torch alone":
        parts = {"model": dsd.get_model_state_dict(run.model), "optimizer": run_state(run)}
        dcp.load(parts, checkpoint_id=folder / "all")
        dsd.set_model_state_dict(run.model, parts["model"])
        dsd.set_optimizer_state_dict(run.model, run.optimizer, parts["optimizer"])
        return None
    return dmuon.load_checkpoint(run.model, run.optimizer, folder / (source or name))


CASES = {
    "1": (1, (1,), ["all"], None, ("",)),
    "2, other owners": (2, (2,), ["all"], REGROUPED, ("", "full")),
    "3": (3, (3,), ["all"], None, ("", "torch alone")),
    "8, five own nothing": (8, (8,), ["three"], None, ("",)),
    "2x2": (4, (2, 2), ["all"], None, ("", "full")),
    "4x1": (4, (4, 1), ["three"], None, ("",)),
    "the same": (4, (4,), ["all", "three"], None, ("",)),
    "the same, otherwise saved": (4, (4,), ["all"], None, ("plain", "async", "full", "torch alone")),
}


@functools.cache
def oracle_of(name):
    return dict(uninterrupted(5, predicate=PREDICATES[name]).named_parameters())


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_on_another_mesh(ranks, saved, case):
    """Bitwise where mesh and owners are the same, else within the order of the reductions."""
    folder, ends, _ = saved
    world, sizes, names, planning, sources = CASES[case]
    moved = False
    for rank, got in enumerate(ranks(world, load_and_go_on, str(folder), sizes, names, planning, sources)):
        for (name, source), (end, loaded, owners, extra) in got.items():
            want, before, were = ends[0][name]
            assert_same(loaded, before)
            if case.startswith("the same"):
                assert owners == were
                assert_same(end, want)
            else:
                moved = moved or owners != were
                oracle = oracle_of(name) if rank == 0 else {}
                for key, value in oracle.items():
                    close(f"{source} {key}", end[key], value, 5e-3)
            if source == "":
                assert extra["step"] == 3
                assert torch.equal(extra["seen"], torch.arange(3))
    assert moved or case.startswith(("the same", "8"))  # the three stay with the first three ranks


def test_every_owner_writes_its_matrices(saved):
    """A checkpoint that rank 0 writes alone waits for one disk."""
    folder, ends, _ = saved
    table = dcp.FileSystemReader(folder / "all").read_metadata()
    owners = ends[0]["all"][2]
    for index, stored in table.storage_data.items():
        name = index.fqn.removeprefix("model.")
        if name in owners:
            rank = int(re.match(r"__(\d+)_", stored.relative_path)[1])
            assert rank == owners[name][1], name
    assert len(set(owners.values())) == 4


def back_from_hsdp(folder):
    run = Run(2, 2, seed=7)
    dmuon.load_checkpoint(run.model, run.optimizer, f"{folder}/all")
    run.train([3])
    dmuon.save_checkpoint(run.model, run.optimizer, f"{folder}/hsdp")  # with the publish of the step under way
    want = run.everything()
    flat = Run(seed=8)
    dmuon.load_checkpoint(flat.model, flat.optimizer, f"{folder}/hsdp")
    assert_same(flat.everything(), want)


def in_bf16():
    return Toy().bfloat16()


def masters_travel(folder):
    """fp32 masters of a bf16 model, to another mesh: the digits that the weights have not."""
    policy = {"param_policy": [dmuon.ParamPolicy("*", master_dtype=torch.float32)]}
    source, target = Run(make=in_bf16, dedicate=policy), Run(2, 2, make=in_bf16, dedicate=policy, seed=5)
    source.train(range(2))
    dmuon.save_checkpoint(source.model, source.optimizer, f"{folder}/masters")
    dmuon.load_checkpoint(target.model, target.optimizer, f"{folder}/masters")
    got, want = target.everything(), source.everything()
    assert_same(got, want)
    master, weight = want["blocks.0.q.weight.master"], want["blocks.0.q.weight"]
    assert master.dtype == torch.float32
    assert not torch.equal(master, weight.float())


def replicas_and_masters(folder):
    back_from_hsdp(folder)
    masters_travel(folder)


def test_to_replicas_and_back_with_masters(ranks, saved):
    ranks(4, replicas_and_masters, str(saved[0]))


def load_fsdp2(folder):
    got = []
    for kind in ("fsdp2", "bare", "ours"):
        run = Run(seed=1)
        dmuon.load_checkpoint(run.model, None, f"{folder}/{kind}")
        got.append(run.weights())
    both = []
    for kind in ("fsdp2", "ours"):
        model, optimizer = fsdp2_alone(seed=1)
        dmuon.load_checkpoint(model, optimizer, f"{folder}/{kind}")
        both.append(weights_and_moments(model, optimizer))
    try:
        dmuon.load_checkpoint(run.model, run.optimizer, f"{folder}/fsdp2")
    except KeyError as error:
        return got, both, str(error)
    return got, both, "accepted"


def test_what_fsdp2_saved(ranks, saved):
    """Its weights under owners, and all of it in FSDP2 again, on another world."""
    want, moments, lr = saved[2]
    for got, both, said in ranks(3, load_fsdp2, str(saved[0])):
        for weights in [*got, *(weights for weights, _, _ in both)]:
            assert_same(weights, want)
        for _, state, rate in both:
            assert rate == lr
            for one, other in zip(state, moments, strict=True):
                assert_same(one, other)
        assert "lacks 'optimizer.state.blocks.0.down.weight.momentum_buffer'" in said
        assert "has 'optimizer.state.blocks.0.down.weight.exp_avg'" in said


# --- into models and optimizers of other kinds


class Frozen(Toy):
    """The toy with a frozen matrix and a frozen norm from the start, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.blocks[0].q.weight.requires_grad_(False)
        self.blocks[0].norm1.weight.requires_grad_(False)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def on_meta():
    with torch.device("meta"):
        return Frozen()


def other_kinds(folder):
    source = Run(make=Frozen)
    for name in ("q", "norm1"):
        source.model.blocks[0].get_submodule(name).weight.requires_grad_(True)
    source.train(range(2))
    source.model.seen = 5
    dmuon.save_checkpoint(source.model, source.optimizer, folder)
    saved = source.everything()
    saved.pop("_extra_state")
    for make in (Frozen, on_meta):
        target = Run(make=make, seed=2)
        frozen = target.model.blocks[0].q.weight
        assert not target.optimizer.state.get(frozen)
        assert dmuon.load_checkpoint(target.model, target.optimizer, folder) is None
        got = target.everything()
        assert got.pop("_extra_state") == {"seen": 5}
        assert_same(got, saved)
        assert target.optimizer.state[frozen]["momentum_buffer"].full_tensor().any()
    narrow = Run(make=Frozen, seed=2, momentum_dtype=torch.bfloat16)
    dmuon.load_checkpoint(narrow.model, narrow.optimizer, folder)
    for key, value in narrow.state().items():
        wanted = saved[key].bfloat16() if key.endswith("momentum_buffer") else saved[key]
        assert torch.equal(value, wanted), key
    deeper = Run(make=Deeper, seed=2)
    fresh = deeper.everything()
    dmuon.load_checkpoint(deeper.model, deeper.optimizer, folder, strict=False)
    for key, value in deeper.everything().items():
        assert torch.equal(value, saved.get(key, fresh[key])), key
    meta = Run(make=on_meta)
    with pytest.raises(ValueError, match="the model is on meta"):
        dmuon.get_optimizer_state_dict(meta.model, meta.optimizer)


def test_frozen_parameters_extra_state_meta_other_momentum_and_a_deeper_model(ranks, tmp_path):
    """The momentum of a parameter frozen from the start has no place in the optimizer that resumes."""
    ranks(2, other_kinds, str(tmp_path / "saved"))


# --- what cannot be loaded


def damage(folder):
    """Copies of a good checkpoint, each wrong in one way."""
    good = Path(folder) / "good"
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    one = next(name for name in sorted(files) if name.startswith("__1_"))
    middle = len(files[one]) // 2
    for kind, changed in {
        "truncated": {one: files[one][:middle]},
        "flipped": {one: files[one][:middle] + bytes(64) + files[one][middle + 64 :]},
        "overwritten": {one: os.urandom(len(files[one]))},
        "missing": {one: None},
        "foreign": {".metadata": b"not a table"},
        "list": {".metadata": pickle.dumps([1, 2])},
        "unfinished": {".metadata": None},
    }.items():
        copy = Path(folder) / kind
        copy.mkdir()
        for name, content in {**files, **changed}.items():
            if content is not None:
                (copy / name).write_bytes(content)
    return one


class Deeper(Toy):
    def __init__(self):
        super().__init__(depth=3)


class Wider(Toy):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64, elementwise_affine=True, bias=False)
        self.lm_head = torch.nn.Linear(64, 99, bias=False)


def load_damaged(folder):
    run = Run()
    run.train([0])
    dmuon.save_checkpoint(run.model, run.optimizer, f"{folder}/good")
    run.train([1])
    if dist.get_rank() == 0:
        damage(folder)
    dist.barrier()
    said = {}
    before = run.everything()

    def attempt(what, run, before, kind):
        try:
            dmuon.load_checkpoint(run.model, run.optimizer, f"{folder}/{kind}")
            said[what] = "accepted"
        except (OSError, KeyError, ValueError) as error:
            said[what] = f"{type(error).__name__}: {error}"
        if said[what] != "accepted":
            assert_same(run.everything(), before)

    for kind in ("nowhere", "unfinished", "foreign", "list", "missing", "truncated", "overwritten", "flipped"):
        attempt(kind, run, before, kind)
    for what, make in (("deeper", Deeper), ("wider", Wider)):
        other = Run(make=make)
        attempt(what, other, other.everything(), "good")
    said["disk full"] = refused_by_the_disk(run, f"{folder}/good")
    dmuon.load_checkpoint(run.model, run.optimizer, f"{folder}/good")
    return said


def refused_by_the_disk(run, folder):
    """One rank may write no more than 200 kB a file: the save fails on all, the last checkpoint stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        dmuon.save_checkpoint(run.model, run.optimizer, folder)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "accepted"


def test_a_damaged_or_foreign_checkpoint_is_named_and_changes_nothing(ranks, tmp_path):
    first, second = ranks(2, load_damaged, str(tmp_path))
    for what in first:
        assert first[what] == second[what], what
    assert "no complete checkpoint" in first["nowhere"]
    assert "no complete checkpoint" in first["unfinished"]
    for kind in ("foreign", "list"):
        assert f"{tmp_path}/{kind}/.metadata is no table" in first[kind]
    for kind, what in (("missing", "is missing"), ("truncated", "ends after")):
        assert f"{tmp_path}/{kind}/__1_0.distcp {what}" in first[kind]
        assert re.search(r"'(model|optimizer)\.\S+' is not there", first[kind])
    for kind in ("overwritten", "flipped"):
        assert re.search(rf"{tmp_path}/{kind}/__1_0.distcp: '\S+' cannot be read", first[kind]), first[kind]
    assert "KeyError: " in first["deeper"]
    assert "lacks 'blocks.2.down.weight'" in first["deeper"]
    assert "has 'norm.bias', which nothing here asks for" in first["wider"]
    assert "was not written" in first["disk full"]


# --- a rank that dies


def die_while_saving(folder):
    run = Run()
    run.train([0])
    dmuon.save_checkpoint(run.model, run.optimizer, folder, extra={"step": 1})
    want = run.everything()
    if dist.get_rank() == 0:
        torch.save(want, f"{folder}.want")
    run.train([1])
    if dist.get_rank() == 1:
        # The kernel kills it in the middle of the first large write.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    dmuon.save_checkpoint(run.model, run.optimizer, folder, extra={"step": 2})


def load_the_last(folder):
    run = Run(seed=3)
    extra = dmuon.load_checkpoint(run.model, run.optimizer, folder)
    assert_same(run.everything(), torch.load(f"{folder}.want"))
    assert extra == {"step": 1}
    # As it is between the two renames of a save.
    if dist.get_rank() == 0:
        os.rename(folder, f"{folder}.old")
    dist.barrier()
    assert dmuon.load_checkpoint(run.model, run.optimizer, folder) == {"step": 1}
    dmuon.save_checkpoint(run.model, run.optimizer, folder, extra={"step": 3})
    assert dmuon.load_checkpoint(run.model, run.optimizer, folder) == {"step": 3}
    return sorted(path.name for path in Path(folder).parent.iterdir())


def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(ranks, tmp_path):
    folder = str(tmp_path / "run")
    with pytest.raises(AssertionError, match=f"died without a report, exit code -{signal.SIGXFSZ:d}"):
        run_ranks(2, die_while_saving, folder)
    assert Path(f"{folder}.new").exists()
    assert ranks(2, load_the_last, folder)[0] == ["run", "run.want"]


@pytest.mark.parametrize("call", [dmuon.save_checkpoint, dmuon.load_checkpoint])
def test_arguments_in_the_order_of_torch_save_are_named(call):
    """They ended in "'str' object has no attribute 'modules'"."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters())
    for arguments in (("folder", model, optimizer), (model, "folder", optimizer)):
        with pytest.raises(ValueError, match=f"dmuon.{call.__name__}.model, optimizer, folder. takes the model first"):
            call(*arguments)
