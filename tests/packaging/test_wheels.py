"""The built wheels: what is in them, and that they work where the checkout is not."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import DISTRIBUTIONS, ENTRY_POINTS, IMPORTS, Venv, run, wheel

pytestmark = pytest.mark.packaging

REPORT = """
import importlib, json
from importlib import metadata, util
report = {}
for name in ("dmuon_core", "dmuon_kernels", "dmuon_fsdp", "dmuon"):
    if util.find_spec(name):
        module = importlib.import_module(name)
        report[name] = {"version": module.__version__, "file": module.__file__}
report["entry points"] = [e.name for e in metadata.entry_points(group="dmuon_core.syrk")]
report["status"] = importlib.import_module("dmuon_core").get_backend_status()
print(json.dumps(report))
"""

USER_SCRIPT = """
import torch

import dmuon
import dmuon_core
import dmuon_fsdp
import dmuon_kernels

orthogonal: torch.Tensor = dmuon.newton_schulz(torch.ones(4, 8), ns_steps=5)
solver = dmuon_core.NewtonSchulz(kernel="auto")
line: str = dmuon.get_ns_backend()
versions: list[str] = [dmuon_fsdp.__version__, dmuon_kernels.__version__]
"""


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_contents(wheels: Path, distribution: str) -> None:
    """A wheel without py.typed is untyped for its users, and one without the license may not be passed on."""
    with zipfile.ZipFile(wheel(wheels, distribution)) as archive:
        names = archive.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
    info = metadata_name.rpartition("/")[0]
    assert {name.partition("/")[0] for name in names} == {info, *IMPORTS[distribution]}
    assert {f"{name}/py.typed" for name in IMPORTS[distribution]} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, flags=re.MULTILINE)
    assert set(required) == {"torch", "dmuon-core"} - {distribution}


@pytest.mark.parametrize(
    "chosen",
    [("dmuon-core",), ("dmuon-kernels",), ("dmuon-fsdp",), DISTRIBUTIONS],
    ids=["core", "kernels", "fsdp", "all"],
)
def test_installed_outside_the_checkout(wheels: Path, new_venv: Callable[[], Venv], chosen: tuple[str, ...]) -> None:
    """Each distribution brings core along and nothing else; discovery finds the kernels that are there."""
    venv = new_venv()
    venv.install("--find-links", wheels, *chosen)
    report = json.loads(venv.execute(REPORT))
    for distribution in DISTRIBUTIONS:
        expected = distribution in chosen or distribution == "dmuon-core"
        for name in IMPORTS[distribution]:
            assert (name in report) == expected
            if expected:
                assert report[name]["version"] == wheel(wheels, distribution).name.split("-")[1]
                assert Path(report[name]["file"]).is_relative_to(venv.python.parents[1])
    kernels = ENTRY_POINTS if "dmuon-kernels" in chosen else set()
    assert set(report["entry points"]) == kernels
    assert set(report["status"]) == {"cublas", "torch"} | kernels


def test_compiled_kernels_are_in_the_wheel(wheels: Path) -> None:
    """Data files are forgotten in silence; a wheel for one platform alone would be missing on all others."""
    path = wheel(wheels, "dmuon-kernels")
    assert path.name.endswith("-py3-none-any.whl")
    assert path.stat().st_size < 3_000_000
    with zipfile.ZipFile(path) as archive:
        folder = "dmuon_kernels/aot/cubins"
        manifest = json.loads(archive.read(f"{folder}/manifest.json"))
        for name, sha256 in manifest["sources"].items():
            assert hashlib.sha256(archive.read(f"dmuon_kernels/{name}")).hexdigest() == sha256
        for architecture, artefacts in manifest["artefacts"].items():
            cubins = lzma.decompress(archive.read(f"{folder}/sm_{architecture}.xz"))
            last = artefacts[-1]
            assert last["offset"] + last["size"] == len(cubins)


def test_versions_are_those_of_the_pyprojects(sources: Path, wheels: Path) -> None:
    """A version is written in the pyproject and in the package: one of them is forgotten sooner or later."""
    for distribution in DISTRIBUTIONS:
        text = (sources / "packages" / distribution / "pyproject.toml").read_text()
        version = wheel(wheels, distribution).name.split("-")[1]
        assert f'\nversion = "{version}"\n' in text


def test_user_script_is_typed(wheels: Path, new_venv: Callable[[], Venv], tmp_path: Path) -> None:
    """Types reach a user through the installed wheels; the wrong line shows that they are not Any."""
    venv = new_venv()
    venv.install("--find-links", wheels, *DISTRIBUTIONS)
    script = tmp_path / "user.py"
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--python-executable", venv.python, script]
    script.write_text(USER_SCRIPT)
    run(mypy, cwd=tmp_path)
    script.write_text(f"{USER_SCRIPT}\nwrong: int = dmuon.get_ns_backend()\n")
    assert 'has type "str", variable has type "int"' in run(mypy, cwd=tmp_path, fails=True)
