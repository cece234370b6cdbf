"""The contract between Newton-Schulz and the kernels: one operation, and the value that describes a backend.

Legend: B matrices, M rows, K columns.

    D = alpha * A @ B.mT + beta * C        A, B: [*, M, K]    C, D: [*, M, M], symmetric

- ``b=None`` means A, a true SYRK. With another B the caller promises that the product is symmetric (polynomials
  of one symmetric matrix commute). B may have batch stride 0.
- fp32 accumulation (fp64 for fp64 input), one rounding to the output dtype. ``D == D.mT`` bitwise.
- Of C only the lower triangle is read, of a diagonal tile all of it before the first store. A float ``beta == 0`` does
  not read C; ``K == 0`` gives ``beta * C``; ``M == 0`` or an empty batch launches nothing.
- ``out`` may be C itself (same storage, shape and strides); any other overlap with an input is a ValueError.
- ``alpha`` and ``beta`` are floats, or fp32 tensors on the device: 0-d, or one per batch item.
- Bitwise repeatable: no floating-point atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

API = 1
"""The number of this contract. A backend built for another one is skipped, with a reason."""

ENTRY_POINT_GROUP = "dmuon_core.syrk"

Scalar = float | Tensor


class SyrkFn(Protocol):
    """A loaded kernel: see this module's text for what it computes."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor | None = None,
        c: Tensor | None = None,
        *,
        alpha: Scalar = 1.0,
        beta: Scalar = 0.0,
        out: Tensor | None = None,
        sms: int | None = None,
    ) -> Tensor: ...


class NormalizeFn(Protocol):
    """A fused norm and cast: see :func:`dmuon_core.normalize.normalize_into` for what it computes.

    It takes float32, float16 and bfloat16 in, and float16 and bfloat16 out.
    """

    def __call__(self, matrices: Sequence[Tensor], outs: Sequence[Tensor]) -> None: ...


@dataclass(frozen=True)
class Layout:
    """How the entries of a matrix lie: row r, column c at ``r * row_stride + c * column_stride`` entries."""

    row_stride: int
    column_stride: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Kind:
    """What the matrices that one launch updates have in common, wherever they lie.

    Attributes:
        m, n: m ≤ n.
        grad, buffer, weight: float32, float16 or bfloat16, any strides.
        copy: likewise, of where the new weight goes once more, rounded; None where it does not.
        presence: dtype of a number that is 0 where no rank had a gradient; None where all have one.
        scale: of the step.
    """

    m: int
    n: int
    grad: Layout
    buffer: Layout
    weight: Layout
    copy: Layout | None = None
    presence: torch.dtype | None = None
    scale: float = 1.0


TABLE = ("grad", "buffer", "weight", "copy", "presence", "slot")
"""Columns of a table, int64, contiguous, a row for each of one or more matrices.

Where its tensors begin, and which matrix of Newton-Schulz's stack it is.
"""


class DirectFn(Protocol):
    """Momentum in place, then the direction normalized and cast: ``momentum_`` followed by ``normalize_into``.

    The direction itself is in float32, of a buffer in half precision as it is stored.

    Args:
        table: ``[items, len(TABLE)]`` on the device.
        out: ``[B, M', N']`` as in ``normalize_into``, float16 or bfloat16; written at every row's slot.
        aligned: whether all addresses but that of the presence are multiples of 16.

    Where the presence is 0 a buffer stays bitwise as it is.
    """

    def __call__(
        self, table: Tensor, kind: Kind, out: Tensor, *, momentum: float, nesterov: bool, aligned: bool
    ) -> None: ...


class ApplyFn(Protocol):
    """W ← W·(1 − lr·weight_decay) − lr·scale·factor, in place, and the new W once more, rounded, in its copy.

    Args:
        table, aligned: as in :class:`DirectFn`.
        factor: ``[B, M, N]`` of any strides, float16 or bfloat16; read at every row's slot.
        lr: number or one-element tensor; never read by the host where it is on the device.

    Where the presence is 0 a weight stays bitwise as it is. The copy is written either way.
    """

    def __call__(
        self, table: Tensor, kind: Kind, factor: Tensor, *, lr: Scalar, weight_decay: float, aligned: bool
    ) -> None: ...


@dataclass(frozen=True)
class UpdateFns:
    """The passes of an update over memory, each fused: what comes before Newton-Schulz, and what comes after it."""

    direct: DirectFn
    apply: ApplyFn


class ProductFn(Protocol):
    """A B, every entry computed: a [B, M, K], b [B, K, N], out [B, M, N], accumulated in fp32 and rounded once."""

    def __call__(self, a: Tensor, b: Tensor, *, out: Tensor, config: str) -> Tensor: ...


@dataclass(frozen=True)
class ProductSpec:
    """Whole products that a backend brings. They run where a measurement says so, else ``torch.bmm`` does.

    Attributes:
        load: returns the function; may import what it needs and may raise anything.
        configs: ``configs(a, b, out)`` names the configurations worth timing for these operands: none where the
            function does not take them.
    """

    load: Callable[[], ProductFn]
    configs: Callable[[Tensor, Tensor, Tensor], Sequence[str]]


