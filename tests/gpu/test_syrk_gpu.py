"""The kernels on a CUDA device: the conformance suite, and what only a GPU can show."""

from __future__ import annotations

import functools

import pytest
import torch

from dmuon_core.syrk.contract import SyrkSpec
from dmuon_core.syrk.discovery import discover
from dmuon_core.testing.syrk import (
    SyrkCase,
    build_operands,
    run_syrk_case,
    run_syrk_error_case,
    syrk_cases,
    syrk_error_cases,
)
from dmuon_kernels import specs, syrk
from dmuon_kernels.quack_config import SM90_CANDIDATES
from dmuon_kernels.triton_config import CONFIGS, TmaConfig, tma_candidates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
KERNELS = ["quack", "cute_sm80", "triton", "cublas", "torch"]


TMA = {c.label: c for m, batch in ((512, 1), (512, 16), (2048, 1), (2048, 8)) for c in tma_candidates(m, batch)}
SPLIT = TmaConfig(64, 64, 64, warps=4, stages=4, split=4)


@functools.cache
def _spec(name: str) -> SyrkSpec:
    """The backend, or a skip with its own reason. From this checkout where the package is not installed."""
    own = {spec.name: spec for spec in (specs.QUACK, specs.CUTE_SM80, specs.TRITON)}
    known = {found.name: found.spec for found in discover() if found.spec is not None}
    return {**own, **known}[name]


def _available(name: str) -> SyrkSpec:
    spec = _spec(name)
    reason = spec.probe(CUDA)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return spec


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", syrk_cases(), ids=lambda case: case.name)
def test_conformance(name, case):
    spec = _available(name)
    refusal = run_syrk_case(spec.load(), case, CUDA, rejects=spec.rejects)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", syrk_error_cases(), ids=lambda case: case.name)
def test_calls_outside_the_contract_raise(name, case):
    run_syrk_error_case(_available(name).load(), case, CUDA)


LARGER = [
    SyrkCase(1000, 1000, torch.bfloat16, (2,), c="lower", out="c", beta=0.5),
    SyrkCase(2048, 512, torch.float16, c="lower", out="c", beta="0-d"),
    SyrkCase(1152, 4304, torch.float16, (3,), "transposed"),
    SyrkCase(1001, 777, torch.bfloat16, (2,), "offset", b="given", c="lower", out="given", beta=-1.0),
]


@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.name)
@pytest.mark.parametrize("name", KERNELS)
def test_conformance_at_the_sizes_of_layers(name, case):
    spec = _available(name)
    run_syrk_case(spec.load(), case, CUDA, rejects=spec.rejects)


@pytest.mark.parametrize("name", KERNELS)
def test_a_thousand_launches_give_the_same_bits(name):
    """A race between the tiles of C and D shows now and then only."""
    fn = _available(name).load()
    case = SyrkCase(904, 256, torch.float16, (4,), c="lower", out="c", beta=0.5)
    operands = build_operands(case, CUDA)
    assert operands.c is not None
    before = operands.c.view.clone()
    want = operands.call(fn).clone()
    differences = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(1000):
        operands.c.view.copy_(before)
        differences += (operands.call(fn) != want).sum()
    assert differences.item() == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sms", [None, 1, 7])
def test_every_triton_configuration(config, sms):
    spec = _available("triton")
    fn = functools.partial(spec.load(), config=config, sms=sms)
    for layout in ("contiguous", "transposed", "offset"):
        run_syrk_case(fn, SyrkCase(300, 200, torch.bfloat16, (2,), layout, c="lower", out="c", beta=0.5), CUDA)


def _needs_tma() -> functools.partial:
    spec = _available("triton")
    if torch.cuda.get_device_capability(CUDA) != (9, 0):
        pytest.skip("tensor descriptors are for compute capability 9.0")
    return functools.partial(spec.load())


@pytest.mark.parametrize("config", TMA.values(), ids=TMA)
@pytest.mark.parametrize("sms", [None, 1, 7])
def test_every_configuration_with_descriptors(config, sms):
    fn = functools.partial(_needs_tma(), config=config.label, sms=sms)
    for layout in ("contiguous", "padded rows"):
        run_syrk_case(fn, SyrkCase(808, 200, torch.bfloat16, (2,), layout, c="lower", out="c", beta=0.5), CUDA)
    run_syrk_case(fn, SyrkCase(808, 520, torch.float16, (2,), "transposed", b="given", alpha="per item"), CUDA)


