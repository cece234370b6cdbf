"""Time one training step of FSDP2 + fused AdamW and of DMuon on the same model and data, side by side.

    torchrun --nproc_per_node=2 tools/bench_step.py [--tokens 8192 16384] [--replicas 1 2] [--rounds 3] [--out r.json]

The model is Llama-like (12 layers, d 2048, ff 8192, vocabulary 32,000), bf16 compute and reduce, fp32 masters. The loss
of the variants' first forward is compared; every variant is timed in turn, several rounds, medians. What is printed
last is a Markdown table: milliseconds of a step by part, host time, memory. Exposed communication is the time of a
profiled step in which a kernel of NCCL runs and no other does.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

SEQUENCE = 4096
VOCABULARY = 32_000


class Block(nn.Module):
    def __init__(self, d: int, ff: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        y = self.attention_norm(x_BTD)
        q, k, v = (
            projection(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x_BTD)
        return x_BTD + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LanguageModel(nn.Module):
    def __init__(self, d: int = 2048, ff: int = 8192, heads: int = 16, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d)
        self.layers = nn.ModuleList([Block(d, ff, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embed(ids_BT)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids_BT[:, 1:].reshape(-1))


def build(variant: str, hsdp: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    replicated = hsdp.size(0) > 1
    mesh = hsdp if replicated else hsdp["shard"]
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = LanguageModel()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if variant != "fsdp2":
        dmuon.dedicate_params(
            model,
            hsdp["shard"],
            lambda name, p: "_proj" in name and p.ndim == 2,
            replicate_mesh=hsdp["replicate"] if replicated else None,
        )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=variant != "dmuon-z2")
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if variant == "fsdp2":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, dmuon.Muon(model, lr=1e-4, adamw_lr=1e-4)


def measure(variant: str, mesh: DeviceMesh, ids: Tensor, steps: int) -> dict[str, float]:
    """Medians of a few steps: forward and backward, optimizer, host time, peak memory, the first six steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = build(variant, mesh)
    losses, first = [], time.perf_counter()
    for _ in range(6):
        losses.append(step(model, optimizer, ids, []))
    torch.cuda.synchronize()
    first_six = time.perf_counter() - first
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event, float, float]] = []
    dist.barrier()
    for _ in range(steps):
        step(model, optimizer, ids, marks)
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated()
    result = {
        "forward_backward_ms": statistics.median(a.elapsed_time(b) for a, b, _, _, _ in marks),
        "optimizer_ms": statistics.median(b.elapsed_time(c) for _, b, c, _, _ in marks),
        "host_forward_backward_ms": statistics.median(h for *_, h, _ in marks) * 1e3,
        "host_optimizer_ms": statistics.median(h for *_, h in marks) * 1e3,
        "exposed_communication_ms": exposed_communication(functools.partial(step, model, optimizer, ids, [])),
        "rest_gib": at_rest / 2**30,
        "peak_gib": peak / 2**30,
        "first_six_steps_s": first_six,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }
    if variant != "fsdp2" and dist.get_rank() == 0:
        print(dmuon.get_ns_backend(optimizer), flush=True)
    del model, optimizer
    gc.collect()
    return result


def exposed_communication(run: Callable[[], object]) -> float:
    """Milliseconds of one ``run()`` in which NCCL works and nothing else does."""
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    edges = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 0:
            kind = 0 if "nccl" in event.name.lower() else 1
            edges += [(event.time_range.start, 1, kind), (event.time_range.end, -1, kind)]
    exposed, running, last = 0.0, [0, 0], 0.0
    for time_us, change, kind in sorted(edges):
        if running[0] and not running[1]:
            exposed += time_us - last
        running[kind] += change
        last = time_us
    return exposed / 1e3


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, marks: list) -> Tensor:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    begin = time.perf_counter()
    loss = model(ids)
    loss.backward()
    middle = time.perf_counter()
    events[1].record()
    optimizer.step()
    optimizer.zero_grad()
    events[2].record()
    marks.append((*events, middle - begin, time.perf_counter() - middle))
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens a GPU and step")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], help="HSDP: replicas; 1 is one mesh")
    parser.add_argument("--variants", nargs="+", default=["fsdp2", "dmuon-z3", "dmuon-z2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = []
    for replicas in options.replicas:
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
        rows += [{"replicas": replicas, **row} for tokens in options.tokens for row in compare(tokens, mesh, options)]
    if dist.get_rank() == 0:
        report(rows, options.out)
    dist.destroy_process_group()


def compare(tokens: int, mesh: DeviceMesh, options: argparse.Namespace) -> list[dict]:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (tokens // SEQUENCE, SEQUENCE), device="cuda", generator=generator)
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in options.variants}
    for _ in range(options.rounds):
        for variant in options.variants:
            runs[variant].append(measure(variant, mesh, ids, options.steps))
    losses = [results[0]["first_loss"] for results in runs.values()]
    if max(losses) - min(losses) > 1e-2:
        raise AssertionError(f"the variants do not compute the same loss: {dict(zip(runs, losses, strict=True))}")
    return [
        {"tokens": tokens, "variant": variant, **{k: statistics.median(r[k] for r in results) for k in results[0]}}
        for variant, results in runs.items()
    ]


def report(rows: list[dict], out: Path | None) -> None:
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "dmuon": dmuon.__version__,
    }
    if out is not None:
        out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    columns = [key for key in rows[0] if key not in ("replicas", "tokens", "variant")]
    print("| replicas | tokens a GPU | variant | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 3))
    for row in rows:
        values = " | ".join(f"{row[key]:.2f}" for key in columns)
        print(f"| {row['replicas']} | {row['tokens']} | {row['variant']} | {values} |", flush=True)


if __name__ == "__main__":
    main()
