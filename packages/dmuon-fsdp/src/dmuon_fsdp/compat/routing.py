"""Every operator of a DTensor subclass, brought to one function of ours.

Since 2.12 torch hands an operator to the `__torch_dispatch__` of a subclass that overrides it, and DTensor's own
works when called. Before, its C++ path took every subclass for a DTensor and `__torch_dispatch__` was a stub that
raised. There the Python call is caught by `__torch_function__`, and the operators under it by a dispatch mode, which
goes before that path. What autograd's engine runs by itself escapes: a gradient that it accumulates would become a
plain DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon_fsdp.compat.trees import tree_leaves


def _hands_operators_to_subclasses() -> bool:
    try:
        DTensor.__torch_dispatch__(torch.no_grad, ())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return False
    return True


AUTOGRAD_KEEPS_SUBCLASSES = _hands_operators_to_subclasses()


class RoutedDTensor(DTensor):
    """A DTensor all of whose operators come to `route`."""

    @classmethod
    def route(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    if AUTOGRAD_KEEPS_SUBCLASSES:

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return cls.route(func, args, kwargs or {})

    else:

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if func in _WITHOUT_OPERATOR:
                    return func(*args)
                with _RouteMode(cls):
                    return func(*args, **(kwargs or {}))


_GRAD: Any = torch.Tensor.grad
_READ = ("requires_grad", "grad", "dtype", "device", "shape", "is_leaf", "_post_accumulate_grad_hooks")
# What is asked of a parameter many times in every step; a mode costs ten times as much as the answer.
_WITHOUT_OPERATOR = frozenset({*(getattr(torch.Tensor, name).__get__ for name in _READ), _GRAD.__set__})


class _RouteMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, routed: type[RoutedDTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routed = routed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, self.routed) for leaf in tree_leaves((args, kwargs))):
            return self.routed.route(func, args, kwargs)
        return func(*args, **kwargs)
