"""Muon against AdamW on the text of examples/pretrain.py: learning rates, then decay and warm-up at the best of them.

    python tools/study.py run --phase rates [--part 0/2] [--out runs/study]    one part of the sweep, in one process
    python tools/study.py run --phase others [--part 0/2] [--out runs/study]   decay and warm-up, when that is done
    python tools/study.py report [--out runs/study]                            tables and the plot

Runs append to study-<part>.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import pretrain

SEEDS = (0, 1, 2)
RATES = {
    "muon": (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    "adamw": (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04),
}
DECAYS = (0.0, 0.1, 0.3)
WARMUPS = (10, 25, 50)
DEFAULTS = {"weight_decay": 0.1, "warmup": 25}


def rate_runs() -> Iterator[dict[str, Any]]:
    """The sweep of the learning rates."""
    for optimizer, rates in RATES.items():
        for lr in rates:
            yield from ({"optimizer": optimizer, "lr": lr, "seed": seed, **DEFAULTS} for seed in SEEDS)


def other_runs(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Decay and warm-up at the best rate of what is done."""
    for optimizer in RATES:
        lr = best(done, optimizer, DEFAULTS)
        for decay in DECAYS:
            for warmup in WARMUPS:
                setting = {"optimizer": optimizer, "lr": lr, "weight_decay": decay, "warmup": warmup}
                yield from ({**setting, "seed": seed} for seed in SEEDS)


def best(done: list[dict[str, Any]], optimizer: str, fixed: dict[str, float]) -> float:
    """The rate with the lowest mean held-out loss."""
    means = {lr: mean_loss(done, {"optimizer": optimizer, "lr": lr, **fixed})[0] for lr in RATES[optimizer]}
    if float("inf") in means.values():
        raise SystemExit(f"the learning rates of {optimizer} are not all done: run --phase rates for every part first")
    return min(means, key=lambda lr: means[lr])


def mean_loss(done: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[float, float]:
    """(mean, half range) over the seeds; infinite where there is none."""
    losses = [row["held_out_loss"] for row in done if all(row[key] == value for key, value in setting.items())]
    if not losses:
        return float("inf"), 0.0
    return statistics.mean(losses), (max(losses) - min(losses)) / 2


def run(options: argparse.Namespace) -> None:
    part, parts = (int(number) for number in options.part.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"study-{part}.jsonl"
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cuda" if cuda else "cpu", (1,))
        settings = rate_runs() if options.phase == "rates" else other_runs(read(options.out))
        for index, setting in enumerate(settings):
            if index % parts == part and not known(read(options.out), setting):
                job = argparse.Namespace(**{**vars(options.defaults), **setting})
                row = pretrain.train(job, mesh)[-1]
                line = {**setting, "held_out_loss": row["held_out_loss"], "steps": job.steps}
                with log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        dist.destroy_process_group()


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(out.glob("study-*.jsonl")) for line in file.read_text().splitlines()]


def known(done: list[dict[str, Any]], setting: dict[str, Any]) -> bool:
    return any(all(row[key] == value for key, value in setting.items()) for row in done)


def report(options: argparse.Namespace) -> None:
    done = read(options.out)
    print(f"{len(done)} runs, {done[0]['steps']} steps each\n")
    print("| optimizer | learning rate | held-out loss, mean of the seeds | half range |\n|---|---|---|---|")
    for optimizer, rates in RATES.items():
        for lr in rates:
            mean, spread = mean_loss(done, {"optimizer": optimizer, "lr": lr, **DEFAULTS})
            print(f"| {optimizer} | {lr:g} | {mean:.4f} | {spread:.4f} |")
    print("\n| optimizer | learning rate | decay | warm-up | held-out loss | half range |\n|---|---|---|---|---|---|")
    for optimizer in RATES:
        lr = best(done, optimizer, DEFAULTS)
        for decay in DECAYS:
            for warmup in WARMUPS:
                setting = {"optimizer": optimizer, "lr": lr, "weight_decay": decay, "warmup": warmup}
                mean, spread = mean_loss(done, setting)
                print(f"| {optimizer} | {lr:g} | {decay:g} | {warmup} | {mean:.4f} | {spread:.4f} |")
    plot(done, options.out / "study.png")


def plot(done: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for optimizer, rates in RATES.items():
        points = [mean_loss(done, {"optimizer": optimizer, "lr": lr, **DEFAULTS}) for lr in rates]
        axes.errorbar(
            rates, [m for m, _ in points], yerr=[s for _, s in points], marker="o", capsize=3, label=optimizer
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats a byte")
    axes.set_title(f"{done[0]['steps']} steps, three seeds")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"\nwrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--phase", choices=["rates", "others"], default="rates")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.argv = sys.argv[:1]
    options.defaults = pretrain.parse()
    run(options) if options.command == "run" else report(options)


if __name__ == "__main__":
    main()
