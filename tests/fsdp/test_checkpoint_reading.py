"""Reading a checkpoint's tensors: with checksums off, in parts, from a folder that is replaced meanwhile."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dmuon_fsdp.checkpoint.reading import Contents, read

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
