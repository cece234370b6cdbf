"""Compare the public surface of each package with its snapshot under tests/golden/, or write it anew.

    python tools/api_snapshot.py            print the differences, exit 1 if there are any
    python tools/api_snapshot.py --write    write the snapshots; a change comes with a CHANGELOG line and a version

A line is a name of ``__all__``, its kind and its signature; a class is followed by its public methods.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGES = ("dmuon_core", "dmuon_kernels", "dmuon_fsdp", "dmuon")
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
_SPECIAL = {"__call__", "__enter__", "__getitem__"}


def snapshot(module: ModuleType) -> str:
    """The surface of ``module`` as text."""
    lines = [line for name in sorted(module.__all__) for line in _describe(name, getattr(module, name))]
    return "".join(f"{line}\n" for line in lines)


def _describe(name: str, value: object) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name} module"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"{name} class({bases}) {_signature(value)}"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value) and not isinstance(value, type):
        yield f"{name} function {_signature(value)}"
    else:
        yield f"{name} value {type(value).__name__}"


def _members(cls: type) -> Iterator[str]:
    """Public methods and properties of ``cls``, inherited ones too where the base is ours.

    Fields of a dataclass are in its signature.
    """
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in PACKAGES or base is cls]
    names = {name for base in ours for name in vars(base) if not name.startswith("_") or name in _SPECIAL}
    fields = {item.name for item in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in sorted(names - fields):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, (property, functools.cached_property)):
            yield f"{name} property"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{name} {type(value).__name__} {_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name} method {_signature(value)}"
        else:
            yield f"{name} attribute"


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(unknown)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def differences(package: str) -> list[str]:
    """The lines of a unified diff from the snapshot to what is there now."""
    path = GOLDEN / f"api-{package}.txt"
    if not path.exists():
        return [f"{path} is missing; write it: python tools/api_snapshot.py --write"]
    now = snapshot(importlib.import_module(package))
    then = path.read_text(encoding="utf-8")
    return list(difflib.unified_diff(then.splitlines(), now.splitlines(), path.name, "now", lineterm=""))


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for package in PACKAGES:
            text = snapshot(importlib.import_module(package))
            (GOLDEN / f"api-{package}.txt").write_text(text, encoding="utf-8")
        return 0
    found = [line for package in PACKAGES for line in differences(package)]
    print("\n".join(found) or "public surface as in the snapshots")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
