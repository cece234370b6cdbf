"""Newton-Schulz as users call it: scales, degenerate input, shapes, bits, steps and restarts."""

import threading

import pytest
import torch

from dmuon_core import (
    KELLER,
    POLAR_EXPRESS,
    YOU,
    NewtonSchulz,
    as_coefficients,
    derive_restarts,
    direct_newton_schulz,
    gram_newton_schulz,
    newton_schulz,
)
from dmuon_core.syrk.builtin import full_precision_reduction
from dmuon_core.testing import exact_polynomial, relative_error

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
SHAPES = ((64, 64), (64, 256), (256, 64), (176, 64))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_invariance(shape, backend, dtype):
    """A norm floor of 1e-7 shrinks the output of tiny gradients; a norm after the down-cast overflows."""
    ns = NewtonSchulz(backend, dtype=dtype)
    x = gaussian(*shape)
    x /= x.norm()
    want = ns(x)
    assert want.norm() > 1
    for scale in (1e-8, 1e-12, 1e-20, 1e-30, 1e20, 1e30):
        assert relative_error(ns(x * scale), want) <= (5e-3 if dtype == torch.float32 else 3e-2), scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_powers_of_two_give_the_same_bits(backend, dtype):
    ns = NewtonSchulz(backend, dtype=dtype)
    x = gaussian(64, 96)
    for exponent in (-100, -20, 3, 100):
        assert torch.equal(ns(x), ns(x * 2.0**exponent)), exponent


def test_the_smallest_and_the_largest_numbers():
    ns = NewtonSchulz()
    x = gaussian(32, 48).sign()
    for scale in (1e-45, 1e-38, 3e38):
        assert relative_error(ns(x * scale), ns(x)) <= 3e-2, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_zero_gives_exactly_zero(backend, dtype):
    ns = NewtonSchulz(backend, dtype=dtype)
    batch = torch.stack([gaussian(16, 24), torch.zeros(16, 24)])
    got = ns(batch)
    assert torch.equal(got[1], torch.zeros(16, 24))
    assert got[0].norm() > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_non_finite_input_never_becomes_a_silent_zero(backend, bad):
    batch = torch.stack([gaussian(16, 24), gaussian(16, 24)])
    batch[1, 3, 5] = bad
    got = NewtonSchulz(backend)(batch)
    assert torch.isfinite(got[0]).all()
    assert not torch.isfinite(got[1]).any()


@pytest.mark.parametrize("shape", [(1, 512), (512, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_vectors_come_out_parallel(shape, backend):
    """A scalar head [1, N]: the update is parallel to the momentum."""
    x = gaussian(*shape)
    got = NewtonSchulz(backend)(x)
    cosine = (got * x).sum() / (got.norm() * x.norm())
    assert float(cosine.abs()) == pytest.approx(1.0, abs=1e-3)
    # Classical Newton-Schulz (Keller, five steps) takes σ = 1 to 0.696.
    keller = NewtonSchulz("direct", coefficients=KELLER, dtype=torch.float64)(x.double())
    assert float(keller.norm()) == pytest.approx(0.696, abs=2e-3)


@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_rank_two_stays_rank_two(backend):
    x = gaussian(128, 2, seed=1) @ gaussian(2, 256, seed=2)
    sigma = torch.linalg.svdvals(NewtonSchulz(backend, dtype=torch.float32)(x))
    assert (sigma[:2] > 0.5).all()
    assert float(sigma[2:].max()) <= 1e-4


@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (65, 130), (130, 65), (1, 96), (176, 64), (11, 139), (99, 216)], ids=str)
def test_batch_layout_and_slicing_do_not_change_bits(shape, dtype, backend):
    """MKL's bmm differs from its mm where K is not a multiple of the vector length, and mm from mm by alignment."""
    ns = NewtonSchulz(backend, dtype=dtype, deterministic=True)
    batch = gaussian(5, *shape).to(torch.float64 if dtype == torch.float64 else torch.float32)
    whole = ns(batch)
    assert torch.equal(whole[3], ns(batch[3]))
    assert torch.equal(whole[1:4], ns(batch[1:4]))
    assert torch.equal(whole[2], ns(batch.mT.contiguous().mT[2]))
    if shape[0] != shape[1]:  # a square matrix transposed has another Gram matrix
        assert torch.equal(whole[2].mT, ns(batch[2].mT))
    wide = batch.new_full((shape[0], shape[1] + 3), float("nan"))
    wide[:, 1:-2] = batch[0]
    assert torch.equal(whole[0], ns(wide[:, 1:-2]))
    assert torch.equal(whole.reshape(5, 1, *shape), ns(batch.reshape(5, 1, *shape)))


def test_output_follows_the_input_in_shape_dtype_and_leaves_it_alone():
    for dtype in (*DTYPES, torch.float64):
        x = gaussian(2, 3, 8, 12).to(dtype)
        before = x.clone()
        got = newton_schulz(x)
        assert got.shape == x.shape
        assert got.dtype == dtype
        assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 0)], ids=str)
def test_empty(shape):
    assert newton_schulz(torch.empty(shape)).shape == shape


def test_functions_agree_with_the_class():
    x = gaussian(24, 40)
    assert torch.equal(gram_newton_schulz(x), NewtonSchulz("gram")(x))
    assert torch.equal(direct_newton_schulz(x), NewtonSchulz("direct")(x))
    assert torch.equal(newton_schulz(x, ns_steps=3, coefficients="you"), NewtonSchulz(coefficients=YOU)(x, ns_steps=3))


