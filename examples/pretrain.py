"""Pretrain a small byte-level language model with Muon and with AdamW, and draw both loss curves.

    python examples/pretrain.py                      both optimizers, every GPU or two CPU processes
    python examples/pretrain.py --optimizer muon --ranks 4 --lr 0.01
    torchrun --nproc_per_node=2 examples/pretrain.py

The text is what every Python installation carries: the help texts of `pydoc_data.topics`, about 700 kB of English.
A tenth of it is held out. The model is Llama-like and trains under FSDP2; with Muon its projections have owners.
Written to --out: metrics.jsonl, one line per evaluation, and loss.png; with --save-every, and when the job is told to
stop (SIGTERM), a checkpoint, from which --resume goes on, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

BYTES = 256
# The best learning rates of the study in docs/study.md.
BEST_LR = {"muon": 0.02, "adamw": 0.005}


# --- the model


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.down_proj = nn.Linear(3 * d, d, bias=False)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x_BTD.shape
        y = self.attention_norm(x_BTD)
        q, k, v = (
            projection(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x_BTD = x_BTD + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x_BTD)
        return x_BTD + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class ByteModel(nn.Module):
    """A Llama over bytes."""

    def __init__(self, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.head_size = d // heads
        self.embed = nn.Embedding(BYTES, d)
        self.layers = nn.ModuleList([Block(d, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, BYTES, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Mean cross entropy of every byte after the first, in nats."""
        x = self.embed(ids_BT[:, :-1])
        rotation = rotary_table(x.shape[1], self.head_size, x.device)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), ids_BT[:, 1:].flatten())


