"""Newton-Schulz on a CUDA device: the accuracy rules with real kernels' rounding, plans, graphs, streams."""

import functools
import logging
import os
import subprocess
import sys
import zlib

import pytest
import torch

from dmuon_core import NewtonSchulz, get_ns_backend, muon_update_, workspace
from dmuon_core.normalize import normalize, normalize_into
from dmuon_core.syrk import ladder, tuning, verdicts
from dmuon_core.testing import SPECTRA, exact_polynomial, judge, relative_error, repeated_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KERNELS = ["auto", "quack", "triton", "cublas"]
SHAPES = [(64, 256), (256, 64), (96, 96), (67, 131), (300, 200), (1, 96), (96, 1)]


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))


@functools.cache
def _kernel(name: str) -> str:
    try:
        NewtonSchulz(kernel=name)
    except ladder.KernelUnavailableError as error:
        return str(error)
    return ""


def orthogonalizer(form: str, kernel: str, **options) -> NewtonSchulz:
    if _kernel(kernel):
        pytest.skip(_kernel(kernel).splitlines()[0])
    return NewtonSchulz(form, kernel, **options)


def matrix(family: str, shape: tuple[int, int]) -> torch.Tensor:
    return SPECTRA[family](*shape, torch.Generator().manual_seed(zlib.crc32(family.encode()))).float()


HARD = ("repeated rows", "half zeros", "log decay 1e-3", "condition 1e6")
EVERY = [(family, "auto") for family in SPECTRA] + [(family, kernel) for kernel in KERNELS[1:] for family in HARD]


@pytest.mark.parametrize("form", ["gram", "direct"])
@pytest.mark.parametrize(("family", "kernel"), EVERY)
def test_every_family_holds_the_bound_on_singular_values(family, form, kernel):
    ns = orthogonalizer(form, kernel)
    for shape in SHAPES:
        x = matrix(family, shape)
        results = [ns(x.cuda()).cpu() for _ in range(3)]  # eager, captured, replayed
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        got = judge(x, results[0], ns.schedule().triples)
        assert got.sigma_max <= got.sigma_bound, (shape, got)
        assert got.dual >= got.exact_dual - 0.05, (shape, got)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gaussian_error(kernel):
    """The families' errors have their bounds on a CPU; this is the kernels' own rounding."""
    ns = orthogonalizer("gram", kernel)
    for shape in ((256, 768), (512, 512), (768, 256)):
        x = matrix("gaussian", shape)
        assert judge(x, ns(x.cuda()).cpu(), ns.schedule().triples).error <= 0.004


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_restart_rule_on_repeated_rows(kernel):
    """Restarting after 3 steps gave a largest singular value of 118 once in sixty draws; after 2 it is bounded."""
    ns = orthogonalizer("gram", kernel)
    draws = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        distinct, rank, noise = 1 + seed % 8, 1 + seed % 3, 10.0 ** -(2 + seed % 4)
        draws.append(repeated_rows(256, 768, generator, distinct=distinct, rank=rank, noise=noise).float())
    x = torch.stack(draws).cuda()
    y = ns(x).double()
    bound = judge(draws[0], draws[0], ns.schedule().triples).sigma_bound
    assert float(torch.linalg.matrix_norm(y, ord=2).max()) <= bound
    want = torch.stack([exact_polynomial(draw, ns.schedule().triples) for draw in draws[:20]])
    errors = [relative_error(got, exact) for got, exact in zip(y.cpu(), want, strict=False)]
    assert max(errors) <= 0.2, errors


def test_launches_are_counted_in_replays():
    ns = orthogonalizer("gram", "cublas")
    x = torch.randn(2, 64, 96, device="cuda")
    for steps in range(1, 5):
        ns(x)
        assert ns.kernel.launches == {"cublas": 14 * steps}
    assert get_ns_backend(ns).endswith("launches: cublas 56")


