"""`pip install -e .` in a clone: three real distributions, and the clone's code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import DISTRIBUTIONS, ENTRY_POINTS, IMPORTS, Venv, copy_sources

pytestmark = pytest.mark.packaging

FILES = """
import importlib, json
print(json.dumps({name: importlib.import_module(name).__file__ for name in %r}))
"""
METADATA = """
import json
from importlib import metadata
names = ("dmuon-workspace", "dmuon-core", "dmuon-kernels", "dmuon-fsdp")
print(json.dumps({
    "versions": {name: metadata.version(name) for name in names},
    "entry points": [e.name for e in metadata.entry_points(group="dmuon_core.syrk")],
}))
"""


def imported_files(venv: Venv, *distributions: str) -> list[Path]:
    names = [name for distribution in distributions for name in IMPORTS[distribution]]
    return [Path(file) for file in json.loads(venv.execute(FILES % names)).values()]


def test_root(new_venv: Callable[[], Venv], tmp_path: Path) -> None:
    """A virtual root would install an empty distribution and exit 0, with no package to import."""
    clone = copy_sources(tmp_path / "my clone")
    venv = new_venv()
    venv.install("-e", ".", cwd=clone)
    found = json.loads(venv.execute(METADATA))
    assert len(found["versions"]) == 4
    assert sorted(found["entry points"]) == sorted(ENTRY_POINTS)
    assert all(file.is_relative_to(clone / "packages") for file in imported_files(venv, *DISTRIBUTIONS))


def test_root_sources_win(new_venv: Callable[[], Venv], tmp_path: Path) -> None:
    """pip also copies the packages into site-packages; an edit in the clone must be seen all the same."""
    clone = copy_sources(tmp_path / "clone")
    venv = new_venv()
    venv.install("-e", ".", cwd=clone)
    copies = venv.python.parents[1].glob("lib/python*/site-packages/dmuon_fsdp/__init__.py")
    assert len(list(copies)) == 1
    source = clone / "packages" / "dmuon-fsdp" / "src" / "dmuon_fsdp" / "__init__.py"
    source.write_text(f"{source.read_text()}\nEDITED = True\n")
    assert venv.execute("import dmuon_fsdp; print(dmuon_fsdp.EDITED)").strip() == "True"


def test_root_again_and_away(new_venv: Callable[[], Venv], tmp_path: Path) -> None:
    """Installing twice is harmless, and uninstalling leaves nothing on the path."""
    clone = copy_sources(tmp_path / "clone")
    venv = new_venv()
    venv.install("-e", ".", cwd=clone)
    venv.install("-e", ".", cwd=clone)
    venv.pip("uninstall", "--yes", "dmuon-workspace", *DISTRIBUTIONS)
    assert str(clone) not in venv.execute("import sys; print(sys.path)")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_one_package(new_venv: Callable[[], Venv], wheels: Path, tmp_path: Path, distribution: str) -> None:
    """One package editable; what it needs comes as a wheel."""
    clone = copy_sources(tmp_path / "my clone")
    venv = new_venv()
    venv.install("--find-links", wheels, "-e", Path("packages", distribution), cwd=clone)
    assert all(file.is_relative_to(clone / "packages") for file in imported_files(venv, distribution))
