"""What ``torch.save`` wrote, read into memory that is there: every byte that matters is held against a checksum."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch

from dmuon_fsdp.checkpoint.records import Records, Section

BEFORE, AFTER = b"what is saved before", b"what is saved after"


def saved(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def section_of(path, content):
    path.write_bytes(BEFORE + content + AFTER)
    return Section(path.open("rb"), len(BEFORE), len(content))


def read(section, target):
    """As a checkpoint is read: into ``target`` where that is what was saved, else by torch."""
    records = Records(section)
    records.check_tables()
    described = records.described()
    if described is not None:
        assert (described.shape, described.dtype) == (target.shape, target.dtype)
        records.read_into_(target)
        return target
    records.check()
    section.seek(0)
    return records.loaded()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(300, 1000).bfloat16(),
        torch.tensor(3.5),
        torch.arange(9, dtype=torch.int64),
        torch.rand(4, 4) > 0.5,
        torch.empty(0, 6),
        torch.randn(3, 5).to(torch.float8_e4m3fn),
        torch.randn(3, 5, dtype=torch.complex64),
    ],
    ids=["fp32", "bf16", "no dimensions", "int64", "bool", "empty", "fp8", "complex"],
)
def test_values_arrive_in_place(tmp_path, tensor):
    target = torch.zeros_like(tensor)
    with section_of(tmp_path / "file", saved(tensor)) as section:
        assert read(section, target) is target
    assert torch.equal(bytes_of(target), bytes_of(tensor))


def test_bytes_in_another_order_are_left_to_torch(tmp_path):
    """Read as they lie they would be other values."""
    tensor, wide = torch.randn(6, 4), torch.randn(6, 8)
    cases = {
        "transposed": saved(tensor.mT.contiguous().mT),
        "of a machine that turns bytes round": in_the_other_order(tensor),
        "a view into more": saved(wide[:, :4]),
    }
    for what, content in cases.items():
        target = torch.zeros(6, 4)
        with section_of(tmp_path / "file", content) as section:
            got = read(section, target)
        assert torch.equal(got, wide[:, :4] if what == "a view into more" else tensor), what
        assert not target.any(), what


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_values_that_are_not_the_bytes_are_left_to_torch(tmp_path):
    """The conjugate of a tensor is its memory and a bit; read as plain values it was the tensor itself."""
    rotation, real = torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3)
    for tensor, target in (
        (rotation.conj(), torch.zeros(4, 3, dtype=torch.complex64)),
        (rotation.conj().imag.contiguous(), torch.zeros(4, 3)),
        (torch._neg_view(real), torch.zeros(4, 3)),
        (torch.quantize_per_tensor(real, 0.1, 0, torch.qint8), torch.zeros(4, 3)),
    ):
        with section_of(tmp_path / "file", saved(tensor)) as section:
            assert torch.equal(read(section, target), tensor)


def test_a_record_of_several_tensors_or_compressed(tmp_path):
    """Not as torch writes a checkpoint's tensor, but as it may be found."""
    tensor = torch.randn(300, 100)
    with section_of(tmp_path / "file", saved([tensor, tensor])) as section:
        assert Records(section).described() is None
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(tensor))) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for record in source.infolist():
            made.writestr(record.filename, source.read(record))
    with section_of(tmp_path / "file", packed.getvalue()) as section:
        assert torch.equal(read(section, torch.zeros_like(tensor)), tensor)


def in_the_other_order(tensor):
    """As a machine writes it whose bytes lie the other way round."""
    values = tensor.numpy()
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as source, zipfile.ZipFile(written, "w") as made:
        for record in source.infolist():
            changed = {"archive/byteorder": b"big", "archive/data/0": values.byteswap().tobytes()}
            made.writestr(record.filename, changed.get(record.filename, source.read(record)))
    return written.getvalue()


def test_no_byte_that_is_changed_changes_a_value(tmp_path):
    """torch's reader takes whatever stands in the file. Padding may differ, everything else raises."""
    tensor = torch.randn(4, 8)
    good = saved(tensor)
    values = good.index(tensor.numpy().tobytes())
    accepted = []
    for place in range(len(good)):
        damaged = good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :]
        with section_of(tmp_path / "file", damaged) as section:
            try:
                got = read(section, torch.zeros(4, 8))
            except Exception:  # whatever a damaged file makes of the readers
                continue
        accepted.append(place)
        assert torch.equal(got, tensor), place
    assert not set(accepted) & set(range(values, values + tensor.nbytes))
    assert len(accepted) < len(good)


def test_a_file_cut_short_or_none_of_torch(tmp_path):
    good = saved(torch.randn(300, 1000))
    for content in (good[:1000], good[: len(good) // 2], b"", b"no archive"):
        with section_of(tmp_path / "file", content) as section:
            assert Records(section).described() is None
            with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)):  # of torch's reader
                read(section, torch.zeros(300, 1000))
