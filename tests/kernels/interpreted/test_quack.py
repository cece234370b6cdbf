"""The quack adapter on the CPU: a function in place of quack leaves what quack leaves, whole squares unmirrored."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from dmuon_core.testing.syrk import run_syrk_case, run_syrk_error_case, syrk_cases, syrk_error_cases
from dmuon_kernels.probes import quack_rejects
from dmuon_kernels.quack_config import QuackConfig

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
