"""The kernels that ship compiled, on a CUDA device: their bits, and that nothing but the driver is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dmuon_core.testing.syrk import SyrkCase, build_operands, run_syrk_case, syrk_cases
from dmuon_kernels import routes
from dmuon_kernels.aot import shipped
from dmuon_kernels.aot.driver import DriverError, encode_tensor_map
from dmuon_kernels.aot.manifest import TRITON, read_cubin, read_manifest
from dmuon_kernels.aot.table import tabled_configs, tabled_launches
from dmuon_kernels.triton_config import CONFIGS, AnyConfig
from dmuon_kernels.triton_launch import Launch, Operands, Scalars, plan
from dmuon_kernels.triton_syrk import triton_syrk

CUDA = torch.device("cuda", 0)


def _complaint() -> str | None:
    return shipped.complaint(CUDA) if torch.cuda.is_available() else "needs a CUDA device"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_complaint() is not None, reason=str(_complaint()))]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ALL: dict[str, AnyConfig] = {
    **{config.label: config for config in CONFIGS.values()},
    **({config.label: config for config in tabled_configs()} if HOPPER else {}),
}


def _plan(x: Operands, config: AnyConfig) -> Launch:
    return plan(x, config, torch.cuda.get_device_properties(CUDA).multi_processor_count)


def _operands(form: str, m: int, k: int, batch: int = 3) -> Operands:
    """``plain``: A alone in fp16; ``full``: B, C and device scalars in bf16; ``tall``: A column-major."""
    generator = torch.Generator(CUDA).manual_seed(m + k)

    def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, generator=generator).to(dtype)

    dtype = torch.bfloat16 if form == "full" else torch.float16
    d = torch.full((batch, m, m), float("nan"), device=CUDA, dtype=dtype)
    if form == "tall":
        return Operands(randn(batch, k, m, dtype=dtype).mT, None, None, d, Scalars.of(0.5, 0.0))
    a = randn(batch, m, k, dtype=dtype)
    if form == "plain":
        return Operands(a, None, None, d, Scalars.of(1.0, 0.0))
    c = randn(batch, m, m, dtype=dtype)
    scalars = Scalars.of(torch.rand(batch, device=CUDA), torch.rand(batch, device=CUDA))
    return Operands(a, a.clone(), c + c.mT, d, scalars)


@pytest.mark.parametrize("form", ["plain", "full", "tall"])
@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_same_bits_as_compiled_here(config, form):
    """Shipped and compiled kernels stand for one another, from call to call and from machine to machine."""
    compiled = pytest.importorskip("dmuon_kernels.triton_jit")
    if routes.compiler_complaint() is not None:
        pytest.skip(routes.compiler_complaint())
    for m, k in ((272, 528), (1056, 1024)) if config != CONFIGS["unaligned"] else ((265, 519),):
        x = _operands(form, m, k)
        launch = _plan(x, config)
        found = shipped.find(launch, CUDA)
        assert found is not None, "a tabled configuration ships"
        kernel, fitted = found
        kernel.launch(fitted, 0)
        first = x.d.clone()
        x.d.fill_(float("nan"))
        compiled.run(launch)
        assert not first.isnan().any()
        assert torch.equal(first, x.d)


# An import of triton fails then, and a look for it finds nothing.
BLOCKED = "import runpy, sys; sys.modules['triton'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("case", syrk_cases()[::9], ids=lambda case: case.name)
def test_conformance_of_what_is_compiled_here(case, monkeypatch):
    """Elsewhere the shipped kernels run: these are the same launches by the compiler's."""
    if routes.compiler_complaint() is not None:
        pytest.skip(routes.compiler_complaint())
    monkeypatch.setattr(shipped, "find", lambda launch, device: None)
    refusal = run_syrk_case(triton_syrk, case, CUDA, rejects=routes.rejects)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The report of a process without Triton and without a C compiler."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    environment |= {"PATH": str(tmp_path_factory.mktemp("empty")), "DMUON_CACHE_DIR": str(tmp_path_factory.mktemp("c"))}
    script = Path(__file__).parent / "without_triton.py"
    words = [sys.executable, "-c", BLOCKED, script]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_conformance_without_triton_and_compiler(alone):
    """The purpose: torch and the driver are enough. What is refused, other backends take."""
    assert alone["modules"] == ["triton"]  # the entry that blocks it
    assert set(alone["launched"]) == {"shipped"}
    assert len(alone["refused"]) < alone["cases"] / 2
    odd = [(name, why) for name, why in alone["refused"] if "nothing can be compiled" not in why and "takes" not in why]
    assert not odd


def test_newton_schulz_without_triton_and_compiler(alone):
    assert "kernel=triton" in alone["newton_schulz"]["line"]
    assert all(error < 0.02 for error in alone["newton_schulz"]["errors"].values())


def test_status_says_that_nothing_can_be_compiled(alone):
    """Who reports a slow call must see which kernels ran."""
    notes = alone["status"]["triton"]["notes"]
    assert notes.startswith("shipped kernels only: the package triton is not installed")
    assert "shipped" in notes.partition("launched: ")[2]
    assert "none can be compiled: the package triton is not installed" in alone["complaint"]