def test_graphs_equal_eager_runs_with_new_data(monkeypatch):
    """What a graph baked in would be the first step's data."""
    monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", "0")
    eager = NewtonSchulz()
    monkeypatch.delenv("DMUON_NS_CUDA_GRAPH")
    graphed = NewtonSchulz()
    for seed in range(5):
        torch.manual_seed(seed)
        for shape in ((3, 128, 320), (200, 64), (77, 301)):
            x = torch.randn(shape, device="cuda")
            assert torch.equal(graphed(x), eager(x)), (seed, shape)


def test_capture_that_fails_leaves_the_plan_eager(monkeypatch, caplog):
    def fail(self, run):
        raise RuntimeError("no capture today")

    monkeypatch.setattr(workspace.Capture, "__call__", fail)
    ns = NewtonSchulz()
    x = torch.randn(48, 80, device="cuda")
    with caplog.at_level(logging.WARNING, "dmuon"):
        results = [ns(x) for _ in range(4)]
    assert all(torch.equal(y, results[0]) for y in results)
    assert [record.getMessage() for record in caplog.records] == [
        "Newton-Schulz of 1×48×80 stays without a CUDA graph: RuntimeError: no capture today"
    ]


def test_capture_that_breaks_off_leaves_random_numbers_alone():
    """torch once went on refusing every random number on the device."""
    capture = workspace.Capture(torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(1)
    torch.randn(7, device="cuda")
    state = torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError):
        capture(torch.cuda.synchronize)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.randn(7, device="cuda")
    x = torch.ones(5, device="cuda")
    capture(lambda: x.add_(1)).replay()
    assert torch.equal(x, torch.full_like(x, 2.0))


def test_plans_do_replay(caplog):
    """Staying eager would pass every comparison of results."""
    ns = NewtonSchulz()
    for shape in ((256, 768), (2, 64, 96), (33, 77), (300, 300)):
        x = torch.randn(shape, device="cuda")
        with caplog.at_level(logging.WARNING, "dmuon"):
            for _ in range(3):
                ns(x)
    assert not caplog.records
    plans = [plan for arena in workspace._arenas.values() for plan in arena._plans.values() if plan.kernel is ns.kernel]
    assert len(plans) == 4
    assert all(plan._graphs for plan in plans)


def test_between_runs_the_memory_is_everybodys():
    """Half a GiB used to stay. What a graph has the addresses of must not be written to when it is another's."""
    ns = NewtonSchulz()
    x = torch.randn(4, 2048, 4096, device="cuda", dtype=torch.bfloat16)
    want = ns(x)
    held = torch.cuda.memory_allocated() + 128 * 2**20  # what cuBLAS takes for a graph
    places, in_the_way = set(), []
    for _ in range(3):
        for _ in range(3):
            assert torch.equal(ns(x), want)
        (plan,) = (p for arena in workspace._arenas.values() for p in arena._plans.values() if p.kernel is ns.kernel)
        assert plan.recipe.nbytes > 2 * 128 * 2**20
        assert torch.cuda.memory_allocated() < held + sum(map(len, in_the_way))
        places |= set(plan._graphs)
        for _ in range(4):  # in every place that is free
            in_the_way.append(torch.full((plan.recipe.nbytes,), 255, dtype=torch.uint8, device="cuda"))
    assert len(places) > 1, "what this test is about"
    for _ in range(3):
        assert torch.equal(ns(x), want)
    assert all(bool((each == 255).all()) for each in in_the_way)


