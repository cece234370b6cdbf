"""Check the import arrows, between the packages and inside dmuon_fsdp: who may import whom, late imports included.

    dmuon (facade) ──► dmuon_fsdp ──► dmuon_core ◄── dmuon_kernels

- A package imports torch, the standard library, itself and the packages named in ``PACKAGES``.
- ``typing_extensions`` is imported for the type checker alone.
- A compiler package (``LATE``) is imported inside functions, or at the top of a module that is itself reached only
  through imports inside functions.
- A room of dmuon_fsdp imports the rooms below it (``ROOMS``), never one above and never the door.
- A private torch name stands only in a package's ``compat.py``, or in its folder ``compat``.
- The facade defines no function and no class.

Standard library only: ``python tools/check_arrows.py [root]``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = {
    "dmuon_core": {"torch"},
    "dmuon_kernels": {"torch", "dmuon_core"},
    "dmuon_fsdp": {"torch", "dmuon_core"},
    "dmuon": {"dmuon_fsdp", "dmuon_core"},
}
LATE = {
    "dmuon_kernels": {"triton", "quack", "cutlass", "cuda"},
    "dmuon_fsdp": {"matplotlib", "safetensors"},
}
ROOMS: dict[str, set[str]] = {
    "planning": set(),
    "comm": set(),
    "runtime": {"planning", "comm"},
    "optim": {"planning", "comm", "runtime"},
    "checkpoint": {"planning", "comm", "runtime"},
}
DOOR = {"__init__", "__main__", "api", "options", "describe", "cli", "doctor"}
COMPAT = "compat"
TYPING_ONLY = "typing_extensions"


@dataclass(frozen=True, order=True)
class Violation:
    """A broken rule and where."""

    path: Path
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


@dataclass(frozen=True)
class Import:
    """One imported module or name.

    Attributes:
        target: absolute, ``torch.nn.Module``.
        late: not run when the module is imported.
        typing: run by type checkers alone.
    """

    line: int
    target: str
    late: bool
    typing: bool


@dataclass
class Module:
    """A source file: its dotted name, its imports, the private torch names it uses."""

    name: str
    path: Path
    is_package: bool
    imports: list[Import] = field(default_factory=list)
    private: list[tuple[int, str]] = field(default_factory=list)
    definitions: list[tuple[int, str]] = field(default_factory=list)

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


class _Reader(ast.NodeVisitor):
    def __init__(self, module: Module) -> None:
        self.module = module
        self.depth = 0
        self.typing = 0
        self.aliases: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)
            top = alias.name.partition(".")[0]
            self.aliases[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._base(node)
        for alias in node.names:
            target = f"{base}.{alias.name}".rstrip(".*")
            self._add(node.lineno, target)
            self.aliases[alias.asname or alias.name] = target

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.name.split(".")
        up = node.level - 1 if self.module.is_package else node.level
        return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])

    def visit_If(self, node: ast.If) -> None:
        """An import for the type checker alone is never run: it counts as late."""
        self.visit(node.test)
        guard = node.test.attr if isinstance(node.test, ast.Attribute) else node.test
        typing_only = guard == "TYPE_CHECKING" or (isinstance(guard, ast.Name) and guard.id == "TYPE_CHECKING")
        self.typing += typing_only
        self._inside(node.body, typing_only)
        self.typing -= typing_only
        self._inside(node.orelse, False)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if not self.depth:
            self.module.definitions.append((node.lineno, node.name))
        header = [*node.decorator_list, node.args, *filter(None, [node.returns])]
        self._inside(header, False)
        self._inside(node.body, True)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside([node.args], False)
        self._inside([node.body], True)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.module.definitions.append((node.lineno, node.name))
        self.generic_visit(node)

    def _inside(self, nodes: Sequence[ast.AST], late: bool) -> None:
        self.depth += late
        for node in nodes:
            self.visit(node)
        self.depth -= late

    def visit_Call(self, node: ast.Call) -> None:
        called = (_dotted(node.func) or "").rpartition(".")[2]
        first = node.args[0] if node.args else None
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            self._add(node.lineno, str(first.value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node)
        if dotted is None:
            self.generic_visit(node)
            return
        head, _, rest = dotted.partition(".")
        self._note_private(node.lineno, f"{self.aliases.get(head, head)}.{rest}")

    def _add(self, line: int, target: str) -> None:
        self.module.imports.append(Import(line, target, late=self.depth > 0, typing=self.typing > 0))
        self._note_private(line, target)

    def _note_private(self, line: int, dotted: str) -> None:
        head, *rest = dotted.split(".")
        if head == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
            self.module.private.append((line, dotted))


def _dotted(node: ast.AST) -> str | None:
    """``a.b.c`` for a chain of attributes on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def read_modules(root: Path) -> dict[str, Module]:
    """Every module under ``root/packages/*/src``, by dotted name."""
    modules = {}
    for source in sorted(root.glob("packages/*/src")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            module = Module(name, path.relative_to(root), is_package)
            _Reader(module).visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
            modules[name] = module
    return modules


def entry_point_modules(root: Path) -> set[str]:
    """Modules that the pyprojects name as ``"module:object"``: discovery imports them."""
    texts = (path.read_text(encoding="utf-8") for path in root.glob("packages/*/pyproject.toml"))
    return {name for text in texts for name in re.findall(r'"(dmuon[\w.]*):[\w.]+"', text)}


def check(root: Path) -> list[Violation]:
    """Every broken rule under ``root``, in order of file and line."""
    modules = read_modules(root)
    eager = _eager(modules, entry_point_modules(root))
    found: set[Violation] = set()
    for module in modules.values():
        found.update(_check_packages(module, module.name in eager))
        found.update(_check_private(module))
        if module.package == "dmuon_fsdp":
            found.update(_check_rooms(module, modules))
        if module.package == "dmuon":
            found.update(
                Violation(module.path, line, f"the facade defines nothing, here {name}")
                for line, name in module.definitions
            )
    return sorted(found)


def _eager(modules: dict[str, Module], entries: set[str]) -> set[str]:
    """Names of the modules that run when a package or an entry point is imported."""
    pending = [name for name in modules if "." not in name] + sorted(entries & modules.keys())
    eager: set[str] = set()
    while pending:
        name = pending.pop()
        if name in eager:
            continue
        eager.add(name)
        pending.extend(filter(None, [name.rpartition(".")[0]]))
        for imported in modules[name].imports:
            if not imported.late:
                pending.extend(filter(None, [_module_of(imported.target, modules)]))
    return eager


def _module_of(target: str, modules: dict[str, Module]) -> str | None:
    """The module that ``target`` is, or is a name of."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def _check_packages(module: Module, eager: bool) -> Iterator[Violation]:
    allowed = {module.package, *PACKAGES.get(module.package, ())}
    late = LATE.get(module.package, set())
    for imported in module.imports:
        top = imported.target.partition(".")[0]
        if top in allowed or top in sys.stdlib_module_names or (imported.typing and top == TYPING_ONLY):
            continue
        if top not in late:
            rule = (
                f"{module.package} may import {', '.join(sorted(allowed | late))} and the standard library, not {top}"
            )
            yield Violation(module.path, imported.line, rule)
        elif eager and not imported.late:
            rule = f"{top} is imported with {module.package}; import it inside a function, or in a module loaded by one"
            yield Violation(module.path, imported.line, rule)


def _check_private(module: Module) -> Iterator[Violation]:
    if COMPAT in module.name.split(".")[1:2]:
        return
    # An attribute chain of a private module is reported with the import that brought it.
    for line, dotted in module.private:
        yield Violation(module.path, line, f"private torch name {dotted} outside {COMPAT}")


def _check_rooms(module: Module, modules: dict[str, Module]) -> Iterator[Violation]:
    here = _room(module.name)
    if here in DOOR:
        return
    allowed = {here, *ROOMS.get(here, ())}
    for imported in module.imports:
        if here == "planning" and f"{imported.target}.".startswith("torch.distributed."):
            yield Violation(module.path, imported.line, "planning knows no process group, here torch.distributed")
        target = _module_of(imported.target, modules)
        if target is None or not f"{target}.".startswith("dmuon_fsdp."):
            continue
        there = _room(target)
        if there in allowed or (there not in ROOMS and there not in DOOR):
            continue
        below = ", ".join(sorted(allowed - {here})) or "no other room"
        yield Violation(module.path, imported.line, f"arrow upward: {here} may import {below}, not {there}")


def _room(name: str) -> str:
    """``planning`` for dmuon_fsdp.planning.lpt; the file's own name for one at the top of the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"import arrows: {len(violations)} violations in {len(read_modules(root))} modules")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
