"""Reading a checkpoint: with checksums off, in parts, from damaged tables, from a folder that is replaced meanwhile."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.metadata import MetadataIndex

import dmuon
from dmuon_fsdp.checkpoint.reading import Contents, read
from dmuon_fsdp.comm.together import all_or_none, world
from fsdp.resuming import Run, assert_same

MIB = 2**20


def peak_on_top(call):
    """MiB that the process had at most on top of what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here

    def now(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(key))

    before = now("VmRSS")
    result = call()
    return result, now("VmHWM") - before


def in_another_dtype(folder):
    """Four records that arrive converted, so each is read whole beside its place."""
    saved = {f"part{index}": torch.full((64 * MIB // 4,), float(index)) for index in range(4)}
    dcp.save(saved, checkpoint_id=folder)
    templates = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in saved.items()}
    contents = Contents.of(Path(folder))
    got, on_top = peak_on_top(lambda: read(contents, templates))
    for key, value in saved.items():
        assert torch.equal(got[key], value.bfloat16())
    return on_top


def without_checksums(folder):
    """torch's switch belongs to a thread's context; the threads that read took the files for damaged."""
    saved = {"whole": torch.randn(6, 4), "turned": torch.randn(4, 6).mT, "object": {"step": 3}}
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(saved, checkpoint_id=folder)
        contents = Contents.of(Path(folder))
        got = read(contents, contents.templates(""))
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(got["whole"], saved["whole"])
    assert torch.equal(got["turned"], saved["turned"])
    assert got["object.step"] == 3


def read_otherwise(folder):
    without_checksums(f"{folder}/unchecked")
    return in_another_dtype(f"{folder}/wide")


def test_without_checksums_and_one_whole_record_at_a_time(ranks, tmp_path):
    """The four threads once held four whole records beside their places: 256 MiB here, where one has 64."""
    (on_top,) = ranks(1, read_otherwise, str(tmp_path))
    assert on_top < 2 * 64 + 32, (
        on_top
    )  # one record, the last one's memory that is not given back yet, and small things


# --- what is refused, on every rank alike and with the model as it was


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def with_another_table(folder, name, change):
    """A copy of the checkpoint, made by the first rank."""
    copy = folder.with_name(name)
    if dist.get_rank() == 0:
        shutil.copytree(folder, copy)
        table = copy / ".metadata"
        table.write_bytes(change(table.read_bytes()))
    dist.barrier()
    return copy


def fields_renamed(table):
    return table.replace(b"relative_path", b"relative_pbth")


def part_dropped(table):
    metadata = pickle.loads(table)
    entry = metadata.state_dict_metadata["model.embed.weight"]
    metadata.state_dict_metadata["model.embed.weight"] = dataclasses.replace(entry, chunks=entry.chunks[:1])
    return pickle.dumps(metadata)


def place_dropped(table):
    metadata = pickle.loads(table)
    places = [place for place in metadata.storage_data if place.fqn == "model.embed.weight"]
    del metadata.storage_data[places[1]]
    return pickle.dumps(metadata)


def part_moved_out(table):
    metadata = pickle.loads(table)
    second = metadata.state_dict_metadata["model.embed.weight"].chunks[1]
    second.offsets = torch.Size([second.offsets[0] + 1, 0])
    return pickle.dumps(metadata)


def part_moved_over_another(table):
    metadata = pickle.loads(table)
    part = metadata.state_dict_metadata["model.embed.weight"].chunks[1]
    stored = metadata.storage_data.pop(MetadataIndex("model.embed.weight", part.offsets))
    part.offsets = torch.Size([part.offsets[0] - 1, 0])
    metadata.storage_data[MetadataIndex("model.embed.weight", part.offsets)] = stored
    return pickle.dumps(metadata)


def file_elsewhere(table):
    metadata = pickle.loads(table)
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../saved/{stored.relative_path}"
    return pickle.dumps(metadata)


def what_is_refused(folder):
    run, folder = Run(), Path(folder) / "saved"
    run.train([0])
    dmuon.save_checkpoint(run.model, run.optimizer, folder)
    run.train([1])
    before = run.everything()
    said = {}

    def load(what, source):
        said[what] = error_of(lambda: dmuon.load_checkpoint(run.model, run.optimizer, source))
        assert_same(run.everything(), before)

    tables = fields_renamed, part_dropped, place_dropped, part_moved_out, part_moved_over_another, file_elsewhere
    for change in tables:
        load(change.__name__, with_another_table(folder, change.__name__, change))
    model, optimizer = dsd.get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "extra": 5}, checkpoint_id=f"{folder}.plain")
    load("extra", f"{folder}.plain")
    mine = {"when": datetime.timedelta(1)} if dist.get_rank() == 1 else {}
    said["own class"] = error_of(lambda: dmuon.save_checkpoint(run.model, run.optimizer, folder, extra=mine))
    said.update(replaced(run, folder))
    ours = error_of(lambda: all_or_none(lambda: 1 // (1 - dist.get_rank()), world()))
    return said, ours


def replaced(run, folder):
    """As a load finds it when another job saves under the same name: the files have the same names and lengths."""
    contents = Contents.of(folder)
    dist.barrier()
    dmuon.save_checkpoint(run.model, run.optimizer, folder)
    said = {"replaced": error_of(lambda: read(contents, contents.templates("")))}
    contents = Contents.of(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    said["removed"] = error_of(lambda: read(contents, contents.templates("")))
    return said


def test_damaged_tables_foreign_extras_and_a_folder_that_is_replaced(ranks, tmp_path):
    """Parts that the table lacks came out of uninitialised memory, and two checkpoints were mixed; a failure of an
    unforeseen kind on one rank left the others waiting, and ``extra`` was looked at when the model was overwritten."""
    (said, on_first), (other, on_second) = ranks(2, what_is_refused, str(tmp_path))
    assert said == other
    for kind, why in {
        "fields_renamed": "no attribute 'relative_path'",
        "part_dropped": r"'model.embed.weight' of shape \(97, 64\) has parts with 3136 of 6208 values",
        "place_dropped": "'model.embed.weight' is in no file, or not all of it",
        "part_moved_out": r"'model.embed.weight' of shape \(97, 64\) has a part outside of it",
        "part_moved_over_another": r"'model.embed.weight' of shape \(97, 64\) has parts that overlap",
        "file_elsewhere": r"is in '../saved/.*', which is not in this folder",
    }.items():
        assert re.match(rf"ValueError: {tmp_path}/{kind}/.metadata is no table .*{why}", said[kind]), said[kind]
    assert f"ValueError: {tmp_path}/saved.plain: 'extra' is not what dmuon.save_checkpoint writes" in said["extra"]
    assert "ValueError: extra could not be loaded again; give numbers" in said["own class"]
    assert "datetime.timedelta" in said["own class"]
    for kind in ("replaced", "removed"):
        assert said[kind] == f"RuntimeError: {tmp_path}/saved was replaced while it was read; load again"
    assert on_first == "RuntimeError: ZeroDivisionError: integer division or modulo by zero"
    assert on_second == "ZeroDivisionError: integer division or modulo by zero"
