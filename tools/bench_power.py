"""What the device's power limit costs forward and backward: the same ones, with and without work behind them.

    torchrun --nproc_per_node=2 tools/bench_power.py [--model dense-1b] [--variants fsdp2 dmuon-z2] [--tokens 8192]
        [--pause 20] [--rounds 3] [--steps 40] [--out r.json] [--markdown r.md] [--cpu]

A device at its power limit lowers its clock, and how far depends on all that a step does: an optimizer of matrix
products slows down the next forward, one that waits speeds it up. A variant of bench_step.py runs as it is, then with
``--pause`` ms of rest behind its optimizer, then with as much instead of it; in a rest one thread waits. Every round
begins with another of the three. Compare rows of one variant, and of two the last ones. Medians of the later half of
the steps, then of rounds, on the rank where they are highest; clock and power are means of what ``nvidia-smi`` says of
rank 0's GPU over that time, whole steps, and "limited" is the share of it in which the power limit held the clock down.
``--cpu`` tries it all with tiny models, with no rest and no clock.

Correctness first: variants begin with the same loss, it stays finite, and an optimizer moves every matrix.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from bench_step import (
    OURS,
    build,
    check_beginning,
    completed,
    environment,
    lengths,
    micro_batches,
    parser_of,
    release,
    say,
)
from step_times import Figures, Trained, median_of, optimize, timed, train_step
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ENDS = ("its optimizer", "its optimizer, then idle", "idle instead")
"""What follows forward and backward."""
WARM_UP = 10
TIMES = {"forward_backward_ms": "forward + backward ms", "optimizer_ms": "what follows ms"}
COLUMNS = {
    **TIMES,
    "clock_mhz": "clock MHz",
    "power_w": "power W",
    "power_limit_w": "limit W",
    "limited": "limited",
}
CYCLES_PER_MS = 1_700_000  # about; what came of it is measured
FIELDS = {
    "clocks.sm": "clock_mhz",
    "power.draw.instant": "power_w",
    "enforced.power.limit": "power_limit_w",
    "clocks_event_reasons.sw_power_cap": "limited",
}
"""Of ``nvidia-smi``, by our names."""
ANSWERS = {"Active": 1.0, "Not Active": 0.0}


class Meter:
    """What ``nvidia-smi`` says of one GPU, read by a process of its own; nothing without one, or without a GPU.

    Args:
        gpu: what ``nvidia-smi`` calls it; None on a CPU.
    """

    def __init__(self, gpu: str | None) -> None:
        self.samples: list[tuple[float, Figures]] = []
        self._process: subprocess.Popen[str] | None = None
        if gpu is not None and shutil.which("nvidia-smi"):
            options = f"--id={gpu}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"
            self._process = subprocess.Popen(
                ["nvidia-smi", *options, "--loop-ms=20"], stdout=subprocess.PIPE, text=True
            )
            self._thread = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
            self._thread.start()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            read = dict(zip(FIELDS.values(), map(figure_of, line.split(",")), strict=False))
            known = {name: figure for name, figure in read.items() if figure is not None}
            if known:
                self.samples.append((time.perf_counter(), known))

    def between(self, begin: float, end: float) -> Figures:
        """Means over that time, by ``time.perf_counter``, of what was read."""
        then = [figures for moment_s, figures in list(self.samples) if begin <= moment_s <= end]
        names = [name for name in FIELDS.values() if any(name in figures for figures in then)]
        return {name: statistics.mean(figures[name] for figures in then if name in figures) for name in names}


def figure_of(field: str) -> float | None:
    """None for "[N/A]" and messages."""
    try:
        return ANSWERS[field.strip()] if field.strip() in ANSWERS else float(field)
    except ValueError:
        return None


def gpu_of(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def idle(device: torch.device, milliseconds: float) -> None:
    """Let the device wait; the host goes on."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def finish(trained: Trained, device: torch.device, end: str, pause: float) -> None:
    """A step, behind its forward and backward."""
    if end == "idle instead":
        for optimizer in trained.optimizers:
            optimizer.zero_grad()
    else:
        optimize(trained)
    if end != "its optimizer":
        idle(device, pause)


