"""The cost model: the design's own figures, and the shape of the curve."""

import itertools

import pytest

from dmuon_core.cost import (
    DeviceModel,
    muon_seconds,
    newton_schulz_flops,
    newton_schulz_seconds,
    recurrence_seconds,
    syrk_tiles,
    wave_efficiency,
)


def test_waves_at_m_512():
    """13 matrices fill 98 % of a wave on 132 SMs, 16 only 61 % of two."""
    assert syrk_tiles(512) == 10
    assert wave_efficiency(13 * 10) == pytest.approx(0.985, abs=1e-3)
    assert wave_efficiency(16 * 10) == pytest.approx(0.606, abs=1e-3)
    assert recurrence_seconds(13, 512) / 13 < 0.9 * recurrence_seconds(16, 512) / 16
    assert wave_efficiency(0) == 1.0


def test_tiles_of_4096_fill_four_waves():
    assert syrk_tiles(4096) == 528 == 4 * 132


@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (2048, 2048), (4096, 1024)])
def test_flops(m, n):
    k, l = min(m, n), max(m, n)  # noqa: E741
    assert newton_schulz_flops(m, n) == 6 * k * k * l + 16 * k**3
    assert newton_schulz_flops(m, n, segments=(2, 2, 1)) == 9 * k * k * l + 11 * k**3
    assert newton_schulz_flops(m, n, backend="direct") == 15 * k * k * l + 5 * k**3


def test_floors_of_the_performance_page():
    """ms at 660 TFLOP/s with 14 m³; two products computed whole, tile waste, launches, norm and cast stand above it."""
    for count, m, n, floor in ((8, 2048, 8192, 3.96), (1, 4096, 14336, 3.64), (1, 8192, 28672, 29.2)):
        minimal = count * (6 * m * m * n + 14 * m**3)
        assert minimal / 660e12 * 1e3 == pytest.approx(floor, rel=0.01)
        assert minimal < count * newton_schulz_flops(m, n) <= 1.08 * minimal
        assert floor <= newton_schulz_seconds(count, m, n) * 1e3 <= 1.35 * floor


def test_monotone_and_batched():
    times = [newton_schulz_seconds(count, 512, 2048) for count in range(40)]
    assert times[0] == 0.0
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert newton_schulz_seconds(8, 1024, 4096) < 8 * newton_schulz_seconds(1, 1024, 4096)
    assert newton_schulz_seconds(2, 1024, 4096) == newton_schulz_seconds(2, 4096, 1024)


def test_a_step_batches_by_shape():
    together = muon_seconds([(512, 2048), (2048, 512), (512, 2048)])
    assert together == pytest.approx(muon_seconds([(512, 2048)] * 3))
    assert together < 3 * muon_seconds([(512, 2048)])
    assert muon_seconds([]) == 0
    assert muon_seconds([(512, 512)], device=DeviceModel(sms=66)) != muon_seconds([(512, 512)])
