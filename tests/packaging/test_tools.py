"""tools/test and tools/quickstart where something is missing, and what they pass on."""

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
    for name in ("test", "quickstart", "environment.sh"):
        shutil.copy(ROOT / "tools" / name, root / "tools" / name)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "test_suite.py").write_text("def test_one():\n    assert True\n\ndef test_two():\n    assert False\n")
    return root


def run_tool(clone: Path, commands: Path, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it from elsewhere, with ``commands`` as the only folder of the PATH."""
    return subprocess.run(
        [clone / "tools" / tool, *arguments],
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


@pytest.mark.parametrize("tool", ["test", "quickstart"])
def test_python_too_old(clone: Path, commands: Path, tool: str) -> None:
    """The message says which Python was found."""
    add_command(commands, "python3", '[[ $1 == --version ]] && echo "Python 3.8.1" || exit 1')
    done = run_tool(clone, commands, tool)
    assert done.returncode == 2
    assert "Python 3.10 or newer is needed, found: Python 3.8.1" in done.stderr


@pytest.mark.parametrize("tool", ["test", "quickstart"])
def test_no_venv_module(clone: Path, commands: Path, tool: str) -> None:
    """Debian's Python comes without it; the message says which package brings it."""
    add_command(commands, "python3", '[[ $* == *ensurepip* ]] && exit 1; echo "Python 3.11.2"')
    done = run_tool(clone, commands, tool)
    assert done.returncode == 2
    assert f"tools/{tool}: " in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_here_passes_arguments_and_status(clone: Path, commands: Path) -> None:
    """The current environment, pytest's exit status, and its closing line as the last one."""
    # A link to the interpreter would lose its virtual environment.
    add_command(commands, "python", f'exec "{sys.executable}" "$@"')
    passed = run_tool(clone, commands, "test", "--here", "-k", "test_one")
    assert passed.returncode == 0
    assert "1 passed, 1 deselected in" in passed.stdout.splitlines()[-1]
    assert run_tool(clone, commands, "test", "--here").returncode == 1
    assert not (clone / ".venv").exists()


def test_quickstart_here_without_the_packages(clone: Path, commands: Path) -> None:
    """The message says what to install and with which Python."""
    add_command(commands, "python", '[[ $1 == --version ]] && echo "Python 3.11.2" || exit 1')
    done = run_tool(clone, commands, "quickstart", "--here")
    assert done.returncode == 2
    assert "Python 3.11.2 cannot import dmuon" in done.stderr
    assert "pip install -e ." in done.stderr


def test_no_network(clone: Path, commands: Path) -> None:
    """pip's failure is followed by what to do without one."""
    script = f"""
if [[ $* == *ensurepip* ]]; then exit 0; fi
if [[ $1 == --version ]]; then echo "Python 3.11.2"; exit; fi
if [[ $2 == venv ]]; then "{shutil.which("mkdir")}" -p "$4/bin"; "{shutil.which("cp")}" "$0" "$4/bin/python"; exit; fi
if [[ $2 == pip && $3 == install ]]; then echo "no route to host" >&2; exit 1; fi
if [[ $1 == - ]]; then exit 1; fi
exit 0
"""
    add_command(commands, "python3", script)
    (clone / "tools" / "editable_hook.py").write_text("")
    done = run_tool(clone, commands, "quickstart")
    assert done.returncode == 2, done.stderr
    assert "Without a network" in done.stderr
    assert "--here" in done.stderr
