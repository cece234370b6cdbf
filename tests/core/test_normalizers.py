"""Which norm and cast runs: the one that a backend brings, after a check, or core's own in torch."""

import dataclasses

import pytest
import torch

from dmuon_core import notices
from dmuon_core.normalize import normalize, normalize_into
from dmuon_core.syrk import normalizers
from dmuon_core.syrk.builtin import TORCH
from dmuon_core.syrk.extras import CheckedExtras
from dmuon_core.syrk.ladder import KernelChoice
from dmuon_core.syrk.normalizers import normalizer_of
from dmuon_core.testing import relative_error

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(normalizers, "_extras", CheckedExtras())


class Fused:
    """A norm and cast that counts its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls = 0
        self.factor = factor

    def __call__(self, matrices, outs):
        self.calls += 1
        normalize_into([x * self.factor for x in matrices], outs)
        for out in outs:
            out.mul_(self.factor)


def backend(load):
    return dataclasses.replace(TORCH, name="other", normalize=load)


def run(normalize_fn, dtype=torch.float32):
    x = torch.randn(2, 10, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.full((2, 16, 32), float("nan"), dtype=torch.float16)
    normalize_fn([x], [out])
    assert relative_error(out[:, :10, :20], normalize(x, torch.float16, exact=True)) <= 1e-3
    assert not out[:, 10:].any()
    assert not out[:, :, 20:].any()


def test_the_first_backend_that_brings_one_is_taken_for_what_it_takes():
    fused = Fused()
    taken = normalizer_of([TORCH, backend(lambda: fused), backend(lambda: pytest.fail("the second"))], CPU)
    checked = fused.calls
    assert checked == 1
    run(taken)
    assert fused.calls == checked + 1
    run(taken, torch.float64)
    assert fused.calls == checked + 1


def test_without_one_torch_computes():
    assert normalizer_of([TORCH], CPU) is normalize_into
    assert KernelChoice.of("torch").normalizer(CPU) is normalize_into
    run(normalize_into)


@pytest.mark.parametrize(
    ("load", "reason"),
    [(lambda: Fused(1.01), "wrong values"), (lambda: [].pop(), "IndexError"), (lambda: lambda m, o: 1 / 0, "Division")],
    ids=["wrong", "does not load", "does not run"],
)
def test_one_that_fails_is_left_out_with_one_warning(load, reason):
    """An optional package may be broken in any way; the step goes on."""
    notices.warn_once.cache_clear()
    spec = backend(load)
    with pytest.warns(RuntimeWarning, match=f"of 'other' is left out on cpu: .*{reason}") as given:
        found = [normalizer_of([spec], CPU) for _ in range(2)]
    assert found == [normalize_into] * 2
    assert len(given) == 1
