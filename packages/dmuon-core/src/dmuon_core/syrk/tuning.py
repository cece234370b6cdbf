"""Measuring which kernel is fastest. Nothing here runs inside a step.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.syrk import verdicts
from dmuon_core.syrk.builtin import full_precision_reduction, torch_syrk
from dmuon_core.syrk.contract import Scalar, SyrkFn, with_config
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.ladder import KernelChoice, Loaded, default_device, refusal_of
from dmuon_core.syrk.verdicts import Verdict, operands_key

_log = logging.getLogger("dmuon.tuning")

_ROUNDS = 7
_SECONDS = 4e-4  # of one timed stretch
_ERROR_RATIO = 2.0
_WHOLE = "whole"


@dataclass(frozen=True)
class Operands:
    """Of one product; b None is a, c None is not added."""

    a: Tensor
    b: Tensor | None
    c: Tensor | None

    @property
    def key(self) -> str:
        return operands_key(self.a, self.b, self.c)

    def call(self, fn: SyrkFn, out: Tensor | None = None) -> Tensor:
        return fn(self.a, self.b, self.c, alpha=1.0, beta=0.0 if self.c is None else 0.5, out=out)


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    kernels: Sequence[str] | None = None,
    keep: bool = True,
) -> dict[str, Verdict]:
    """Measure every kernel on ``shapes`` and go by the fastest from now on.

    A kernel is timed only after its result passed against fp32. Times are medians of interleaved rounds of launches
    replayed from a CUDA graph, so host time is not in them.

    Args:
        shapes: (batch, M, K). With K = M also the products with B and C that Newton-Schulz takes.
        dtype: float16 or bfloat16.
        device: a CUDA device; None is the current one.
        kernels: names to try; None tries all that run there.
        keep: also write the verdicts to the file under ``DMUON_CACHE_DIR``.

    Returns:
        The verdict by operands.

    Raises:
        ValueError: the device is no CUDA device.
    """
    where = default_device() if device is None else torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"tune measures on a CUDA device, got {where}; elsewhere there is one kernel only")
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    found: dict[str, Verdict] = {}
    with torch.cuda.device(where), torch.no_grad():
        backends = [x for x in KernelChoice("auto").ladder(where) if kernels is None or x.spec.name in kernels]
        for shape in shapes:
            for operands in operands_of(*shape, dtype, where):
                ranking = rank(operands, backends)
                if ranking:
                    found[operands.key] = ranking[0]
                    # One by one, so that an interrupted run keeps what it measured.
                    verdicts.add(where, {operands.key: ranking[0]}, keep=keep)
    return found


def operands_of(batch: int, m: int, k: int, dtype: torch.dtype, device: torch.device) -> list[Operands]:
    """The products of Newton-Schulz with these sizes, on random data: zeros would run faster than any real operand.

    X Xᵀ with X in both layouts; with K = M, R Rᵀ, b R + c R², and the product of two polynomials of R.
    """
    x = (torch.randn(batch, m, k, device=device) / k**0.5).to(dtype)
    if k != m:
        tall = x.mT.contiguous().mT
        return [Operands(x, None, None), Operands(tall, None, None)]
    r = torch_syrk(x)
    return [Operands(x, None, None), Operands(r, None, r), Operands(r, torch_syrk(r, None, r, beta=0.5), None)]


def rank(operands: Operands, backends: Sequence[Loaded], *, rounds: int = _ROUNDS) -> list[Verdict]:
    """The best configuration of every backend that computes right, the fastest first."""
    runs: dict[tuple[str, str | None], Callable[[], object]] = {}
    for spec, fn in backends:
        if refusal_of(spec, operands.a, operands.b, operands.c) is not None:
            continue
        for config in (None, *spec.configs(operands.a, operands.b, operands.c)):
            run = _replayed(operands, with_config(fn, config))
            if run is not None:
                runs[spec.name, config] = run
    if operands.c is None:
        runs[_WHOLE, None] = _captured(operands, _bmm)
    times: dict[tuple[str, str | None], list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    launches = _launches(operands)
    medians = {name: round(statistics.median(each) / launches * 1e6, 2) for name, each in times.items()}
    whole = medians.pop((_WHOLE, None), None)
    ordered = sorted(medians, key=lambda name: medians[name])
    firsts = dict(reversed(ordered))
    return [
        Verdict(kernel, config, medians[kernel, config], whole)
        for kernel, config in ordered
        if firsts[kernel] == config
    ]


def _bmm(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
) -> Tensor:
    with full_precision_reduction():
        return torch.bmm(a, (a if b is None else b).mT, out=out)


def _launches(operands: Operands) -> int:
    flops = operands.a.shape[:-2].numel() * operands.a.shape[-2] ** 2 * operands.a.shape[-1]
    return max(4, min(40, int(_SECONDS / (flops / 500e12 + 3e-6))))


def _replayed(operands: Operands, fn: SyrkFn) -> Callable[[], object] | None:
    """Launches of ``fn`` as a graph, or None where it fails or computes wrong values."""
    out = torch.full_like(torch_syrk(operands.a), float("nan"))
    try:
        operands.call(fn, out)
        if not _is_accurate(operands, out):
            return None
        return _captured(operands, fn)
    except Exception as error:
        _log.warning("a kernel is left out of the choice for %s: %s", tuple(out.shape), describe_error(error))
        return None


def _captured(operands: Operands, fn: SyrkFn) -> Callable[[], object]:
    out = operands.call(fn, torch.empty_like(torch_syrk(operands.a)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_launches(operands)):
            operands.call(fn, out)
    return _Replay(graph, operands, out)


@dataclass(frozen=True)
class _Replay:
    """A graph and what it reads and writes, which lives as long as it does."""

    graph: torch.cuda.CUDAGraph
    operands: Operands
    out: Tensor

    def __call__(self) -> None:
        self.graph.replay()


def _is_accurate(operands: Operands, got: Tensor) -> bool:
    b, c = (None if x is None else x.float() for x in (operands.b, operands.c))
    wide = Operands(operands.a.float(), b, c)
    want = wide.call(torch_syrk)
    allowed = _ERROR_RATIO * float((operands.call(torch_syrk).float() - want).abs().max())
    return torch.equal(got, got.mT) and float((got.float() - want).abs().max()) <= allowed


def _seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
