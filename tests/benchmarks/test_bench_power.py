"""The benchmark of the power limit, tried on a CPU, where nothing waits and there is no clock."""

from __future__ import annotations

import time

import bench_power
import pytest

VARIANTS = ("fsdp2", "dmuon-z2")


def compare() -> None:
    options = bench_power.parse(["--cpu", "--tokens", "64", "--micro-batch", "32", "--steps", "2", "--rounds", "1"])
    calls = []
    optimize = bench_power.optimize
    bench_power.optimize = lambda trained: (calls.append(trained), optimize(trained))
    rows = bench_power.run(options)
    assert list(rows) == [(variant, end) for variant in VARIANTS for end in bench_power.ENDS]
    assert all(row["forward_backward_ms"] > 0 for row in rows.values())
    # Two of the three ends have the optimizer in them.
    assert len(calls) == len(VARIANTS) * 2 * (bench_power.WARM_UP + 2)
    assert bench_power.table(rows).count("| – | – |") == len(rows)


def test_every_variant_has_a_row_for_every_end(ranks):
    ranks(2, compare)


def test_the_meter_takes_means_of_what_the_tool_says(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'no devices'\necho '1500, 600.5'\necho '[N/A], 1'\necho '1600, 700.5'\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    begin = time.perf_counter()
    meter = bench_power.Meter("GPU-0")
    deadline = begin + 20
    while len(meter.samples) < 2 and time.perf_counter() < deadline:
        time.sleep(0.01)
    meter.close()
    assert meter.between(begin, deadline) == {"clock_mhz": pytest.approx(1550), "power_w": pytest.approx(650.5)}
    assert meter.between(begin - 2, begin - 1) == {}


def test_without_the_tool_there_is_no_clock(monkeypatch):
    monkeypatch.setenv("PATH", "")
    meter = bench_power.Meter("GPU-0")
    meter.close()
    assert meter.between(0, time.perf_counter()) == {}
