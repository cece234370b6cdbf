"""The conformance suite on the backends that need torch alone, and on faulty ones that it must catch."""

from __future__ import annotations

import pytest
import torch

from dmuon_core.syrk.builtin import cublas_syrk, torch_syrk
from dmuon_core.testing.syrk import (
    SyrkCase,
    run_syrk_case,
    run_syrk_error_case,
    syrk_cases,
    syrk_error_cases,
)

CASES = syrk_cases()
BACKENDS = [torch_syrk, cublas_syrk]


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("fn", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(fn, case):
    assert run_syrk_case(fn, case) is None


@pytest.mark.parametrize("fn", BACKENDS)
@pytest.mark.parametrize("case", syrk_error_cases(), ids=lambda case: case.name)
def test_calls_outside_the_contract_raise(fn, case):
    run_syrk_error_case(fn, case)


def _asymmetric(a, b=None, c=None, **options):
    d = torch_syrk(a, b, c, **options)
    d[..., 0, -1] += 1
    return d


def _reads_above_the_diagonal(a, b=None, c=None, **options):
    if c is not None:
        c = c.mT.contiguous()
    return torch_syrk(a, b, c, **options)


def _reads_beside_a_view(a, b=None, c=None, **options):
    """What a kernel does that takes the row length for the row stride."""
    wrong = a.as_strided(a.shape, (*a.stride()[:-2], a.shape[-1], 1), a.storage_offset())
    return torch_syrk(wrong, b, c, **options)


def _writes_beside_out(a, b=None, c=None, *, out=None, **options):
    d = torch_syrk(a, b, c, out=out, **options)
    if out is not None:
        out.as_strided((1,), (1,), out.storage_offset() + out.stride(-2) * out.shape[-2]).fill_(0)
    return d


def _accumulates_in_half(a, b=None, c=None, **options):
    d = torch_syrk(a[..., :1], None if b is None else b[..., :1])
    for k in range(1, a.shape[-1]):
        d += torch_syrk(a[..., k : k + 1], None if b is None else b[..., k : k + 1])
    return d


def _forgets_the_batch_of_alpha(a, b=None, c=None, *, alpha=1.0, **options):
    return torch_syrk(a, b, c, alpha=alpha if isinstance(alpha, float) else alpha.flatten()[0], **options)


def _ignores_out(a, b=None, c=None, *, out=None, **options):
    return torch_syrk(a, b, c, **options)


def _reads_c_at_beta_zero(a, b=None, c=None, *, beta=0.0, **options):
    d = torch_syrk(a, b, c, beta=beta, **options)
    return d if c is None else d + beta * c


def _differs_each_time(a, b=None, c=None, *, calls=[], **options):  # noqa: B006  (the state is the point)
    calls.append(None)
    d = torch_syrk(a, b, c, **options)
    # A bit flips in every second call; the first is right.
    d.view(torch.int16)[0, 0] ^= (len(calls) + 1) % 2
    return d


@pytest.mark.parametrize(
    ("faulty", "case", "complaint"),
    [
        (_asymmetric, SyrkCase(8, 8), "error|symmetric"),
        (_reads_above_the_diagonal, SyrkCase(8, 8, c="lower", beta=1.0), "error"),
        (_reads_beside_a_view, SyrkCase(8, 8, layout="offset"), "error"),
        (_writes_beside_out, SyrkCase(8, 8, out="given", layout="padded rows"), "beside the output"),
        (_accumulates_in_half, SyrkCase(9, 1000), "fp32 accumulation|allowed"),
        (_forgets_the_batch_of_alpha, SyrkCase(8, 8, batch=(3,), alpha="per item"), "error"),
        (_ignores_out, SyrkCase(8, 8, out="given"), "not in out"),
        (_reads_c_at_beta_zero, SyrkCase(8, 8, c="nan"), "error"),
        (_differs_each_time, SyrkCase(64, 64, out="fresh"), "other bits"),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else "",
)
def test_faulty_backends_are_caught(faulty, case, complaint):
    with pytest.raises(AssertionError, match=complaint):
        run_syrk_case(faulty, case)


def test_a_refusal_is_returned():
    assert run_syrk_case(torch_syrk, SyrkCase(8, 8), rejects=lambda a, b, c: "no") == "no"


def test_a_call_that_does_not_raise_is_reported():
    with pytest.raises(AssertionError, match="no ValueError"):
        run_syrk_error_case(lambda *args, **kwargs: None, syrk_error_cases()[0])