def rotary_table(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864)."""
    cos, sin = rotation
    left, right = x_BHTE.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


# --- the text


def load_text() -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes): every tenth stretch of 2,000 bytes is held out."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    stretches = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(2_000)
    train = [stretch for i, stretch in enumerate(stretches) if i % 10]
    return torch.cat(train), torch.cat(list(stretches[::10]))


def batches(data: Tensor, batch: int, context: int, generator: torch.Generator) -> Tensor:
    """[batch, context + 1] bytes from random places."""
    starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
    return data[starts[:, None] + torch.arange(context + 1)]


# --- training


def build(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(options.seed)
    model = ByteModel(options.d, options.heads, options.layers).to(mesh.device_type)
    if options.optimizer == "muon":
        dmuon.dedicate_params(model, mesh, lambda name, p: "_proj" in name and p.ndim == 2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    betas = (0.9, 0.95)
    if options.optimizer == "adamw":
        return model, torch.optim.AdamW(
            model.parameters(), lr=options.lr, betas=betas, weight_decay=options.weight_decay, fused=True
        )
    return model, dmuon.Muon(
        model,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adamw_lr=options.adamw_lr or options.lr,
        adamw_betas=betas,
        adamw_weight_decay=options.weight_decay,
    )


def schedule(options: argparse.Namespace) -> object:
    """Linear warm-up, then a cosine to a tenth."""

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        progress = (step - options.warmup) / max(1, options.steps - options.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

    return factor


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Tensor, options: argparse.Namespace, device: str) -> float:
    """Mean loss over fixed held-out stretches; each rank takes its rows of every batch."""
    stretches = data[: len(data) // (options.context + 1) * (options.context + 1)].view(-1, options.context + 1)
    chunks = stretches[: options.eval_rows // options.batch * options.batch].split(options.batch)
    mine = rows_of_this_rank(options.batch)
    total = sum(model(chunk[mine].to(device)).double() for chunk in chunks)
    dist.all_reduce(total)
    return float(total) / (len(chunks) * dist.get_world_size())


def rows_of_this_rank(batch: int) -> slice:
    rank, world = dist.get_rank(), dist.get_world_size()
    return slice(rank * batch // world, (rank + 1) * batch // world)


def train(options: argparse.Namespace, mesh: DeviceMesh) -> list[dict]:
    """One run; on every rank the same list of evaluations."""
    device, rank = mesh.device_type, mesh.get_rank()
    model, optimizer = build(options, mesh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(options))
    text, held_out = load_text()
    # One stream of batches for any number of ranks: each takes its rows of the global batch.
    generator = torch.Generator().manual_seed(options.seed)
    rows = rows_of_this_rank(options.batch)
    bar = ProgressBar(options, rank)
    checkpoint = Checkpoint(options, model, optimizer, scheduler, generator)
    first, log = checkpoint.load()
    begin, evaluating = time.perf_counter(), 0.0
    bar.update(first)
    for step in range(first + 1, options.steps + 1):
        ids = batches(text, options.batch, options.context, generator)[rows].to(device)
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        bar.update()
        if step % options.eval_every == 0 or step == options.steps:
            paused = time.perf_counter()
            speed = (step - first) * options.batch * options.context / (paused - begin - evaluating)
            log.append(
                {
                    "optimizer": options.optimizer,
                    "lr": options.lr,
                    "seed": options.seed,
                    "step": step,
                    "train_loss": loss.item(),
                    "held_out_loss": held_out_loss(model, held_out, options, device),
                    "tokens_per_s": round(speed),
                }
            )
            evaluating += time.perf_counter() - paused
            bar.show(log[-1])
        if STOP.asked_on_any_rank(device):
            checkpoint.save(step, log)
            bar.close()
            raise Stopped(step)
        if options.save_every and (step % options.save_every == 0 or step == options.steps):
            checkpoint.save(step, log)
    bar.close()
    if rank == 0 and options.optimizer == "muon":
        print(dmuon.get_ns_backend(optimizer))
    return log


class Checkpoint:
    """All that a run needs to go on as if it had not stopped, in one folder."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        generator: torch.Generator,
    ) -> None:
        self.options, self.model, self.optimizer = options, model, optimizer
        self.scheduler, self.generator = scheduler, generator
        self.folder = options.out / f"checkpoint-{options.optimizer}"

    def save(self, step: int, log: list[dict]) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        extra = {
            "step": step,
            "log": log,
            "scheduler": self.scheduler.state_dict(),
            "generator": self.generator.get_state(),
        }
        dmuon.save_checkpoint(self.model, self.optimizer, self.folder, extra=extra)

    def load(self) -> tuple[int, list[dict]]:
        """(steps done, evaluations so far)."""
        if not self.options.resume:
            return 0, []
        try:
            extra = dmuon.load_checkpoint(self.model, self.optimizer, self.folder)
        except FileNotFoundError:
            return 0, []
        self.scheduler.load_state_dict(extra["scheduler"])
        self.generator.set_state(extra["generator"])
        return extra["step"], extra["log"]


class Stopped(Exception):
    """The job was told to stop, and saved itself."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step} and saved; go on with --resume")


class Stop:
    """Whether SIGTERM came. Ranks get it at different times, so they ask each other after every step."""

    def __init__(self) -> None:
        self.asked = False
        self.answer: Tensor | None = None

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True

    def asked_on_any_rank(self, device: str) -> bool:
        """As it was a step ago, so that the host does not wait for the device."""
        before, self.answer = self.answer, torch.tensor(float(self.asked), device=device)
        dist.all_reduce(self.answer, op=dist.ReduceOp.MAX)
        return before is not None and bool(before)


STOP = Stop()


class ProgressBar:
    """tqdm's on rank 0 where it is installed, else a line per evaluation."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.rank = rank
        self.bar = None
        if rank == 0:
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=options.steps, desc=options.optimizer, unit="step", mininterval=1.0)
            except ImportError:
                print("no progress bar: tqdm is not installed (extra dmuon-fsdp[plots])")

    def update(self, steps: int = 1) -> None:
        if self.bar is not None:
            self.bar.update(steps)

    def show(self, row: dict) -> None:
        if self.bar is not None:
            self.bar.set_postfix(held_out=f"{row['held_out_loss']:.3f}", tokens_per_s=row["tokens_per_s"])
        elif self.rank == 0:
            print(f"{row['optimizer']} step {row['step']}: held-out loss {row['held_out_loss']:.3f}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


# --- the whole job


def job(options: argparse.Namespace) -> None:
    """What each rank does, with a process group."""
    cuda = torch.cuda.is_available() and not options.cpu
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))
    check(options, mesh.size())
    rows = []
    for name in ("adamw", "muon") if options.optimizer == "both" else (options.optimizer,):
        each = argparse.Namespace(**{**vars(options), "optimizer": name, "lr": options.lr or BEST_LR[name]})
        rows += train(each, mesh)
    if dist.get_rank() == 0:
        write(rows, options.out)
    dist.barrier()


