"""Weights from safetensors files, each rank reading its own parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dmuon
from fsdp.models import Toy
from fsdp.resuming import Run, assert_same, global_loss

save_file = pytest.importorskip("safetensors.torch").save_file


class Tied(Toy):
    """The toy with a tied head and a buffer without dimensions."""

    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))


def published(seed=21):
    """What a publisher has: bf16 values, the tied head left out."""
    torch.manual_seed(seed)
    values = {name: value.bfloat16() for name, value in Tied().state_dict().items()}
    del values["lm_head.weight"]
    return values


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One file; two with an index; the two under other names; and damaged ones."""
    folder = tmp_path_factory.mktemp("files")
    values = published()
    (folder / "one").mkdir()
    save_file(values, folder / "one" / "model.safetensors")
    write_sharded(folder / "two", values)
    write_sharded(folder / "renamed", {f"net.{name}": v for name, v in values.items()} | {"inv_freq": torch.zeros(3)})
    content = (folder / "one" / "model.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(content[:-100])
    (folder / "foreign.safetensors").write_bytes(b"PK" + bytes(200))
    index = json.loads((folder / "two" / "model.safetensors.index.json").read_text())
    index["weight_map"]["norm.weight"] = "b.safetensors"
    (folder / "two" / "wrong.safetensors.index.json").write_text(json.dumps(index))
    index["weight_map"]["norm.weight"] = "c.safetensors"
    (folder / "two" / "lost.safetensors.index.json").write_text(json.dumps(index))
    (folder / "empty.safetensors.index.json").write_text("{}")
    save_file({**values, "embed.weight": torch.zeros(90, 64), "more": torch.zeros(2)}, folder / "other.safetensors")
    return folder


def write_sharded(folder, values):
    folder.mkdir()
    names = sorted(values)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: values[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rename(name):
    return name.removeprefix("net.") if name.startswith("net.") else None


def load_every_way(folder, sizes):
    """The values of the files on any mesh; then a step, in which replicas must have them too."""
    folder = Path(folder)
    want = {name: value.float() for name, value in published().items()}
    want["lm_head.weight"] = want["embed.weight"]
    losses = []
    for path, options in (
        (folder / "one", {}),
        (folder / "one" / "model.safetensors", {}),
        (folder / "two", {}),
        (folder / "two" / "model.safetensors.index.json", {}),
        (folder / "renamed", {"rename": rename}),
    ):
        run = Run(*sizes, make=Tied, seed=1)
        run.train([4])
        random = torch.get_rng_state()
        dmuon.load_pretrained(run.model, path, **options)
        assert torch.equal(torch.get_rng_state(), random)
        got = run.weights()
        assert_same({name: got[name] for name in want}, want)
        losses.append(global_loss(run.model, 0).item())
    run = Run(*sizes, make=on_meta)
    dmuon.load_pretrained(run.model, folder / "two")
    assert_same({name: value for name, value in run.weights().items() if name in want}, want)
    return losses


def on_meta():
    with torch.device("meta"):
        return Tied()


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_one_file_or_several_on_any_mesh(ranks, files, sizes):
    torch.manual_seed(0)
    plain = Tied()
    plain.load_state_dict({name: value.float() for name, value in published().items()}, strict=False)
    want = global_loss(plain, 0).item()
    world = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    for losses in ranks(world, load_every_way, str(files), sizes):
        assert losses == pytest.approx([want] * 5, rel=1e-5)


def largest_reads(folder):
    """Elements that this rank took out of the files, by whether it owns them; memory of others stays empty."""
    run = Run()
    read = {}
    for member in dmuon.dedicated_params(run.model):
        read[member.fqn] = member.is_owner, member.owned.local.untyped_storage().nbytes()
    dmuon.load_pretrained(run.model, Path(folder) / "untied.safetensors")
    assert all(m.owned.local.untyped_storage().nbytes() == read[m.fqn][1] for m in dmuon.dedicated_params(run.model))
    return {name: size for name, (mine, size) in read.items() if not mine}


def test_nobody_gets_memory_for_what_others_own(ranks, files):
    torch.manual_seed(3)
    save_file(Toy().state_dict(), files / "untied.safetensors")
    for foreign in ranks(2, largest_reads, str(files)):
        assert foreign
        assert not any(foreign.values())


def load_what_does_not_fit(folder):
    run = Run(make=Tied)
    run.train([0])
    before = run.everything()
    said = {}
    for path in (
        "nowhere",
        "truncated.safetensors",
        "foreign.safetensors",
        "two/wrong.safetensors.index.json",
        "two/lost.safetensors.index.json",
        "empty.safetensors.index.json",
        "other.safetensors",
        "renamed",
    ):
        try:
            dmuon.load_pretrained(run.model, Path(folder) / path)
            said[path] = "accepted"
        except (OSError, KeyError, ValueError) as error:
            said[path] = f"{type(error).__name__}: {error}"
        assert_same(run.everything(), before)
    dmuon.load_pretrained(run.model, Path(folder) / "renamed", strict=False)
    return said


def test_what_does_not_fit_names_file_and_key_and_changes_nothing(ranks, files):
    first, second = ranks(2, load_what_does_not_fit, str(files))
    assert first == second
    for path, texts in {
        "nowhere": ("FileNotFoundError", "nowhere is no file"),
        "truncated.safetensors": ("ValueError", "truncated.safetensors is no safetensors file, or is damaged"),
        "foreign.safetensors": ("ValueError", "foreign.safetensors is no safetensors file"),
        "two/wrong.safetensors.index.json": ("ValueError", "b.safetensors lacks 'norm.weight'"),
        "two/lost.safetensors.index.json": ("FileNotFoundError", "c.safetensors is not there"),
        "empty.safetensors.index.json": ("ValueError", "is no index of safetensors files"),
        "other.safetensors": ("KeyError", "has 'more', which nothing here asks for"),
        "renamed": ("KeyError", "lacks 'blocks.0.down.weight'"),
    }.items():
        for text in texts:
            assert text in first[path]


def only_the_shape(folder):
    run = Run(make=Tied)
    with pytest.raises(ValueError, match=r"'embed.weight' \(90, 64\) for \(97, 64\)"):
        dmuon.load_pretrained(run.model, Path(folder) / "other.safetensors", strict=False)


def test_another_shape_is_named(ranks, files):
    ranks(1, only_the_shape, str(files))
