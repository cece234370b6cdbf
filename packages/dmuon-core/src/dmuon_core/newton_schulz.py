"""Newton-Schulz orthogonalization, by the Gram recurrence or directly.

Legend: B matrices, M rows, N columns, M <= N after orienting.

Both forms apply the same odd polynomial to the singular values of X = U / ‖U‖_F:

    direct   R = X Xᵀ;  W = a I + b R + c R²;  X ← W X                    per step
    gram     R = X Xᵀ;  W = a I + b R + c R²;  Q ← Q W;  R ← W R W        per step,
             and X ← Q X once per segment (``dmuon_core.restarts`` says where segments end)

With five steps, one restart and symmetric products the Gram form takes 6 M²N + 14 M³ FLOP, the direct one
20 M²N + 10 M³ without using symmetry.

Sources: Keller Jordan, "Muon" (2024) for the iteration; Dao-AILab, "Gram Newton-Schulz" (2026) for the recurrence.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from dmuon_core import ops, workspace
from dmuon_core.batching import Batch, Stack, by_shape, by_short_side
from dmuon_core.coefficients import CoefficientsLike, Triple, as_coefficients
from dmuon_core.cost import newton_schulz_flops
from dmuon_core.env import read_settings
from dmuon_core.iteration import HALVES, Backend, FreshArithmetic, iterate, iterate_wide
from dmuon_core.normalize import normalize
from dmuon_core.restarts import as_restarts, check_restarts, derive_restarts
from dmuon_core.syrk.contract import UpdateFns
from dmuon_core.syrk.ladder import KernelChoice, computes
from dmuon_core.workspace import Fill, Part, Recipe

__all__ = [
    "Backend",
    "NewtonSchulz",
    "Schedule",
    "check_matrices",
    "direct_newton_schulz",
    "gram_newton_schulz",
    "newton_schulz",
]

_PLANS = 256  # of batches; a model has a handful, one with routed experts another in every step
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        backend: ``"gram"`` or ``"direct"``. On a GPU in half precision, matrices that are square or nearly so take the
            direct form either way, which costs less there and is the more accurate one; not where deterministic.
        kernel: SYRK backend; ``"auto"`` takes the best on the device, a name never falls back.
        coefficients: see :func:`dmuon_core.as_coefficients`; None is Polar Express.
        restart_iterations: steps after which the Gram form restarts; None derives them from the coefficients. The
            direct form has no restarts.
        dtype: what X, R and Q are stored in; products accumulate in fp32 (fp64 in fp64). bfloat16 has three bits less
            than float16 and errs up to ten times more: an option, not the default.
        deterministic: the same bits over runs, batches and layouts, on GPUs one matrix at a time. On a CPU always so.
        ns_steps: number of steps where a call does not say.
        workspace_mib: memory on a GPU, MiB, that half-precision products write to, taken for as long as they run; many
            matrices go in batches of what fits. A single matrix takes what it needs. Batches of up to 16 MiB share
            as much on every stream, which stays.

    Raises:
        ValueError: an unknown backend or dtype, a workspace that is not positive, or coefficients that the Gram form
            cannot carry.
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
        workspace_mib: int = 512,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
        if workspace_mib <= 0:
            raise ValueError(f"workspace_mib must be positive, got {workspace_mib!r}")
        self.backend: Backend = backend
        self.coefficients = as_coefficients(coefficients)
        self.restart_iterations = as_restarts(restart_iterations)
        self.dtype = dtype
        self.deterministic = deterministic
        self.ns_steps = ns_steps
        self.workspace_mib = workspace_mib
        self.forms: set[Backend] = set()
        self._graphs = read_settings().ns_cuda_graph
        self._batches: dict[tuple[Stack, ...], list[Batch]] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self.schedule()
        self.kernel = KernelChoice.of(kernel, deterministic=deterministic)
        self.signature = ops.Signature(
            backend,
            self.kernel.name,
            self.coefficients.triples,
            self.coefficients.repeats,
            self.restart_iterations,
            dtype,
            deterministic,
            workspace_mib,
        )
        self._number = ops.enlist(self)

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
        if torch.compiler.is_compiling():
            return ops.call(x, self.signature, self.ns_steps if ns_steps is None else ns_steps, self._number)
        return self._orthogonalize(x, self.schedule(ns_steps), x.dtype)

    def orthogonalize(self, x: Tensor, schedule: Schedule) -> Tensor:
        """As the call, with a schedule of :meth:`schedule`; the result stays in ``self.dtype``."""
        return self._orthogonalize(x, schedule, self.dtype)

    @torch.no_grad()
    def _orthogonalize(self, x: Tensor, schedule: Schedule, dtype: torch.dtype) -> Tensor:
        if x.numel() == 0:
            return x.new_zeros(x.shape, dtype=dtype)
        tall = x.shape[-2] > x.shape[-1]
        x_BMN = x.reshape(-1, *x.shape[-2:])
        x_BMN = x_BMN.mT if tall else x_BMN
        if self._has_workspace(x.device):
            y_BMN = torch.empty_like(x_BMN, dtype=dtype)
            for batch in self.batches([Stack(*_sizes(x_BMN), x.dtype, x.device)]):
                pieces = [slice(piece.start, piece.stop) for piece in batch]
                with self.factors([x_BMN[piece] for piece in pieces], schedule) as factors:
                    for piece, factor in zip(pieces, factors, strict=True):
                        y_BMN[piece].copy_(factor)
        else:
            y_BMN = self._fresh(x_BMN, schedule).to(dtype)
        return (y_BMN.mT if tall else y_BMN).reshape(x.shape)

    def form(self, m: int, n: int) -> Backend:
        """The form that [m, n] matrices, m ≤ n, take in a workspace: of the two the one with less work."""
        if self.backend == "direct":
            return "direct"
        segments = [len(segment) for segment in self.schedule().segments]
        gram, direct = (newton_schulz_flops(m, n, backend=form, segments=segments) for form in get_args(Backend))
        return "gram" if gram < direct else "direct"

    def batches(self, stacks: Sequence[Stack]) -> list[Batch]:
        """How :meth:`factors` is to be called for ``stacks``, each matrix once."""
        key = tuple(stacks)
        if key not in self._batches:
            if len(self._batches) >= _PLANS:
                self._batches.clear()
            on_gpu = [i for i, stack in enumerate(stacks) if self._has_workspace(stack.device)]
            others = [i for i in range(len(stacks)) if i not in set(on_gpu)]
            budget = self.workspace_mib * 2**20
            merged = by_short_side([stacks[i] for i in on_gpu], budget=budget, sms=_multiprocessors, form=self.form)
            equal = by_shape([stacks[i] for i in others])
            self._batches[key] = [_renumbered(b, on_gpu) for b in merged] + [_renumbered(b, others) for b in equal]
        return self._batches[key]

    def update_fns(self, device: torch.device) -> UpdateFns | None:
        """An update's fused passes around :meth:`factors`, where a backend brings some for ``device``."""
        if not self._has_workspace(device):
            return None
        # They read addresses that the host sends, which a user's graph would not send again.
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return None if captured else self.kernel.update(device)

    @contextlib.contextmanager
    def factors(self, matrices: Sequence[Tensor], schedule: Schedule) -> Iterator[list[Tensor]]:
        """The orthogonal factors of one of :meth:`batches`, in ``self.dtype``, to be read inside the context only.

        Args:
            matrices: stacks ``[count, m, n]``, m ≤ n, of any strides.
            schedule: of :meth:`schedule`.
        """
        device = matrices[0].device
        if self._has_workspace(device):
            with workspace.factors(
                matrices,
                form=self._formed(*_sizes(matrices[0])[1:]),
                segments=schedule.segments,
                dtype=self.dtype,
                kernel=self.kernel,
                graphs=self._graphs,
            ) as factors:
                yield factors
        else:
            stacked = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
            yield list(torch.split(self._fresh(stacked, schedule), [len(x) for x in matrices]))

    @contextlib.contextmanager
    def factors_of(
        self, parts: tuple[Part, ...], schedule: Schedule, device: torch.device, fill: Fill
    ) -> Iterator[list[Tensor]]:
        """As :meth:`factors`, of what ``fill`` writes, a stack for each part; on devices with :meth:`update_fns`."""
        assert self._has_workspace(device), "only a workspace has memory to write to"
        recipe = Recipe(self._formed(parts[0].m, parts[0].n), schedule.segments, self.dtype, parts)
        with workspace.planned(recipe, device, kernel=self.kernel, graphs=self._graphs) as plan:
            yield plan.run(fill)

    def _formed(self, m: int, n: int) -> Backend:
        form = self.form(m, n)
        self.forms.add(form)
        return form

    def _has_workspace(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.dtype in HALVES and not self.deterministic and computes(device)

    def _fresh(self, x_BMN: Tensor, schedule: Schedule) -> Tensor:
        """The factors in memory of their own. The same bits in any batch where deterministic."""
        on_cpu = x_BMN.device.type == "cpu"
        x_BMN = normalize(x_BMN, self.dtype, exact=self.deterministic or on_cpu)
        # A kernel may choose its tiles by the batch or by the address, and with them the order of its sums: one matrix
        # at a time, each at the start of its own memory.
        parts = [part.clone() for part in x_BMN.split(1)] if self.deterministic and not on_cpu else [x_BMN]
        return torch.cat([self._iterate(part, schedule) for part in parts])

    def _iterate(self, x_BMN: Tensor, schedule: Schedule) -> Tensor:
        products = FreshArithmetic(self.kernel)
        if self.backend == "gram" and self.dtype not in HALVES:
            return iterate_wide(x_BMN, schedule.segments, products)
        (y_BMN,) = iterate(self.backend, (x_BMN,), schedule.segments, products)
        return y_BMN

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._number = ops.enlist(self)

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


def _sizes(x_BMN: Tensor) -> tuple[int, int, int]:
    return x_BMN.shape[0], x_BMN.shape[1], x_BMN.shape[2]


def _renumbered(batch: Batch, numbers: Sequence[int]) -> Batch:
    return tuple(replace(piece, stack=numbers[piece.stack]) for piece in batch)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