def test_sm80_kernels_by_the_drivers_compiler():
    """No card of 8.x is here: their code at least computes right, loaded by their manifest, from the PTX between."""
    pytest.importorskip("triton")
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    import build_cubins
    import triton

    launches = tabled_launches(80)
    shipping = read_manifest().artefacts[80]
    for name, form in (("large", "plain"), ("large", "full"), ("small", "tall"), ("tiny", "full")):
        x = _operands(form, 264, 512)
        launch = shipped.canonical(_plan(x, CONFIGS[name]))
        variant = shipped.variant_of(launch)
        variant = variant if variant in shipping else shipped._masking_k(variant)
        built = build_cubins.compile_variant(variant, launches[variant], 80)
        if triton.__version__ == TRITON:
            assert build_cubins.artefact_of(built, shipping[variant].offset) == shipping[variant]
        kernel = shipped.ShippedKernel(shipping[variant], built.ptx.encode())
        kernel.launch(launch, 0)
        first = x.d.clone()
        found = shipped.find(launch, CUDA)
        assert found is not None
        found[0].launch(found[1], 0)
        assert torch.equal(first, x.d)


def _shipped_only(call):
    """The call's result; it must have been shipped kernels alone."""
    before = routes.launched["compiled"]
    result = call()
    assert routes.launched["compiled"] == before
    return result


def test_a_thousand_launches_give_the_same_bits():
    operands = build_operands(SyrkCase(904, 256, torch.float16, (4,), c="lower", out="c", beta=0.5), CUDA)
    before = operands.c.view.clone()
    want = _shipped_only(lambda: operands.call(triton_syrk)).clone()
    differences = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(1000):
        operands.c.view.copy_(before)
        differences += (_shipped_only(lambda: operands.call(triton_syrk)) != want).sum()
    assert differences.item() == 0


def test_streams_and_threads_do_not_meet():
    """Parameters of a launch lie in memory until the driver has read them; each thread has its own."""
    inputs = [torch.randn(2, 512, 640, device=CUDA).half() for _ in range(4)]
    want = [triton_syrk(a) for a in inputs]
    torch.cuda.synchronize()
    wrong, errors = [], []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                got = [triton_syrk(inputs[i]) for _ in range(200)]
                torch.cuda.current_stream().synchronize()
                wrong.extend(d for d in got if not torch.equal(d, want[i]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong


def test_thread_that_never_called_cuda():
    """Its first call is a launch: it has no context yet."""
    x = _operands("plain", 256, 512)
    kernel, launch = shipped.find(_plan(x, CONFIGS["small"]), CUDA)
    kernel.launch(launch, 0)
    torch.cuda.synchronize()
    want = x.d.clone()
    x.d.zero_()
    torch.cuda.synchronize()
    errors = []

    def work() -> None:
        try:
            kernel.launch(launch, 0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert torch.equal(x.d, want)


COLD = """
import torch
from dmuon_kernels import routes
from dmuon_kernels.triton_syrk import triton_syrk
a = torch.randn(2, 512, 1024, device="cuda").half()
out = torch.empty(2, 512, 512, device="cuda").half()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    triton_syrk(a, out=out)
a.copy_(torch.randn_like(a))
graph.replay()
assert routes.launched == {"shipped": 1}, routes.launched
assert torch.equal(out, triton_syrk(a))
"""


def test_first_launch_of_a_process_may_be_captured():
    """A kernel is loaded in the capture then, which no compiler survives."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("aligned", [True, False])
def test_more_than_two_to_the_31_elements_in_d(aligned):
    m = 46400 if aligned else 46401
    if torch.cuda.mem_get_info()[0] < 3 * m * m:
        pytest.skip("needs 7 GB of GPU memory")
    a = torch.randint(-2, 3, (m, 16), device=CUDA).half()
    d = _shipped_only(lambda: triton_syrk(a))
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device=CUDA)
    want = a[rows].float() @ a.float().mT
    assert torch.equal(d[rows].float(), want)
    assert torch.equal(d[:, rows].float(), want.mT)


def test_more_than_two_to_the_31_elements_between_rows():
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of GPU memory")
    m, stride = 64, 2**25 + 2**20
    buffer = torch.zeros(m * stride, device=CUDA, dtype=torch.float16)
    rows = buffer.as_strided((m, 128), (stride, 1))
    rows.copy_(torch.randint(-2, 3, (m, 128), device=CUDA))
    columns = buffer.as_strided((128, m), (1, stride))
    for a in (rows, columns):
        assert torch.equal(_shipped_only(lambda a=a: triton_syrk(a)).float(), a.float() @ a.float().mT)


@pytest.mark.skipif(not HOPPER, reason="tensor maps are for compute capability 9.0")
def test_tensor_map_that_the_driver_refuses_is_named():
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled failed: 1 CUDA_ERROR_INVALID_VALUE"):
        encode_tensor_map(3, (1, 8, 8), (64, 8, 1), (1, 8, 8), element_type=6, element_bytes=2, swizzle=0)


@pytest.mark.skipif(not HOPPER, reason="the cubin of 8.0 is for another architecture than 9.0 only")
def test_cubin_of_another_architecture_is_refused_by_name():
    """The driver's reason, not a crash; where it is the first kernel to load, Triton's compiler takes over."""
    artefact = next(iter(read_manifest().artefacts[80].values()))
    with pytest.raises(DriverError, match="NO_BINARY_FOR_GPU"):
        shipped.ShippedKernel(artefact, read_cubin(80, artefact)).prepare(0)
