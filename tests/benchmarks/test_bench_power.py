"""The benchmark of the power limit, tried on a CPU, where nothing waits and there is no clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import bench_power
import pytest

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
        assert f"| {row['variant']} | {row['then']} | {row['forward_backward_ms']:.1f} |" in page.read_text()


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
    monkeypatch.setattr(bench_power, "forward_backward", lambda *_: seen.append("backward"))
    monkeypatch.setattr(bench_power, "optimize", lambda _: seen.append("optimize"))
    monkeypatch.setattr(bench_power, "idle", lambda _, pause: seen.append("idle") if pause == 7.0 else None)
    bench_power.train_step(trained, [bench_power.torch.zeros(1)], end, 7.0)
    assert seen == ["backward", *calls]


def test_the_meter_takes_means_of_what_the_tool_says(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, "no devices", "1500, 600.5", "[N/A], 1", "1600, 700.5")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    begin = time.perf_counter()
    with bench_power.Meter("GPU-0") as meter:
        deadline = begin + 20
        while len(meter.samples) < 2 and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert meter.between(begin, deadline) == {"clock_mhz": pytest.approx(1550), "power_w": pytest.approx(650.5)}
    assert meter.between(begin - 2, begin - 1) == {}


def nvidia_smi(folder: Path, *lines: str):
    tool = folder / "nvidia-smi"
    tool.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), "exec sleep 60", ""]))
    tool.chmod(0o755)


def test_without_the_tool_there_is_no_clock(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with bench_power.Meter("GPU-0") as meter:
        pass
    assert meter.between(0, time.perf_counter()) == {}


def test_rows_without_a_clock_leave_it_to_the_others():
    rows = [{"end_ms": 1.0}, {"end_ms": 3.0, "clock_mhz": 1500.0}]
    assert bench_power.median_of(rows) == {"end_ms": 2.0, "clock_mhz": 1500.0}


def test_other_muons_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_power.parse(["--cpu", "--variants", "fsdp2", "torch-muon"])
    assert "torch-muon: other Muons are compared by bench_step.py alone" in capsys.readouterr().err