@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, YOU, KELLER], ids=lambda c: c.name)
@pytest.mark.parametrize("ns_steps", [1, 2, 3, 4, 5])
def test_steps_take_the_first_triples(coefficients, ns_steps, backend):
    x = gaussian(24, 40).double()
    got = NewtonSchulz(backend, coefficients=coefficients, dtype=torch.float64, ns_steps=ns_steps)(x)
    assert relative_error(got, exact_polynomial(x, coefficients.take(ns_steps))) <= 1e-10


def test_more_steps_than_the_set_holds():
    for coefficients in (POLAR_EXPRESS, YOU):
        with pytest.raises(ValueError, match=r"ns_steps=6.*hold 5 steps"):
            NewtonSchulz(coefficients=coefficients, ns_steps=6)
    x = gaussian(8, 8).double()
    got = NewtonSchulz(coefficients=KELLER, dtype=torch.float64)(x, ns_steps=8)
    assert relative_error(got, exact_polynomial(x, KELLER.take(8))) <= 1e-10
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="ns_steps must be a positive integer"):
            NewtonSchulz(ns_steps=wrong)


def test_restarts_follow_from_the_coefficients():
    assert derive_restarts(POLAR_EXPRESS.take(5)) == (2,)
    assert derive_restarts(YOU.take(5)) == (2,)
    assert derive_restarts(KELLER.take(5)) == (3,)
    assert derive_restarts(KELLER.take(10)) == (3, 6, 9)
    assert derive_restarts(POLAR_EXPRESS.take(2)) == ()
    assert len(derive_restarts(POLAR_EXPRESS.take(5), torch.bfloat16)) > 1


def test_coefficients_that_the_gram_form_cannot_carry():
    steep = ((5.18, -5.18, 2.59),) * 3
    with pytest.raises(ValueError, match=r'the bound is \d+; use backend="direct"'):
        NewtonSchulz(coefficients=steep, ns_steps=3)
    NewtonSchulz("direct", coefficients=steep, ns_steps=3)


def test_own_restarts():
    x = gaussian(24, 40).double()
    for restarts in ((), (1,), (1, 2, 3, 4), (4, 2)):
        got = NewtonSchulz(restart_iterations=restarts, dtype=torch.float64)(x)
        assert relative_error(got, exact_polynomial(x, POLAR_EXPRESS.triples)) <= 1e-9, restarts
    for wrong in ((0,), (5,), (-1,)):
        with pytest.raises(ValueError, match="restart_iterations"):
            NewtonSchulz(restart_iterations=wrong)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ("polar", "unknown ns_coefficients 'polar'"),
        ((1.0, 2.0), "must be a triple"),
        ((1.0, 2.0, float("nan")), "finite"),
        (((1.0, 2.0),), "must be a triple"),
        ((), "must be a triple"),
        (7, "must be a triple"),
    ],
)
def test_bad_coefficients(coefficients, message):
    with pytest.raises(ValueError, match=message):
        NewtonSchulz(coefficients=coefficients)


def test_bad_arguments():
    with pytest.raises(ValueError, match="backend must be one of 'gram', 'direct'"):
        NewtonSchulz("svd")
    with pytest.raises(ValueError, match="dtype must be one of"):
        NewtonSchulz(dtype=torch.int8)
    with pytest.raises(ValueError, match=r"takes \[\.\.\., m, n\]"):
        newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match="real floating point"):
        newton_schulz(torch.zeros(3, 3, dtype=torch.complex64))


def test_no_torch_global_is_changed():
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_fp16_reduced_precision_reduction, torch.get_default_dtype(), torch.get_rng_state())
    newton_schulz(gaussian(8, 8))
    assert matmul.allow_fp16_reduced_precision_reduction == before[0]
    assert torch.get_default_dtype() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("wrong", [2, 2.0, ("2",), "2"])
def test_restarts_that_are_no_positions(wrong):
    with pytest.raises(ValueError, match="restart_iterations must be None or the steps"):
        NewtonSchulz(restart_iterations=wrong)


def test_coefficient_sets_are_sequences_that_read_back():
    assert list(POLAR_EXPRESS) == [POLAR_EXPRESS[i] for i in range(len(POLAR_EXPRESS))]
    assert len(POLAR_EXPRESS) == len(YOU) == 5
    for given in (POLAR_EXPRESS, YOU, KELLER, (1.5, -0.5, 0.1), ((1.5, -0.5, 0.1),) * 2):
        assert as_coefficients(as_coefficients(given).plain()) == as_coefficients(given)
    assert all(as_coefficients(known.name) is known for known in (POLAR_EXPRESS, YOU, KELLER))


def test_meta_tensors_have_shapes():
    assert newton_schulz(torch.empty(2, 3, 4, device="meta")).shape == (2, 3, 4)


def test_threads_leave_the_flags_of_torch_as_they_were():
    """Two threads that each saved and restored them once left both flags off for good."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    inside, outside = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)

    def first():
        with full_precision_reduction():
            inside.wait()
        outside.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with full_precision_reduction():
        outside.wait()
        assert not any(getattr(matmul, name) for name in names)
    thread.join()
    assert [getattr(matmul, name) for name in names] == before
