"""Runs ``interpreted/`` in a process of its own: the interpreter has to be chosen before the kernel is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_kernel_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("this process collects interpreted/ itself")
    folder = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
