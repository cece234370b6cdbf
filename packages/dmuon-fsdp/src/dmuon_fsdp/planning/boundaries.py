"""Where hooks go: the modules that gather before their forward and reduce after their backward.

By default a parameter's boundary is its outermost ancestor that is an element of a repeated container (``layers.N``,
``h.N``, ``encoder.layer.N``), whatever the container's name; where there is none, the module that holds it, or around
one without a forward (a ParameterList) the one that has one, since hooks fire where a forward is called. A repeated
container is a ModuleList or a ModuleDict with numbers for keys, or a Sequential of equal classes, whose elements are
themselves made of modules: a list of Linears is not one, so hooks never land on each Linear of a block.

The outermost, because all ranks must enter the same boundaries: the experts of a layer are a repeated container too,
and a rank may route no token to one of them (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn

from dmuon_fsdp.planning.names import canonical, unwrap_data_parallel

BoundaryPredicate = Callable[[nn.Module], bool]


def is_repeated_container(module: nn.Module) -> bool:
    """Whether the children of ``module`` are blocks of a stack."""
    children = list(module.children())
    if not children or not all(any(True for _ in child.children()) for child in children):
        return False
    if isinstance(module, nn.ModuleList):
        return True
    if isinstance(module, nn.ModuleDict):
        return all(key.isdigit() for key in module)
    return isinstance(module, nn.Sequential) and len(children) > 1 and len({type(child) for child in children}) == 1


def find_boundaries(model: nn.Module, predicate: BoundaryPredicate | None) -> set[str]:
    """Canonical names of the modules that may be a boundary by rule or by the user's predicate."""
    found: set[str] = set()
    for name, module in unwrap_data_parallel(model).named_modules(remove_duplicate=False):
        if predicate is not None:
            if predicate(module):
                found.add(canonical(name))
        elif is_repeated_container(module) and not _lies_within(canonical(name), found):
            found.update(canonical(f"{name}.{child}".lstrip(".")) for child, _ in module.named_children())
    return found


def without_forward(model: nn.Module) -> set[str]:
    """Canonical names of the modules that nobody can call, such as a ParameterList."""
    modules = unwrap_data_parallel(model).named_modules(remove_duplicate=False)
    return {canonical(name) for name, module in modules if type(module).forward is nn.Module.forward}


def is_out_of_reach(name: str, boundary: str, silent: Collection[str]) -> bool:
    """Whether no module of ``boundary`` that is called reads the parameter: then hooks do not see who reads it.

    Args:
        silent: modules without a forward. Of a model that is one itself nothing is said.
    """
    holder = name.rpartition(".")[0]
    while holder != boundary and holder in silent:
        holder = holder.rpartition(".")[0]
    return holder == boundary != "" and boundary in silent


def _lies_within(name: str, boundaries: set[str]) -> bool:
    """Whether the module is a boundary or a part of one."""
    return _innermost(f"{name}.parameter", boundaries, strict=True) is not None


def boundary_of(
    places: Iterable[str], boundaries: set[str], *, strict: bool, silent: Collection[str] = ()
) -> str | None:
    """The boundary of a parameter that stands at ``places`` (names of parameters), or None.

    A parameter that stands in several boundaries belongs to their nearest common ancestor.

    Args:
        strict: None where no boundary is an ancestor; else the parameter's own module then.
        silent: modules without a forward, which are passed over for the one around them.
    """
    chosen = {_innermost(place, boundaries, strict=strict, silent=silent) for place in places}
    if None in chosen:
        return None
    names = [name for name in chosen if name is not None]
    return names[0] if len(names) == 1 else _common_ancestor(names)


def _innermost(place: str, boundaries: set[str], *, strict: bool, silent: Collection[str] = ()) -> str | None:
    own = place.rpartition(".")[0]
    module = own
    while module:
        if module in boundaries:
            return module
        module = module.rpartition(".")[0]
    if "" in boundaries:
        return ""
    while own and own in silent:
        own = own.rpartition(".")[0]
    return None if strict else own


def _common_ancestor(names: list[str]) -> str:
    split = [name.split(".") for name in names]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
