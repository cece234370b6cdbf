"""The wheels on every other supported Python found here: install, metadata, byte-compile. torch is not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import DISTRIBUTIONS, run, wheel

pytestmark = pytest.mark.packaging

OLDEST = (3, 10)

CHECK = """
import compileall, sys, sysconfig
from importlib import metadata
site = sysconfig.get_path("purelib")
packages = ("dmuon_core", "dmuon_kernels", "dmuon_fsdp", "dmuon")
assert all(compileall.compile_dir(f"{site}/{name}", quiet=1, force=True) for name in packages)
print(*sorted(e.name for e in metadata.entry_points(group="dmuon_core.syrk")))
"""


def other_pythons() -> dict[str, Path]:
    """One interpreter for each supported minor version, this one's left out, by version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 20)]
    candidates = [*map(Path, filter(None, on_path)), *sorted(pyenv.glob("versions/3.*/bin/python"))]
    found: dict[str, Path] = {}
    for candidate in candidates:
        version = _version(candidate)
        if version is not None and version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(f"{version[0]}.{version[1]}", candidate)
    return found


def _version(python: Path) -> tuple[int, ...] | None:
    """None where the name is a shim for a version that is not installed, or venv is missing."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return None if done.returncode else tuple(map(int, done.stdout.split()))


OTHERS = other_pythons()


@pytest.mark.skipif(not OTHERS, reason="no other supported Python is installed here")
@pytest.mark.parametrize("version", sorted(OTHERS))
def test_install_and_compile(wheels: Path, tmp_path: Path, version: str) -> None:
    """Syntax or metadata that one supported Python does not take."""
    run([OTHERS[version], "-m", "venv", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    chosen = [wheel(wheels, distribution) for distribution in DISTRIBUTIONS]
    run([python, "-m", "pip", "install", "--no-deps", *chosen])
    assert run([python, "-c", CHECK], cwd=tmp_path).split() == ["cute_sm80", "quack", "triton"]
