"""Optional kernel packages break in every way; each becomes a reason that users can read (design case 24).

A stub distribution is a folder on the path with a module and metadata, which is all that discovery sees of a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = """
from dmuon_core.syrk.contract import SyrkSpec
def spec(api=1, probe=lambda device: None, load=None):
    return SyrkSpec(__name__, api, "a stub", 500, probe, load)
def explode(*args, **kwargs):
    raise AssertionError("kaboom")
"""

# How a stub fails at import, when its entry point is loaded: module text, and what the reason must say.
AT_IMPORT = {
    "stub_import": ("raise ImportError('cannot import name moved')", "ImportError: cannot import name moved"),
    "stub_module": ("import a_module_nobody_has", "ModuleNotFoundError: No module named 'a_module_nobody_has'"),
    "stub_attribute": ("import torch; torch.no_such_name", "AttributeError"),
    "stub_runtime": ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
    "stub_os": ("raise OSError('libfoo.so: cannot open')", "OSError: libfoo.so: cannot open"),
    "stub_assertion": ("assert False, 'one version only'", "AssertionError: one version only"),
    "stub_syntax": ("def f(:", "SyntaxError"),
    "stub_own": ("class Odd(Exception): pass\nraise Odd('odd')", "Odd: odd"),
    "stub_object": ("other = 1", "AttributeError"),
    "stub_contract": (f"{SPEC}\nSTUB = spec(api=99)", "contract 99"),
    "stub_value": ("STUB = {'name': 'stub'}", "dict where a SyrkSpec is expected"),
}

# How a stub fails later: when it is probed, loaded or first called.
AT_USE = {
    "stub_unsuited": (f"{SPEC}\nSTUB = spec(probe=lambda device: 'needs SM90')", "needs SM90"),
    "stub_probe": (f"{SPEC}\nSTUB = spec(probe=explode)", "kaboom"),
    "stub_load": (f"{SPEC}\nSTUB = spec(load=explode)", "kaboom"),
    "stub_call": (f"{SPEC}\nSTUB = spec(load=lambda: explode)", "kaboom"),
    "stub_wrong": (f"{SPEC}\nSTUB = spec(load=lambda: lambda a, *rest, **options: a @ a.mT)", "wrong values"),
}

ASK = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import dmuon_core
    x = dmuon_core.NewtonSchulz()(torch.randn(4, 8))
    dmuon_core.NewtonSchulz()(torch.randn(4, 8))
    status = dmuon_core.get_backend_status()
    line = dmuon_core.get_ns_backend()

def explicit(kernel):
    try:
        dmuon_core.NewtonSchulz(kernel=kernel)
    except Exception as error:
        return [isinstance(error, RuntimeError), str(error)]
    return [False, "no error"]

warnings.simplefilter("ignore")
print(json.dumps({
    "status": status,
    "finite": bool(torch.isfinite(x).all()),
    "line": line,
    "errors": {name: explicit(name) for name in status if name.startswith("stub")},
    "warnings": [str(w.message) for w in caught],
}))
"""


def install_stub(folder: Path, name: str, module: str) -> None:
    """A distribution called ``name``, version 0.3.0, that offers ``STUB`` of the module of that name."""
    info = folder / f"{name}-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.0\n")
    (info / "entry_points.txt").write_text(f"[dmuon_core.syrk]\n{name} = {name}:STUB\n")
    (folder / f"{name}.py").write_text(module)


def ask(folder: Path) -> dict:
    """What a user's process sees with the stubs in ``folder`` installed."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {key: value for key, value in os.environ.items() if key != "DMUON_NS_KERNEL"} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All the broken packages at once: one process tells."""
    folder = tmp_path_factory.mktemp("stubs")
    for name, (module, _) in (AT_IMPORT | AT_USE).items():
        install_stub(folder, name, module)
    return ask(folder)


def test_auto_works(seen: dict) -> None:
    """The next backend runs, and is the one that the line names."""
    assert seen["finite"]
    assert "stub" not in seen["line"]
    assert seen["status"]["torch"]["available"] is True


@pytest.mark.parametrize("name", AT_IMPORT)
def test_broken_at_import(seen: dict, name: str) -> None:
    """quack once raised ImportError under a newer CUTLASS, and only ModuleNotFoundError was expected."""
    _, reason = AT_IMPORT[name]
    entry = seen["status"][name]
    assert entry["available"] is False
    assert entry["distribution"] == f"{name} 0.3.0"
    assert f"{name} 0.3.0" in entry["reason"]
    assert reason in entry["reason"]
    assert sum(f"{name} " in text for text in seen["warnings"]) <= 1


@pytest.mark.parametrize("name", AT_IMPORT | AT_USE)
def test_explicit_raises_with_the_reason(seen: dict, name: str) -> None:
    """At construction; a package may also import well and fail at its first kernel, inside the compiler."""
    _, reason = (AT_IMPORT | AT_USE)[name]
    is_runtime_error, text = seen["errors"][name]
    assert is_runtime_error
    assert reason in text.partition("\n")[0]
    assert "torch: available" in text


def test_contract_mismatch_names_both_distributions(seen: dict) -> None:
    """Who is told that 99 is not 1 needs to know which two packages to match."""
    reason = seen["status"]["stub_contract"]["reason"]
    assert "stub_contract 0.3.0" in reason
    assert "dmuon-core" in reason


def test_name_of_another_package(tmp_path: Path) -> None:
    """A second `torch` backend must not replace the built-in one."""
    impostor = f"{SPEC}\nSTUB = SyrkSpec('torch', 1, 'an impostor', 500, lambda device: None, explode)"
    install_stub(tmp_path, "stub_impostor", impostor)
    seen = ask(tmp_path)
    assert seen["finite"]
    assert seen["status"]["torch"]["available"] is True
    assert seen["status"]["torch"]["distribution"].startswith("dmuon-core")
    (label,) = [name for name in seen["status"] if "stub_impostor" in name]
    assert "taken by dmuon-core" in seen["status"][label]["reason"]
