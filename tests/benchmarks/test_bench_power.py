"""The benchmark of the power limit, tried on a CPU, where nothing waits and there is no clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import bench_power
import pytest
import torch

SMALL = ["--cpu", "--tokens", "64", "--micro-batch", "32", "--steps", "3", "--rounds", "2"]


def test_every_variant_has_a_row_for_every_end(tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.md"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--local_addr=127.0.0.1"]
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    files = ["--out", str(out), "--markdown", str(page)]
    command = [*launch, *rendezvous, bench_power.__file__, *SMALL, *files]
    subprocess.run(command, check=True, timeout=150, env=environment)
    report = json.loads(out.read_text())
    assert report["environment"]["ranks"] == "2"
    assert [(row["variant"], row["then"]) for row in report["rows"]] == [
        (variant, end) for variant in ("fsdp2", "dmuon-z2") for end in bench_power.ENDS
    ]
    for row in report["rows"]:
        assert row["forward_backward_ms"] > 0
        assert f"| {row['variant']} | {row['then']} | {row['forward_backward_ms']:.2f} |" in page.read_text()


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        ("its optimizer", ["optimize"]),
        ("its optimizer, then idle", ["optimize", "idle"]),
        ("idle instead", ["zero_grad", "idle"]),
    ],
)
def test_what_follows_backward(monkeypatch, end, calls):
    seen = []

    class Watched:
        def zero_grad(self):
            seen.append("zero_grad")

    trained = bench_power.Trained(None, [Watched()])
    monkeypatch.setattr(bench_power, "optimize", lambda _: seen.append("optimize"))
    monkeypatch.setattr(bench_power, "idle", lambda _, pause: seen.append("idle") if pause == 7.0 else None)
    bench_power.finish(trained, torch.device("cpu"), end, 7.0)
    assert seen == calls


def test_the_meter_takes_means_of_what_the_tool_says(tmp_path, monkeypatch):
    lines = "no devices", "1500, 600.5, 700, Active", "1550, [N/A], 700, Not Active", "1600, 700.5, 700, Active"
    said = [f"echo '{line}'" for line in lines]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("\n".join(["#!/bin/sh", f'echo "$@" > {tmp_path}/asked', *said, "exec sleep 60", ""]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    begin = time.perf_counter()
    with bench_power.Meter("GPU-0") as meter:
        deadline = begin + 20
        while len(meter.samples) < 3 and time.perf_counter() < deadline:
            time.sleep(0.01)
    wanted = {"clock_mhz": 1550, "power_w": 650.5, "power_limit_w": 700, "limited": 2 / 3}
    assert meter.between(begin, deadline) == pytest.approx(wanted)
    assert meter.between(begin - 2, begin - 1) == {}
    fields = "clocks.sm,power.draw.instant,enforced.power.limit,clocks_event_reasons.sw_power_cap"
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["--id=GPU-0", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--loop-ms=20"]


def test_without_the_tool_there_is_no_clock(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with bench_power.Meter("GPU-0") as meter:
        pass
    assert meter.between(0, time.perf_counter()) == {}


def test_rows_without_a_clock_leave_it_to_the_others():
    rows = [{"optimizer_ms": 1.0}, {"optimizer_ms": 3.0, "clock_mhz": 1500.0}]
    assert bench_power.median_of(rows) == {"optimizer_ms": 2.0, "clock_mhz": 1500.0}


def test_other_muons_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_power.parse(["--cpu", "--variants", "fsdp2", "torch-muon"])
    assert "torch-muon: other Muons are compared by bench_step.py alone" in capsys.readouterr().err


class Still(torch.optim.Optimizer):
    def step(self, closure=None):
        pass


class Moving(torch.optim.SGD):
    """Also where it should rest."""

    def zero_grad(self, set_to_none=True):
        self.step()
        super().zero_grad(set_to_none)


def refused(optimizer, end, message):
    options = bench_power.parse(SMALL)
    build = bench_power.build

    def built(*arguments):
        trained = build(*arguments)
        parameters = list(trained.model.parameters())
        return bench_power.Trained(trained.model, [optimizer(parameters, {"lr": 0.1} if optimizer is Still else 0.1)])

    bench_power.build = built
    mesh = bench_power.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    batches = bench_power.micro_batches(64, "cpu", options)
    with pytest.raises(AssertionError, match=message):
        bench_power.measure("fsdp2", [end], mesh, batches, bench_power.Meter(None), options)


@pytest.mark.parametrize(
    ("optimizer", "end", "message"),
    [
        (Still, "its optimizer", "14 of 14 matrices are as they were, not 0"),
        (Moving, "idle instead", "0 of 14 matrices are as they were, not 14"),
    ],
)
def test_what_does_not_do_what_its_row_says_is_refused(ranks, optimizer, end, message):
    ranks(1, refused, optimizer, end, message)


def begins_elsewhere():
    options = bench_power.parse(SMALL)
    losses = iter([5.0, 5.5])
    bench_power.measure = lambda *_: (next(losses), {})
    with pytest.raises(AssertionError, match=r"dmuon-z2 begins with the loss 5\.5, not with 5\.0"):
        bench_power.run(options)


def test_variants_that_begin_with_another_loss_are_refused(ranks):
    ranks(1, begins_elsewhere)
