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
from dmuon_core.syrk.builtin import torch_syrk
from dmuon_core.syrk.contract import SyrkFn, with_config
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.ladder import KernelChoice, Loaded, default_device, refusal_of
from dmuon_core.syrk.verdicts import Verdict, operands_key

_log = logging.getLogger("dmuon.tuning")

_ROUNDS = 7
_SECONDS = 4e-4  # of one timed stretch
_ERROR_RATIO = 2.0


@dataclass(frozen=True)
class _Operands:
    a: Tensor
    b: Tensor | None
    c: Tensor | None

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
            for operands in _variants(*shape, dtype, where):
                best = _fastest(operands, backends)
                if best is not None:
                    key = operands_key(operands.a, operands.b, operands.c)
                    found[key] = best
                    # One by one, so that an interrupted run keeps what it measured.
                    verdicts.add(where, {key: best}, keep=keep)
    return found


def _variants(batch: int, m: int, k: int, dtype: torch.dtype, device: torch.device) -> list[_Operands]:
    """The products of Newton-Schulz with these sizes, on random data: zeros would run faster than any real operand."""
    x = (torch.randn(batch, m, k, device=device) / k**0.5).to(dtype)
    if k != m:
        tall = x.mT.contiguous().mT
        return [_Operands(x, None, None), _Operands(tall, None, None)]
    r = torch_syrk(x)
    return [_Operands(x, None, None), _Operands(r, None, r), _Operands(r, torch_syrk(r, None, r, beta=0.5), r)]


def _fastest(operands: _Operands, backends: Sequence[Loaded]) -> Verdict | None:
    runs: dict[Verdict, Callable[[], object]] = {}
    for spec, fn in backends:
        if refusal_of(spec, operands.a, operands.b, operands.c) is not None:
            continue
        for config in (None, *spec.configs(operands.a, operands.b, operands.c)):
            run = _replayed(operands, with_config(fn, config))
            if run is not None:
                runs[Verdict(spec.name, config)] = run
    times: dict[Verdict, list[float]] = {verdict: [] for verdict in runs}
    for _ in range(_ROUNDS):
        for verdict, run in runs.items():
            times[verdict].append(_seconds(run))
    if not times:
        return None
    best = min(times, key=lambda verdict: statistics.median(times[verdict]))
    launches = _launches(operands)
    return Verdict(best.kernel, best.config, round(statistics.median(times[best]) / launches * 1e6, 2))


def _launches(operands: _Operands) -> int:
    flops = operands.a.shape[:-2].numel() * operands.a.shape[-2] ** 2 * operands.a.shape[-1]
    return max(4, min(40, int(_SECONDS / (flops / 500e12 + 3e-6))))


def _replayed(operands: _Operands, fn: SyrkFn) -> Callable[[], object] | None:
    """Launches of ``fn`` as a graph, or None where it fails or computes wrong values."""
    out = torch.full_like(torch_syrk(operands.a), float("nan"))
    try:
        operands.call(fn, out)
        if not _is_accurate(operands, out):
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_launches(operands)):
                operands.call(fn, out)
    except Exception as error:
        _log.warning("a kernel is left out of the choice for %s: %s", tuple(out.shape), describe_error(error))
        return None
    return _Replay(graph, operands, out)


@dataclass(frozen=True)
class _Replay:
    """A graph and what it reads and writes, which lives as long as it does."""

    graph: torch.cuda.CUDAGraph
    operands: _Operands
    out: Tensor

    def __call__(self) -> None:
        self.graph.replay()


def _is_accurate(operands: _Operands, got: Tensor) -> bool:
    b, c = (None if x is None else x.float() for x in (operands.b, operands.c))
    wide = _Operands(operands.a.float(), b, c)
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
