"""The Triton kernel with tensor descriptors, interpreted: all kinds of tiles, split sums, mirrored squares."""

from __future__ import annotations

from functools import partial
from math import gcd

import pytest
import torch
import triton
import triton.language as tl

from dmuon_core.testing.syrk import SyrkCase, build_operands, run_syrk_case, syrk_cases
from dmuon_kernels.mirror_kernel import mirror_kernel
from dmuon_kernels.probes import tma_complaint
from dmuon_kernels.triton_config import TmaConfig, count_tiles
from dmuon_kernels.triton_kernel import grouped_tile
from dmuon_kernels.triton_syrk import triton_syrk

CONFIGS = {
    "square": TmaConfig(64, 64, 32, 4, 3, chunk=64, group=3),
    "chunks": TmaConfig(64, 64, 32, 4, 3, chunk=16, group=2),
    "flat": TmaConfig(64, 128, 32, 4, 3, chunk=64, group=2),
    "tall": TmaConfig(128, 64, 32, 4, 3, chunk=32, group=1),
    "split": TmaConfig(64, 64, 32, 4, 3, chunk=32, group=2, split=3),
    "tail": TmaConfig(64, 64, 32, 4, 3, chunk=64, group=2, split=2, tail=True),
}
HARD = [
    SyrkCase(200, 200, torch.bfloat16, (2,), c="lower", out="c", beta=0.5),
    SyrkCase(200, 96, torch.float16, (2,), "transposed", alpha="per item"),
    SyrkCase(136, 40, torch.float16, (3,), "padded rows", c="lower", out="given", beta=-0.5),
    SyrkCase(136, 96, torch.float16, (3,), "expanded", c="lower", beta="0-d"),
    SyrkCase(136, 96, torch.bfloat16, (3,), b="expanded", c="lower", out="c", beta="per item"),
    SyrkCase(200, 96, torch.float16, (2,), b="given"),
]


def _rejects(a, b, c):
    three = [None if x is None else x.reshape(-1, *x.shape[-2:]) for x in (a, b, c)]
    return tma_complaint(*three) or ("takes rows at multiples of 16 bytes" if a.shape[-2] % 8 else None)


EASY = [case for case in syrk_cases() if case.dtype != torch.float32 and case.m >= 40 and case.m % 8 == 0 and case.k]
EASY = [case for case in EASY if "offset" not in case.layout and "second" not in case.layout and case.k % 8 == 0]


@pytest.mark.parametrize("case", [case for case in EASY if case.layout != "transposed"], ids=lambda case: case.name)
def test_conformance(case):
    assert run_syrk_case(partial(triton_syrk, config=CONFIGS["split"]), case, rejects=_rejects) is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", HARD, ids=lambda case: case.name)
def test_every_kind_of_tile(name, case):
    if case.layout == "transposed" and case.c != "none":
        pytest.skip("C is row-major")
    run_syrk_case(partial(triton_syrk, config=CONFIGS[name].label), case)


@pytest.mark.parametrize("name", ["flat", "split", "tail"])
def test_order_of_units_does_not_matter(name):
    """Whoever arrives last adds the parts, always in the same order."""
    config = CONFIGS[name]
    case = SyrkCase(200, 96, batch=(2,), b="given", c="lower", out="c", beta=0.5)
    tiles = count_tiles(config, case.m, 2)
    whole = config.whole_tiles(tiles, 4)
    units = whole + (tiles - whole) * config.split
    want = build_operands(case, "cpu").call(partial(triton_syrk, config=config))
    for step in [step for step in (units - 1, 7, 11) if gcd(step, units) == 1]:
        got = build_operands(case, "cpu").call(partial(triton_syrk, config=config, tile_step=step))
        assert torch.equal(got, want), f"step {step}"


def test_fewer_programs_give_the_same_bits():
    case = SyrkCase(200, 96, batch=(2,), c="lower", beta=0.5)
    want = build_operands(case, "cpu").call(partial(triton_syrk, config=CONFIGS["tail"]))
    got = build_operands(case, "cpu").call(partial(triton_syrk, config=CONFIGS["tail"], sms=1))
    assert torch.equal(got, want)


def test_counters_are_zero_again(monkeypatch):
    """The next launch on the stream takes them as they are."""
    from dmuon_kernels import triton_launch as module

    given = []
    monkeypatch.setattr(
        module, "arrival_counters", lambda device, n: given.append(torch.zeros(n, dtype=torch.int32)) or given[-1]
    )
    triton_syrk(torch.randn(200, 96).half(), config=CONFIGS["split"])
    assert len(given) == 1
    assert not given[0].any()


def test_device_beta_of_zero_does_not_add_c():
    a = torch.randn(2, 136, 64).half()
    c = torch.full((2, 136, 136), float("nan")).half()
    got = triton_syrk(a, None, c, beta=torch.zeros(2), config=CONFIGS["chunks"])
    assert torch.equal(got, triton_syrk(a, config=CONFIGS["chunks"]))


def test_operands_without_descriptors_raise():
    with pytest.raises(ValueError, match="rows at multiples of 16 bytes"):
        triton_syrk(torch.ones(64, 63).half(), config=CONFIGS["square"])


@triton.jit
def _decode(rows, columns, n, GROUP: tl.constexpr, N: tl.constexpr):
    t = tl.arange(0, N)
    i, j = grouped_tile(t.to(tl.int64), n, GROUP)
    inside = t < n * (n + 1) // 2
    tl.store(rows + t, i, mask=inside)
    tl.store(columns + t, j, mask=inside)


@pytest.mark.parametrize("group", [1, 2, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 13])
def test_every_tile_is_visited_once(n, group):
    count = n * (n + 1) // 2
    rows, columns = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    _decode[(1,)](rows, columns, n, group, 128)
    visited = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert visited == {(i, j) for i in range(n) for j in range(i + 1)}
    # Bands follow each other.
    assert (rows // group == (rows // group).sort().values).all()


@pytest.mark.parametrize(("m", "side"), [(200, 64), (200, 192), (130, 256), (64, 64), (500, 192)])
def test_squares_on_the_diagonal_are_mirrored(m, side):
    d = torch.randn(2, m, m).half()
    want = d.clone()
    for start in range(0, m, side):
        square = want[:, start : start + side, start : start + side]
        square.copy_(torch.tril(square) + torch.tril(square, -1).mT)
    squares, rows = -(-m // side), -(-side // 64)
    mirror_kernel[(2 * squares * (rows * (rows + 1) // 2),)](d, m, squares, *d.stride()[:2], SIDE=side, TILE=64)
    assert torch.equal(d, want)
