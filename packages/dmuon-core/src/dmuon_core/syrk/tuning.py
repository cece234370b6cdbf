"""Measuring which kernel is fastest. Nothing here runs inside a step.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.syrk import verdicts
from dmuon_core.syrk.builtin import full_precision_reduction, torch_syrk
from dmuon_core.syrk.contract import ProductSpec, SyrkFn, with_config
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.ladder import KernelChoice, Loaded, default_device, refusal_of
from dmuon_core.syrk.verdicts import BMM, Verdict, operands_key, product_key

_log = logging.getLogger("dmuon.tuning")

_ROUNDS = 7
_SECONDS = 4e-4  # of one timed stretch
_ERROR_RATIO = 2.0
TIE = 1.03
"""Times of one product differ by this much from run to run."""

_Runs = dict[tuple[str, str | None], Callable[[], None]]


@dataclass(frozen=True)
class Operands:
    """Of a symmetric product; b None is a, c None is not added."""

    a: Tensor
    b: Tensor | None
    c: Tensor | None
    exact: bool = True

    @property
    def key(self) -> str:
        return operands_key(self.a, self.b, self.c, exact=self.exact)

    @property
    def flops(self) -> float:
        return self.a.shape[:-2].numel() * float(self.a.shape[-2]) ** 2 * self.a.shape[-1]

    def call(self, fn: SyrkFn, out: Tensor | None = None) -> Tensor:
        return fn(self.a, self.b, self.c, alpha=1.0, beta=0.0 if self.c is None else 0.5, out=out)


@dataclass(frozen=True)
class Factors:
    """Of a whole product, ``[B, M, K]`` and ``[B, K, N]``."""

    a: Tensor
    b: Tensor

    @property
    def key(self) -> str:
        return product_key(self.a, self.b)

    @property
    def flops(self) -> float:
        return 2.0 * self.a.numel() * self.b.shape[-1]

    def out(self) -> Tensor:
        """Memory for the result: Q X lies as X does, X Xᵀ row-major."""
        batch, m, n = *self.a.shape[:2], self.b.shape[2]
        is_gram = n == m != self.b.shape[1]
        if self.b.stride(-1) == 1 or is_gram:
            return self.a.new_full((batch, m, n), float("nan"))
        return self.a.new_full((batch, n, m), float("nan")).mT


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
        for shape in shapes:
            for key, ranking in rankings(*shape, dtype, where, kernels).items():
                if ranking:
                    found[key] = ranking[0]
                    # One by one, so that an interrupted run keeps what it measured.
                    verdicts.add(where, {key: ranking[0]}, keep=keep)
    return found


def rankings(
    batch: int, m: int, k: int, dtype: torch.dtype, device: torch.device, kernels: Sequence[str] | None = None
) -> dict[str, list[Verdict]]:
    """For every product of Newton-Schulz with these sizes the best configuration of every kernel, the fastest first."""
    backends, loose = (
        [x for x in KernelChoice("auto").ladder(device, exact=exact) if kernels is None or x.spec.name in kernels]
        for exact in (True, False)
    )
    symmetric, whole = operands_of(batch, m, k, dtype, device)
    found = {each.key: _rank(each, backends if each.exact else loose) for each in symmetric}
    return found | {each.key: _rank_whole(each, backends) for each in whole}


def operands_of(
    batch: int, m: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Operands], list[Factors]]:
    """The products of Newton-Schulz with these sizes, on random data: zeros would run faster than any real operand.

    X Xᵀ and Q X, with X in both layouts; with K = M, R Rᵀ, b R + c R² and the product of two polynomials of R, each
    also where its halves may differ by a rounding.
    """
    x = (torch.randn(batch, m, k, device=device) / k**0.5).to(dtype)
    tall = x.mT.contiguous().mT
    r = torch_syrk(x)
    if k != m:
        grams = [Operands(x, None, None), Operands(tall, None, None)]
        return grams, [Factors(r, x), Factors(r, tall), Factors(x, x.mT), Factors(tall, tall.mT)]
    w = torch_syrk(r, None, r, beta=0.5)
    symmetric = [Operands(x, None, None)]
    symmetric += [Operands(r, b, c, exact) for b, c in ((None, r), (w, None)) for exact in (True, False)]
    return symmetric, [Factors(r, w), Factors(r, tall)]


def _rank(operands: Operands, backends: Sequence[Loaded]) -> list[Verdict]:
    runs: _Runs = {}
    for spec, fn in backends:
        if refusal_of(spec, operands.a, operands.b, operands.c) is not None:
            continue
        configs: list[str | None] = [None, *spec.configs(operands.a, operands.b, operands.c)]
        for config in configs:
            chosen = with_config(fn, config)
            out = torch.full_like(torch_syrk(operands.a), float("nan"))
            run = functools.partial(operands.call, chosen, out)
            graph = _replayed(run, functools.partial(_is_accurate, operands, out), operands.flops)
            if graph is not None:
                runs[spec.name, config] = graph
    return _ranked(runs, operands.flops)


def _rank_whole(factors: Factors, backends: Sequence[Loaded]) -> list[Verdict]:
    runs: _Runs = {}
    choices: list[tuple[str, str | None, Callable[..., object]]] = [(BMM, None, _bmm)]
    for spec, _ in backends:
        if spec.product is not None:
            for label in spec.product.configs(factors.a, factors.b, factors.out()):
                choices.append((spec.name, label, functools.partial(_loaded_then_called, spec.product, label)))
    for name, config, fn in choices:
        out = factors.out()
        product = functools.partial(fn, factors.a, factors.b, out=out)
        graph = _replayed(product, functools.partial(_is_product, factors, out), factors.flops)
        if graph is not None:
            runs[name, config] = graph
    return _ranked(runs, factors.flops)


def _loaded_then_called(product: ProductSpec, config: str, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """A product that does not load is left out as one that does not run."""
    return product.load()(a, b, out=out, config=config)


def _bmm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    with full_precision_reduction():
        return torch.bmm(a, b, out=out)


def _ranked(runs: _Runs, flops: float) -> list[Verdict]:
    """Timed in turn; of every kernel its fastest configuration. A tie goes to ``torch.bmm``, which needs nothing."""
    times: dict[tuple[str, str | None], list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    medians = {name: round(statistics.median(each) / _launches(flops) * 1e6, 2) for name, each in times.items()}
    ordered = sorted(medians, key=lambda name: medians[name] * (1.0 if name[0] == BMM else TIE))
    best = dict(reversed(ordered))
    return [Verdict(kernel, config, medians[kernel, config]) for kernel, config in ordered if best[kernel] == config]


def _launches(flops: float) -> int:
    """Of one timed stretch."""
    return max(4, min(40, int(_SECONDS / (flops / 500e12 + 3e-6))))


def _replayed(run: Callable[[], object], is_accurate: Callable[[], bool], flops: float) -> Callable[[], None] | None:
    """Launches of ``run`` as a graph, or None where it fails or computes wrong values."""
    try:
        run()
        if not is_accurate():
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_launches(flops)):
                run()
    except Exception as error:
        _log.warning("a kernel is left out of the choice: %s", describe_error(error))
        return None
    return _Replay(graph, run)


@dataclass(frozen=True)
class _Replay:
    """A graph, and what holds the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def _is_accurate(operands: Operands, got: Tensor) -> bool:
    b, c = (None if x is None else x.float() for x in (operands.b, operands.c))
    wide = Operands(operands.a.float(), b, c)
    want = wide.call(torch_syrk)
    allowed = _ERROR_RATIO * float((operands.call(torch_syrk).float() - want).abs().max())
    symmetric = torch.equal(got, got.mT) or not operands.exact
    return symmetric and float((got.float() - want).abs().max()) <= allowed


def _is_product(factors: Factors, got: Tensor) -> bool:
    want = torch.bmm(factors.a.float(), factors.b.float())
    allowed = _ERROR_RATIO * float((want.to(got.dtype).float() - want).abs().max())
    return float((got.float() - want).abs().max()) <= allowed


def _seconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
