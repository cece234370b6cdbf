"""The examples and the command line, run as a newcomer runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = "--steps 10 --d 32 --heads 2 --layers 2 --batch 8 --context 32 --eval-every 5 --eval-rows 16 --warmup 2 --cpu"


def run(*command: str, timeout: int = 200, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stderr[-3000:]
    return done


def pretrain(out: Path, *extra: str) -> list[dict]:
    run(sys.executable, "examples/pretrain.py", *TINY.split(), "--out", str(out), *extra)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_same_curve_on_one_two_and_four_ranks(tmp_path):
    curves = [
        [row["held_out_loss"] for row in pretrain(tmp_path / str(ranks), "--optimizer", "muon", "--ranks", str(ranks))]
        for ranks in (1, 2, 4)
    ]
    assert len(curves[0]) == 2
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=5e-3)
    assert stopped_and_resumed(tmp_path / "stopped", "--optimizer", "muon", "--ranks", "2") == curves[1]


def stopped_and_resumed(out: Path, *options: str) -> list[float]:
    """The held-out losses of a run that SIGTERM stops after its first checkpoint, and of the one that goes on."""
    command = [sys.executable, "examples/pretrain.py", *TINY.split(), "--out", str(out), *options]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, "--save-every", "1"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (out / "checkpoint-muon" / ".metadata").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0
    assert re.search(r"^stopped at step \d and saved; go on with --resume$", said, re.MULTILINE), said
    assert not (out / "metrics.jsonl").exists()
    return [row["held_out_loss"] for row in pretrain(out, "--resume", *options)]


def test_both_optimizers_fall_muon_below_and_are_plotted(tmp_path):
    rows = pretrain(tmp_path, "--ranks", "2", "--steps", "80", "--d", "64", "--eval-every", "20", "--warmup", "8")
    ends = {}
    for name in ("adamw", "muon"):
        losses = [row["held_out_loss"] for row in rows if row["optimizer"] == name]
        assert losses[-1] < losses[0]
        ends[name] = losses[-1]
    assert ends["muon"] < ends["adamw"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 3", "--batch 8 does not divide over 3 ranks"),
        ("--ranks 0", "--ranks 0, but at least one is needed"),
        ("--eval-rows 4", "--eval-rows 4 is less than --batch 8"),
        ("--d 30 --heads 4", "--d 30 must be a multiple of 2 x --heads, 8"),
    ],
)
def test_options_that_cannot_work(options, message):
    """``--ranks -1`` started no process and ended as if all were well."""
    done = run(sys.executable, "examples/pretrain.py", *TINY.split(), *options.split(), status=1)
    assert done.stderr.strip().splitlines()[-1].startswith(message)


@pytest.mark.parametrize("script", ["train_fsdp2.py", "train_hsdp.py"])
def test_the_shortest_scripts_without_torchrun(script):
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, f"examples/{script}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"examples/{script}" in done.stderr


@pytest.mark.parametrize(("script", "ranks"), [("train_fsdp2.py", 2), ("train_hsdp.py", 4)])
def test_the_shortest_scripts(script, ranks):
    launch = ("-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--local_addr=127.0.0.1")
    rendezvous = ("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0")
    done = run(sys.executable, *launch, *rendezvous, f"examples/{script}")
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
    assert "NS · kernel=" in done.stdout


def test_doctor():
    done = run(sys.executable, "-m", "dmuon", "doctor")
    for text in (
        "versions",
        "imported from",
        "Gram NS · kernel=",
        "the seam fits",
        "Newton-Schulz: right",
        "one rank: right",
    ):
        assert text in done.stdout
    for backend in ("cublas", "torch"):
        assert re.search(rf"^  {backend} ", done.stdout, re.MULTILINE)