@pytest.mark.parametrize("config", SM90_CANDIDATES, ids=lambda config: config.label)
def test_every_quack_configuration(config):
    fn = functools.partial(_available("quack").load(), config=config.label)
    run_syrk_case(fn, SyrkCase(808, 200, torch.bfloat16, (2,), c="lower", out="c", beta=0.5), CUDA)
    if config.takes_m_major:
        run_syrk_case(fn, SyrkCase(808, 520, torch.float16, (2,), "transposed"), CUDA)


def test_split_sums_on_two_streams_and_in_two_graphs():
    """Counters shared by launches that run at once would make a program add parts that are not there yet."""
    fn = functools.partial(_needs_tma(), config=SPLIT)
    a = torch.randn(512, 4096, device=CUDA).half() / 64
    want = fn(a)
    streams, graphs, outs = [torch.cuda.Stream() for _ in range(2)], [], []
    for _ in streams:
        outs.append(torch.empty_like(want))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
            fn(a, out=outs[-1])
    eager = [torch.empty_like(want) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph, out in zip(streams, graphs, eager, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                fn(a, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(d, want) for d in (*outs, *eager))


def test_more_than_two_to_the_31_elements_in_d():
    """Offsets in 32 bits wrap around and write in front of the tensor."""
    triton_syrk = _available("triton").load()
    m = 46400
    _need_gigabytes(2 * m * m / 1e9 + 2)
    a = torch.randint(-2, 3, (m, 16), device=CUDA).half()
    d = triton_syrk(a)
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device=CUDA)
    want = a[rows].float() @ a.float().mT
    assert torch.equal(d[rows].float(), want)
    assert torch.equal(d[:, rows].float(), want.mT)


def test_more_than_two_to_the_31_elements_in_a():
    """Once along the rows and once along the columns, where the step over K is the large offset."""
    triton_syrk = _available("triton").load()
    _need_gigabytes(6)
    m, stride = 64, 2**25 + 2**20
    buffer = torch.zeros(m * stride, device=CUDA, dtype=torch.float16)
    k_major = buffer.as_strided((m, 128), (stride, 1))
    k_major.copy_(torch.randint(-2, 3, (m, 128), device=CUDA))
    assert torch.equal(triton_syrk(k_major).float(), k_major.float() @ k_major.float().mT)
    m_major = buffer.as_strided((128, m), (1, stride))
    assert torch.equal(triton_syrk(m_major).float(), m_major.float() @ m_major.float().mT)


def _need_gigabytes(needed: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < needed:
        pytest.skip(f"needs {needed:.0f} GB of GPU memory, {free:.0f} are free")


@pytest.mark.parametrize("name", KERNELS)
def test_two_streams_do_not_meet(name):
    fn = _available(name).load()
    cases = [SyrkCase(1024, 2048, torch.float16, (4,)), SyrkCase(1024, 1024, torch.float16, (4,), alpha=2.0)]
    operands = [build_operands(case, CUDA) for case in cases]
    want = [x.call(fn) for x in operands]
    streams = [torch.cuda.Stream() for _ in operands]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for stream, x, results in zip(streams, operands, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(x.call(fn))
    torch.cuda.synchronize()
    assert all(torch.equal(d, want[i]) for i, results in enumerate(got) for d in results)


@pytest.mark.parametrize("name", ["quack", "triton", "cublas"])
def test_captured_graph_reads_device_scalars_anew(name):
    """The reason for scalars on the device: a replay sees their present values."""
    fn = _available(name).load()
    a = torch.randn(2, 256, 128, device=CUDA).half()
    alpha, out = torch.ones(2, device=CUDA), torch.empty(2, 256, 256, device=CUDA, dtype=torch.float16)
    fn(a, alpha=alpha, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn(a, alpha=alpha, out=out)
    alpha.copy_(torch.tensor([2.0, -1.0]))
    graph.replay()
    assert torch.equal(out, fn(a, alpha=alpha))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_the_current_one():
    fn = _available("triton").load()
    assert run_syrk_case(fn, SyrkCase(300, 200, batch=(2,)), "cuda:1") is None


def test_public_function_on_the_device():
    a = torch.randn(3, 200, 300, device=CUDA).half()
    compiled = torch.compile(lambda x: syrk(x, alpha=0.5) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a), syrk(a, alpha=0.5) + 1)