def test_inside_a_capture_of_the_users():
    ns = NewtonSchulz()
    x = torch.randn(2, 96, 160, device="cuda")
    ns(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = ns(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(y, ns(x)) <= 1e-2


def test_two_streams_have_memory_of_their_own():
    ns = NewtonSchulz()
    inputs = [torch.randn(4, 512, 1024, device="cuda") for _ in range(2)]
    want = [ns(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        for stream, x, results in zip(streams, inputs, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(ns(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[i]) for i, results in enumerate(got) for y in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_scalar_is_not_rounded_before_it_is_added(dtype):
    """A rounded ``a`` is one error in all of Q and none in W·R."""
    x = torch.randn(1000, device="cuda").to(dtype)
    for a in (8.287212 / 1.05, 4.107059 / 1.05, 3.9486908):
        assert torch.equal(x.clone().add_(a), (x.float() + a).to(dtype))


NORMALIZERS = {"core": "cublas", "fused": "triton"}
"""By the kernel that brings it."""


def normalizer(name: str):
    if _kernel(NORMALIZERS[name]):
        pytest.skip(_kernel(NORMALIZERS[name]).splitlines()[0])
    found = ladder.KernelChoice.of(NORMALIZERS[name]).normalizer(torch.device("cuda", torch.cuda.current_device()))
    assert (found is normalize_into) == (name == "core")
    return found


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1.0, 1e4, 1e20, 3e38])
def test_normalizing_over_the_whole_range(scale, dtype, name):
    x = (torch.randn(3, 65, 100, device="cuda").sign() * scale).to(dtype)
    if not bool(torch.isfinite(x).all()) or not bool(x.any()):
        pytest.skip("outside of this dtype")
    out = torch.empty(3, 112, 80, device="cuda", dtype=torch.float16).mT
    normalizer(name)([x[:2], x[2:]], [out[:2], out[2:]])
    assert relative_error(out[:, :65, :100], normalize(x, torch.float16, exact=True)) <= 1e-3
    assert not out[:, 65:].any()
    assert not out[:, :, 100:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1000, 3000), (1, 4096, 11008), (3, 64, 70_000), (2, 9000, 33)], ids=str)
def test_fused_normalizing_of_large_matrices(shape, dtype):
    """More tiles than parts, sizes that are no multiples of a tile, both layouts; the same bits every time."""
    fused = normalizer("fused")
    for x in (torch.randn(shape, device="cuda").to(dtype), torch.randn(shape, device="cuda").to(dtype).mT):
        first, again = (torch.full_like(x, float("nan"), dtype=torch.float16) for _ in range(2))
        fused([x], [first])
        assert relative_error(first, normalize(x, torch.float16, exact=False)) <= 1e-3
        fused([x[:1]], [again[:1]])
        assert torch.equal(first[0], again[0])


def test_zero_and_non_finite():
    x = torch.randn(3, 40, 64, device="cuda")
    x[1] = 0
    x[2, 3, 5] = float("nan")
    for _ in range(3):
        got = NewtonSchulz()(x)
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        assert torch.isfinite(got[0]).all()
        assert not torch.isfinite(got[2]).any()


def test_deterministic_bits_depend_on_no_batch():
    ns = NewtonSchulz(deterministic=True)
    # In a stack of the second shape matrices begin at addresses of any alignment.
    for shape in ((200, 333), (67, 131)):
        x = torch.randn(5, *shape, device="cuda")
        whole = ns(x)
        assert torch.equal(whole[3], ns(x[3]))
        assert torch.equal(whole[1:4], ns(x[1:4]))


BITS = """
import ctypes, hashlib, sys
import torch
from dmuon_core import NewtonSchulz

SHAPES = [(1, 1024, 4096), (5, 200, 333), (3, 67, 131), (4, 768, 256), (1, 1001, 77), (2, 96, 96)]
kept = []  # memory lies elsewhere in the process that goes the other way round
for shape in SHAPES[:: int(sys.argv[1])]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).cuda()
    for form in ("gram", "direct"):
        ns = NewtonSchulz(form, deterministic=True)
        kept.append(ns(x))
        assert torch.equal(kept[-1], torch.stack([ns(one) for one in x])), (shape, form)
        bits = kept[-1].cpu().contiguous()
        print(shape, form, hashlib.sha256(ctypes.string_at(bits.data_ptr(), bits.nbytes)).hexdigest())
"""


def test_deterministic_bits_are_those_of_another_process(tmp_path):
    """What a process measures, compiles and allocates first may not choose between two orders of a sum."""
    printed = []
    for number, order in enumerate(("1", "-1")):
        environment = os.environ | {"DMUON_CACHE_DIR": str(tmp_path / str(number))}
        words = [sys.executable, "-c", BITS, order]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        printed.append(sorted(done.stdout.splitlines()))
    assert len(set(printed[0])) == 12
    assert printed[0] == printed[1]


def test_a_step_on_many_shapes_equals_the_deterministic_step():
    shapes = [(256, 512), (512, 256), (256, 256), (3, 256, 128), (384, 96)]
    views = [None, None, None, "batched", "split(128, 256)"]
    torch.manual_seed(0)
    weights = [torch.randn(s, device="cuda") for s in shapes]
    copies = [w.clone() for w in weights]
    buffers, others = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    ns, plain = NewtonSchulz(workspace_mib=2), NewtonSchulz(deterministic=True)
    for _ in range(4):
        grads = [torch.randn(s, device="cuda") for s in shapes]
        muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=ns, views=views)
        muon_update_(copies, grads, others, lr=0.1, newton_schulz=plain, views=views)
    assert all(torch.equal(a, b) for a, b in zip(buffers, others, strict=True))
    assert max(relative_error(a, b) for a, b in zip(weights, copies, strict=True)) <= 2e-3


def test_compiled_equals_eager():
    torch._dynamo.reset()
    ns = NewtonSchulz()
    x = torch.randn(64, 128, device="cuda")
    compiled = torch.compile(lambda x: ns(x) + 1, fullgraph=True)
    assert torch.equal(compiled(x), ns(x) + 1)


def test_tuning_chooses_what_runs_and_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "_book", verdicts._Book())
    found = tuning.tune([(2, 256, 512), (2, 256, 256)])
    x = torch.randn(2, 256, 512, device="cuda").half()
    r = torch.randn(2, 256, 256, device="cuda").half()
    assert {verdicts.operands_key(x, None, None), verdicts.product_key(r, x)} <= found.keys()
    assert verdicts.operands_key(r, None, r, exact=False) in found
    assert list(tmp_path.glob("verdicts-*.json"))
    monkeypatch.setattr(verdicts, "_book", verdicts._Book())
    device = torch.device("cuda", torch.cuda.current_device())
    for key, verdict in found.items():
        assert verdicts.find(device, key) == (verdict,)
    ns = NewtonSchulz()
    ns(x)
    key = verdicts.operands_key(x, None, None)
    if not ns.kernel.prefers_whole(x, None, x.mT):
        assert ns.kernel.launches[found[key].kernel] >= 2


