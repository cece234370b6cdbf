#!/usr/bin/env python3
"""Symmetric products, side by side: cuBLAS, the Triton kernels and quack, in one process on one CUDA device.

    python tools/bench_syrk.py [--out DIR] [--dtypes float16 bfloat16] [--rounds 9] [--with-c]

Checks every kernel against fp32 first, then times CUDA graphs of launches in turn, on random data, and prints the
medians as Markdown. With --out it also writes ``syrk.json``. A kernel that does not run here has a dash.

Legend: B matrices, M rows, K columns. TFLOP/s are effective: a full product's 2·B·M²·K over the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dmuon_core.syrk.builtin import CUBLAS
from dmuon_kernels import specs

SHAPES = [
    (1, 256, 1024), (16, 256, 1024), (1, 512, 2048), (16, 512, 2048), (1, 1024, 1024), (1, 1024, 4096),
    (16, 1024, 1024), (16, 1024, 4096), (1, 2048, 2048), (1, 2048, 8192), (8, 2048, 2048), (8, 2048, 8192),
    (1, 4096, 4096), (1, 4096, 14336), (1, 8192, 8192),
]  # fmt: skip
SECONDS = 2e-3
"""About as much device time as one replay takes."""


def kernels(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """The backends that run on ``device``, after printing why the others do not."""
    found = {}
    for spec in (CUBLAS, specs.TRITON, specs.QUACK):
        reason = spec.probe(device)
        if reason is None:
            found[spec.name] = spec.load()
        else:
            print(f"{spec.name}: {reason}")
    return found


def runs(x_BMK: Tensor, c_BMM: Tensor | None, backends: dict[str, Callable[..., Tensor]]) -> dict[str, Callable]:
    """What is timed: cuBLAS's full product without mirroring, every backend's own choice, and its configurations."""
    out = x_BMK.new_empty((*x_BMK.shape[:-1], x_BMK.shape[1]))
    options = {"out": out} if c_BMM is None else {"c": c_BMM, "beta": 0.5, "out": out}
    todo: dict[str, Callable] = {}
    if c_BMM is None:
        todo["bmm"] = lambda: torch.bmm(x_BMK, x_BMK.mT, out=out)
    else:
        todo["bmm"] = lambda: torch.baddbmm(c_BMM, x_BMK, x_BMK.mT, beta=0.5, out=out)
    for spec in (CUBLAS, specs.TRITON, specs.QUACK):
        if spec.name not in backends:
            continue
        fn = backends[spec.name]
        todo[spec.name] = lambda fn=fn: fn(x_BMK, **options)
        for label in spec.configs(x_BMK, None, c_BMM):
            todo[f"{spec.name} {label}"] = lambda fn=fn, label=label: fn(x_BMK, config=label, **options)
    return todo


def checked(name: str, run: Callable[[], Tensor], want_MM: Tensor) -> bool:
    """Whether ``run`` computes the first product right, symmetric to the bit, and everywhere."""
    try:
        got = run()
        got.fill_(float("nan"))
        got = run()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        return False
    error = ((got[0].float() - want_MM).norm() / want_MM.norm()).item()
    symmetric = name == "bmm" or torch.equal(got, got.mT)
    if not error < 5e-3 or not symmetric or got.isnan().any():
        print(f"{name}: relative error {error:.2g}, symmetric: {symmetric}")
        return False
    return True


def captured(run: Callable[[], Tensor], launches: int) -> torch.cuda.CUDAGraph:
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


def measure(shape: tuple[int, int, int], dtype: torch.dtype, rounds: int, with_c: bool, backends: dict) -> dict:
    batch, m, k = shape
    x_BMK = (torch.randn(batch, m, k, device="cuda") / k**0.5).to(dtype)
    c_BMM = None
    want_MM = x_BMK[0].float() @ x_BMK[0].float().mT
    if with_c:
        c_BMM = torch.randn(batch, m, m, device="cuda")
        c_BMM = (c_BMM + c_BMM.mT).to(dtype)
        want_MM += 0.5 * c_BMM[0].float()
    launches = max(2, min(40, int(SECONDS / (2 * batch * m * m * k / 1e15 + 3e-6))))
    good = {name: run for name, run in runs(x_BMK, c_BMM, backends).items() if checked(name, run, want_MM)}
    times = medians({name: captured(run, launches) for name, run in good.items()}, launches, rounds)
    return {"batch": batch, "m": m, "k": k, "dtype": str(dtype)[6:], "with_c": with_c, "us": times}


def row(result: dict) -> str:
    times, batch, m, k = result["us"], result["batch"], result["m"], result["k"]
    cells = [f"{batch}×{m}×{k}", result["dtype"]]
    cells += [f"{times[name]:.1f}" if name in times else "–" for name in ("bmm", "cublas")]
    for backend in ("triton", "quack"):
        tuned = {name: us for name, us in times.items() if name.startswith(f"{backend} ")}
        best = min(tuned, key=tuned.__getitem__, default=None)
        cells.append(f"{times[backend]:.1f}" if backend in times else "–")
        cells.append(f"{tuned[best]:.1f} {best.split()[1].split('-', 1)[1]}" if best else "–")
    ours = [us for name, us in times.items() if name != "bmm"]
    cells.append(f"{2 * batch * m * m * k / min(ours) / 1e6:.0f}" if ours else "–")
    return "| " + " | ".join(cells) + " |"


def environment(device: torch.device) -> dict[str, str]:
    import triton

    name, version = torch.cuda.get_device_name(device), torch.__version__
    return {"gpu": name, "torch": version, "triton": triton.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for syrk.json")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--with-c", action="store_true", help="add half of a C to every product")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    backends = kernels(device)
    results = []
    for dtype in arguments.dtypes:
        for shape in SHAPES:
            results.append(measure(shape, getattr(torch, dtype), arguments.rounds, arguments.with_c, backends))
            if arguments.out is not None:
                report = {"environment": environment(device), "results": results}
                arguments.out.joinpath("syrk.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(environment(device)))
    print("| batch×M×K | dtype | bmm | cublas | triton | its best | quack | its best | TFLOP/s of the best |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(row, results)))


if __name__ == "__main__":
    main()
