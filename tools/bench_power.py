"""What the device's power limit costs forward and backward: the same ones, with and without work behind them.

    torchrun --nproc_per_node=2 tools/bench_power.py [--model dense-1b] [--variants fsdp2 dmuon-z2] [--rounds 2]
        [--steps 40] [--out r.json] [--markdown r.md] [--cpu]

A device at its power limit lowers its clock, and how far depends on all that a step does: an optimizer of matrix
products slows down the next forward, one that waits speeds it up. Every variant of bench_step.py runs as it is, then
with the device left alone behind its optimizer, then with the device left alone in the optimizer's place, each until
the end of the step is ``--pause`` ms long. Variants take turns; medians of steps, then of rounds, on the rank where
they are highest; clock and power are means of what ``nvidia-smi`` says of rank 0's GPU every 20 ms. ``--cpu`` tries it
all with tiny models, with no pause and no clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from bench_step import build, completed, micro_batches, parser_of, release, say
from step_times import Figures, Trained, elapsed_ms, forward_backward, highest, moment, optimize, synchronize
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

ENDS = ("its optimizer", "its optimizer, then idle", "idle instead")
"""What follows forward and backward."""
WARM_UP = 10
COLUMNS = {
    "forward_backward_ms": "forward + backward ms",
    "end_ms": "what follows ms",
    "clock_mhz": "clock MHz",
    "power_w": "power W",
}
CYCLES_PER_MS = 1_700_000  # about; what came of it is measured


class Meter:
    """Clock and power of one GPU, read by a process of its own; without one, or without a GPU, there are none.

    Args:
        gpu: what ``nvidia-smi`` calls it; None on a CPU.
    """

    QUERY = "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "--loop-ms=20"

    def __init__(self, gpu: str | None) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if gpu is not None and shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--id={gpu}", *self.QUERY]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=[self._process.stdout], daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:
                continue  # "[N/A]", or a message
            self.samples.append((time.perf_counter(), clock, power))

    def between(self, begin: float, end: float) -> Figures:
        """Means over that time, by ``time.perf_counter``; nothing where nothing was read."""
        then = [sample for sample in list(self.samples) if begin <= sample[0] <= end]
        if not then:
            return {}
        return {"clock_mhz": statistics.mean(s[1] for s in then), "power_w": statistics.mean(s[2] for s in then)}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def gpu_of(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def idle(device: torch.device, milliseconds: float) -> None:
    """Let the device wait; the host goes on."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def end_step(trained: Trained, end: str, device: torch.device, pause: float, optimizer_ms: float) -> None:
    if end == "idle instead":
        idle(device, pause)
        for optimizer in trained.optimizers:
            optimizer.zero_grad()
        return
    optimize(trained)
    if end == "its optimizer, then idle":
        idle(device, max(pause - optimizer_ms, 0.0))


def measure(variant: str, options: argparse.Namespace, batches: Sequence[Tensor], meter: Meter) -> list[Figures]:
    """One row for each of :data:`ENDS`, all of one model."""
    release()
    device = batches[0].device
    mesh = init_device_mesh(options.device, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    trained = build(variant, options.sizes, mesh)
    rows: list[Figures] = []
    for end in ENDS:
        optimizer_ms = rows[0]["end_ms"] if rows else 0.0
        marks = []
        for step in range(WARM_UP + options.steps):
            if step == WARM_UP:
                synchronize(device)
                dist.barrier()
                begin = time.perf_counter()
            first = moment(device)
            forward_backward(trained, batches)
            middle = moment(device)
            end_step(trained, end, device, options.pause, optimizer_ms)
            marks.append((first, middle, moment(device)))
        synchronize(device)
        end_of_row = time.perf_counter()
        clock = meter.between((begin + end_of_row) / 2, end_of_row)  # which settles in the first half
        timed = marks[WARM_UP:]
        row = {
            "forward_backward_ms": statistics.median(elapsed_ms(a, b) for a, b, _ in timed),
            "end_ms": statistics.median(elapsed_ms(b, c) for _, b, c in timed),
        }
        rows.append({**highest(row, device), **clock})
    return rows


def table(rows: dict[tuple[str, str], Figures]) -> str:
    titles = ["variant", "then", *COLUMNS.values()]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (variant, end), row in rows.items():
        figures = " | ".join(f"{row[name]:.1f}" if name in row else "–" for name in COLUMNS)
        lines.append(f"| {variant} | {end} | {figures} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.set_defaults(variants=["fsdp2", "dmuon-z2"])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of this rank in a step")
    parser.add_argument("--pause", type=float, default=20.0, help="ms from the end of backward to the next forward")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="timed steps a row")
    return completed(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> dict[tuple[str, str], Figures]:
    device = torch.device(options.device)
    batches = micro_batches(options.tokens, options.device, options)
    meter = Meter(gpu_of(device))
    rounds: dict[tuple[str, str], list[Figures]] = {}
    for _ in range(options.rounds):
        for variant in options.variants:
            for end, row in zip(ENDS, measure(variant, options, batches, meter), strict=True):
                rounds.setdefault((variant, end), []).append(row)
    meter.close()
    release()
    return {
        key: {name: statistics.median(row[name] for row in rows if name in row) for name in rows[0]}
        for key, rows in rounds.items()
    }


def main() -> None:
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rows = run(options)
    if dist.get_rank() == 0 and options.markdown is not None:
        options.markdown.write_text(table(rows) + "\n", encoding="utf-8")
    if dist.get_rank() == 0 and options.out is not None:
        details = [{"variant": variant, "then": end, **row} for (variant, end), row in rows.items()]
        options.out.write_text(json.dumps(details, indent=1), encoding="utf-8")
    say(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