def measure(
    variant: str, ends: Sequence[str], mesh: DeviceMesh, batches: Sequence[Tensor], meter: Meter, options
) -> tuple[float, dict[str, Figures]]:
    """The first loss, and a row for each of ``ends``, all of one model."""
    release()
    trained = build(variant, options.sizes, mesh)
    first_loss = math.nan
    rows = {}
    for end in ends:
        before = lengths(trained.model)
        ended = functools.partial(finish, device=batches[0].device, end=end, pause=options.pause)
        for _ in range(WARM_UP + options.steps // 2):
            loss, _ = train_step(trained, batches, ended)
            first_loss = float(loss) if math.isnan(first_loss) else first_loss
        begin = time.perf_counter()
        figures = timed(trained, batches, (options.steps + 1) // 2, ended)
        rows[end] = {name: figures[name] for name in TIMES} | meter.between(begin, time.perf_counter())
        still = int((lengths(trained.model) == before).sum())
        wanted = len(before) if end == "idle instead" else 0
        if still != wanted:
            raise AssertionError(f"{variant}, {end}: {still} of {len(before)} matrices are as they were, not {wanted}")
    return first_loss, rows


def run(options: argparse.Namespace) -> dict[tuple[str, str], Figures]:
    """Medians over the rounds, of rank 0 with clock and power. Needs an initialised process group."""
    device = torch.device(options.device)
    mesh = init_device_mesh(options.device, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    batches = micro_batches(options.tokens, options.device, options)
    rounds: dict[tuple[str, str], list[Figures]] = {(v, end): [] for v in options.variants for end in ENDS}
    wanted = None
    with Meter(gpu_of(device) if dist.get_rank() == 0 else None) as meter:
        for number in range(options.rounds):
            first = number % len(ENDS)
            for variant in options.variants:
                loss, rows = measure(variant, [*ENDS[first:], *ENDS[:first]], mesh, batches, meter, options)
                wanted = loss if wanted is None else wanted
                check_beginning(variant, loss, wanted)
                for end, row in rows.items():
                    rounds[variant, end].append(row)
        if not meter.samples and device.type == "cuda":
            say("nvidia-smi is not there or says nothing of this GPU: no clock and no power")
    release()
    return {key: median_of(rows) for key, rows in rounds.items()}


def table(rows: dict[tuple[str, str], Figures], about: dict[str, str]) -> str:
    titles = ["variant", "then", *COLUMNS.values()]
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), ""]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (variant, end), row in rows.items():
        figures = " | ".join(f"{row[name]:.2f}" if name in row else "–" for name in COLUMNS)
        lines.append(f"| {variant} | {end} | {figures} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.set_defaults(variants=["fsdp2", "dmuon-z2"])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of this rank in a step")
    parser.add_argument("--pause", type=float, default=20.0, help="ms of rest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps a row, of which the later half is timed")
    options = completed(parser.parse_args(arguments))
    if strangers := [variant for variant in options.variants if variant not in OURS]:
        parser.error(f"{', '.join(strangers)}: other Muons are compared by bench_step.py alone, which survives them")
    if options.rounds < 1 or options.steps < 1 or not 0 <= options.pause < math.inf:
        parser.error("--rounds and --steps must be at least 1, and --pause a time")
    return options


def main() -> None:
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rows = run(options)
    about = environment(options) | {name: str(vars(options)[name]) for name in ("tokens", "pause", "steps", "rounds")}
    if dist.get_rank() == 0 and options.markdown is not None:
        options.markdown.write_text(table(rows, about) + "\n", encoding="utf-8")
    if dist.get_rank() == 0 and options.out is not None:
        listed = [{"variant": variant, "then": end, **row} for (variant, end), row in rows.items()]
        options.out.write_text(json.dumps({"environment": about, "rows": listed}, indent=1), encoding="utf-8")
    say(table(rows, about))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
