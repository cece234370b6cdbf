"""Newton-Schulz orthogonalization, by the Gram recurrence or directly.

Legend: B matrices, M rows, N columns, M <= N after orienting.

Both forms apply the same odd polynomial to the singular values of X = U / ‖U‖_F:

    direct   A = X Xᵀ;  X ← a X + (b A + c A²) X                          per step
    gram     R = X Xᵀ;  Z = b R + c R²;  Q ← a Q + Q Z;  R ← (a I + Z) R (a I + Z)
             per step, and X ← Q X once per segment (``dmuon_core.restarts`` says where segments end)

With five steps, one restart and symmetric products the Gram form takes 6 M²N + 14 M³ FLOP, the direct one
20 M²N + 10 M³ without using symmetry.

Sources: Keller Jordan, "Muon" (2024) for the iteration; Dao-AILab, "Gram Newton-Schulz" (2026) for the recurrence.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dmuon_core.coefficients import CoefficientsLike, Triple, as_coefficients
from dmuon_core.normalize import normalize
from dmuon_core.restarts import as_restarts, check_restarts, derive_restarts
from dmuon_core.syrk.builtin import batched_product, full_precision_reduction
from dmuon_core.syrk.contract import SyrkFn
from dmuon_core.syrk.ladder import KernelChoice

Backend = Literal["gram", "direct"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Schedule:
    """The steps to take, cut into segments between restarts (one segment for the direct form)."""

    segments: tuple[tuple[Triple, ...], ...]

    @property
    def triples(self) -> tuple[Triple, ...]:
        return tuple(triple for segment in self.segments for triple in segment)


class NewtonSchulz:
    """Orthogonalizes matrices: a callable on ``[..., m, n]``.

    Args:
        backend: ``"gram"`` or ``"direct"``.
        kernel: SYRK backend; ``"auto"`` takes the best on the device, a name never falls back.
        coefficients: see :func:`dmuon_core.as_coefficients`; None is Polar Express.
        restart_iterations: steps after which the Gram form restarts; None derives them from the coefficients. The
            direct form has no restarts.
        dtype: what X, R and Q are stored in; products accumulate in fp32 (fp64 in fp64). bfloat16 has three bits less
            than float16 and errs up to ten times more: an option, not the default.
        deterministic: the same bits over runs, batches and layouts, on GPUs one matrix at a time. On a CPU always so.
        ns_steps: number of steps where a call does not say.

    Raises:
        ValueError: an unknown backend or dtype, or coefficients that the Gram form cannot carry.
        RuntimeError: the named kernel, or that of ``DMUON_NS_KERNEL``, cannot run here; lists every backend's reason.
    """

    def __init__(
        self,
        backend: Backend = "gram",
        kernel: str = "auto",
        coefficients: CoefficientsLike = None,
        restart_iterations: Iterable[int] | None = None,
        dtype: torch.dtype = torch.float16,
        deterministic: bool = False,
        *,
        ns_steps: int = 5,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
        self.backend: Backend = backend
        self.coefficients = as_coefficients(coefficients)
        self.restart_iterations = as_restarts(restart_iterations)
        self.dtype = dtype
        self.deterministic = deterministic
        self.ns_steps = ns_steps
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self.schedule()
        self.kernel = KernelChoice.of(kernel)

    def schedule(self, ns_steps: int | None = None, coefficients: CoefficientsLike = None) -> Schedule:
        """The steps of a call; None means this object's own value.

        Raises:
            ValueError: more steps than the set holds, or coefficients that the Gram form cannot carry.
        """
        chosen = self.coefficients if coefficients is None else as_coefficients(coefficients)
        key = (chosen, ns_steps)
        if key not in self._schedules:
            triples = chosen.take(self.ns_steps if ns_steps is None else ns_steps)
            self._schedules[key] = Schedule(_cut(triples, self._restarts(triples)))
        return self._schedules[key]

    def _restarts(self, triples: tuple[Triple, ...]) -> tuple[int, ...]:
        if self.backend == "direct":
            return ()
        if self.restart_iterations is not None:
            return check_restarts(self.restart_iterations, len(triples))
        return derive_restarts(triples, self.dtype)

    def __call__(self, x: Tensor, *, ns_steps: int | None = None) -> Tensor:
        """The orthogonal factor of every matrix of ``x``.

        Args:
            x: ``[..., m, n]``, real floating point, any strides.
            ns_steps: None takes this object's.

        Returns:
            ``[..., m, n]`` in x's dtype. A zero matrix gives zeros, a non-finite one a non-finite result.

        Raises:
            ValueError: x has fewer than two dimensions or is not real floating point.
        """
        check_matrices(x)
        return self.orthogonalize(x, self.schedule(ns_steps)).to(x.dtype)

    @torch.no_grad()
    def orthogonalize(self, x: Tensor, schedule: Schedule) -> Tensor:
        """As the call, with a schedule of :meth:`schedule`; the result stays in ``self.dtype``."""
        if x.numel() == 0:
            return x.new_zeros(x.shape, dtype=self.dtype)
        tall = x.shape[-2] > x.shape[-1]
        x_BMN = x.reshape(-1, *x.shape[-2:])
        x_BMN = normalize(x_BMN.mT if tall else x_BMN, self.dtype, exact=self.deterministic or x.device.type == "cpu")
        iterate = _gram if self.backend == "gram" else _direct
        # A kernel may choose its tiles by the batch, and with them the order of its sums: one matrix at a time.
        parts = x_BMN.split(1) if self.deterministic and x.device.type != "cpu" else [x_BMN]
        y_BMN = torch.cat([iterate(part, schedule.segments, self.kernel) for part in parts])
        return (y_BMN.mT if tall else y_BMN).reshape(x.shape)

    def __repr__(self) -> str:
        return (
            f"NewtonSchulz({self.backend!r}, kernel={self.kernel.name!r}, coefficients={self.coefficients.name!r}, "
            f"dtype={self.dtype}, deterministic={self.deterministic}, ns_steps={self.ns_steps})"
        )


def check_matrices(x: Tensor) -> None:
    """Raise ValueError unless ``x`` is ``[..., m, n]`` of a real floating-point dtype."""
    if x.ndim < 2:
        raise ValueError(f"Newton-Schulz takes [..., m, n], got shape {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise ValueError(f"Newton-Schulz takes real floating point, got {x.dtype}")


def newton_schulz(
    x: Tensor,
    *,
    ns_steps: int = 5,
    backend: Backend = "gram",
    kernel: str = "auto",
    coefficients: CoefficientsLike = None,
    restart_iterations: Iterable[int] | None = None,
    dtype: torch.dtype = torch.float16,
    deterministic: bool = False,
) -> Tensor:
    """Orthogonalize once; arguments as :class:`NewtonSchulz`, which is the one to keep where calls repeat."""
    ns = NewtonSchulz(backend, kernel, coefficients, restart_iterations, dtype, deterministic, ns_steps=ns_steps)
    return ns(x)


def gram_newton_schulz(
    x: Tensor,
    *,
    ns_steps: int = 5,
    kernel: str = "auto",
    coefficients: CoefficientsLike = None,
    restart_iterations: Iterable[int] | None = None,
    dtype: torch.dtype = torch.float16,
    deterministic: bool = False,
) -> Tensor:
    """:func:`newton_schulz` by the Gram recurrence."""
    ns = NewtonSchulz("gram", kernel, coefficients, restart_iterations, dtype, deterministic, ns_steps=ns_steps)
    return ns(x)


def direct_newton_schulz(
    x: Tensor,
    *,
    ns_steps: int = 5,
    kernel: str = "auto",
    coefficients: CoefficientsLike = None,
    dtype: torch.dtype = torch.float16,
    deterministic: bool = False,
) -> Tensor:
    """:func:`newton_schulz` in its direct form."""
    return NewtonSchulz("direct", kernel, coefficients, None, dtype, deterministic, ns_steps=ns_steps)(x)


def _cut(triples: tuple[Triple, ...], restarts: tuple[int, ...]) -> tuple[tuple[Triple, ...], ...]:
    bounds = (0, *restarts, len(triples))
    return tuple(triples[i:j] for i, j in itertools.pairwise(bounds))


def _gram(x_BMN: Tensor, segments: Sequence[Sequence[Triple]], syrk: SyrkFn) -> Tensor:
    for segment in segments:
        r_BMM = syrk(x_BMN)
        if x_BMN.dtype in _HALVES:
            q_BMM = _segment_polynomial(r_BMM, segment, syrk)
        else:
            q_BMM = _wide_segment_polynomial(r_BMM, segment)
        x_BMN = _product(q_BMM, x_BMN)
    return x_BMN


def _segment_polynomial(r_BMM: Tensor, segment: Sequence[Triple], syrk: SyrkFn) -> Tensor:
    """Q with Q·X = the segment's steps applied to X, from R = X Xᵀ.

    A symmetric kernel mirrors one triangle, and rounded polynomials of R commute only up to rounding, so what it
    mirrors is off by a commutator. Two products cannot afford that and are computed whole. One is W·R in R ← W·R·W,
    W = aI + Z: a congruence keeps the small eigenvalues of R to relative accuracy, which the steps to come amplify;
    with one step to come it does not matter. The other is the last Q of a segment of three steps or more, which
    nothing corrects. The order of the operands is chosen too: mirrored, Z·R before ·Z errs half of what R·Z does.
    """
    steps = len(segment)
    q_BMM: Tensor | None = None
    for i, (a, b, c) in enumerate(segment):
        z_BMM = syrk(r_BMM, None, r_BMM, alpha=c, beta=b)
        if q_BMM is None:
            q_BMM = _plus_identity(z_BMM, a)
        elif steps >= 3 and i == steps - 1:
            q_BMM = _product(q_BMM, z_BMM, q_BMM, beta=a)
        else:
            q_BMM = syrk(q_BMM, z_BMM, q_BMM, alpha=1.0, beta=a)
        if i + 1 < steps:
            whole = i + 2 < steps
            w_BMM = _product(z_BMM, r_BMM, r_BMM, beta=a) if whole else syrk(z_BMM, r_BMM, r_BMM, alpha=1.0, beta=a)
            r_BMM = syrk(w_BMM, z_BMM, w_BMM, alpha=1.0, beta=a)
    assert q_BMM is not None, "a segment has at least one step"
    return q_BMM


def _wide_segment_polynomial(r_BMM: Tensor, segment: Sequence[Triple]) -> Tensor:
    """As above in fp32 and fp64, whose kernels save nothing by mirroring: every product is whole."""
    q_BMM: Tensor | None = None
    for i, (a, b, c) in enumerate(segment):
        w_BMM = _plus_identity(batched_product(r_BMM, r_BMM, r_BMM, beta=b, alpha=c), a)
        q_BMM = w_BMM if q_BMM is None else batched_product(q_BMM, w_BMM)
        if i + 1 < len(segment):
            r_BMM = batched_product(batched_product(w_BMM, r_BMM), w_BMM)
    assert q_BMM is not None, "a segment has at least one step"
    return q_BMM


def _plus_identity(z_BMM: Tensor, a: float) -> Tensor:
    q_BMM = z_BMM.clone()
    diagonal_BM = q_BMM.diagonal(dim1=-2, dim2=-1)
    # A half-precision add_ may round the scalar first (torch does on a CPU): one error in all of Q, and none in W·R.
    wide_BM = diagonal_BM.float() if z_BMM.dtype in _HALVES else diagonal_BM
    diagonal_BM.copy_(wide_BM + a)
    return q_BMM


def _direct(x_BMN: Tensor, segments: Sequence[Sequence[Triple]], syrk: SyrkFn) -> Tensor:
    for segment in segments:
        for a, b, c in segment:
            a_BMM = syrk(x_BMN)
            x_BMN = _product(syrk(a_BMM, None, a_BMM, alpha=c, beta=b), x_BMN, x_BMN, beta=a)
    return x_BMN


def _product(q_BMM: Tensor, x_BMN: Tensor, c_BMN: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Q X + beta C in x's dtype, accumulated in fp32 (fp64), rounded once."""
    if x_BMN.device.type == "cpu" and x_BMN.dtype in _HALVES:
        wide = _product(q_BMM.float(), x_BMN.float(), None if c_BMN is None else c_BMN.float(), beta)
        return wide.to(x_BMN.dtype)
    with full_precision_reduction() if x_BMN.device.type == "cuda" else contextlib.nullcontext():
        return batched_product(q_BMM, x_BMN, c_BMN, beta=beta)
