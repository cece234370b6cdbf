"""Time whole training steps of FSDP2 + fused AdamW, DMuon and other Muons on the same model and data, side by side.

    torchrun --nproc_per_node=2 --max-restarts=9 tools/bench_step.py [--model dense-1b] [--tokens 8192 32768 131072]
        [--peers] [--profile] [--trace FOLDER] [--replicas 1 2] [--rounds 3] [--steps 15] [--out r.json]
        [--markdown r.md]

Models are those of bench_models.py, bf16 compute and reduce, fp32 masters. A step's tokens come in micro-batches, and
each one's gradients are reduced, which is what FSDP2 does by default. Variants are ``fsdp2``, ``dmuon-z3`` and
``dmuon-z2`` (weights stay gathered until backward), both also with ``-norms``, where the norms of a layer have owners
too, who step them by AdamW; and with ``--peers`` all of peer_optimizers.py, last, in one round and with fewer steps.
One that cannot run says why instead and is left out from then on; if it fails on some ranks alone, all of them start
anew without it, as often as ``--max-restarts`` has it.

Correctness first: a variant's first loss must be that of the first variant, its last one finite, and every matrix must
have moved. Variants take turns, several rounds; medians of steps, then of rounds. Every figure is the highest over the
ranks. Printed last is a Markdown table: milliseconds of a step by part, its ratio to ``fsdp2``, host time, memory.

Steps are timed one after the other without a wait. What the host takes is measured apart, see step_times.py: "started
idle" is a part of a step that finds the device idle, and the host's time is that until the call returns. It is that of
one micro-batch, of which a step has tokens / micro-batch. A variant whose host takes about as long as its step is bound
by it. Exposed communication is the time of one profiled step in which a kernel of NCCL runs and no other does; idle is
that between the step's first and last kernel in which none runs, and more under the profiler, which slows the host,
than without. ``--trace`` keeps rank 0's trace of that step, for chrome://tracing or Perfetto. ``--profile`` adds the
kernels of one optimizer step of DMuon that starts on an idle GPU. ``--cpu`` tries it all with tiny models.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import step_profile
import torch
import torch.distributed as dist
from bench_models import MODELS, TINY, LanguageModel, Sizes, is_matrix
from peer_optimizers import ABSENT, LEARNING_RATE, PEERS, Division
from step_times import (
    Figures,
    Trained,
    allocated,
    forward_backward,
    highest,
    median_of,
    optimize,
    started_idle,
    synchronize,
    timed,
    train_step,
)
from step_turns import Turns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import dmuon
from dmuon_core import workspace

OURS = ("fsdp2", "dmuon-z3", "dmuon-z2", "dmuon-z3-norms", "dmuon-z2-norms")
WARM_UP = 6
PACKAGES = {"triton", "quack-kernels", *PEERS}
COLUMNS = {
    "step_ms": "step ms",
    "step_ratio": "ratio",
    "forward_backward_ms": "forward + backward ms",
    "forward_backward_ratio": "ratio",
    "optimizer_ms": "optimizer ms",
    "exposed_communication_ms": "exposed communication ms",
    "idle_ms": "idle ms",
    "idle_start_host_forward_backward_ms": "started idle: host, forward + backward of a micro-batch ms",
    "idle_start_host_optimizer_ms": "started idle: host, optimizer ms",
    "idle_start_optimizer_ms": "started idle: optimizer ms",
    "rest_gib": "at rest GiB",
    "peak_gib": "peak GiB",
    "first_six_steps_s": "first six steps s",
}
"""Of the table; JSON has more."""


@dataclass
class Results:
    """What is known of the variants on one mesh: rounds of figures by variant and tokens, reasons, profiles."""

    figures: dict[tuple[str, int], list[Figures]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, step_profile.Profile] = field(default_factory=dict)
    first_loss: float | None = None


# --- building


def build(variant: str, sizes: Sizes, hsdp: DeviceMesh) -> Trained:
    mesh = hsdp if hsdp.size(0) > 1 else hsdp["shard"]
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = LanguageModel(sizes)
    if variant.startswith("dmuon"):
        norms = variant.endswith("-norms")
        policies = [dmuon.ParamPolicy("*.experts.*", view="batched")] if sizes.experts else []
        if norms:
            policies += [dmuon.ParamPolicy("*norm*", route="adamw")]
            policies += [dmuon.ParamPolicy("*.router.*", route="adamw")] if sizes.experts else []
        dmuon.dedicate_params(
            model,
            hsdp["shard"],
            lambda name, p: is_matrix(name, p) or (norms and "layers." in name),
            replicate_mesh=hsdp["replicate"] if hsdp.size(0) > 1 else None,
            param_policy=policies,
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward="-z2" not in variant)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Trained(model, optimizers_of(variant, model, mesh))


def optimizers_of(variant: str, model: nn.Module, mesh: DeviceMesh) -> Sequence[Optimizer]:
    if variant == "fsdp2":
        return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)]
    if variant.startswith("dmuon"):
        return [dmuon.Muon(model, lr=LEARNING_RATE, adamw_lr=LEARNING_RATE)]
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if is_matrix(name, p)}
    return PEERS[variant](Division(matrices, [p for name, p in named.items() if name not in matrices], mesh))


def release() -> None:
    """Forget what the last variant left: cycles, compiled code, memory of Newton-Schulz, cached blocks."""
    gc.collect()
    torch.compiler.reset()
    workspace.forget()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- measuring


def measure(variant: str, mesh: DeviceMesh, data: dict[int, list[Tensor]], results: Results, options) -> None:
    """One round of a variant: built anew, warmed up, then every number of tokens in turn."""
    release()
    left_over = allocated()
    trained = build(variant, options.sizes, mesh)
    before = lengths(trained.model)
    first_six, first_loss, last_loss = warm_up(trained, next(iter(data.values())))
    if results.first_loss is None:
        results.first_loss = first_loss
    check_beginning(variant, first_loss, results.first_loss)
    whole = {"left_over_gib": left_over, "first_six_steps_s": first_six, "sixth_loss": last_loss}
    whole |= started_idle(trained, next(iter(data.values()))[0])
    steps = options.steps if variant in OURS else min(options.steps, options.peer_steps)
    rows = {}
    for tokens, batches in data.items():
        rows[tokens] = {**timed(trained, batches, max(3, steps // len(batches))), **whole}
        if (variant, tokens) not in results.figures:
            rows[tokens] |= profile_step(trained, batches, trace_file(options, mesh, variant, tokens))
    still = int((lengths(trained.model) == before).sum())
    if still:
        raise AssertionError(f"{variant} left {still} of {len(before)} matrices as they were")
    if options.profile and variant.startswith("dmuon") and variant not in results.profiles:
        results.profiles[variant] = profile_optimizer(trained, next(iter(data.values())))
    for tokens, row in rows.items():
        results.figures.setdefault((variant, tokens), []).append(row)


def check_beginning(variant: str, first_loss: float, wanted: float) -> None:
    if not abs(first_loss - wanted) <= 1e-2:
        raise AssertionError(f"{variant} begins with the loss {first_loss}, not with {wanted} as the first")


def lengths(model: nn.Module) -> Tensor:
    """Norms of all matrices in fp64, which one step changes; the same on all ranks."""
    squares = [
        torch.linalg.vector_norm(p.to_local() if isinstance(p, DTensor) else p, dtype=torch.float64) ** 2
        for name, p in model.named_parameters()
        if is_matrix(name, p)
    ]
    total = torch.stack(squares).detach()
    dist.all_reduce(total)
    return total.sqrt()


def warm_up(trained: Trained, batches: Sequence[Tensor]) -> tuple[float, float, float]:
    """Seconds of the first six steps, the first loss and the last."""
    begin = time.perf_counter()
    losses = [train_step(trained, batches)[0] for _ in range(WARM_UP)]
    synchronize(batches[0].device)
    seconds = time.perf_counter() - begin
    figures = highest({"seconds": seconds, "first": float(losses[0]), "last": float(losses[-1])}, batches[0].device)
    if not math.isfinite(figures["last"]):
        raise AssertionError(f"after {WARM_UP} steps the loss is {figures['last']}")
    return figures["seconds"], figures["first"], figures["last"]


def profile_step(trained: Trained, batches: Sequence[Tensor], trace_to: Path | None) -> Figures:
    """How one step occupies the device; nothing, and without a step, where neither that nor a trace can be had."""
    device = batches[0].device
    if device.type == "cpu" and trace_to is None:
        return {}
    return highest(step_profile.step(functools.partial(train_step, trained, batches), device, trace_to), device)


def trace_file(options: argparse.Namespace, mesh: DeviceMesh, variant: str, tokens: int) -> Path | None:
    return options.trace and options.trace / f"{variant}-replicas{mesh.size(0)}-tokens{tokens}.json.gz"


def profile_optimizer(trained: Trained, batches: Sequence[Tensor]) -> step_profile.Profile:
    """Of this rank: the kernels of one optimizer step."""
    forward_backward(trained, batches)
    return step_profile.profiled(functools.partial(optimize, trained), batches[0].device)


# --- comparing


def take_turn(
    turn: int, variant: str, results: Results, turns: Turns, measured: Callable[[], None], drain: Callable[[], None]
) -> None:
    """One round of a variant. One that cannot run leaves its reason; it is not tried again."""
    begin, reason = time.perf_counter(), ""
    try:
        measured()
    except Exception as error:
        reason = describe(error)
        if dist.get_rank() == 0:
            traceback.print_exc(limit=-6)
    agreed = turns.end(turn, reason, drain)
    if agreed:
        results.reasons[variant] = agreed
    say(f"{variant}: {time.perf_counter() - begin:.1f} s {agreed}")


def micro_batches(tokens: int, device: str, options: argparse.Namespace) -> list[Tensor]:
    """Random ids, [sequences, sequence] each, others on every rank."""
    micro, sequence = min(tokens, options.micro_batch), options.sizes.sequence
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (tokens // micro, micro // sequence, sequence)
    return list(torch.randint(options.sizes.vocabulary, shape, device=device, generator=generator))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def rows_of(results: Results, replicas: int) -> list[dict]:
    """Medians over the rounds, with ratios to FSDP2's."""
    medians = {key: median_of(rounds) for key, rounds in results.figures.items()}
    rows = []
    for (variant, tokens), figures in sorted(medians.items(), key=lambda item: item[0][1]):
        base = medians.get(("fsdp2", tokens))
        ratios = {
            f"{part}_ratio": figures[f"{part}_ms"] / base[f"{part}_ms"] if base else math.nan
            for part in ("step", "forward_backward")
        }
        key = {"replicas": replicas, "tokens": tokens, "variant": variant}
        rows.append({**key, **ratios, **figures})
    return rows


