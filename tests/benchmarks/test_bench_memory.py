"""The benchmark of memory among many ranks, tried on a CPU, where it has no figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_memory
import pytest
import torch
from torch import nn

TOOL = Path(bench_memory.__file__)
MIB = 2**20


def test_every_variant_runs_among_ranks_that_are_not_there(tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.md"
    files = ["--out", str(out), "--markdown", str(page)]
    variants = ["fsdp2", "dmuon-z3-norms", "dmuon-z2", "torch-muon"]
    command = [
        sys.executable,
        str(TOOL),
        "--cpu",
        "--tokens",
        "64",
        "--micro-batch",
        "32",
        "--ranks",
        "2",
        "5",
        "--variants",
        *variants,
        *files,
    ]
    subprocess.run(command, check=True, timeout=120)
    rows = json.loads(out.read_text())
    assert [(row["ranks"], row["variant"]) for row in rows] == [(ranks, name) for ranks in (2, 5) for name in variants]
    assert not [row["reason"] for row in rows if row["reason"]]
    assert page.read_text().count("\n| ") == len(rows)


def event(action, address, mib, line=0):
    frames = [{"filename": "torch/nn/modules/linear.py", "line": 1, "name": "forward"}]
    frames += [{"filename": "somewhere/model.py", "line": line, "name": "forward"}]
    return {"action": action, "addr": address, "size": mib * MIB, "frames": frames}


def test_the_peak_is_made_of_what_is_alive_then():
    events = [
        event("free_completed", 9, 100),  # from before the recording
        event("alloc", 1, 30, line=3),
        event("alloc", 2, 50, line=5),
        event("free_requested", 2, 50),
        event("free_completed", 2, 50),
        event("alloc", 3, 20, line=3),
        event("alloc", 4, 40, line=7),
        event("free_completed", 1, 30),
        event("alloc", 5, 10, line=9),
    ]
    top = bench_memory.at_peak(events, 2)
    assert [(where, size * 1024) for where, size in top] == [("model.py:3 forward", 50), ("model.py:7 forward", 40)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(SystemExit, match="no GPU here; --cpu"):
        bench_memory.parse([])


class Idle(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def test_an_optimizer_that_does_nothing_is_refused(monkeypatch):
    """It would need no memory."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 1))
    model.register_forward_hook(lambda module, args, output: output.sum())
    trained = bench_memory.Trained(model, [Idle(model.parameters())])
    options = bench_memory.parse(["--cpu"])
    row = bench_memory.Row(2, "idle")
    with pytest.raises(AssertionError, match="idle left every parameter as it was"):
        bench_memory.fill(trained, row, 0.0, [torch.zeros(1, 3, dtype=torch.int64)], options)
