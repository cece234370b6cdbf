"""Which kernel runs: every rung under patched probes, byte for byte, and what goes wrong on the way."""

import copy
import dataclasses
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dmuon_core
from dmuon_core import Muon, NewtonSchulz, SyrkSpec, __main__, get_backend_status, get_ns_backend, notices, report
from dmuon_core.iteration import FreshArithmetic, iterate
from dmuon_core.normalize import normalize
from dmuon_core.syrk import discovery, ladder
from dmuon_core.syrk.builtin import CUBLAS, TORCH, loose_cublas_syrk, torch_syrk
from dmuon_core.syrk.contract import API
from dmuon_core.syrk.discovery import Found
from dmuon_core.testing import SPECTRA, judge


def supported(device):
    return None


def spec(name, priority, origin="DMuon internal", *, probe=supported, load=lambda: torch_syrk, **options) -> SyrkSpec:
    return SyrkSpec(name, API, origin, priority, probe, load, **options)


QUACK = spec("quack", 90, "Tri Dao quack")
CUTE = spec("cute_sm80", 80)
TRITON = spec("triton", 70)


def no(reason):
    return lambda device: reason


@pytest.fixture
def machine(monkeypatch):
    """``machine(specs, capability)``: a pretended machine with these backends; None is one without CUDA."""

    def pretend(specs, capability=None):
        found = [Found(s.name, "dmuon-kernels 0.1.0", s) for s in specs]
        found += [
            Found(s.name, "dmuon-core 0.1.0", s) for s in (CUBLAS, TORCH) if s.name not in {x.name for x in specs}
        ]
        registry = tuple(sorted(found, key=lambda f: -f.spec.priority))
        monkeypatch.setattr(ladder, "discover", lambda: registry)
        monkeypatch.setattr(ladder, "_loaded", {})
        notices.warn_once.cache_clear()
        if capability is not None:
            device = torch.device("cuda", 0)
            for module in (ladder, report):
                monkeypatch.setattr(module, "default_device", lambda: device)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
            monkeypatch.setattr(ladder, "_accuracy_complaint", lambda fn, device: None)

    return pretend


def cublas_here():
    return dataclasses.replace(CUBLAS, probe=supported, load=lambda: torch_syrk)


