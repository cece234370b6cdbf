"""Time saving and loading a checkpoint of DMuon beside FSDP2's own, model and optimizer, and what memory it takes.

    torchrun --nproc_per_node=2 tools/bench_checkpoint.py [--layers 12] [--rounds 3] [--folder /tmp/checkpoint] [--cpu]

The model is the dense one of bench_models.py, about 1 B parameters in fp32. Variants: FSDP2 with AdamW through
torch.distributed.checkpoint; DMuon through the same; DMuon's save_checkpoint and load_checkpoint, which also swap
folders, compare names and verify checksums. Medians over the rounds; what is written is synced to the disk, what is
read may come from the page cache. Memory is what came on top at the peak, of the GPU and of the process, on the rank
with most.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_models import LanguageModel, Sizes, is_matrix
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

VARIANTS = ("fsdp2, dcp", "dmuon, dcp", "dmuon, save_checkpoint")


@dataclass
class Cost:
    """Of one call, on the rank on which it was highest."""

    seconds: float
    device_mib: float
    host_mib: float


def build(variant: str, mesh: DeviceMesh, options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = LanguageModel(Sizes(options.width, options.ff, options.heads, options.layers))
    if variant.startswith("dmuon"):
        dmuon.dedicate_params(model, mesh, is_matrix)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if variant.startswith("dmuon"):
        return model, dmuon.Muon(model, lr=1e-4, adamw_lr=1e-4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def save(variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if variant == "dmuon, save_checkpoint":
        dmuon.save_checkpoint(model, optimizer, folder)
        return
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if variant == "dmuon, save_checkpoint":
        dmuon.load_checkpoint(model, optimizer, folder)
        return
    weights, state = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": state}
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def cost_of(work: Callable[[], None], device: str) -> Cost:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    at_rest = torch.cuda.memory_allocated() if on_gpu else 0
    host = forget_host_peak()
    dist.barrier()
    begin = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    figures = torch.tensor([seconds, (peak - at_rest) / 2**20, host_memory("VmHWM") - host], device=device)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return Cost(*figures.tolist())


def forget_host_peak() -> float:
    """Let Linux begin its peak of resident memory anew; what is resident now, MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return host_memory("VmRSS")


def host_memory(entry: str) -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")) / 1024


def measure(variant: str, mesh: DeviceMesh, options: argparse.Namespace) -> str:
    """One row of the table."""
    model, optimizer = build(variant, mesh, options)
    folder = options.folder / variant.replace(", ", "-")
    saves, loads, first = [], [], dist.get_rank() == 0
    for _ in range(options.rounds + 1):  # the first warms up
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            options.folder.mkdir(parents=True, exist_ok=True)
        saves.append(cost_of(lambda: save(variant, model, optimizer, folder), mesh.device_type))
        loads.append(cost_of(lambda: load(variant, model, optimizer, folder), mesh.device_type))
    gigabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    dist.barrier()
    if first:
        shutil.rmtree(folder)
    cells = [f"{gigabytes:.2f}"]
    for costs in (saves[1:], loads[1:]):
        seconds = statistics.median(cost.seconds for cost in costs)
        device, host = max(cost.device_mib for cost in costs), max(cost.host_mib for cost in costs)
        cells += [f"{seconds:.2f}", f"{gigabytes / seconds:.2f}", f"{device:.0f}", f"{host:.0f}"]
    return f"| {variant} | {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ff", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dmuon-checkpoint"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--cpu", action="store_true", help="on the CPU although there is a GPU")
    return parser.parse_args()


def main() -> None:
    options = parse()
    on_gpu = torch.cuda.is_available() and not options.cpu
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda *_: None
    say("| | GB | save s | GB/s | GPU MiB | host MiB | load s | GB/s | GPU MiB | host MiB |")
    say("|---|" + "---|" * 9)
    for variant in options.variants:
        say(measure(variant, mesh, options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
