"""Check that nothing here needs JAX: no import in any Python file, no dependency, and none loaded by our packages.

Standard library only: ``python tools/check_no_jax.py [root]``. The last check runs where torch is installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED = {"jax", "jaxlib", "jaxtyping", "flax", "optax", "haiku", "chex", "orbax", "equinox"}
PACKAGES = ("dmuon_core", "dmuon_kernels", "dmuon_fsdp", "dmuon")
SKIPPED = {"build", "dist", "node_modules", "runs", "__pycache__"}

_IMPORT_ALL = """
import importlib, sys
sys.path[:0] = {sources!r}
asked = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {banned!r}:
            asked.append(name)
            raise ModuleNotFoundError(name, name=name)

import torch
sys.meta_path.insert(0, Refuse())
for package in {packages!r}:
    importlib.import_module(package)
sys.exit(f"importing the packages asks for {{asked}}" if asked else 0)
"""


def python_files(root: Path) -> Iterator[Path]:
    """The repository's own Python files: hidden folders and build outputs are not."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED:
            continue
        if path.is_dir():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def imports_in(path: Path) -> Iterator[str]:
    """Complaints about ``path``, one for each banned import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in BANNED:
                yield f"{path}:{node.lineno}: imports {name}"


def dependencies_in(path: Path) -> Iterator[str]:
    """Complaints about a pyproject: any quoted requirement that starts with a banned name."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for quoted in re.findall(r"""["']\s*([A-Za-z0-9_.-]+)""", line):
            if quoted.lower() in BANNED or quoted.lower() == "dm-haiku":
                yield f"{path}:{number}: depends on {quoted}"


def loaded_by_packages(root: Path) -> Iterator[str]:
    """Import our packages in a process that refuses every banned module and remembers who asked."""
    sources = [str(path) for path in sorted(root.glob("packages/*/src"))]
    code = _IMPORT_ALL.format(sources=sources, banned=BANNED, packages=PACKAGES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        yield done.stderr.strip()


def check(root: Path) -> list[str]:
    complaints = [text for path in python_files(root) for text in imports_in(path)]
    projects = [root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    complaints += [text for path in projects for text in dependencies_in(path)]
    return complaints


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    complaints = [*check(root), *loaded_by_packages(root)]
    print("\n".join(complaints) or "no jax")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