# --- reporting


def environment(options: argparse.Namespace) -> dict[str, str]:
    on_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "ranks": str(dist.get_world_size()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
        "dmuon": dmuon.__version__,
        **{each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES},
        "model": options.model,
        "micro-batch": str(options.micro_batch),
    }


def tables(rows: list[dict], results: dict[int, Results]) -> str:
    """The report in Markdown: steps, what did not run, profiles."""
    titles = ["replicas", "tokens a GPU", "variant", *COLUMNS.values()]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        values = [
            f"{row.get(key, math.nan):.3f}" if "ratio" in key else f"{row.get(key, math.nan):.1f}" for key in COLUMNS
        ]
        lines.append(f"| {row['replicas']} | {row['tokens']} | {row['variant']} | {' | '.join(values)} |")
    for replicas, each in results.items():
        lines += [f"\n{variant} (replicas {replicas}) did not run: {why}" for variant, why in each.reasons.items()]
        for variant, profile in each.profiles.items():
            lines.append(
                f"\n{variant}, one optimizer step on an idle device (replicas {replicas}, rank 0): under the profiler "
                f"kernels ran for {profile.busy_ms:.2f} ms\n\n{step_profile.markdown(profile)}"
            )
    return "\n".join(lines)


def write(results: dict[int, Results], options: argparse.Namespace) -> str:
    """The report; of rank 0 to the files that were asked for too."""
    rows = [row for replicas, each in results.items() for row in rows_of(each, replicas)]
    about = environment(options)
    text = ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n" + tables(rows, results)
    if options.peers:
        text += "".join(f"\n\n{name} is not compared: {why}" for name, why in ABSENT.items())
    if options.markdown is not None and dist.get_rank() == 0:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.out is not None and dist.get_rank() == 0:
        profiles = {
            replicas: {variant: asdict(profile) for variant, profile in each.profiles.items()}
            for replicas, each in results.items()
        }
        reasons = {replicas: each.reasons for replicas, each in results.items()}
        details = {"environment": about, "rows": rows, "reasons": reasons, "absent": ABSENT, "profiles": profiles}
        options.out.write_text(json.dumps(details, indent=1), encoding="utf-8")
    return text


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of training steps has; :func:`completed` reads them."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense-1b")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens a GPU and micro-batch")
    parser.add_argument("--variants", nargs="+", choices=[*OURS, *PEERS], default=list(OURS))
    parser.add_argument("--peers", action="store_true", help="other Muons too")
    parser.add_argument("--out", type=Path, help="everything as JSON")
    parser.add_argument("--markdown", type=Path, help="what is printed last")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU")
    return parser


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """With the device, the sizes of the model, and the peers among the variants; tokens in whole micro-batches."""
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --cpu tries it all with tiny models")
    options.device = "cpu" if options.cpu else "cuda"
    options.sizes = (TINY if options.cpu else MODELS)[options.model]
    if options.peers:
        options.variants = [*options.variants, *(name for name in PEERS if name not in options.variants)]
    for tokens in [options.tokens] if isinstance(options.tokens, int) else options.tokens:
        micro, sequence = min(tokens, options.micro_batch), options.sizes.sequence
        if micro < 1 or tokens % micro or micro % sequence:
            raise SystemExit(
                f"{tokens} tokens must be whole micro-batches of {micro}, and these sequences of {sequence}"
            )
    return options


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens a GPU and step")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], help="HSDP: replicas; 1 is one mesh")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="timed micro-batches, of at least three steps")
    parser.add_argument("--peer-steps", type=int, default=6, help="the same of other Muons")
    parser.add_argument("--profile", action="store_true", help="kernels of one optimizer step of DMuon")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="a trace of one step of every variant")
    return completed(parser.parse_args(arguments))