def check(options: argparse.Namespace, world: int) -> None:
    """End with a message where the job cannot work."""
    complaint = None
    if options.batch < world or options.batch % world:
        complaint = f"--batch {options.batch} does not divide over {world} ranks; take a multiple of {world}"
    elif options.eval_rows < options.batch:
        complaint = f"--eval-rows {options.eval_rows} is less than --batch {options.batch}; take at least as many"
    elif options.d % (2 * options.heads):
        complaint = f"--d {options.d} must be a multiple of 2 x --heads, {2 * options.heads}, for rotary embeddings"
    if complaint:
        raise SystemExit(complaint)


def write(rows: list[dict], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in {row["optimizer"]: row for row in rows}.values():
        print(f"{row['optimizer']:>6}  lr {row['lr']:<8g} held-out loss {row['held_out_loss']:.4f} nats a byte")
    print(f"wrote {out / 'metrics.jsonl'}{draw(rows, out / 'loss.png')}")


def draw(rows: list[dict], path: Path) -> str:
    """The curves as a PNG; what to say of it."""
    try:
        import matplotlib
    except ImportError:
        return "; no plot: matplotlib is not installed (extra dmuon-fsdp[plots])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        curve = [row for row in rows if row["optimizer"] == name]
        axes.plot(
            [r["step"] for r in curve], [r["held_out_loss"] for r in curve], label=f"{name}, lr {curve[0]['lr']:g}"
        )
    axes.set(xlabel="step", ylabel="held-out loss, nats a byte", title="Byte-level Llama on Python's help texts")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return f" and {path}"


def start(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    """One rank of this machine."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    run_rank(options)


def run_rank(options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available() and not options.cpu
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("nccl" if cuda else "gloo")
    STOP.listen()
    try:
        job(options)
    except Stopped as stopped:
        if dist.get_rank() == 0:
            print(stopped)
    # A thread of gloo may still hold the last tensors; letting go of them while Python ends would abort the process.
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["both", "muon", "adamw"], default="both")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, help="default: the best of the study, per optimizer")
    parser.add_argument("--adamw-lr", type=float, help="of what Muon leaves to AdamW; default: --lr")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=25, help="steps")
    parser.add_argument("--batch", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--context", type=int, default=128, help="bytes a row")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--eval-rows", type=int, default=256)
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0 saves only when told to stop")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--ranks", type=int, help="default: every GPU, or two CPU processes")
    parser.add_argument("--cpu", action="store_true", help="on the CPU although there is a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if "RANK" in os.environ:  # started by torchrun or the like
        run_rank(options)
        return
    gpus = 0 if options.cpu else torch.cuda.device_count()
    world = gpus or 2 if options.ranks is None else options.ranks
    if world < 1:
        raise SystemExit(f"--ranks {world}, but at least one is needed")
    if gpus and world > gpus:
        raise SystemExit(f"--ranks {world}, but this machine has {gpus} GPUs; take fewer, or --cpu")
    check(options, world)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = mp.start_processes(start, args=(world, port, options), nprocs=world, start_method="spawn", join=False)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in ranks.pids()])
    while not ranks.join():
        pass


if __name__ == "__main__":
    main()
