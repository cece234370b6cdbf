"""The JAX checker itself, and the repository under it."""

from __future__ import annotations

from pathlib import Path

import check_no_jax
from workshop import ROOT


def test_import_and_dependency_are_found(tmp_path: Path) -> None:
    """One late import and one dependency, each with its line; hidden folders are not ours."""
    (tmp_path / "pyproject.toml").write_text('dependencies = [\n    "torch",\n    "optax>=0.2",\n]\n')
    (tmp_path / "module.py").write_text("import json\ndef f():\n    from jax.numpy import dot\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "hidden.py").write_text("import jax\n")
    found = check_no_jax.check(tmp_path)
    assert [text.rpartition("/")[2] for text in found] == [
        "module.py:3: imports jax.numpy",
        "pyproject.toml:3: depends on optax",
    ]


def test_this_repository() -> None:
    assert check_no_jax.check(ROOT) == []


def test_packages_ask_for_no_jax() -> None:
    """An optional import inside try/except counts too: the process that imports us refuses it and remembers."""
    assert list(check_no_jax.loaded_by_packages(ROOT)) == []
