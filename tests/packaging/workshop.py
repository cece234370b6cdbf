"""What the packaging tests share: copies of the sources, virtual environments without a network, pip.

An environment here holds our packages from the wheels alone. torch and hatchling are not installed again: a folder of
links to the installed ones, metadata included, is put on its path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("dmuon-core", "dmuon-kernels", "dmuon-fsdp")
IMPORTS = {
    "dmuon-core": ("dmuon_core",),
    "dmuon-kernels": ("dmuon_kernels",),
    "dmuon-fsdp": ("dmuon_fsdp", "dmuon"),
}
ENTRY_POINTS = {"quack", "cute_sm80", "triton"}
_NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")


def run(command: Sequence[str | Path], *, cwd: Path | None = None, fails: bool = False) -> str:
    """Run offline, without the caller's Python and pip settings; return stdout, of a failure stderr too."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False)
    everything = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"exit {done.returncode}: {words}\n{everything}"
    return everything if fails else done.stdout


def clean_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "DMUON_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def copy_sources(folder: Path) -> Path:
    """The checkout without version control and hidden folders, through a tarball."""
    archive = folder.parent / f"{folder.name}.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("pyproject.toml", ".gitignore", "LICENSE"):
            tar.add(ROOT / name, name)
        for name in ("packages", "tools"):
            staged = folder.parent / f"{folder.name}-staged" / name
            shutil.copytree(ROOT / name, staged, ignore=_NOT_SOURCES)
            tar.add(staged, name)
    folder.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    return folder


def build(project: Path, output: Path) -> None:
    """The project's sdist, and from it the wheel."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", output, project], cwd=output.parent)


def wheel(wheels: Path, distribution: str, version: str = "*") -> Path:
    """The one wheel of ``distribution``."""
    (path,) = wheels.glob(f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl")
    return path


def link_distributions(folder: Path, *names: str) -> Path:
    """Fill ``folder`` with links to what ``names`` and everything they require have installed."""
    folder.mkdir()
    for distribution in _closure(names):
        site = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


def _closure(names: Sequence[str]) -> Iterator[metadata.Distribution]:
    pending, seen = list(names), set()
    while pending:
        name = pending.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        yield distribution
        requirements = [Requirement(text) for text in distribution.requires or ()]
        pending += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


@dataclass(frozen=True)
class Venv:
    """A virtual environment without pip."""

    python: Path

    @classmethod
    def make(cls, folder: Path, links: Path) -> Venv:
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        venv = cls(folder / "bin" / "python")
        site = venv.execute("import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(site.strip(), "linked.pth").write_text(f"{links}\n")
        return venv

    def pip(self, *arguments: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
        pip = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        return run(pip, cwd=cwd, fails=fails)

    def install(self, *arguments: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
        return self.pip("install", "--no-build-isolation", *arguments, cwd=cwd, fails=fails)

    def execute(self, code: str) -> str:
        """Run ``code`` outside the checkout; return what it printed."""
        return run([self.python, "-c", code], cwd=self.python.parent)
