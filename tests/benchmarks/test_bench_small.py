"""The benchmark of many small matrices, tried on a CPU: a time counts only of steps that do the work."""

from __future__ import annotations

import json

import bench_small
import pytest
import torch

CPU = torch.device("cpu")
updates = bench_small.updates


def test_every_optimizer_has_a_row_for_every_shape(tmp_path):
    out = tmp_path / "small.json"
    shapes = ["8x24", "24x8", "16x16"]
    text = bench_small.main(["--cpu", "--count", "5", "--steps", "2", "--out", str(out), "--shapes", *shapes])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["shape"], row["optimizer"]) for row in rows] == [
        (shape, name) for shape in shapes for name in bench_small.OPTIMIZERS
    ]
    for row in rows:
        assert 0 < row["host_ms"] <= row["device_ms"]  # a CPU's work is done when the call returns
        assert f"| 5 × {row['shape']} | `{row['optimizer']}` | {row['host_ms']:.2f} |" in text


def descent(weights, presence, copies):
    def step():
        for weight, present, copy in zip(weights, presence, copies, strict=True):
            weight.sub_(0.01 * present * weight.grad)
            copy.copy_(weight)

    return step


def without_copies(weights, presence, copies):
    return updates(weights, presence, [torch.empty_like(copy) for copy in copies])


def without_presence(weights, presence, copies):
    return updates(weights, [torch.ones_like(each) for each in presence], copies)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(descent, "factor is wrong"), (without_copies, "or a copy is"), (without_presence, "has no gradient")],
)
def test_an_update_that_leaves_something_out_is_refused(monkeypatch, wrong, what):
    """It would be faster."""
    monkeypatch.setattr(bench_small, "updates", wrong)
    with pytest.raises(AssertionError, match=what):
        bench_small.check((8, 24), CPU)


def test_a_step_that_leaves_a_matrix_as_it_was_is_refused(monkeypatch):
    monkeypatch.setitem(bench_small.OPTIMIZERS, "half", lambda weights: torch.optim.AdamW(weights[1:]).step)
    with pytest.raises(AssertionError, match="left 1 of 3 matrices"):
        bench_small.measure("half", 3, (4, 4), 2, CPU)
