"""numerics.md's accuracy rules: every algorithm, dtype and shape class on every family of spectra.

Legend: the yardstick is the same algorithm written with torch.mm in the same dtype, no symmetric products.
"""

import functools
import zlib

import pytest
import torch

from dmuon_core import KELLER, POLAR_EXPRESS, YOU, NewtonSchulz
from dmuon_core.coefficients import apply_polynomial
from dmuon_core.testing import ERROR_RATIO, SPECTRA, judge, plain_newton_schulz, repeated_rows

SHAPES = {
    "wide": (64, 256),
    "tall": (256, 64),
    "square": (96, 96),
    "prime": (67, 131),
    "odd": (33, 40),
    "row": (1, 96),
    "column": (96, 1),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def matrix(family: str, shape: tuple[int, int]) -> torch.Tensor:
    # fp32, what momentum is stored in: exact in every wider dtype.
    return SPECTRA[family](*shape, torch.Generator().manual_seed(zlib.crc32(family.encode()))).float()


def error_bound(yardstick: float, dtype: torch.dtype, *, one_value: bool) -> float:
    """1.5 times the yardstick's error, but not below what luck decides.

    The oracle's SVD is worth some roundings in the wide dtypes (in float64 it has no more digits than what it judges).
    A single singular value has sixteen roundings that add up or cancel by luck; over many values luck averages out.
    """
    roundings = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 32, torch.float64: 1024}[dtype]
    if one_value:
        roundings = max(4 * roundings, 16)
    return max(ERROR_RATIO * yardstick, roundings * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("family", SPECTRA)
def test_every_family_holds_both_bounds(family, backend, dtype):
    ns = NewtonSchulz(backend, dtype=dtype)
    schedule = ns.schedule()
    for name, shape in SHAPES.items():
        x = matrix(family, shape).double() if dtype == torch.float64 else matrix(family, shape)
        got = judge(x, ns(x.double()), schedule.triples)
        plain = plain_newton_schulz(x, schedule.segments, gram=backend == "gram", dtype=dtype)
        yardstick = judge(x, plain, schedule.triples)
        one_value = min(shape) == 1 or family == "one row"
        assert got.error <= error_bound(yardstick.error, dtype, one_value=one_value), (name, got, yardstick)
        assert got.sigma_max <= got.sigma_bound, (name, got)
        assert got.dual >= got.exact_dual - (0.1 if dtype == torch.bfloat16 else 0.05), (name, got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coefficients", [YOU, KELLER], ids=lambda c: c.name)
def test_other_coefficients_hold_the_singular_value_bound(coefficients, dtype):
    ns = NewtonSchulz(coefficients=coefficients, dtype=dtype)
    for family in SPECTRA:
        for name in ("wide", "square", "prime"):
            x = matrix(family, SHAPES[name])
            got = judge(x, ns(x), ns.schedule().triples)
            assert got.sigma_max <= got.sigma_bound, (family, name, got)


def test_repeated_rows():
    """A gradient whose rows copy a few vectors once blew up a later restart: σ_max 118 in one draw of sixty."""
    ns = NewtonSchulz()
    worst = 0.0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        distinct, rank, noise = 1 + seed % 8, 1 + seed % 3, 10.0 ** -(2 + seed % 4)
        x = repeated_rows(256, 768, generator, distinct=distinct, rank=rank, noise=noise).float()
        worst = max(worst, float(torch.linalg.matrix_norm(ns(x), ord=2)))
    assert worst <= judge(x, x, ns.schedule().triples).sigma_bound


def test_a_later_restart_is_what_repeated_rows_forbid():
    """The suite can fail: restarting after 3 steps alone breaks it in bfloat16."""
    ns = NewtonSchulz(restart_iterations=(3,), dtype=torch.bfloat16)
    draws = [repeated_rows(67, 131, torch.Generator().manual_seed(seed)).float() for seed in range(8)]
    worst = max(float(torch.linalg.matrix_norm(ns(x), ord=2)) for x in draws)
    assert worst > judge(draws[0], draws[0], ns.schedule().triples).sigma_bound


def test_symmetric_products_cost_no_accuracy_on_half_empty_spectra():
    """Mirroring one triangle of W·R before ·W lost a factor seven here."""
    x = SPECTRA["half zeros"](128, 384, torch.Generator().manual_seed(0)).float()
    ns = NewtonSchulz()
    got = judge(x, ns(x), ns.schedule().triples)
    plain = judge(
        x, plain_newton_schulz(x, ns.schedule().segments, gram=True, dtype=torch.float16), ns.schedule().triples
    )
    assert got.error <= ERROR_RATIO * plain.error


def test_known_values_of_the_default_polynomial():
    """σ in [0.01, 1] comes out in [0.846, 1.124]: it does not converge to one."""
    sigma = apply_polynomial(torch.linspace(0.01, 1.0, 10_001, dtype=torch.float64), POLAR_EXPRESS.triples)
    assert float(sigma.min()) == pytest.approx(0.846, abs=1e-3)
    assert float(sigma.max()) == pytest.approx(1.124, abs=1e-3)


def test_gaussian_orthogonality_of_each_set():
    """‖OOᵀ − I‖/√m of a Gaussian 256×1024 in float64: 0.168 Polar Express, 0.034 YOU, 0.283 Keller."""
    x = torch.randn(256, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for coefficients, want in ((POLAR_EXPRESS, 0.168), (YOU, 0.034), (KELLER, 0.283)):
        o = NewtonSchulz(coefficients=coefficients, dtype=torch.float64)(x)
        distance = float(torch.linalg.matrix_norm(o @ o.mT - torch.eye(256, dtype=torch.float64))) / 16
        assert distance == pytest.approx(want, abs=0.01)


def test_gaussian_matrices_hold_the_error_bound_on_every_draw():
    """torch's half-precision add_ on a CPU rounds the scalar first: in Q, not in R. Every draw erred 2.7 times."""
    ns = NewtonSchulz()
    schedule = ns.schedule()
    for seed in range(20):
        x = torch.randn(67, 131, generator=torch.Generator().manual_seed(seed))
        got = judge(x, ns(x), schedule.triples)
        plain = plain_newton_schulz(x, schedule.segments, gram=True, dtype=torch.float16)
        assert got.error <= judge(x, plain, schedule.triples).error, seed
