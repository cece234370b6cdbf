"""The quack adapter on the CPU: a function in place of quack leaves what quack leaves, whole squares unmirrored."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from dmuon_core.testing.syrk import run_syrk_case, run_syrk_error_case, syrk_cases, syrk_error_cases
from dmuon_kernels.probes import quack_multiplies, quack_rejects
from dmuon_kernels.quack_config import PRODUCT_CANDIDATES, QuackConfig, parse_product_config

CALLS = []


def fake_gemm_symmetric(*, A, B, D, C, tile_M, cluster_M, tile_N, cluster_N, alpha, beta, **options):
    """The product below the squares on the diagonal mirrored, the squares as they come, C read whole."""
    CALLS.append({"tile_M": tile_M, "tile_N": tile_N, "alpha": alpha, "beta": beta, "C": C, **options})
    side = tile_M * cluster_M
    assert side == tile_N * cluster_N
    product = alpha * (A.float() @ B.float().mT)
    if C is not None:
        product = product + beta * C.float()
    product = product.to(D.dtype)
    square = torch.arange(D.shape[-1]) // side
    below, on = square[:, None] > square[None, :], square[:, None] == square[None, :]
    D.copy_(torch.where(on | below, product, product.mT))
    # What rounding does to a product of two factors.
    ulps = torch.triu(torch.ones_like(D, dtype=torch.int16), 1) * on
    if B is not A and B.data_ptr() != A.data_ptr():
        D.view(torch.int16).add_(ulps)


@pytest.fixture(scope="module")
def quack_syrk():
    package, module = types.ModuleType("quack"), types.ModuleType("quack.gemm_symmetric")
    module.gemm_symmetric = fake_gemm_symmetric
    sys.modules.update({"quack": package, "quack.gemm_symmetric": module})
    from dmuon_kernels import quack_syrk

    quack_syrk._capability = lambda device: (9, 0)
    yield quack_syrk.quack_syrk
    for name in ("quack", "quack.gemm_symmetric", "dmuon_kernels.quack_syrk"):
        del sys.modules[name]


@pytest.mark.parametrize("case", syrk_cases(), ids=lambda case: case.name)
def test_conformance(quack_syrk, case):
    refusal = run_syrk_case(quack_syrk, case, rejects=quack_rejects)
    if (
        case.dtype != torch.float32
        and case.m % 8 == case.k % 8 == 0
        and case.m * case.k
        and case.layout == "contiguous"
    ):
        assert refusal is None


@pytest.mark.parametrize("case", syrk_error_cases(), ids=lambda case: case.name)
def test_calls_outside_the_contract_raise(quack_syrk, case):
    run_syrk_error_case(quack_syrk, case)


def test_an_unread_c_stays_out(quack_syrk):
    """In quack a C is read at beta = 0 too, and NaN times 0 is NaN."""
    quack_syrk(torch.ones(64, 64).half(), None, torch.full((64, 64), float("nan")).half())
    assert CALLS[-1]["C"] is None
    assert CALLS[-1]["beta"] == 1.0


def test_scalars_per_item_are_launches_per_item(quack_syrk):
    before = len(CALLS)
    quack_syrk(torch.ones(3, 64, 64).half(), alpha=torch.tensor([1.0, 2.0, 3.0]))
    assert [float(call["alpha"]) for call in CALLS[before:]] == [1.0, 2.0, 3.0]
    assert all(call["alpha"].ndim == 0 for call in CALLS[before:])


def test_configuration_reaches_quack(quack_syrk):
    for config in (QuackConfig(128, 128, pingpong=True), "quack-128x128-c1x1-pp"):
        quack_syrk(torch.ones(64, 64).half(), config=config)
        assert CALLS[-1]["pingpong"]
        assert (CALLS[-1]["tile_M"], CALLS[-1]["tile_N"]) == (128, 128)


def test_refused_operands_raise(quack_syrk):
    with pytest.raises(ValueError, match="the quack kernel takes M in multiples of 8"):
        quack_syrk(torch.ones(9, 9).half())


def test_tiles_of_192_never_meet_m_major_operands(quack_syrk):
    a = torch.randn(64, 64).half()
    quack_syrk(a, config="quack-192x192-c1x1")
    before = len(CALLS)
    with pytest.raises(ValueError, match="quack-192x192-c1x1 takes a and b with rows"):
        quack_syrk(a.mT, config="quack-192x192-c1x1")
    with pytest.raises(ValueError, match="quack-192x192-c1x1 takes a and b with rows"):
        quack_syrk(a, a.mT, config="quack-192x192-c1x1")
    assert len(CALLS) == before


def fake_gemm(A, B, D, C, semaphore, tile_m, tile_n, cluster_m, cluster_n, *, pingpong):
    """[B, M, K] by [B, N, K], both factors in either layout, the result row-major in these tests."""
    assert C is None
    assert D.stride(-1) == 1
    CALLS.append((tile_m, tile_n, cluster_m, cluster_n, pingpong))
    D.copy_(A.float() @ B.float().mT)


@pytest.fixture(scope="module")
def quack_product(quack_syrk):
    module = types.ModuleType("quack.gemm")
    module.gemm = fake_gemm
    sys.modules["quack.gemm"] = module
    from dmuon_kernels.quack_product import quack_product

    yield quack_product
    for name in ("quack.gemm", "dmuon_kernels.quack_product"):
        del sys.modules[name]


@pytest.mark.parametrize("layout", ["rows", "columns", "gram"])
def test_the_general_product_in_every_layout(quack_product, layout):
    """A transposed X is multiplied transposed; the result has to land where X's layout says."""
    a, b = torch.randn(2, 24, 24).half(), torch.randn(2, 24, 40).half()
    out = torch.full((2, 24, 40), float("nan")).half()
    if layout == "columns":
        b, out = b.mT.contiguous().mT, out.mT.contiguous().mT
    if layout == "gram":
        a, b, out = b, b.mT, torch.empty(2, 24, 24).half()
    assert quack_multiplies(a, b, out)
    assert quack_product(a, b, out=out, config="product-128x192-c2x1-pp") is out
    assert CALLS[-1] == (128, 192, 2, 1, True)
    torch.testing.assert_close(out, (a.float() @ b.float()).half())


