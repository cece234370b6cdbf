"""The fused norm and cast, interpreted: against core's own in torch, and what only its two passes can get wrong."""

from __future__ import annotations

import pytest
import torch

from dmuon_core import NewtonSchulz, workspace
from dmuon_core.normalize import normalize, normalize_into
from dmuon_core.testing import relative_error
from dmuon_kernels import normalize as module
from dmuon_kernels.normalize import triton_normalize_into

SHAPES = [(2, 12, 20), (1, 20, 1030), (3, 1, 96), (2, 96, 1), (1, 130, 300)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded_like(x: torch.Tensor, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    batch, m, n = x.shape
    return torch.full((batch, -(-m // 16) * 16, -(-n // 16) * 16), float("nan"), dtype=dtype)


def assert_one_rounding_apart(got: torch.Tensor, want: torch.Tensor) -> None:
    """The norms differ in their last bits, so a tie may fall to the other side."""
    assert float((got.float() - want.float()).abs().max()) <= torch.finfo(got.dtype).eps * float(want.abs().max())


DTYPES = [(torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_torch_and_fills_the_padding_with_zeros(shape, dtype, out_dtype):
    """Both layouts of the input in both of the output."""
    for x in (gaussian(*shape).to(dtype), gaussian(shape[0], shape[2], shape[1]).to(dtype).mT):
        for by_columns in (False, True):
            got, want = (padded_like(x.mT, out_dtype).mT if by_columns else padded_like(x, out_dtype) for _ in "12")
            triton_normalize_into([x], [got])
            normalize_into([x], [want])
            assert_one_rounding_apart(got, want)
            assert not got[:, shape[1] :].any()
            assert not got[:, :, shape[2] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e20, 3e38])
def test_the_whole_range(scale, dtype):
    """Squares in fp32 overflow from 1e19 on and vanish below 1e-22; a sum of two parts mixes their scales."""
    x = (gaussian(2, 24, 1100).sign() * scale).to(dtype)
    if dtype == torch.bfloat16 and scale < 1e-37:
        pytest.skip("the interpreter reads subnormal bfloat16 as zero; tests/gpu has them")
    x[:, :, 600:] *= 2.0**-20
    got = padded_like(x)
    triton_normalize_into([x], [got])
    assert relative_error(got[:, :24, :1100], normalize(x, torch.float16, exact=True)) <= 1e-3


def test_powers_of_two_give_the_same_bits():
    x = gaussian(1, 40, 600)
    outs = [padded_like(x) for _ in range(3)]
    for out, power in zip(outs, (0, -100, 90), strict=True):
        triton_normalize_into([x * 2.0**power], [out])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_bits_depend_on_no_batch(monkeypatch):
    """And not on how many programs the second pass has."""
    x = gaussian(4, 40, 1030)
    whole, alone, few = padded_like(x), padded_like(x[:1]), padded_like(x)
    triton_normalize_into([x], [whole])
    triton_normalize_into([x[3:4]], [alone])
    monkeypatch.setattr(module, "PROGRAMS", 1)
    triton_normalize_into([x], [few])
    assert torch.equal(whole[3], alone[0])
    assert torch.equal(whole, few)


def test_more_tiles_than_parts(monkeypatch):
    """A part then takes several tiles, whose scales differ."""
    monkeypatch.setattr(module, "PARTS", 4)
    x = gaussian(2, 60, 1030)
    x[0, 40:] *= 2.0**70
    x[1, :30] *= 2.0**-70
    got = padded_like(x)
    triton_normalize_into([x], [got])
    assert relative_error(got[:, :60, :1030], normalize(x, torch.float16, exact=True)) <= 1e-3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_zero_and_non_finite(wrong):
    """Never a silent zero: all of the matrix is nan, and its neighbours are not."""
    x = gaussian(4, 30, 70)
    x[1] = 0
    x[2, 29, 69] = wrong
    got = padded_like(x)
    triton_normalize_into([x], [got])
    assert torch.isfinite(got[[0, 1, 3]]).all()
    assert not got[1].any()
    assert got[2, :30, :70].isnan().all()


def test_views_of_larger_memory():
    """Every second row, a batch that is a slice, and rows that start at odd addresses."""
    memory = gaussian(6, 80, 151)
    for x in (memory[1::2, ::2, 3:101], memory[:2, 1:, 1::2]):
        got, want = padded_like(x), padded_like(x)
        triton_normalize_into([x], [got])
        normalize_into([x.clone()], [want])
        assert_one_rounding_apart(got, want)


def test_nothing_in_front_of_or_behind_the_output_is_written():
    memory = torch.full((4, 64, 96), 7.0).half()
    triton_normalize_into([gaussian(2, 30, 40)], [memory[1:3, :32, :48]])
    memory[1:3, :32, :48] = 7.0
    assert (memory == 7.0).all()


def test_newton_schulz_takes_it_with_its_backend(monkeypatch):
    """The hook: a plan of the interpreted kernel normalizes with this module, one of torch's with core's own."""
    monkeypatch.setattr(NewtonSchulz, "_has_workspace", lambda self, device: True)
    monkeypatch.setattr(workspace, "_arenas", {})
    from dmuon_core.syrk import ladder
    from dmuon_kernels.specs import TRITON

    choice = ladder.KernelChoice("triton", _ladders={torch.device("cpu"): (ladder.Loaded(TRITON, TRITON.load()),)})
    x = gaussian(2, 24, 40)
    calls = []
    monkeypatch.setattr(
        module, "_normalize_rows", lambda x, out, run=module._normalize_rows: (calls.append(x.shape), run(x, out))
    )
    options = {"form": "gram", "segments": NewtonSchulz().schedule().segments, "dtype": torch.float16, "graphs": False}
    with workspace.factors([x], kernel=choice, **options) as got:
        fused = got[0].clone()
    assert calls[-1] == (2, 24, 40)
    count = len(calls)
    with workspace.factors([x], kernel=ladder.KernelChoice.of("torch"), **options) as got:
        assert relative_error(fused, got[0]) <= 5e-3
    with workspace.factors([x.double()], kernel=choice, **options):
        assert len(calls) == count