def run(options: argparse.Namespace, turns: Turns) -> dict[int, Results]:
    """Compare on every mesh and report. Needs an initialised process group.

    Peers come last, and what is known is written after every turn: one that breaks the device takes nothing else along.
    """
    ours = [variant for variant in options.variants if variant in OURS]
    peers = [variant for variant in options.variants if variant not in OURS]
    rounds = [ours] * options.rounds + [[peer] for peer in peers]
    order = [(replicas, variant) for variants in rounds for replicas in options.replicas for variant in variants]
    meshes = {
        replicas: init_device_mesh(
            options.device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
        )
        for replicas in options.replicas
    }
    data = {tokens: micro_batches(tokens, options.device, options) for tokens in options.tokens}
    drain = functools.partial(synchronize, torch.device(options.device))
    done, results = resume(turns, order, options)
    for turn, (replicas, variant) in enumerate(order):
        here = results[replicas]
        if turn >= done and variant not in here.reasons:
            measured = functools.partial(measure, variant, meshes[replicas], data, here, options)
            take_turn(turn, variant, here, turns, measured, drain)
            write(results, options)
        turns.keep(max(done, turn + 1), results)
    release()
    say(write(results, options))
    return results


def resume(turns: Turns, order: Sequence[tuple[int, str]], options: argparse.Namespace) -> tuple[int, dict]:
    """How many turns are done, and the results. A restart leaves out the variant whose turn it was."""
    kept = turns.kept()
    if kept is None:
        results = {replicas: Results() for replicas in options.replicas}
        turns.keep(0, results)
        return 0, results
    done, results = kept
    if done < len(order):
        replicas, variant = order[done]
        results[replicas].reasons.setdefault(variant, turns.said(done))
    return done, results


def main() -> None:
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]  # torchrun's, of this run with all its restarts
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        # torchrun's store may still hold addresses of ranks that are gone.
        init_method=f"file://{folder}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=5),  # compiling a peer takes minutes, and one rank may be done before another
    )
    run(options, Turns(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
