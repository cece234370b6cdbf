"""Versions that do not fit together are refused by pip, not found out at run time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import Venv, build, wheel

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def with_next_core(sources: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, and a dmuon-core 0.2.0 beside them."""
    folder = tmp_path_factory.mktemp("next")
    project = folder / "dmuon-core"
    shutil.copytree(sources / "packages" / "dmuon-core", project)
    pyproject = project / "pyproject.toml"
    text, changed = re.subn(r'^version = ".*"', 'version = "0.2.0"', pyproject.read_text(), flags=re.MULTILINE)
    assert changed == 1
    pyproject.write_text(text)
    output = folder / "wheels"
    shutil.copytree(wheels, output)
    build(project, output)
    return output


def test_core_beside_older_kernels(with_next_core: Path, new_venv: Callable[[], Venv]) -> None:
    """Kernels 0.1 are written for core 0.1: pip says who requires what."""
    text = new_venv().install("--find-links", with_next_core, "dmuon-core==0.2.0", "dmuon-kernels==0.1.0", fails=True)
    assert "ResolutionImpossible" in text
    assert re.search(r"dmuon-kernels 0\.1\.0 depends on dmuon-core<0\.2", text)


def test_kernels_onto_newer_core(with_next_core: Path, new_venv: Callable[[], Venv]) -> None:
    """With core 0.2 installed and the ranges' newest asked for, pip goes back to core 0.1."""
    venv = new_venv()
    venv.install("--no-deps", wheel(with_next_core, "dmuon-core", "0.2.0"))
    venv.install("--find-links", with_next_core, "dmuon-kernels")
    version = venv.execute("from importlib.metadata import version; print(version('dmuon-core'))")
    assert version.startswith("0.1.")