def test_what_the_general_product_does_not_take():
    a, b, out = (torch.zeros(2, 24, 24).half() for _ in range(3))
    assert quack_multiplies(a, b, out)
    assert not quack_multiplies(a.float(), b.float(), out.float())
    assert not quack_multiplies(a.mT, b, out)
    assert not quack_multiplies(a, b, out.mT)
    assert not quack_multiplies(torch.zeros(2, 24, 20).half(), b[:, :20], out)
    assert not quack_multiplies(a, torch.zeros(2, 24, 25).half()[:, :, :24], out)


def test_labels_of_general_products():
    for config in PRODUCT_CANDIDATES:
        assert parse_product_config(config.label) == config
    with pytest.raises(ValueError, match="names no configuration of quack's product"):
        parse_product_config("quack-128x128-c1x1")


def test_inexact_results_are_left_as_they_come(quack_syrk):
    """No pass over the squares, and the lower triangle is that of the exact result."""
    a = torch.randn(2, 200, 64).half()
    b = a.clone()
    options = {"config": "quack-64x64-c1x1"}
    loose, exact = quack_syrk(a, b, exact=False, **options), quack_syrk(a, b, **options)
    assert not torch.equal(loose, loose.mT)
    assert torch.equal(loose.tril(), exact.tril())


def test_inexact_results_of_one_square_are_mirrored(quack_syrk):
    """Newton-Schulz erred 2.6 times as much as plain products at m = 64, all of which is one square."""
    a = torch.randn(2, 64, 64).half()
    result = quack_syrk(a, a.clone(), exact=False, config="quack-64x64-c1x1")
    assert torch.equal(result, result.mT)