@pytest.mark.parametrize(
    ("specs", "capability", "line"),
    [
        ([QUACK, CUTE, TRITON], (9, 0), "Gram NS · kernel=quack (SM90, Tri Dao quack)"),
        ([CUTE, TRITON], (8, 0), "Gram NS · kernel=cute_sm80 (SM80, DMuon internal)"),
        ([TRITON], (9, 0), "Gram NS · kernel=triton (SM90, DMuon internal)"),
        ([], (8, 0), "Gram NS · kernel=cublas (SM80, universal fallback)"),
        ([], None, "Gram NS · kernel=torch (CPU, reference)"),
    ],
)
def test_the_five_lines(machine, specs, capability, line):
    machine([*specs, cublas_here()] if capability else specs, capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert get_ns_backend() == line


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (12, 0)])
def test_unknown_architectures_fall_back(machine, capability):
    machine([dataclasses.replace(TRITON, probe=no("not for this one")), cublas_here()], capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert get_ns_backend() == f"Gram NS · kernel=cublas (SM{capability[0]}{capability[1]}, universal fallback)"


def test_each_probe_that_refuses_moves_one_rung_down(machine):
    order = [QUACK, CUTE, TRITON, cublas_here()]
    for i, expected in enumerate(order):
        refused = [dataclasses.replace(s, probe=no("absent")) for s in order[:i]]
        machine([*refused, *order[i:]], (9, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert f"kernel={expected.name} " in get_ns_backend()


@pytest.mark.parametrize("name", ["quack", "triton"])
def test_an_explicit_choice_never_falls_back(machine, name):
    machine(
        [
            dataclasses.replace(QUACK, probe=no("no quack-kernels here")),
            dataclasses.replace(TRITON, probe=no("no C compiler")),
        ]
    )
    with pytest.raises(RuntimeError) as caught:
        NewtonSchulz(kernel=name)
    text = str(caught.value)
    assert f"kernel={name!r}" in text
    for reason in (
        "no quack-kernels here",
        "no C compiler",
        "torch: available",
        "dmuon-core[kernels]",
        "dmuon-kernels[quack]",
    ):
        assert reason in text


def test_an_explicit_choice_stays_where_operands_do_not_fit(machine):
    picky = spec("picky", 60, rejects=lambda a, b, c: "M must divide by 8" if a.shape[-2] % 8 else None)
    machine([picky])
    ns = NewtonSchulz(kernel="picky")
    assert ns(torch.randn(8, 16)).shape == (8, 16)
    with pytest.raises(RuntimeError, match=r"picky.*does not take these operands.*M must divide by 8"):
        ns(torch.randn(7, 16))
    assert set(ns.kernel.launches) == {"picky"}


def test_auto_hands_operands_down_the_ladder(machine):
    picky = spec("picky", 60, rejects=lambda a, b, c: "M must divide by 8" if a.shape[-2] % 8 else None)
    machine([picky, cublas_here()], (9, 0))
    choice = ladder.KernelChoice.of("auto")
    device = torch.device("cuda", 0)
    choice._ladders[torch.device("cpu")] = choice.ladder(device)
    choice(torch.randn(7, 16))
    choice(torch.randn(8, 16))
    assert choice.launches == {"cublas": 1, "picky": 1}


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no name x"),
        AttributeError("gone"),
        RuntimeError("driver"),
        OSError("lib"),
        AssertionError(),
        KeyError("k"),
    ],
)
@pytest.mark.parametrize("where", ["probe", "load", "first call"])
def test_any_exception_in_an_optional_package_is_a_reason(machine, monkeypatch, where, error):
    def fail(*_, **__):
        raise error

    broken = {"probe": {"probe": fail}, "load": {"load": fail}, "first call": {"load": lambda: fail}}[where]
    machine([spec("broken", 60, **broken), cublas_here()], (9, 0))
    if where == "first call":
        monkeypatch.setattr(ladder, "_accuracy_complaint", lambda fn, device: fn() if fn is fail else None)
    with pytest.warns(RuntimeWarning, match=type(error).__name__):
        assert "kernel=cublas" in get_ns_backend()
    assert type(error).__name__ in get_backend_status("cuda:0")["broken"]["reason"]
    with pytest.raises(RuntimeError, match=type(error).__name__):
        NewtonSchulz(kernel="broken")


def test_a_kernel_that_computes_wrong_values_is_left_out(machine):
    def wrong(*args, **kwargs):
        return torch_syrk(*args, **kwargs) + 1

    machine([spec("wrong", 60, load=lambda: wrong)])
    with (
        pytest.warns(RuntimeWarning, match="computes wrong values"),
        pytest.raises(RuntimeError, match="computes wrong values"),
    ):
        NewtonSchulz(kernel="wrong")


def test_a_failure_after_a_success_raises(machine):
    calls = []

    def tired(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("illegal memory access")
        return torch_syrk(*args, **kwargs)

    machine([spec("tired", 60, load=lambda: tired)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        NewtonSchulz(kernel="tired")(torch.randn(8, 16))


def test_warnings_come_once(machine):
    machine([spec("broken", 60, load=lambda: 1 / 0), cublas_here()], (9, 0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            get_ns_backend()
    texts = [str(w.message) for w in seen]
    assert len(texts) == len(set(texts)) == 2
    assert any("ZeroDivisionError" in text for text in texts)
    assert any("runs on cuBLAS" in text and "dmuon-core[kernels]" in text for text in texts)


def test_the_environment_replaces_auto_and_only_auto(machine, monkeypatch):
    machine([TRITON])
    monkeypatch.setenv("DMUON_NS_KERNEL", "triton")
    assert NewtonSchulz().kernel.name == "triton"
    assert NewtonSchulz(kernel="torch").kernel.name == "torch"
    assert get_ns_backend() == "Gram NS · kernel=triton (CPU, DMuon internal)"
    monkeypatch.setenv("DMUON_NS_KERNEL", "cudnn")
    with pytest.raises(RuntimeError, match=r"'cudnn' \(from DMUON_NS_KERNEL\).*no backend has this name"):
        NewtonSchulz()
    with pytest.raises(RuntimeError, match="triton: available"):
        Muon([torch.nn.Parameter(torch.zeros(4, 4))])
    monkeypatch.setenv("DMUON_NS_KERNEL", "")
    assert NewtonSchulz().kernel.name == "auto"


def test_auto_on_a_cpu_never_takes_an_interpreted_kernel(machine):
    machine([TRITON])
    ns = NewtonSchulz()
    ns(torch.randn(8, 16))
    assert set(ns.kernel.launches) == {"torch"}


def test_two_optimizers_with_different_kernels_do_not_meet(machine):
    machine([TRITON])
    params = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(2)]
    first = Muon([params[0]], ns_backend=NewtonSchulz(kernel="triton"))
    second = Muon([params[1]], ns_backend=NewtonSchulz("direct", kernel="torch"))
    for p in params:
        p.grad = torch.randn_like(p)
    first.step()
    second.step()
    first.step()
    assert get_ns_backend(first).startswith("Gram NS · kernel=triton (CPU, DMuon internal) · launches: triton ")
    assert get_ns_backend(second).startswith("Direct NS · kernel=torch (CPU, reference) · launches: torch ")
    assert first.newton_schulz.kernel.launches["triton"] == 2 * 14
    assert second.newton_schulz.kernel.launches["torch"] == 10


def test_the_line_of_an_optimizer_before_its_first_step():
    optimizer = Muon([torch.nn.Parameter(torch.zeros(4, 4))])
    assert get_ns_backend(optimizer) == "Gram NS · kernel=torch (CPU, reference)"
    with pytest.raises(TypeError, match="takes a Muon or a NewtonSchulz, got int"):
        get_ns_backend(3)


def test_the_line_stays_with_the_kernel_that_ran_most(machine):
    """It once looked for that kernel on the device of the last call alone, and found none."""
    machine([TRITON])
    ns = NewtonSchulz(kernel="triton")
    ns(torch.randn(8, 16))
    ns.kernel.launches["triton"] += 10
    ns.kernel._ladders = {torch.device("cpu"): (ladder.Loaded(TORCH, torch_syrk),)}
    ns(torch.randn(8, 16))
    assert get_ns_backend(ns).startswith("Gram NS · kernel=triton (CPU, DMuon internal) · launches: triton ")


def test_a_copy_counts_its_own_launches(machine):
    machine([])
    ns = NewtonSchulz()
    ns(torch.randn(8, 16))
    assert get_ns_backend(copy.deepcopy(ns)) == "Gram NS · kernel=torch (CPU, reference)"


def test_no_backend_at_all_says_why(machine):
    def wrong(*args, **kwargs):
        return torch_syrk(*args, **kwargs) + 1

    machine([dataclasses.replace(TORCH, load=lambda: wrong)])
    with (
        pytest.warns(RuntimeWarning, match="computes wrong values"),
        pytest.raises(RuntimeError, match="no backend passes its check"),
    ):
        get_ns_backend()


def test_faked_tensors_do_not_spoil_the_kernels(machine):
    """A first use under a fake mode once left every kernel out for the rest of the process."""
    machine([])
    ns = NewtonSchulz()
    with FakeTensorMode():
        assert ns(torch.empty(8, 16)).shape == (8, 16)
    assert ns(torch.randn(8, 16)).norm() > 1
    assert get_backend_status("cpu")["torch"]["available"]


def test_the_status_command_explains_an_unknown_kernel(monkeypatch, capsys):
    monkeypatch.setenv("DMUON_NS_KERNEL", "cudnn")
    monkeypatch.setattr(sys, "argv", ["dmuon_core", "status"])
    with pytest.raises(SystemExit, match="1"):
        __main__.main()
    assert "'cudnn' (from DMUON_NS_KERNEL)" in capsys.readouterr().err


def test_names_taken_twice(monkeypatch):
    class Entry:
        name, value = "torch", "elsewhere:TORCH"

        class dist:
            name, version = "impostor", "1.0"

        @staticmethod
        def load():
            return spec("torch", 99)

    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: [Entry])
    discovery.discover.cache_clear()
    try:
        found = {f.name: f for f in discovery.discover()}
    finally:
        discovery.discover.cache_clear()
    assert found["torch"].spec is TORCH
    assert "the name is taken" in found["torch@impostor 1.0"].reason


def test_a_backend_with_another_contract_number(monkeypatch):
    class Entry:
        name, value = "old", "old:SPEC"

        class dist:
            name, version = "old-kernels", "9.1"

        @staticmethod
        def load():
            return dataclasses.replace(TRITON, name="old", api=API + 1)

    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: [Entry])
    discovery.discover.cache_clear()
    try:
        (old,) = [f for f in discovery.discover() if f.name == "old"]
    finally:
        discovery.discover.cache_clear()
    assert old.spec is None
    assert "old-kernels 9.1" in old.reason
    assert "dmuon-core" in old.reason


def test_status_has_every_backend_with_a_reason():
    status = get_backend_status("cpu")
    assert status["torch"]["available"]
    assert "CUDA devices only" in status["cublas"]["reason"]
    assert dmuon_core.__version__


def test_status_says_how_an_available_backend_runs(machine):
    """Notes are for people: one that fails must not take the status with it, and a missing backend has none."""

    def broken(device):
        raise AssertionError("kaboom")

    absent = spec("absent", 40, probe=no("no card"), notes=lambda device: "fine")
    machine([spec("noted", 60, notes=lambda device: f"well on {device}"), spec("broken", 50, notes=broken), absent])
    status = get_backend_status("cpu")
    assert status["noted"]["notes"] == "well on cpu"
    assert status["broken"]["notes"] == "its notes failed: AssertionError: kaboom"
    assert (status["absent"]["reason"], status["absent"]["notes"]) == ("no card", "")
    assert status["torch"]["notes"] == ""


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_cublas_without_mirroring(batch, beta):
    """The arithmetic is torch's on any device: both halves, C and the scalars, in memory of its own and in ``out``."""
    a, b = torch.randn(*batch, 24, 40), None
    c = torch.randn(*batch, 24, 24) if beta else None
    want = 2.0 * a @ a.mT + (0.0 if c is None else beta * c)
    out = torch.full((*batch, 24, 24), float("nan"))
    for got in (
        loose_cublas_syrk(a, b, c, alpha=2.0, beta=beta),
        loose_cublas_syrk(a, b, c, alpha=2.0, beta=beta, out=out),
    ):
        torch.testing.assert_close(got, want)
    assert got is out
    scalar = torch.tensor(2.0)
    torch.testing.assert_close(loose_cublas_syrk(a, b, c, alpha=scalar, beta=beta, out=out), want)


def test_cublas_holds_the_singular_value_bound():
    """With a B of its own unmirrored too, the halves of R drift apart: σ_max 1.182 where 1.174 is allowed."""
    x = SPECTRA["linear decay"](256, 768, torch.Generator().manual_seed(0)).float()
    ns = NewtonSchulz()

    def fn(a, b=None, c=None, **options):
        # In half precision as on a GPU: sums in fp32, one rounding.
        wide = [None if each is None else each.float() for each in (a, b, c)]
        return loose_cublas_syrk(*wide, **options).to(a.dtype)

    arithmetic = FreshArithmetic(fn)
    (y,) = iterate("gram", (normalize(x[None], torch.float16, exact=True),), ns.schedule().segments, arithmetic)
    got = judge(x, y[0], ns.schedule().triples)
    assert got.sigma_max <= got.sigma_bound, got