def accept_all(a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """The ``rejects`` of a backend that takes every operand."""
    return None


def one_config(a: Tensor, b: Tensor | None, c: Tensor | None) -> Sequence[str]:
    """The ``configs`` of a backend that chooses for itself and takes no ``config``."""
    return ()


def no_prediction(batch: int, m: int, k: int, device: torch.device) -> float | None:
    """The ``predict`` of a backend without a model of its time."""
    return None


def no_notes(device: torch.device) -> str:
    """The ``notes`` of a backend that has nothing to add."""
    return ""


@dataclass(frozen=True)
class SyrkSpec:
    """A backend, as a value. Building one imports nothing heavy and touches no device.

    Attributes:
        name: what ``kernel=`` and ``DMUON_NS_KERNEL`` call it.
        api: the contract it was written for; must equal :data:`API`.
        origin: who made it, as shown to users ("DMuon internal").
        priority: place in the automatic ladder, highest first. The built-in fallbacks have 10 and 0.
        probe: ``probe(device)`` is None when the backend can run there, else the reason and the remedy. Cheap.
        load: returns the kernel; may import what it needs and may raise anything.
        rejects: ``rejects(a, b, c)`` is None when it takes these operands, else the reason. Cheap.
        configs: ``configs(a, b, c)`` names the configurations (tile, pipeline, cluster, ...) worth timing for these
            operands. A kernel with any takes the keyword ``config``, one of the names or None for its own choice.
        predict: ``predict(batch, m, k, device)`` is the time in seconds of one product in half precision that the
            backend expects on ``device``, None where it has no model. Orders the backends for shapes nobody measured.
        normalize: returns a fused norm and cast that runs where the backend does; may import what it needs and may
            raise anything. None where the backend brings none.
        update: returns an update's fused passes, or None where the backend cannot bring them now; may import what it
            needs and may raise anything.
        notes: ``notes(device)`` says how it runs on a device where its probe found nothing against it, for people.
        load_loose: returns the kernel without what only makes D equal its transpose bitwise: the two halves may differ
            by a rounding, and all of C counts. None where that saves nothing.
        product: whole products that come with the backend.
    """

    name: str
    api: int
    origin: str
    priority: int
    probe: Callable[[torch.device], str | None]
    load: Callable[[], SyrkFn]
    rejects: Callable[[Tensor, Tensor | None, Tensor | None], str | None] = accept_all
    configs: Callable[[Tensor, Tensor | None, Tensor | None], Sequence[str]] = one_config
    predict: Callable[[int, int, int, torch.device], float | None] = no_prediction
    normalize: Callable[[], NormalizeFn] | None = None
    update: Callable[[], UpdateFns | None] | None = None
    notes: Callable[[torch.device], str] = no_notes
    load_loose: Callable[[], SyrkFn] | None = None
    product: ProductSpec | None = None


def with_config(fn: SyrkFn, config: str | None) -> SyrkFn:
    """``fn`` in one of its backend's ``configs``, None for its own choice."""
    return fn if config is None else cast(SyrkFn, functools.partial(cast(Any, fn), config=config))


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_operands(a: Tensor, b: Tensor | None, c: Tensor | None, beta: Scalar, out: Tensor | None) -> None:
    """Raise ValueError, naming the operand, where the contract does not hold."""
    if a.ndim < 2:
        raise ValueError(f"syrk: a must be [*, M, K], got shape {tuple(a.shape)}")
    if a.dtype not in _DTYPES:
        raise ValueError(f"syrk: a must be one of {', '.join(map(str, _DTYPES))}, got {a.dtype}")
    batch, m = a.shape[:-2], a.shape[-2]
    square = (*batch, m, m)
    if b is not None:
        _check_like(b, a, "b", tuple(a.shape))
    if c is None:
        if isinstance(beta, Tensor) or beta != 0.0:
            raise ValueError(f"syrk: beta={beta!r} needs c, a [*, M, M] tensor; pass c or leave beta at 0")
    else:
        _check_like(c, a, "c", square)
    if out is not None:
        _check_like(out, a, "out", square)
        _check_overlap(a, b, c, out)


def check_scalars(a: Tensor, alpha: Scalar, beta: Scalar) -> None:
    """Raise ValueError where a tensor ``alpha`` or ``beta`` is not fp32 on a's device, 0-d or one per batch item."""
    for name, scalar in (("alpha", alpha), ("beta", beta)):
        if not isinstance(scalar, Tensor):
            continue
        if scalar.dtype != torch.float32 or scalar.device != a.device:
            raise ValueError(
                f"syrk: {name} must be a float or a float32 tensor on {a.device}, got {scalar.dtype} on {scalar.device}"
            )
        if scalar.ndim and scalar.shape != a.shape[:-2]:
            raise ValueError(
                f"syrk: {name} must be 0-d or have one value per batch item, {list(a.shape[:-2])}, "
                f"got {list(scalar.shape)}"
            )


def _check_like(x: Tensor, a: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(
            f"syrk: {name} must have shape {list(shape)} to go with a {list(a.shape)}, got {list(x.shape)}"
        )
    if x.dtype != a.dtype or x.device != a.device:
        raise ValueError(
            f"syrk: {name} must match a in dtype and device ({a.dtype}, {a.device}), got ({x.dtype}, {x.device})"
        )


def _check_overlap(a: Tensor, b: Tensor | None, c: Tensor | None, out: Tensor) -> None:
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x is None or not _byte_ranges_meet(x, out):
            continue
        is_c_itself = (
            name == "c" and x.data_ptr() == out.data_ptr() and x.shape == out.shape and x.stride() == out.stride()
        )
        if not is_c_itself:
            raise ValueError(
                f"syrk: out overlaps {name}; only out=c, the very same view, is allowed: give out its own memory"
            )
    if out.numel() and _has_internal_overlap(out):
        raise ValueError(f"syrk: out (strides {out.stride()}) writes an element twice; give it memory of its own")


def _byte_ranges_meet(x: Tensor, y: Tensor) -> bool:
    if not x.numel() or not y.numel() or x.device != y.device:
        return False
    (x0, x1), (y0, y1) = _byte_range(x), _byte_range(y)
    return x0 < y1 and y0 < x1


def _byte_range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _has_internal_overlap(x: Tensor) -> bool:
    reach = 0
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
