"""The arrow checker itself, on small trees with one broken rule each."""

from __future__ import annotations

from pathlib import Path

import check_arrows
import pytest
from workshop import ROOT


def tree(root: Path, files: dict[str, str]) -> list[str]:
    """Write ``files``, by path below the import package, and check: ``file:line rule`` for each violation."""
    folders = {"dmuon_core": "dmuon-core", "dmuon_kernels": "dmuon-kernels"}
    for name, text in files.items():
        package = name.partition("/")[0]
        path = root / "packages" / folders.get(package, "dmuon-fsdp") / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(root).parents:
            init = root / parent / "__init__.py"
            if "src" in parent.parts[:-1] and not init.exists():
                init.touch()
        path.write_text(text)
    return [f"{v.path.name}:{v.line} {v.rule}" for v in check_arrows.check(root)]


BROKEN = {
    "core imports numpy": ("dmuon_core/a.py", "import torch\nimport numpy as np", 2, "not numpy"),
    "core imports kernels late": ("dmuon_core/a.py", "def f():\n    import dmuon_kernels", 2, "not dmuon_kernels"),
    "core imports kernels by name": (
        "dmuon_core/a.py",
        "import importlib\nimportlib.import_module('dmuon_kernels.ops')",
        2,
        "not dmuon_kernels",
    ),
    "fsdp imports kernels": ("dmuon_fsdp/api.py", "import dmuon_kernels", 1, "not dmuon_kernels"),
    "fsdp imports kernels late": ("dmuon_fsdp/api.py", "def f():\n    from dmuon_kernels import x", 2, "dmuon_kernels"),
    "kernels import fsdp": ("dmuon_kernels/a.py", "import dmuon_fsdp", 1, "not dmuon_fsdp"),
    "kernels import triton": ("dmuon_kernels/__init__.py", "import triton.language as tl", 1, "inside a function"),
    "in a try": (
        "dmuon_kernels/__init__.py",
        "try:\n    import quack\nexcept ImportError:\n    pass",
        2,
        "inside a function",
    ),
    "facade imports torch": ("dmuon/__init__.py", "import torch", 1, "not torch"),
    "facade defines": ("dmuon/__init__.py", "import dmuon_fsdp\n\ndef f():\n    pass", 3, "defines nothing"),
    "planning to comm": (
        "dmuon_fsdp/planning/a.py",
        "from dmuon_fsdp.comm import b",
        1,
        "planning may import no other",
    ),
    "planning to groups": ("dmuon_fsdp/planning/a.py", "import torch.distributed as dist", 1, "no process group"),
    "planning from groups": ("dmuon_fsdp/planning/a.py", "from torch.distributed import all_reduce", 1, "no process"),
    "comm to runtime": ("dmuon_fsdp/comm/a.py", "from ..runtime import b", 1, "not runtime"),
    "runtime to optim": ("dmuon_fsdp/runtime/a.py", "def f():\n    import dmuon_fsdp.optim", 2, "not optim"),
    "optim to checkpoint": ("dmuon_fsdp/optim/a.py", "from dmuon_fsdp import checkpoint", 1, "not checkpoint"),
    "checkpoint to optim": ("dmuon_fsdp/checkpoint/a.py", "from dmuon_fsdp.optim import b", 1, "not optim"),
    "room to the door": ("dmuon_fsdp/runtime/a.py", "from dmuon_fsdp.api import dedicate_params", 1, "not api"),
    "room to the package": ("dmuon_fsdp/runtime/a.py", "from dmuon_fsdp import dedicate_params", 1, "not __init__"),
    "private module": ("dmuon_core/a.py", "import torch._dynamo", 1, "private torch name torch._dynamo"),
    "private from": ("dmuon_core/a.py", "from torch.distributed.fsdp import _fully_shard", 1, "_fully_shard"),
    "private attribute": ("dmuon_core/a.py", "import torch\nx = torch._C._foo()", 2, "torch._C._foo"),
    "private in another's compat": ("dmuon_fsdp/comm/compat.py", "import torch._dynamo", 1, "torch._dynamo"),
    "private by alias": ("dmuon_core/a.py", "import torch.distributed as dist\ndist._x", 2, "torch.distributed._x"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rule_is_found(tmp_path: Path, case: str) -> None:
    """Each rule of the architecture, broken once, is reported once with its line."""
    name, text, line, rule = BROKEN[case]
    rooms = {f"dmuon_fsdp/{room}/__init__.py": "" for room in check_arrows.ROOMS}
    (found,) = tree(tmp_path, rooms | {"dmuon_fsdp/api.py": "", name: text})
    assert found.startswith(f"{Path(name).name}:{line} ")
    assert rule in found


def test_allowed_arrows(tmp_path: Path) -> None:
    """What the architecture allows is not reported."""
    found = tree(
        tmp_path,
        {
            "dmuon_core/a.py": "import json, torch\nfrom dmuon_core import b\nx = torch.__version__",
            "dmuon_core/b.py": "",
            "dmuon_core/compat.py": "import torch._foo\nfrom torch import _bar",
            "dmuon_kernels/__init__.py": "from dmuon_kernels.specs import late",
            "dmuon_kernels/specs.py": "def late():\n    import triton\n    from dmuon_kernels import jit",
            "dmuon_kernels/jit.py": "import triton\nimport cutlass.cute as cute",
            "dmuon_fsdp/__init__.py": "from dmuon_fsdp.api import x",
            "dmuon_fsdp/api.py": "from dmuon_fsdp import planning, comm, runtime, optim, checkpoint\nx = 1",
            "dmuon_fsdp/compat/seam.py": "from torch.distributed.fsdp import _fully_shard",
            "dmuon_fsdp/planning/lpt.py": "import dmuon_core.cost",
            "dmuon_fsdp/comm/a.py": "import torch.distributed\nfrom dmuon_fsdp.compat.seam import y\nfrom . import b",
            "dmuon_fsdp/comm/b.py": "",
            "dmuon_fsdp/runtime/a.py": "from dmuon_fsdp.planning import lpt\nfrom dmuon_fsdp.comm.a import z",
            "dmuon_fsdp/optim/a.py": "import dmuon_core\nfrom ..runtime import a",
            "dmuon_fsdp/checkpoint/a.py": "from dmuon_fsdp.runtime.a import z",
            "dmuon/__init__.py": "from dmuon_core import a\nfrom dmuon_fsdp import api",
        },
    )
    assert found == []


def test_compiler_reached_at_import(tmp_path: Path) -> None:
    """The compiler is two modules away from the package, and still comes with it."""
    found = tree(
        tmp_path,
        {
            "dmuon_kernels/__init__.py": "from dmuon_kernels.a import b",
            "dmuon_kernels/a.py": "import dmuon_kernels.b as b",
            "dmuon_kernels/b.py": "\nimport triton",
        },
    )
    assert len(found) == 1
    assert found[0].startswith("b.py:2 triton is imported with dmuon_kernels")


def test_entry_points_are_imports(tmp_path: Path) -> None:
    """Discovery imports the module of an entry point, whoever else does."""
    files = {"dmuon_kernels/specs.py": "import triton"}
    assert tree(tmp_path, files) == []
    (tmp_path / "packages/dmuon-kernels/pyproject.toml").write_text('triton = "dmuon_kernels.specs:TRITON"\n')
    assert len(check_arrows.check(tmp_path)) == 1


def test_type_checking_imports_do_not_run(tmp_path: Path) -> None:
    """What only a type checker sees needs no installed package; at run time it would."""
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton\n    from typing_extensions import Self"
    )
    assert tree(tmp_path, {"dmuon_kernels/__init__.py": text}) == []
    assert len(tree(tmp_path, {"dmuon_kernels/__init__.py": "import typing_extensions"})) == 1


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path, {"dmuon_core/a.py": "import numpy"})
    assert check_arrows.main([str(tmp_path)]) == 1
    assert "a.py:1: dmuon_core may import" in capsys.readouterr().out


def test_this_repository() -> None:
    assert [str(violation) for violation in check_arrows.check(ROOT)] == []
