#!/usr/bin/env python3
"""The products of Newton-Schulz, side by side: cuBLAS, the Triton kernels, quack and the automatic choice.

    python tools/bench_syrk.py [--out DIR] [--dtypes float16 bfloat16] [--data randn real] [--rounds 7] [--exact]

Checks every kernel against fp32 first, then times CUDA graphs of launches in turn, and prints the medians as Markdown.
With --out it also writes ``syrk.json``. A kernel that does not run here has a dash.

The products: ``gram`` X Xᵀ, ``polynomial`` b R + c R², ``product`` W R of a polynomial with R, ``factor`` Q W of two
polynomials, ``apply`` Q X. ``bmm`` is cuBLAS over both halves (with ``polynomial``, after a copy of R); the other
columns are each kernel in its fastest configuration, ``auto`` is what Newton-Schulz would take, and ``auto / best``
compares it with the fastest of all. ``real`` operands are those of a Newton-Schulz iteration on a Gaussian matrix after
its last restart, ``randn`` those of the same steps on the matrix itself.

Legend: B matrices, M rows, K columns. TFLOP/s are effective: those of a whole product over the time.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dmuon_core import NewtonSchulz
from dmuon_core.coefficients import Triple
from dmuon_core.iteration import FreshArithmetic, iterate
from dmuon_core.syrk.builtin import full_precision_reduction, torch_syrk
from dmuon_core.syrk.contract import with_config
from dmuon_core.syrk.ladder import KernelChoice, Loaded, refusal_of

SHAPES = [
    (1, 256, 1024), (16, 256, 1024), (1, 512, 2048), (16, 512, 2048), (1, 1024, 1024), (1, 1024, 4096),
    (16, 1024, 1024), (16, 1024, 4096), (1, 2048, 2048), (1, 2048, 8192), (8, 2048, 2048), (8, 2048, 8192),
    (1, 4096, 4096), (1, 4096, 14336), (1, 8192, 8192),
]  # fmt: skip
SECONDS = 2e-3
"""About as much device time as one replay takes."""
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Product:
    """One product and every way to compute it, into the same memory."""

    kind: str
    batch: int
    m: int
    k: int
    want: Tensor
    runs: dict[str, Run]
    auto: str

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.m * self.k


def products(
    shape: tuple[int, int, int], dtype: torch.dtype, data: str, choice: KernelChoice, exact: bool, device: torch.device
) -> Iterator[Product]:
    """All products of Newton-Schulz with these sizes."""
    batch, m, k = shape
    x = (torch.randn(batch, m, k, device=device) / (m * k) ** 0.5).to(dtype)
    arithmetic = FreshArithmetic(torch_syrk)
    *earlier, segment = NewtonSchulz(dtype=dtype).schedule().segments
    if data == "real":
        (x,) = iterate("gram", (x,), earlier, arithmetic)
    r = arithmetic.gram((x,))
    w = arithmetic.polynomial(r, segment[0])
    next_r = arithmetic.symmetric(arithmetic.whole(w, r), w)
    next_w = arithmetic.polynomial(next_r, segment[1])
    yield symmetric("gram", x, None, None, choice, exact)
    if k == m:
        yield symmetric("polynomial", r, None, r, choice, exact, triple=segment[0])
        yield symmetric("product", w, r, None, choice, exact)
        yield symmetric("factor", w, next_w, None, choice, exact)
    yield whole("apply", arithmetic.symmetric(w, next_w), x, choice)


def symmetric(
    kind: str,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    choice: KernelChoice,
    exact: bool,
    *,
    triple: Triple = (0.0, 0.0, 1.0),
) -> Product:
    """``c A Bᵀ + b C``, b and c of ``triple``."""
    _, beta, alpha = triple
    out = a.new_empty((*a.shape[:-1], a.shape[1]))
    options = {"out": out} if c is None else {"beta": beta, "alpha": alpha, "out": out}
    right = (a if b is None else b).mT
    runs: dict[str, Run] = {}
    if c is None:
        runs["bmm"] = lambda: torch.bmm(a, right, out=out)
    else:
        runs["bmm"] = lambda: torch.baddbmm(c, a, right, beta=beta, alpha=alpha, out=out)
    for spec, fn in choice.ladder(a.device, exact=exact):
        if spec.name != "torch" and refusal_of(spec, a, b, c) is None:
            for config in [None, *spec.configs(a, b, c)]:
                runs[f"{spec.name} {config or ''}"] = functools.partial(with_config(fn, config), a, b, c, **options)
    chosen = choice.order(a, b, c, exact=exact)[0]
    if c is None and not exact and choice.prefers_whole(a, b, right if b is None else b):
        runs["auto"] = lambda: choice.multiply(a, right if b is None else b, out=out)
        label = "whole"
    else:
        runs["auto"] = functools.partial(choice, a, b, c, exact=exact, **options)
        label = _label(chosen)
    want = alpha * (a[0].float() @ right[0].float())
    if c is not None:
        want += beta * c[0].float()
    return Product(kind, *a.shape[:2], a.shape[2], want, runs, label)


def _label(chosen: Loaded) -> str:
    config = chosen.fn.keywords.get("config") if isinstance(chosen.fn, functools.partial) else None
    return f"{chosen.spec.name} {config or ''}"


def whole(kind: str, q: Tensor, x: Tensor, choice: KernelChoice) -> Product:
    out = torch.empty_like(x)
    runs: dict[str, Run] = {"bmm": lambda: torch.bmm(q, x, out=out)}
    for spec, _ in choice.ladder(q.device):
        if spec.product is not None:
            for config in spec.product.configs(q, x, out):
                runs[f"{spec.name} {config}"] = functools.partial(spec.product.load(), q, x, out=out, config=config)
    runs["auto"] = lambda: choice.multiply(q, x, out=out)
    return Product(kind, *x.shape, q[0].float() @ x[0].float(), runs, "")


def checked(name: str, run: Run, want: Tensor) -> bool:
    """Whether ``run`` computes the first product right, and everywhere."""
    try:
        run().fill_(float("nan"))
        got = run()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        return False
    # Of a polynomial the sum is smaller than its terms; rounding in bfloat16 is 2^-8 of an entry.
    error = float((got[0].float() - want).norm() / want.norm())
    if not error < 5e-3 or got.isnan().any():
        print(f"{name}: relative error {error:.2g}")
        return False
    return True


def captured(run: Run, launches: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(launches):
            run()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph], launches: int, rounds: int) -> dict[str, float]:
    """Microseconds a launch."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / launches * 1e3
        for name, pairs in events.items()
    }


