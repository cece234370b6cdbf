from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import DISTRIBUTIONS, Venv, build, copy_sources, link_distributions


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a tarball brings them: without version control, in a folder with a space."""
    return copy_sources(tmp_path_factory.mktemp("tarball") / "a clone")


@pytest.fixture(scope="session")
def wheels(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three sdists and the wheels built from them."""
    folder = tmp_path_factory.mktemp("wheels")
    for distribution in DISTRIBUTIONS:
        build(sources / "packages" / distribution, folder)
    return folder


@pytest.fixture(scope="session")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch, and hatchling for the installs that build."""
    return link_distributions(tmp_path_factory.mktemp("links") / "site", "torch", "hatchling")


@pytest.fixture
def new_venv(links: Path, tmp_path: Path) -> Callable[[], Venv]:
    """Make the test's environment: torch and hatchling, nothing of ours."""
    return lambda: Venv.make(tmp_path / "venv", links)
