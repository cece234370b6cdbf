"""Time optimizer steps of many small matrices, which cost the host and not the GPU: DMuon's beside torch's.

    python tools/bench_small.py [--count 1000] [--shapes 32x128 64x64 128x512] [--steps 7] [--cpu] [--out r.json]
        [--markdown r.md]

``muon_update_`` gets all that a step of ``dmuon.Muon`` gives it: presence, and copies in bf16. Beside it are
``torch.optim.AdamW(fused=True)`` and ``torch.optim.Muon``. Weights are fp32, gradients others in every step, as
training has them. Every step starts on an idle device: "host ms" is the time until the call returns, "device ms" that
until the device is done, by its own clock; medians over the steps. "first call ms", of the first step until the device
is done, has what is planned and allocated once; kernels are compiled in the check before. torch's Muon launches more
than the queue holds, so that its host waits for the GPU too.

Correctness first: every optimizer must move every weight, and DMuon's first step is checked against float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from step_times import elapsed_ms, moment, synchronize
from torch import Tensor

from dmuon_core import POLAR_EXPRESS, NewtonSchulz, lr_scale, muon_update_
from dmuon_core.testing import exact_polynomial, relative_error

WARM_UP = 3
LEARNING_RATE, WEIGHT_DECAY, ADJUST = 1e-2, 0.1, "match_rms_adamw"
Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Of one optimizer on ``count`` matrices; medians in milliseconds."""

    shape: str
    count: int
    optimizer: str
    host_ms: float
    device_ms: float
    first_call_ms: float


def adamw(weights: Sequence[Tensor]) -> Step:
    return torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True).step


def torch_muon(weights: Sequence[Tensor]) -> Step:
    return torch.optim.Muon(weights, lr=LEARNING_RATE, adjust_lr_fn=ADJUST).step


def dmuon(weights: Sequence[Tensor]) -> Step:
    return updates(weights, *beside(weights))


OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Step]] = {
    "torch.optim.AdamW(fused=True)": adamw,
    "torch.optim.Muon": torch_muon,
    "dmuon_core.muon_update_": dmuon,
}
BASE = "torch.optim.AdamW(fused=True)"


def beside(weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of every weight the presence, 1, and a place for its copy."""
    presence = [torch.ones((), device=weight.device) for weight in weights]
    return presence, [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]


def updates(weights: Sequence[Tensor], presence: Sequence[Tensor], copies: Sequence[Tensor]) -> Step:
    buffers = [torch.zeros_like(weight) for weight in weights]
    newton_schulz = NewtonSchulz()

    def step() -> None:
        muon_update_(
            weights,
            [weight.grad for weight in weights],
            buffers,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            newton_schulz=newton_schulz,
            adjust_lr_fn=ADJUST,
            presence=presence,
            copies=copies,
        )

    return step


# --- correctness


def check(shape: tuple[int, int], device: torch.device) -> None:
    """One step of DMuon on a few matrices, the last of which no rank has a gradient for, against float64.

    Raises:
        AssertionError: a weight is not where it belongs, or its copy is another.
    """
    weights = gaussian(4, shape, device)
    give(weights, gaussian(4, shape, device))
    before = [weight.double() for weight in weights]
    presence, copies = beside(weights)
    presence[-1].zero_()
    updates(weights, presence, copies)()
    rate = LEARNING_RATE * lr_scale(ADJUST, *shape)
    for weight, old, copy in zip(weights[:-1], before, copies, strict=False):
        moved = (old * (1 - LEARNING_RATE * WEIGHT_DECAY) - weight.double()) / rate
        error = relative_error(moved, exact_polynomial(weight.grad, POLAR_EXPRESS.triples))
        # A Gaussian matrix errs by a few roundings of half precision.
        if error > 2e-2 or not torch.equal(copy, weight.bfloat16()):
            raise AssertionError(f"muon_update_ on {shape}: the factor is wrong by {error:.1e}, or a copy is")
    if not torch.equal(weights[-1].double(), before[-1]):
        raise AssertionError(f"muon_update_ on {shape} moved a weight that has no gradient")


def gaussian(count: int, shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device) for _ in range(count)]


def give(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad


# --- time


def measure(name: str, count: int, shape: tuple[int, int], steps: int, device: torch.device) -> Row:
    torch.manual_seed(0)
    weights = gaussian(count, shape, device)
    both_grads = [gaussian(count, shape, device) for _ in range(2)]
    before = torch.stack(weights)
    step = OPTIMIZERS[name](weights)
    times = []
    for index in range(WARM_UP + steps):
        give(weights, both_grads[index % 2])
        times.append(timed(step, device))
    after = torch.stack(weights)
    moved = (after != before).flatten(1).any(1)
    if not moved.all() or not after.isfinite().all():
        raise AssertionError(f"{name} left {int((~moved).sum())} of {count} matrices as they were, or not finite")
    host, until_done, done = zip(*times, strict=True)
    host_ms, device_ms = (statistics.median(each[WARM_UP:]) for each in (host, until_done))
    return Row("x".join(map(str, shape)), count, name, host_ms, device_ms, done[0])


def timed(step: Step, device: torch.device) -> tuple[float, float, float]:
    """Milliseconds until the call returns, of the device's work, and until that is done."""
    synchronize(device)
    host_begin, begin = time.perf_counter(), moment(device)
    step()
    host, end = time.perf_counter() - host_begin, moment(device)
    synchronize(device)
    return host * 1e3, elapsed_ms(begin, end), (time.perf_counter() - host_begin) * 1e3


# --- report


def table(rows: Sequence[Row]) -> str:
    lines = ["| matrices | optimizer | host ms | ratio | device ms | ratio | first call ms |", "|---" * 7 + "|"]
    base = {row.shape: row for row in rows if row.optimizer == BASE}
    for row in rows:
        by_host, by_device = row.host_ms / base[row.shape].host_ms, row.device_ms / base[row.shape].device_ms
        lines.append(
            f"| {row.count} × {row.shape} | `{row.optimizer}` | {row.host_ms:.2f} | {by_host:.2f} "
            f"| {row.device_ms:.2f} | {by_device:.2f} | {row.first_call_ms:.0f} |"
        )
    return "\n".join(lines)


def shape_of(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def main(arguments: Sequence[str] | None = None) -> str:
    """Measure, write what was asked for, and return the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="matrices of a shape")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(32, 128), (64, 64), (128, 512)])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, where a step of 1,000 takes seconds")
    parser.add_argument("--out", type=Path, help="everything as JSON")
    parser.add_argument("--markdown", type=Path, help="what is returned")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", torch.cuda.current_device())
    rows = []
    for shape in options.shapes:
        check(shape, device)
        rows += [measure(name, options.count, shape, options.steps, device) for name in OPTIMIZERS]
    about = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n" + table(rows)
    if options.out is not None:
        details = {"environment": about, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(details, indent=1), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    print(main())