def measure(product: Product, rounds: int) -> dict[str, float]:
    """Microseconds of every way that computes right."""
    with full_precision_reduction():
        good = {name: run for name, run in product.runs.items() if checked(f"{product.kind} {name}", run, product.want)}
        launches = max(2, min(40, int(SECONDS / (product.flops / 1e15 + 3e-6))))
        return medians({name: captured(run, launches) for name, run in good.items()}, launches, rounds)


BACKENDS = ("cublas", "triton", "quack")
HEADER = (
    "product",
    "batch×M×K",
    "dtype",
    "data",
    "bmm",
    *BACKENDS,
    "auto",
    "auto takes",
    "auto / best",
    "TFLOP/s of auto",
)


def row(product: Product, dtype: str, data: str, times: dict[str, float]) -> list[str]:
    cells = [product.kind, f"{product.batch}×{product.m}×{product.k}", dtype, data, f"{times['bmm']:.1f}"]
    for backend in BACKENDS:
        own = [us for name, us in times.items() if name.startswith(f"{backend} ")]
        cells.append(f"{min(own):.1f}" if own else "–")
    best = min(us for name, us in times.items() if name != "auto")
    auto = times["auto"]
    return [*cells, f"{auto:.1f}", product.auto.strip(), f"{auto / best:.3f}", f"{product.flops / auto / 1e6:.0f}"]


def environment(device: torch.device) -> dict[str, str]:
    import triton

    name, version = torch.cuda.get_device_name(device), torch.__version__
    return {"gpu": name, "torch": version, "triton": triton.__version__, "python": platform.python_version()}


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str] | None = None) -> str:
    """Measure, write the JSON, and return the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for syrk.json")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--data", nargs="+", default=["randn", "real"], choices=["randn", "real"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--exact", action="store_true", help="ask symmetric kernels for D == D.mT, bit by bit")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    choice = KernelChoice.of("auto")
    results, rows = [], []
    for dtype in options.dtypes:
        for data in options.data:
            for shape in SHAPES:
                for product in products(shape, getattr(torch, dtype), data, choice, options.exact, device):
                    times = measure(product, options.rounds)
                    rows.append(row(product, dtype, data, times))
                    print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
                    sizes = {"kind": product.kind, "batch": product.batch, "m": product.m, "k": product.k}
                    results.append({**sizes, "dtype": dtype, "data": data, "us": times, "auto": product.auto})
    if options.out is not None:
        report = {"environment": environment(device), "results": results}
        options.out.joinpath("syrk.json").write_text(json.dumps(report, indent=1))
    return table(HEADER, rows)


if __name__ == "__main__":
    print(main())
