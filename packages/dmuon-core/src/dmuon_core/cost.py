"""How long Newton-Schulz takes, predicted: what plans owners and cuts batches.

A symmetric product computes the lower triangle of D in square tiles, one a streaming multiprocessor (SM) at a time.
Tiles run in waves of as many as the device has SMs, and a wave that is partly empty takes as long as a full one: at
m = 512, 13 matrices fill 98 % of a wave on 132 SMs, 16 matrices 61 % of two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceModel:
    """What the prediction needs to know of a device. The default is an H200, in half precision.

    Attributes:
        sms: streaming multiprocessors.
        flops: sustained FLOP/s of matrix products over all SMs, on random data.
        bandwidth: bytes/s of memory, read and write together.
        launch: seconds between two kernels that depend on each other.
        tile: rows of a square output tile.
    """

    sms: int = 132
    flops: float = 660e12
    bandwidth: float = 4.2e12
    launch: float = 2.5e-6
    tile: int = 128


H200 = DeviceModel()


def syrk_tiles(m: int, tile: int = 128) -> int:
    """Tiles of the lower triangle of an [m, m] output."""
    side = math.ceil(m / tile)
    return side * (side + 1) // 2


def wave_efficiency(tiles: int, sms: int = 132) -> float:
    """The share of SM time that ``tiles`` equal tiles use: tiles / (waves · sms); 1 for none."""
    return tiles / (math.ceil(tiles / sms) * sms) if tiles else 1.0


@dataclass(frozen=True)
class Products:
    """The matrix products that one [m, n] matrix takes, m ≤ n, by kind.

    Attributes:
        grams: X Xᵀ, symmetric, m²n FLOP each.
        applications: Q X, 2 m²n.
        squares: symmetric [m, m] products, m³.
        wholes: [m, m] products computed whole, 2 m³.
    """

    grams: int
    applications: int
    squares: int
    wholes: int

    @classmethod
    def of(cls, backend: str, segments: Sequence[int]) -> Products:
        """The products of ``backend`` with ``segments`` steps between restarts (``dmuon_core.newton_schulz``)."""
        steps = sum(segments)
        if backend == "direct":
            return cls(steps, steps, steps, 0)
        # A step takes Z; Q, free in a segment's first step; and W·R and R, not needed in a segment's last step.
        small = steps + 3 * (steps - len(segments))
        wholes = sum(length - 1 for length in segments if length >= 3)
        return cls(len(segments), len(segments), small - wholes, wholes)

    def flops(self, m: int, n: int) -> float:
        return m * m * n * (self.grams + 2 * self.applications) + m**3 * (self.squares + 2 * self.wholes)


DEFAULT_SEGMENTS = (2, 3)
"""Steps between restarts of the default coefficients."""


def newton_schulz_flops(m: int, n: int, *, backend: str = "gram", segments: Sequence[int] = DEFAULT_SEGMENTS) -> float:
    """FLOP of one [m, n] matrix, symmetric products at half the work: 6 m²n + 16 m³ for the defaults (m ≤ n)."""
    return Products.of(backend, segments).flops(min(m, n), max(m, n))


def newton_schulz_seconds(
    count: int,
    m: int,
    n: int,
    *,
    backend: str = "gram",
    segments: Sequence[int] = DEFAULT_SEGMENTS,
    device: DeviceModel = H200,
) -> float:
    """Predicted seconds of a batch of ``count`` [m, n] matrices: products in waves, launches, norm and cast."""
    if count == 0:
        return 0.0
    m, n = min(m, n), max(m, n)
    products = Products.of(backend, segments)
    return (
        products.grams * _symmetric_seconds(count, m, n, device)
        + recurrence_seconds(count, m, backend=backend, segments=segments, device=device)
        + products.applications * _product_seconds(count, m, n, device)
        + _memory_seconds(count * m * n, _NORM_AND_CAST, device)
    )


def recurrence_seconds(
    count: int,
    m: int,
    *,
    backend: str = "gram",
    segments: Sequence[int] = DEFAULT_SEGMENTS,
    device: DeviceModel = H200,
) -> float:
    """Predicted seconds of the products among [m, m] matrices alone, of a batch of ``count``."""
    products = Products.of(backend, segments)
    return products.squares * _symmetric_seconds(count, m, m, device) + products.wholes * _product_seconds(
        count, m, m, device
    )


_NORM_AND_CAST = 10.0  # bytes an element: fp32 read twice, half precision written
_ADAMW = 28.0  # bytes an element: weight and both moments read and written, gradient read, in fp32
_MOMENTUM_AND_APPLY = 20.0  # bytes an element: momentum and weight read and written, gradient read, in fp32


def _symmetric_seconds(count: int, m: int, k: int, device: DeviceModel) -> float:
    return _tiled_seconds(count * syrk_tiles(m, device.tile), k, device)


def _product_seconds(count: int, m: int, n: int, device: DeviceModel) -> float:
    return _tiled_seconds(count * math.ceil(m / device.tile) * math.ceil(n / device.tile), m, device)


def _tiled_seconds(tiles: int, k: int, device: DeviceModel) -> float:
    work = 2.0 * device.tile**2 * k * tiles
    return work / wave_efficiency(tiles, device.sms) / device.flops + device.launch


def _memory_seconds(elements: int, bytes_per_element: float, device: DeviceModel) -> float:
    return elements * bytes_per_element / device.bandwidth


def muon_seconds(
    shapes: Sequence[tuple[int, int]],
    *,
    backend: str = "gram",
    segments: Sequence[int] = DEFAULT_SEGMENTS,
    device: DeviceModel = H200,
) -> float:
    """Predicted seconds of one Muon step on matrices of ``shapes``: batched by shape up to transposition."""
    counts = Counter((min(shape), max(shape)) for shape in shapes)
    return sum(
        newton_schulz_seconds(count, m, n, backend=backend, segments=segments, device=device)
        + _memory_seconds(count * m * n, _MOMENTUM_AND_APPLY, device)
        for (m, n), count in counts.items()
    )


def adamw_seconds(elements: int, *, device: DeviceModel = H200) -> float:
    """Predicted seconds of one AdamW step on so many elements, without its launches, which parameters share."""
    return _memory_seconds(elements, _ADAMW, device)
