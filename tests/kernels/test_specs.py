"""The backends as values: where each says it runs, and in which words it says that it does not."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dmuon_core.syrk.contract import API
from dmuon_kernels import probes, specs
from dmuon_kernels.probes import QUACK_RANGES, package_complaint, parse_version, toolchain_complaint, triton_rejects

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PYPROJECT = Path(__file__).parents[2] / "packages" / "dmuon-kernels" / "pyproject.toml"


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU of the given compute capability, and a complete Triton."""

    def pretend(major, minor):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(probes, "_triton_complaint", lambda: None)
        monkeypatch.setattr(probes, "toolchain_complaint", lambda: None)

    return pretend


def test_specs_carry_the_contract_they_are_written_for():
    every = [specs.QUACK, specs.CUTE_SM80, specs.TRITON]
    assert [spec.api for spec in every] == [API] * 3
    assert [(spec.name, spec.priority, spec.origin) for spec in every] == [
        ("quack", 90, "Tri Dao quack"),
        ("cute_sm80", 80, "DMuon internal"),
        ("triton", 70, "DMuon internal"),
    ]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_device_check_by_capability(gpu, monkeypatch, capability):
    """Unknown and old GPUs get a reason, not a launch failure."""
    gpu(*capability)
    monkeypatch.setattr(probes, "not_carried", lambda name: None)
    monkeypatch.setattr(probes, "package_complaint", lambda ranges, extra: None)
    runs = {spec.name for spec in (specs.QUACK, specs.CUTE_SM80, specs.TRITON) if spec.probe(CUDA) is None}
    expected = {"triton"} if capability >= (8, 0) else set()
    expected |= {"cute_sm80"} if capability[0] == 8 else set()
    expected |= {"quack"} if capability >= (9, 0) else set()
    assert runs == expected


@pytest.mark.parametrize("spec", [specs.QUACK, specs.CUTE_SM80, specs.TRITON], ids=lambda spec: spec.name)
def test_reason_names_what_is_needed_and_what_is_there(gpu, spec):
    gpu(7, 5)
    reason = spec.probe(CUDA)
    assert "compute capability" in reason
    assert "has 7.5" in reason


def test_kernels_to_come_are_not_promised(gpu):
    gpu(8, 6)
    assert specs.CUTE_SM80.probe(CUDA) == "dmuon-kernels 0.1.0 carries no cute_sm80 kernel yet; take another backend"
    with pytest.raises(NotImplementedError, match="carries no"):
        specs.CUTE_SM80.load()


def test_absent_quack_is_named(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(metadata, "version", _versions({}))
    assert "quack-kernels" in specs.QUACK.probe(CUDA)


def test_rocm_is_not_taken_for_a_new_nvidia_gpu(gpu, monkeypatch):
    """There torch reports the capability (9, 4) under the device type "cuda"."""
    gpu(9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in specs.TRITON.probe(CUDA)


def test_cuda_device_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in specs.TRITON.probe(CUDA)


def test_triton_on_cpu_only_in_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in specs.TRITON.probe(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(probes, "_triton_complaint", lambda: None)
    assert specs.TRITON.probe(CPU) is None


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_absent_triton(gpu, monkeypatch, device):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "triton is not installed" in specs.TRITON.probe(device)


def test_absent_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(probes.shutil, "which", lambda name: None)
    assert "neither gcc nor clang" in toolchain_complaint()


def test_compiler_named_by_cc(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "python_header", lambda: Path(__file__))
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert "is not an executable" in toolchain_complaint()
    monkeypatch.setenv("CC", sys.executable)
    assert toolchain_complaint() is None


def test_absent_python_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(probes, "python_header", lambda: tmp_path / "Python.h")
    assert "python3-dev" in toolchain_complaint()


def test_header_is_looked_for_in_an_include_folder():
    assert probes.python_header().name == "Python.h"


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        ({}, r"quack-kernels>=0\.5,<0\.7, which is not installed"),
        ({"quack-kernels": "0.4.9"}, "found 0.4.9"),
        ({"quack-kernels": "0.7.0"}, "found 0.7.0"),
        ({"quack-kernels": "0.6.5"}, "nvidia-cutlass-dsl.*not installed"),
        ({"quack-kernels": "0.6.5.post1", "nvidia-cutlass-dsl": "5.0.0"}, "found 5.0.0"),
    ],
)
def test_packages_outside_their_range(monkeypatch, installed, complaint):
    monkeypatch.setattr(metadata, "version", _versions(installed))
    reason = package_complaint(QUACK_RANGES, "quack")
    assert re.search(complaint, reason), reason
    assert "dmuon-kernels[quack]" in reason


def test_packages_in_their_range(monkeypatch):
    monkeypatch.setattr(metadata, "version", _versions({"quack-kernels": "0.5.0", "nvidia-cutlass-dsl": "4.5.2"}))
    assert package_complaint(QUACK_RANGES, "quack") is None


def _versions(installed):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    return version


def test_ranges_are_those_of_the_extras():
    text = PYPROJECT.read_text()
    for name, (first, beyond) in QUACK_RANGES.items():
        assert f'"{name}>={".".join(map(str, first))},<{".".join(map(str, beyond))}"' in text


def test_version_of_letters_is_older_than_all():
    assert parse_version("unknown") == ()
    assert parse_version("0.6.0rc1") == (0, 6, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_triton_rejects_other_dtypes(dtype):
    assert f"got {dtype}" in triton_rejects(torch.zeros(8, 8, dtype=dtype), None, None)


def test_triton_rejects_two_strides():
    x = torch.zeros(8, 8, dtype=torch.float16)
    twice = torch.zeros(16, 16, dtype=torch.float16)[::2, ::2]
    assert "takes a with stride 1" in triton_rejects(twice, None, None)
    assert "takes b with stride 1" in triton_rejects(x, twice, None)
    assert triton_rejects(x, x.mT, twice) is None
    assert triton_rejects(twice[:, :1], None, None) is None
