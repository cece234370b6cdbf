"""The public surface of each package is what its snapshot says; a change is made on purpose."""

from __future__ import annotations

from types import ModuleType

import api_snapshot
import pytest


@pytest.mark.parametrize("package", api_snapshot.PACKAGES)
def test_surface(package: str) -> None:
    """A renamed option breaks users silently; here it shows as a diff to be accepted with --write."""
    assert "\n".join(api_snapshot.differences(package)) == ""


def test_what_a_snapshot_says() -> None:
    """Kinds and signatures, public methods of classes; nothing that changes from run to run."""
    module = ModuleType("fake")
    code = """
__all__ = ["Thing", "act", "LIMIT"]
LIMIT = 3
def act(x: int, *, by=print, key=lambda: 0) -> str: ...
class Thing:
    def __init__(self, size: int = 1) -> None: ...
    def __call__(self, x): ...
    def _hidden(self): ...
    @property
    def size(self) -> int: ...
    @classmethod
    def of(cls, other): ...
"""
    exec(compile(code, "fake", "exec", dont_inherit=True), module.__dict__)
    assert api_snapshot.snapshot(module).splitlines() == [
        "LIMIT value int",
        "Thing class(object) (size: int = 1) -> None",
        "    __call__ method (self, x)",
        "    of classmethod (cls, other)",
        "    size property",
        "act function (x: int, *, by=<built-in function print>, key=<function <lambda>>) -> str",
    ]
