"""The Triton kernel on the CPU, in Triton's interpreter.

The interpreter runs programs one after another and threads not at all, so what a race would break is tested by
permuting the order of the tiles.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import pytest
import torch
import triton
import triton.language as tl

from dmuon_core.testing.syrk import (
    SyrkCase,
    build_operands,
    run_syrk_case,
    run_syrk_error_case,
    syrk_cases,
    syrk_error_cases,
)
from dmuon_kernels.ops import choice_of
from dmuon_kernels.probes import triton_rejects
from dmuon_kernels.routes import probe_triton
from dmuon_kernels.specs import TRITON
from dmuon_kernels.triton_config import CONFIGS, TritonConfig, choose_config, count_tiles
from dmuon_kernels.triton_kernel import lower_tile
from dmuon_kernels.triton_launch import is_aligned
from dmuon_kernels.triton_syrk import triton_syrk

CPU = torch.device("cpu")
SMALL_TILES = TritonConfig(tile_m=32, tile_k=32, warps=4, stages=3)
small_triton = partial(triton_syrk, config=SMALL_TILES)

CASES = syrk_cases()
REFUSED = {case.name for case in CASES if case.dtype == torch.float32 or "every second column" in case.name}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case):
    refusal = run_syrk_case(small_triton, case, rejects=triton_rejects)
    assert (refusal is not None) == (case.name in REFUSED), refusal


@pytest.mark.parametrize("case", syrk_error_cases(), ids=lambda case: case.name)
def test_calls_outside_the_contract_raise(case):
    run_syrk_error_case(triton_syrk, case)


@pytest.mark.parametrize(("m", "k"), [(9, 40), (65, 127), (176, 63)])
def test_shapes_with_the_tiles_they_get(m, k):
    run_syrk_case(triton_syrk, SyrkCase(m, k, torch.bfloat16, c="lower", beta=1.0), rejects=triton_rejects)


@pytest.mark.parametrize("out", ["given", "c"])
def test_order_of_tiles_does_not_matter(out):
    """A tile that read what another writes would depend on the order, which on a GPU is anybody's guess."""
    case = SyrkCase(100, 40, batch=(2,), b="given", c="lower", out=out, beta=0.5)
    tiles = count_tiles(SMALL_TILES, case.m, 2)
    want = build_operands(case, "cpu").call(small_triton)
    for step in (tiles - 1, 3, 7):
        assert gcd(step, tiles) == 1
        got = build_operands(case, "cpu").call(partial(small_triton, tile_step=step))
        assert torch.equal(got, want), f"step {step}"


@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_fewer_programs_give_the_same_bits(sms):
    case = SyrkCase(100, 40, batch=(2,), c="lower", beta=0.5)
    want = build_operands(case, "cpu").call(small_triton)
    got = build_operands(case, "cpu").call(partial(small_triton, sms=sms))
    assert torch.equal(got, want)


def test_device_beta_of_zero_does_not_read_c():
    a = torch.randn(2, 33, 8).half()
    c = torch.full((2, 33, 33), float("nan")).half()
    got = small_triton(a, None, c, beta=torch.zeros(2))
    assert torch.equal(got, small_triton(a))


@pytest.mark.parametrize(
    "scalar", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, 1), torch.ones((), device="meta")]
)
def test_scalars_of_another_kind_raise(scalar):
    """A pointer to fp64, to too few values or to another device would be read as it stands."""
    with pytest.raises(ValueError, match="alpha must be"):
        small_triton(torch.ones(2, 8, 8).half(), alpha=scalar)


def test_no_programs_is_an_error():
    with pytest.raises(ValueError, match="sms must be at least 1"):
        small_triton(torch.ones(8, 8).half(), sms=0)


def test_operands_that_the_kernel_rejects_raise():
    with pytest.raises(ValueError, match=r"takes float16 and bfloat16, got torch\.float32"):
        small_triton(torch.ones(8, 8))


@pytest.mark.parametrize(
    ("m", "aligned", "name"),
    [(16, True, "tiny"), (32, False, "tiny"), (64, True, "small"), (8192, True, "large"), (8191, False, "unaligned")],
)
def test_configuration_by_size_and_alignment(m, aligned, name):
    assert choose_config(torch.float16, m, 1024, 1, aligned=aligned) == CONFIGS[name]


def test_alignment_looks_at_sizes_strides_and_address():
    x = torch.zeros(2, 64, 64).half()
    assert is_aligned(x)
    assert is_aligned(x.mT)
    assert is_aligned(x[:1].expand(5, 64, 64))
    assert not is_aligned(x[..., 1:33])
    assert is_aligned(x[..., :56])
    assert not is_aligned(x[..., :60])
    assert not is_aligned(torch.zeros(2, 64, 68).half()[..., :64])


@triton.jit
def _decode(t, rows, columns, N: tl.constexpr):
    index = tl.arange(0, N)
    i, j = lower_tile(tl.load(t + index))
    tl.store(rows + index, i)
    tl.store(columns + index, j)


def test_triangle_index_is_exact_far_out():
    """The float root is off by one next to triangular numbers."""
    roots = torch.cat([torch.arange(0, 40), torch.tensor([4095, 4096, 30000, 46340, 65534])])
    starts = roots * (roots + 1) // 2
    t = torch.cat([starts, starts + roots // 2, starts + roots])
    t = torch.cat([t, t.new_zeros(256 - len(t))])
    rows, columns = torch.empty_like(t), torch.empty_like(t)
    _decode[(1,)](t, rows, columns, 256)
    assert torch.equal(rows * (rows + 1) // 2 + columns, t)
    assert bool(((columns >= 0) & (columns <= rows)).all())


def test_spec_runs_through_the_ladder():
    """The probe accepts CPU tensors here, and the loaded function passes the check that the ladder makes."""
    from dmuon_core.syrk.ladder import load_checked

    assert probe_triton(CPU) is None
    assert load_checked(TRITON, CPU) is triton_syrk


def test_named_kernel_is_what_runs():
    if "triton" not in _names():
        pytest.skip("dmuon-kernels is not installed: its entry points are not visible")
    from dmuon_kernels import syrk

    choice = choice_of("triton")
    before = choice.launches["triton"]
    a = torch.randn(40, 24).half()
    assert torch.equal(syrk(a, kernel="triton"), triton_syrk(a))
    assert choice.launches["triton"] == before + 1


def _names():
    from dmuon_core.syrk.discovery import discover

    return {found.name for found in discover()}
