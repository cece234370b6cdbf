"""How bench_step.py times a step: in a loop, as training runs it, and by parts that each start on an idle device.

In the loop the host runs ahead until the queue of launches is full and then waits for the GPU, so that its time there
says nothing of its own work. A call that starts on an idle GPU returns when the host's work is done.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

IDLE_STEPS = 3
SHORT = 256
Figures = dict[str, float]
Moment = torch.cuda.Event | float


@dataclass
class Trained:
    """A model and what steps it."""

    model: nn.Module
    optimizers: Sequence[Optimizer]


# --- one step


@dataclass(frozen=True)
class Marks:
    """Of one step: where it began, where the optimizer began, where it ended."""

    begin: Moment
    middle: Moment
    end: Moment


def forward_backward(trained: Trained, batches: Sequence[Tensor]) -> Tensor:
    """The mean loss. The gradients of every micro-batch are reduced."""
    losses = []
    for ids_BT in batches:
        loss = trained.model(ids_BT) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def optimize(trained: Trained) -> None:
    for optimizer in trained.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train_step(
    trained: Trained, batches: Sequence[Tensor], finish: Callable[[Trained], None] = optimize
) -> tuple[Tensor, Marks]:
    device = batches[0].device
    begin = moment(device)
    loss = forward_backward(trained, batches)
    middle = moment(device)
    finish(trained)
    return loss, Marks(begin, middle, moment(device))


# --- many


def timed(
    trained: Trained, batches: Sequence[Tensor], steps: int, finish: Callable[[Trained], None] = optimize
) -> Figures:
    """Medians of ``steps`` steps, one after the other without a wait, and their memory."""
    device = batches[0].device
    on_gpu = device.type == "cuda"
    train_step(trained, batches, finish)  # memory for this many micro-batches
    synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    run = [train_step(trained, batches, finish) for _ in range(steps)]
    synchronize(device)
    loss, marks = run[-1][0], [each for _, each in run]
    figures = {
        "step_ms": statistics.median(elapsed_ms(each.begin, each.end) for each in marks),
        "forward_backward_ms": statistics.median(elapsed_ms(each.begin, each.middle) for each in marks),
        "optimizer_ms": statistics.median(elapsed_ms(each.middle, each.end) for each in marks),
        "rest_gib": allocated(),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "loss": float(loss),
        "steps": float(steps),
    }
    if not math.isfinite(figures["loss"]):
        raise AssertionError(f"after the timed steps the loss is {figures['loss']}")
    return highest(figures, device)


def started_idle(trained: Trained, ids_BT: Tensor) -> Figures:
    """Of the two parts of a step: the host's milliseconds until the call returns; of the optimizer the device's too.

    Medians of a few steps. Of the micro-batch one short sequence is taken, which is the same work for the host: a whole
    one can keep the GPU so long that even the launches of one forward and backward fill the queue.
    """
    short_BT = ids_BT[:1, :SHORT]
    _step_by_parts(trained, short_BT)  # memory for this length
    rows = [_step_by_parts(trained, short_BT) for _ in range(IDLE_STEPS)]
    return highest({name: statistics.median(row[name] for row in rows) for name in rows[0]}, ids_BT.device)


def _step_by_parts(trained: Trained, ids_BT: Tensor) -> Figures:
    device = ids_BT.device
    settle(device)
    host_begin = time.perf_counter()
    forward_backward(trained, [ids_BT])
    host_forward_backward = time.perf_counter() - host_begin
    settle(device)
    begin, host_begin = moment(device), time.perf_counter()
    optimize(trained)
    host_optimizer, end = time.perf_counter() - host_begin, moment(device)
    synchronize(device)
    return {
        "idle_start_host_forward_backward_ms": host_forward_backward * 1e3,
        "idle_start_host_optimizer_ms": host_optimizer * 1e3,
        "idle_start_optimizer_ms": elapsed_ms(begin, end),
    }


# --- many rounds


def median_of(rows: Sequence[Figures]) -> Figures:
    """Of every figure over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


# --- time, memory, other ranks


def moment(device: torch.device) -> Moment:
    """Now, in the order of the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return (end - begin) * 1e3  # type: ignore[operator]
    return begin.elapsed_time(end)


def settle(device: torch.device) -> None:
    """Return when no rank has work left: none then waits in a collective for what another was still doing."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def highest(figures: Figures, device: torch.device) -> Figures:
    """Each figure on the rank on which it is highest."""
    values = torch.tensor(list(figures.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))
