"""What an operator of torch does to an OwnedTensor.

A rule is right if it gives the same answer as on the whole tensor, on every rank, and if all ranks enter the same
collectives. A rank that does not own has no rows, so a rule may not depend on values, and an operator without a rule
raises on the owner too: otherwise the owner would go on alone and the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from dmuon_fsdp.compat import local_tensor, plain_dtensor, tree_leaves, tree_map
from dmuon_fsdp.runtime.home import Housed

aten = torch.ops.aten
Operator = Any
Rule = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]


def route(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply ``func``, or raise ValueError naming the parameter, its owner and what to call."""
    result = _rule_of(func)(func, args, kwargs)
    _count_writes(func, args)
    return result


def _rule_of(func: Operator) -> Rule:
    rule = _RULES.get(func) or _RULES_BY_PACKET.get(func.overloadpacket)
    if rule is not None:
        return rule
    if _is_foreach_pointwise(func):
        return _delegate
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise
    return _refuse


def _count_writes(func: Operator, args: tuple[Any, ...]) -> None:
    """torch counts versions above this point, on the wrapper that was written through, while `local` is what all
    aliases of a parameter share and what the runtime looks at."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Housed):
                    increment_version(leaf.local)
                    leaf.count_write()


def _is_foreach_pointwise(func: Operator) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_foreach_") and name not in ("_foreach_norm", "_foreach_max", "_foreach_powsum")


# --- rules


def _alias(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same local tensor, so that a write through either shows in the `stamp` of both."""
    return _rewrap(args[0].local, args[0])