def test_every_quack_product_and_the_loose_kernel():
    """What verdicts may choose beside symmetric kernels: right in every layout, and symmetric but for rounding."""
    found = {each.name: each.spec for each in ladder.survey(torch.device("cuda", 0))}.get("quack")
    if found is None:
        pytest.skip("quack does not run here")
    for m, n in ((264, 520), (200, 200), (1024, 4096)):
        q, x = torch.randn(2, m, m, device="cuda").half(), torch.randn(2, m, n, device="cuda").half() / n**0.5
        for a, b, out in ((q, x, torch.empty_like(x)), (x, x.mT, torch.empty_like(q)), _by_columns(q, x)):
            want = a.float() @ b.float()
            allowed = 2 * float((want.half().float() - want).abs().max())
            labels = found.product.configs(a, b, out)
            assert labels
            for label in labels:
                found.product.load()(a, b, out=out.fill_(float("nan")), config=label)
                assert float((out.float() - want).abs().max()) <= allowed, label
        r = x @ x.mT
        c = r + r.mT
        loose, exact = (load()(r, r, c, alpha=0.5, beta=2.0) for load in (found.load_loose, found.load))
        assert relative_error(loose, exact) <= 1e-3
        assert relative_error(loose, loose.mT) <= 1e-3


def _by_columns(q, x):
    tall = x.mT.contiguous().mT
    return q, tall, torch.empty_like(tall)


@pytest.mark.parametrize("form", ["gram", "direct"])
def test_with_whole_products_for_symmetric_ones(form, monkeypatch):
    """Where both halves are computed R is symmetric but for rounding; the bounds hold as they do mirrored."""
    monkeypatch.setattr(ladder.KernelChoice, "prefers_whole", lambda self, a, b, whole: True)
    ns = NewtonSchulz(form)
    for family in HARD:
        for shape in ((64, 256), (67, 131), (96, 96)):
            x = matrix(family, shape)
            for _ in range(3):
                got = judge(x, ns(x.cuda()).cpu(), ns.schedule().triples)
                assert got.sigma_max <= got.sigma_bound, (family, shape, got)
