"""Newton-Schulz on one GPU: checks first, then the table of milliseconds, as Markdown and JSON.

    python tools/bench_newton_schulz.py [--json FILE] [--tune] [--rounds 5] [--kernels auto triton cublas ...] [--peers]

Times are medians of interleaved rounds. ``eager`` and ``graph`` are DMuon's own call on a stream, host time included,
without and with CUDA graphs; ``gpu`` is the same work replayed whole from one graph, so without host time. All have the
norm and the cast of the input in them, and leave the result in half precision, as an optimizer consumes it.
``torch.optim.Muon`` is its iteration, one matrix after the other, on a stream. With --peers gram-newton-schulz, not
compiled and compiled, and emerging-optimizers stand beside them, replayed from a graph too; why one does not run is
printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from dmuon_core import NewtonSchulz, get_ns_backend
from dmuon_core.cost import newton_schulz_flops
from dmuon_core.syrk.tuning import tune
from dmuon_core.testing import SPECTRA, judge

SHAPES = (
    (1, 1024, 4096),
    (16, 1024, 4096),
    (16, 1024, 1024),
    (16, 512, 2048),
    (1, 2048, 8192),
    (8, 2048, 2048),
    (8, 2048, 8192),
    (1, 4096, 4096),
    (1, 4096, 14336),
    (4, 4096, 14336),
    (1, 8192, 28672),
)
TARGETS_MS = (0.20, 1.35, 0.75, 0.28, 0.70, 2.45, 4.7, 2.4, 4.1, 16.3, 31.0)


def check(ns: NewtonSchulz) -> None:
    """Raise AssertionError unless the accuracy rules hold on a few spectra, odd sizes and a stack."""
    generator = torch.Generator().manual_seed(0)
    for family in ("gaussian", "repeated rows", "half zeros", "log decay 1e-3"):
        for shape in ((256, 768), (768, 256), (200, 200), (131, 257)):
            x = SPECTRA[family](*shape, generator).float()
            for _ in range(3):  # eager, captured, replayed
                got = judge(x, ns(x.cuda()).cpu(), ns.schedule().triples)
                assert got.sigma_max <= got.sigma_bound, (family, shape, got)
                assert got.error <= 0.2, (family, shape, got)


def torch_muon(x_BMN: torch.Tensor) -> Callable[[], object]:
    from torch.optim._muon import _zeropower_via_newtonschulz

    def run() -> None:
        for x_MN in x_BMN:
            _zeropower_via_newtonschulz(x_MN, (3.4445, -4.7750, 2.0315), 5, 1e-7)

    return run


def peers() -> dict[str, Callable[[torch.Tensor], object]]:
    """Newton-Schulz of other packages, those that import here; prints the reason for the others."""
    found: dict[str, Callable[[torch.Tensor], object]] = {}
    try:
        from gram_newton_schulz import GramNewtonSchulz

        found["gram-newton-schulz"] = GramNewtonSchulz(compile_kwargs=None)
        # For every shape anew, as a model's own shapes would be.
        torch._dynamo.config.recompile_limit = 64
        found["the same, compiled"] = GramNewtonSchulz(compile_kwargs={"fullgraph": True, "dynamic": False})
    except Exception as error:
        print(f"gram-newton-schulz: {type(error).__name__}: {error}")
    try:
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

        found["emerging-optimizers"] = lambda x: newton_schulz(x, steps=5, coefficient_type="polar_express")
    except Exception as error:
        print(f"emerging-optimizers: {type(error).__name__}: {error}")
    return found


def factors_of(ns: NewtonSchulz, x_BMN: torch.Tensor) -> Callable[[], object]:
    from dmuon_core.batching import Stack

    schedule = ns.schedule()
    batches = ns.batches([Stack(*x_BMN.shape, x_BMN.dtype, x_BMN.device)])

    def run() -> None:
        for batch in batches:
            with ns.factors([x_BMN[piece.start : piece.stop] for piece in batch], schedule):
                pass

    return run


def captured(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def medians(runs: dict[str, Callable[[], object]], rounds: int, milliseconds: float) -> dict[str, float]:
    for run in runs.values():
        for _ in range(3):  # eager, captured, replayed
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    repeats = {name: max(1, min(30, int(milliseconds / timed(run, 1)))) for name, run in runs.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, repeats[name]))
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def timed(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def replayed(name: str, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """``run`` as a graph under its name; nothing where it cannot be captured, which is printed."""
    try:
        return {name: captured(run)}
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return {}


def variants(arguments: argparse.Namespace) -> dict[str, NewtonSchulz]:
    eager = NewtonSchulz(workspace_mib=arguments.mib)
    eager._graphs = False
    named = {"eager": eager, "graph": NewtonSchulz(workspace_mib=arguments.mib)}
    for kernel in arguments.kernels:
        named[f"gpu {kernel}"] = NewtonSchulz(kernel=kernel, workspace_mib=arguments.mib)
    if arguments.forms:
        gram = NewtonSchulz(workspace_mib=arguments.mib)
        gram.form = lambda m, n: "gram"  # type: ignore[method-assign]
        named["gpu gram"] = gram
        named["gpu direct"] = NewtonSchulz("direct", workspace_mib=arguments.mib)
    for mib in arguments.budgets:
        named[f"gpu {mib} MiB"] = NewtonSchulz(workspace_mib=mib)
    return named


def row(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    named: dict[str, NewtonSchulz],
    others: dict[str, Callable[[torch.Tensor], object]],
    rounds: int,
) -> dict[str, float]:
    x_BMN = torch.randn(shape, device="cuda").to(dtype)
    runs: dict[str, Callable[[], object]] = {}
    for name, ns in named.items():
        run = factors_of(ns, x_BMN)
        runs[name] = captured(run) if name.startswith("gpu") else run
    for name, peer in others.items():
        runs |= replayed(name, functools.partial(peer, x_BMN))
    if dtype == torch.bfloat16:
        runs["torch.optim.Muon"] = torch_muon(x_BMN)
    return medians(runs, rounds, 8.0)


def markdown(rows: list[dict[str, object]]) -> str:
    columns = list(dict.fromkeys(key for each in rows for key in each))
    lines = [columns, ["---"] * len(columns), *([str(each.get(key, "")) for key in columns] for each in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(given: list[str] | None = None) -> str:
    """Check, measure, write the JSON, and return the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true", help="measure the kernels on the table's shapes first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="workspace of the main columns")
    parser.add_argument("--kernels", nargs="*", default=["auto", "triton", "cublas"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[], help="further workspaces to time, MiB")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"], help="of the input")
    parser.add_argument("--forms", action="store_true", help="time both forms on every shape")
    parser.add_argument("--peers", action="store_true", help="other packages' Newton-Schulz too, where installed")
    arguments = parser.parse_args(given)
    logging.basicConfig(level=logging.WARNING)
    verdicts = {}
    if arguments.tune:
        squares = [(batch, m, m) for batch, m, _ in SHAPES]
        verdicts = tune(dict.fromkeys([*SHAPES, *squares]))
    named = variants(arguments)
    for ns in (named["eager"], named["graph"], NewtonSchulz("direct")):
        check(ns)
    others = peers() if arguments.peers else {}
    rows: list[dict[str, object]] = []
    for dtype in arguments.dtypes:
        for shape, target in zip(SHAPES, TARGETS_MS, strict=True):
            times = row(shape, getattr(torch, dtype), named, others, arguments.rounds)
            tflops = shape[0] * newton_schulz_flops(*shape[1:]) / min(times["gpu auto"], times["graph"]) / 1e9
            label = "×".join(map(str, shape))
            rows.append({"dtype": dtype, "shape": label, "target": target, **times, "TFLOP/s": round(tflops)})
            print(dtype, label, times, flush=True)
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": get_ns_backend(named["graph"]),
    }
    if arguments.json:
        chosen = {key: vars(verdict) for key, verdict in verdicts.items()}
        arguments.json.write_text(json.dumps({"environment": environment, "rows": rows, "verdicts": chosen}, indent=1))
    chosen_lines = [
        f"{key}: {each.kernel} {each.config or ''} {each.microseconds} µs" for key, each in verdicts.items()
    ]
    return "\n".join([*chosen_lines, str(environment), "", markdown(rows)])


if __name__ == "__main__":
    print(main())
