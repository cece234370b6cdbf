"""The package from outside: what importing it costs, its version, its command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dmuon_kernels
from dmuon_kernels.__main__ import main

PYPROJECT = Path(__file__).parents[2] / "packages" / "dmuon-kernels" / "pyproject.toml"

IMPORT = """
import sys, torch
before = set(sys.modules)
import dmuon_kernels, dmuon_kernels.specs
dmuon_kernels.status()
for spec in (dmuon_kernels.specs.QUACK, dmuon_kernels.specs.CUTE_SM80, dmuon_kernels.specs.TRITON):
    spec.probe(torch.device("cpu")), spec.probe(torch.device("cuda"))
heavy = {name.split(".")[0] for name in set(sys.modules) - before} & {"triton", "quack", "cutlass", "cuda"}
assert not heavy, heavy
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
"""


def test_import_and_probes_load_no_kernel():
    """A broken optional package must not break the import, so nothing of it is imported."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_version_is_that_of_the_distribution():
    assert f'\nversion = "{dmuon_kernels.__version__}"\n' in PYPROJECT.read_text()


def test_status_has_a_reason_for_what_is_not_available():
    status = dmuon_kernels.status("cpu")
    assert status["torch"]["available"]
    assert all(bool(backend["reason"]) != backend["available"] for backend in status.values())


def test_command_line_prints_a_line_per_backend(capsys):
    main(["status", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(dmuon_kernels.status("cpu"))
    assert any(re.match(r"torch: available \(dmuon-core", line) for line in lines)
    assert any(line.startswith("cublas: runs on CUDA devices only") for line in lines)


def test_command_line_needs_a_command():
    with pytest.raises(SystemExit):
        main([])