def _view(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of everything: torch makes one to find a leaf's gradient accumulator, in `module.to` for example."""
    if torch.Size(args[1]) != args[0].shape:
        return _refuse(func, args, kwargs)
    return _alias(func, args, kwargs)


def _keep(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies and new tensors of the same shape: the same home around the local result."""
    owned = args[0]
    return _rewrap(func(owned.local, *args[1:], **kwargs), owned)


def _new_like(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`new_empty(size)`: owned if it has the size of the original, else an ordinary tensor."""
    owned, size = args[:2]
    if torch.Size(size) != owned.shape:
        return func(owned.local, size, *args[2:], **kwargs)
    return _rewrap(func(owned.local, owned.local.shape, *args[2:], **kwargs), owned)


def _in_place(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func(args[0].local, *args[1:], **kwargs)
    return args[0]


def _ask_local(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Questions about the tensor itself, and calls without a result."""
    return func(args[0].local, *args[1:], **kwargs)


def _same_size(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _copy(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``target.copy_(source)``: the owner takes the values. Loading a state dict comes here."""
    target, source = args[:2]
    if not isinstance(target, Housed):
        return _refuse(func, args, kwargs)
    func(target.local, part_of(source, target), *args[2:], **kwargs)
    return target


def _pointwise(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors of one home and scalars: the operator on the local tensors."""
    first = _common_home(func, args, kwargs)
    result = func(*tree_map(_operand, args), **tree_map(_operand, kwargs))
    return args[0] if _writes_first(func) else _rewrap(result, first)


def _delegate(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists in which FSDP2's parameters stand beside ours: DTensor's own rule, then our homes again.

    Such operators treat index i of every list alike and nothing else, so result i has the home of entry i.
    """
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    for column in zip(*lists, strict=True) if len(lists) > 1 else ():
        if any(isinstance(entry, Housed) for entry in column):
            _common_home(func, column, {})
    result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if not isinstance(result, (list, tuple)) or not isinstance(args[0], (list, tuple)):
        return result
    return [_rewrap_plain(r, a) for r, a in zip(result, args[0], strict=True)]


def _norm(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm or sum over everything: a partial scalar, reduced by DTensor over the mesh.

    A rank without rows counts as one zero, since the largest of no numbers is an error on that rank alone.
    """
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    over_dims = args[2] if len(args) > 2 else kwargs.get("dim")
    if over_dims is not None or (isinstance(order, (int, float)) and order < 0):
        return _refuse(func, args, kwargs)
    return func(tree_map(_one_zero_if_empty, args[0]), *args[1:], **kwargs)


def _sum(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(plain_dtensor(args[0]), **kwargs)


def _unscale(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler's check. torch reduces `found_inf` as the first gradient is laid out: ours is sharded on every mesh
    dimension, while FSDP2's is replicated on HSDP's, where an infinity of one owner would stay in its row."""
    grads, *rest = args
    ordered = sorted(grads, key=lambda grad: not isinstance(grad, Housed))
    return func([_plain(grad) for grad in ordered], *rest, **kwargs)


def _refuse(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    refuse(next(_owned_in(args, kwargs)), str(func))


def refuse(owned: Housed, what: str) -> NoReturn:
    """Raise on every rank alike."""
    raise ValueError(
        f"{what} needs the values of {owned.describe()}. Read them with .full_tensor() on all ranks of the mesh, or "
        ".local where .is_owner is true; write them with copy_ or load_state_dict on all ranks, or initialise with "
        "dmuon.init_weights(model). A forward that gets here bypassed the hooks of its module"
    )


# --- operands


def part_of(source: Tensor, target: Housed) -> Tensor:
    """The part of ``source`` that ``target`` holds on this rank. Gathers a DTensor, on all ranks of its mesh."""
    if source.shape != target.shape:
        raise ValueError(f"{target.describe()} cannot take values of shape {tuple(source.shape)}")
    if isinstance(source, Housed) and _seat(source) == _seat(target):
        return source.local
    return cut(source.full_tensor() if isinstance(source, DTensor) else source, *target.extent)


def cut(full: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    """The block of a whole tensor at those offsets."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def _owned_in(args: Any, kwargs: Any) -> Iterator[Housed]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Housed))


def _common_home(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Housed:
    first = next(_owned_in(args, kwargs))
    for leaf in tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            continue
        if not isinstance(leaf, Housed) or leaf.shape != first.shape or _seat(leaf) != _seat(first):
            _refuse(func, args, kwargs)
    return first


def _seat(owned: Housed) -> tuple[Any, ...]:
    # Not the name: a gradient may go into a buffer of another parameter of the same owner.
    return owned.home.mesh, owned.home.seat, owned.home.tensor_parallel


def _operand(value: Any) -> Any:
    if isinstance(value, Housed):
        return value.local
    if isinstance(value, DTensor):
        return value.full_tensor()  # a scalar, such as the coefficient of a clip
    return value


def _plain(value: Any) -> Any:
    return plain_dtensor(value) if isinstance(value, Housed) else value


def _one_zero_if_empty(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    local = local_tensor(value)
    if local.numel() == 0:
        local = local.new_zeros((1,) * local.ndim)
    return plain_dtensor(value, local)


def _writes_first(func: Operator) -> bool:
    first = func._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


def _rewrap(result: Tensor, like: Housed) -> Housed:
    return type(like).around(result, like.shape, like.home)


def _rewrap_plain(result: Any, entry: Any) -> Any:
    if isinstance(entry, Housed) and isinstance(result, DTensor) and result.shape == entry.shape:
        return _rewrap(local_tensor(result), entry)
    return result


_RULES_BY_PACKET: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            aten.clone,
            aten._to_copy,
            aten.empty_like,
            aten.full_like,
            aten.ones_like,
            aten.zeros_like,
            aten.pin_memory,
            aten._pin_memory,
            aten.lift_fresh,
        ),
        _keep,
    ),
    **dict.fromkeys((aten.alias, aten.detach), _alias),
    **dict.fromkeys((aten.expand, aten.view), _view),
    **dict.fromkeys((aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros), _new_like),
    **dict.fromkeys((aten.fill_, aten.zero_), _in_place),
    **dict.fromkeys((aten.is_pinned, aten.record_stream), _ask_local),
    aten.equal: _refuse,
    aten.is_same_size: _same_size,
    aten.copy_: _copy,
    aten._foreach_norm: _norm,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((aten._fused_adam_, aten._fused_adamw_, aten._fused_adagrad_, aten._fused_sgd_), _delegate),
}
_RULES: dict[Any, Rule] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.sum.default: _sum,
}
