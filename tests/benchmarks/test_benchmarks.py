"""Times of what a step spends its time on, by pytest-benchmark; every run is checked against an oracle.

    pytest tests/benchmarks --benchmark-only --benchmark-save=NAME     then --benchmark-compare

On a CPU the shapes are small and show the cost of the calls; on a CUDA device they are those of layers. The kernels'
own tables come from ``tools/bench_kernels.py``, which times GPUs without the host.
"""

from __future__ import annotations

import pytest
import torch

from dmuon_core import POLAR_EXPRESS, NewtonSchulz, muon_update_
from dmuon_core.normalize import normalize
from dmuon_core.testing import judge, relative_error

pytest.importorskip("pytest_benchmark")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
SHAPES = [(16, 1024, 4096), (16, 1024, 1024)] if ON_GPU else [(4, 32, 96), (1, 64, 64)]


def finished(run):
    """``run`` and what it launched."""

    def until_done():
        result = run()
        if ON_GPU:
            torch.cuda.synchronize(DEVICE)
        return result

    return until_done


def gaussian(shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("form", ["gram", "direct"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz(benchmark, shape, form):
    ns, x = NewtonSchulz(form), gaussian(shape)
    y = benchmark.pedantic(finished(lambda: ns(x)), rounds=5, warmup_rounds=3)
    verdict = judge(x[0].cpu(), y[0].cpu(), POLAR_EXPRESS.triples)
    # A Gaussian matrix errs by a few roundings of half precision; the families' bounds are in tests/core.
    assert verdict.error <= 0.02
    assert verdict.sigma_max <= verdict.sigma_bound


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalizing(benchmark, shape):
    x = gaussian(shape)
    out = torch.empty_like(x, dtype=torch.float16)
    into = NewtonSchulz().kernel.normalizer(DEVICE)
    benchmark.pedantic(finished(lambda: into([x], [out])), rounds=5, warmup_rounds=2)
    # One rounding, 2^-11 of an entry.
    assert relative_error(out, normalize(x, torch.float32, exact=True)) <= 2.0**-11


def test_a_step_of_muon(benchmark):
    """Momentum, Newton-Schulz and the weights of a layer's seven matrices."""
    d = 2048 if ON_GPU else 32
    shapes = [(d, d)] * 4 + [(4 * d, d)] * 2 + [(d, 4 * d)]
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(s, generator=generator).to(DEVICE) for s in shapes] for _ in range(2))
    buffers = [torch.zeros_like(w) for w in weights]
    before = [w.clone() for w in weights]
    ns = NewtonSchulz()
    step = finished(lambda: muon_update_(weights, grads, buffers, lr=0.01, weight_decay=0.0, newton_schulz=ns))
    benchmark.pedantic(step, rounds=3, warmup_rounds=1)
    # With one gradient throughout, four steps move a weight four times along its orthogonal factor.
    for weight, old, grad in zip(weights, before, grads, strict=True):
        direction = (old - weight) / (4 * 0.01 * max(weight.shape[0] / weight.shape[1], 1.0) ** 0.5)
        assert relative_error(direction, ns(grad)) <= 1e-2
