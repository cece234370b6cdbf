"""tools/test where something is missing, and what it passes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import ROOT

# Commands that tools/test needs beside a Python.
NEEDED = ("bash", "cat", "cksum", "dirname", "env", "sed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a suite of one test, in a folder with a space."""
    root = tmp_path / "a clone"
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "test", root / "tools" / "test")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "test_suite.py").write_text("def test_one():\n    assert True\n\ndef test_two():\n    assert False\n")
    return root


def run_tools_test(clone: Path, commands: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it from elsewhere, with ``commands`` as the only folder of the PATH."""
    return subprocess.run(
        [clone / "tools" / "test", *arguments],
        cwd=commands,
        env={"PATH": str(commands), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def add_command(commands: Path, name: str, script: str) -> None:
    (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (commands / name).chmod(0o755)


def test_python_too_old(clone: Path, commands: Path) -> None:
    """The message says which Python was found."""
    add_command(commands, "python3", '[[ $1 == --version ]] && echo "Python 3.8.1" || exit 1')
    done = run_tools_test(clone, commands)
    assert done.returncode == 2
    assert "Python 3.10 or newer is needed, found: Python 3.8.1" in done.stderr


def test_no_venv_module(clone: Path, commands: Path) -> None:
    """Debian's Python comes without it; the message says which package brings it."""
    add_command(commands, "python3", '[[ $* == *ensurepip* ]] && exit 1; echo "Python 3.11.2"')
    done = run_tools_test(clone, commands)
    assert done.returncode == 2
    assert "apt install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_here_passes_arguments_and_status(clone: Path, commands: Path) -> None:
    """The current environment, pytest's exit status, and its closing line as the last one."""
    # A link to the interpreter would lose its virtual environment.
    add_command(commands, "python", f'exec "{sys.executable}" "$@"')
    passed = run_tools_test(clone, commands, "--here", "-k", "test_one")
    assert passed.returncode == 0
    assert "1 passed, 1 deselected in" in passed.stdout.splitlines()[-1]
    assert run_tools_test(clone, commands, "--here").returncode == 1
    assert not (clone / ".venv").exists()
