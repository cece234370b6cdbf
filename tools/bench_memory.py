"""Memory of one rank among many, measured on one GPU: the process group moves nothing, all else is real.

    python tools/bench_memory.py [--model dense-1b] [--ranks 2 16] [--tokens 8192] [--variants fsdp2 dmuon-z3-norms]
        [--peers] [--top 12] [--out r.json] [--markdown r.md] [--cpu]

Models, variants and peers are bench_step.py's. A rank allocates what it would among so many; what it would receive is
whatever the memory held, so that losses mean nothing and times little. NCCL's own buffers, which torch's allocator
does not see, are not in it. Figures are GiB that torch has allocated: "at rest" between steps, "after forward" with
what backward needs, and the peaks of both parts of a step. ``--top`` lists what is allocated when forward and backward
are at their peak, by the lines of Python that asked for it. ``--cpu`` tries it all with tiny models and has no figures.

Correctness first: a variant must have the parameters of the first one, and its optimizer must change some.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_step import build, completed, describe, micro_batches, parser_of, release
from step_times import Trained, allocated, forward_backward, optimize, synchronize, train_step
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

# Importing it registers the backend "fake".
from torch.testing._internal.distributed.fake_pg import FakeStore as EmptyStore

WARM_UP = 3
GIB = 2**30


@dataclass
class Row:
    """Of one variant; memory in GiB."""

    ranks: int
    variant: str
    rest: float = 0.0
    after_forward: float = 0.0
    forward_backward_peak: float = 0.0
    optimizer_peak: float = 0.0
    reserved: float = 0.0
    reason: str = ""
    top: list[tuple[str, float]] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return max(self.forward_backward_peak, self.optimizer_peak)


class FakeStore(EmptyStore):
    """Where every other rank is already."""

    def add(self, key: str, amount: int) -> int:
        return amount

    def set(self, key: str, value: str) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass


def say_the_same(answers: list[Any], value: Any, group: Any = None) -> None:
    """In place of ``all_gather_object``: every other rank has what this one has."""
    answers[:] = [value] * len(answers)


def measure(variant: str, ranks: int, options: argparse.Namespace) -> Row:
    row = Row(ranks, variant)
    mesh = init_device_mesh(options.device, (1, ranks), mesh_dim_names=("replicate", "shard"))
    batches = micro_batches(options.tokens, options.device, options)
    before = allocated()
    try:
        trained = build(variant, options.sizes, mesh)
        fill(trained, row, before, batches, options)
    except Exception as error:
        row.reason = describe(error)
    return row


def fill(trained: Trained, row: Row, before: float, batches: Sequence[Tensor], options: argparse.Namespace) -> None:
    device = batches[0].device
    values = local_values(trained)
    for _ in range(WARM_UP):
        train_step(trained, batches)
    synchronize(device)
    if all(torch.equal(old, new) for old, new in zip(values, local_values(trained), strict=True)):
        raise AssertionError(f"{row.variant} left every parameter as it was")
    del values
    if options.cpu:
        return
    row.rest = allocated() - before
    torch.cuda.reset_peak_memory_stats()
    if options.top:
        torch.cuda.memory._record_memory_history(max_entries=10**6)
    loss = trained.model(batches[0])
    row.after_forward = allocated() - before
    loss.backward()
    del loss
    for ids_BT in batches[1:]:
        forward_backward(trained, [ids_BT])
    row.forward_backward_peak = torch.cuda.max_memory_allocated() / GIB - before
    if options.top:
        row.top = at_peak(torch.cuda.memory._snapshot()["device_traces"][0], options.top)
        torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.reset_peak_memory_stats()
    optimize(trained)
    row.optimizer_peak = torch.cuda.max_memory_allocated() / GIB - before
    row.reserved = torch.cuda.max_memory_reserved() / GIB


def local_values(trained: Trained) -> list[Tensor]:
    """Of the parameters' parts on this rank, some entries each."""
    locals_ = (getattr(p, "_local_tensor", p).detach().flatten() for p in trained.model.parameters())
    return [local[:64].clone() for local in locals_]


def at_peak(events: Sequence[dict[str, Any]], count: int) -> list[tuple[str, float]]:
    """What was allocated since recording began and alive at its highest sum: lines of Python, and GiB."""
    alive: dict[int, dict[str, Any]] = {}
    now = highest = 0
    at_highest: list[dict[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
        elif event["action"] in ("free_requested", "free_completed") and event["addr"] in alive:
            now -= alive.pop(event["addr"])["size"]
        if now > highest:
            highest, at_highest = now, list(alive.values())
    sizes: Counter[str] = Counter()
    for event in at_highest:
        sizes[" < ".join(lines_of(event)) or "elsewhere"] += event["size"]
    return [(lines, size / GIB) for lines, size in sizes.most_common(count)]


def lines_of(event: dict[str, Any]) -> list[str]:
    """The two innermost lines of Python that led to it, without those of torch's modules."""
    inner = ("torch/nn/modules", "torch/utils", "torch/_", "torch/autograd")
    frames = [
        f for f in event["frames"] if f["filename"].endswith(".py") and not any(i in f["filename"] for i in inner)
    ]
    return [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames[:2]]


def table(rows: Sequence[Row]) -> str:
    titles = "ranks", "variant", "at rest", "after forward", "peak", "of it forward + backward", "optimizer", "reserved"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        figures = row.rest, row.after_forward, row.peak, row.forward_backward_peak, row.optimizer_peak, row.reserved
        values = row.reason or " | ".join(f"{figure:.2f}" for figure in figures)
        lines.append(f"| {row.ranks} | {row.variant} | {values} |")
    for row in rows:
        if row.top:
            lines.append(f"\n{row.variant}, {row.ranks} ranks: allocated at the peak since the step began, GiB\n")
            lines += [f"    {size:6.2f}  {where}" for where, size in row.top]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of this rank in a step")
    parser.add_argument("--top", type=int, default=0, help="list so many of the largest allocations")
    return completed(parser.parse_args(arguments))


def main() -> None:
    options = parse()
    dist.all_gather_object = say_the_same
    rows = []
    for ranks in options.ranks:
        store = FakeStore()  # C++ does not keep what is Python's of it
        dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
        for variant in options.variants:
            release()
            rows.append(measure(variant, ranks, options))
            print(f"{ranks} ranks, {variant}: {rows[-1].reason or 'done'}", flush=True)
        release()
        dist.destroy_process_group()
    if options.markdown is not None:
        options.markdown.write_text(table(rows) + "\n", encoding="utf-8")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
