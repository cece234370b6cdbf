"""Choosing per shape: what a verdict depends on, the file and what may be wrong with it, and what the choice does."""

import dataclasses
import json
import multiprocessing
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dmuon_core import NewtonSchulz, export_verdicts, tune, use_verdicts
from dmuon_core import env as environment
from dmuon_core.normalize import normalize_into
from dmuon_core.notices import warn_once
from dmuon_core.syrk import ladder, loose, normalizers, products, verdicts
from dmuon_core.syrk.builtin import TORCH, torch_syrk
from dmuon_core.syrk.contract import API, ProductSpec, SyrkSpec, with_config
from dmuon_core.syrk.extras import CheckedExtras
from dmuon_core.syrk.ladder import KernelChoice, Loaded
from dmuon_core.syrk.verdicts import Verdict, batch_class, operands_key

CPU = torch.device("cpu")
KEY = "float16 k · · 2x64x96"


@pytest.fixture(autouse=True)
def _own_book(tmp_path, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_book", verdicts._Book())
    monkeypatch.setattr(products, "_extras", CheckedExtras())
    monkeypatch.setattr(loose, "_extras", CheckedExtras())
    monkeypatch.setattr(normalizers, "_extras", CheckedExtras())
    warn_once.cache_clear()


def forget(monkeypatch):
    """As a new process would start."""
    monkeypatch.setattr(verdicts, "_book", verdicts._Book())


def test_keys_tell_apart_what_changes_the_time():
    a = torch.empty(2, 64, 96, dtype=torch.float16)
    square = torch.empty(2, 64, 64, dtype=torch.float16)
    tall = torch.empty(2, 96, 64, dtype=torch.float16).mT
    keys = {
        operands_key(*each)
        for each in [
            (a, None, None),
            (tall, None, None),
            (a, a, None),
            (a, tall, None),
            (a, None, square),
            (a.bfloat16(), None, None),
            (a[:1], None, None),
            (a[:, :32], None, None),
        ]
    }
    assert len(keys) == 8
    assert operands_key(a, None, None) == KEY
    assert [batch_class(batch) for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 3, 4, 8, 8, 16, 16, 32]


def test_verdicts_are_kept_over_processes(monkeypatch):
    verdicts.add(CPU, {KEY: Verdict("torch", "tile-7", 12.5)})
    forget(monkeypatch)
    assert verdicts.find(CPU, KEY) == (Verdict("torch", "tile-7", 12.5),)
    assert not verdicts.find(CPU, KEY + "0")


def test_verdicts_that_are_not_kept(monkeypatch, tmp_path):
    verdicts.add(CPU, {KEY: Verdict("torch")}, keep=False)
    assert verdicts.find(CPU, KEY) == (Verdict("torch"),)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 99}', '{"format": 1, "machine": "another", "verdicts": {}}', "\x00\xff"],
)
def test_a_file_of_another_kind_is_ignored_with_one_warning(monkeypatch, content):
    path = verdicts._file(verdicts.machine(CPU))
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match=r"verdicts-.*are ignored"):
        assert not verdicts.find(CPU, KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verdicts.find(CPU, KEY)
    verdicts.add(CPU, {KEY: Verdict("torch")})
    assert verdicts.find(CPU, KEY) == (Verdict("torch"),)


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DMUON_CACHE_DIR", str(blocked / "below"))
    with pytest.warns(RuntimeWarning, match="stay in this process"):
        verdicts.add(CPU, {KEY: Verdict("torch")})
    assert verdicts.find(CPU, KEY) == (Verdict("torch"),)


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("DMUON_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(environment.Path, "home", homeless)
    verdicts.add(CPU, {KEY: Verdict("torch")})
    assert verdicts.find(CPU, KEY) == (Verdict("torch"),)


def _write(number):
    verdicts.add(CPU, {f"key {number} {i}": Verdict("torch", None, float(i)) for i in range(200)})


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path, monkeypatch):
    """A reader once met half of a file."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    (path,) = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["verdicts"]) >= 200


def test_exported_verdicts_are_used_elsewhere(monkeypatch):
    verdicts.add(CPU, {KEY: Verdict("torch", None, 1.0)}, keep=False)
    exported = json.loads(json.dumps(export_verdicts()))
    forget(monkeypatch)
    before = verdicts.epoch()
    use_verdicts(exported)
    assert verdicts.epoch() != before
    assert verdicts.find(CPU, KEY) == (Verdict("torch", None, 1.0),)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"format": 2, "machines": {}},
        {"format": 1, "machines": {"x": {"k": {"y": 1}}}},
        {"format": 1, "machines": {"x": {"k": {"kernel": "triton", "microseconds": "12"}}}},
        {"format": 1, "machines": {"x": {"k": {"kernel": "triton", "config": ["tile"]}}}},
        {"format": 1, "machines": {"x": {"k": {"kernel": None}}}},
    ],
)
def test_verdicts_of_another_form_are_refused(wrong):
    with pytest.raises(ValueError, match="use_verdicts takes what export_verdicts returned"):
        use_verdicts(wrong)


def backend(name, priority, **options):
    calls = []

    def fn(*args, config=None, **kwargs):
        calls.append(config)
        return torch_syrk(*args, **kwargs)

    return Loaded(SyrkSpec(name, API, "test", priority, lambda device: None, lambda: fn, **options), fn), calls


@pytest.fixture
def two():
    """A ladder of two backends, one with configurations, ranked for CPU operands."""
    first, first_calls = backend("first", 90)
    second, second_calls = backend("second", 80, configs=lambda a, b, c: ("small", "large"))
    return (first, second), {"first": first_calls, "second": second_calls}


def ranked(rungs, a, key=KEY):
    return ladder._ranked(rungs, a, None, None, key)


def test_a_verdict_puts_its_kernel_first_in_its_configuration(two):
    rungs, calls = two
    a = torch.randn(2, 64, 96).half()
    assert [each.spec.name for each in ranked(rungs, a)] == ["first", "second"]
    verdicts.add(CPU, {KEY: Verdict("second", "large")}, keep=False)
    order = ranked(rungs, a)
    assert [each.spec.name for each in order] == ["second", "first"]
    order[0].fn(a)
    assert calls["second"] == ["large"]


@pytest.mark.parametrize("stale", [Verdict("second", "gone"), Verdict("absent")])
def test_a_verdict_that_no_longer_fits_is_passed_over(two, stale):
    verdicts.add(CPU, {KEY: stale}, keep=False)
    assert [each.spec.name for each in ranked(two[0], torch.randn(2, 64, 96).half())] == ["first", "second"]


def test_predictions_order_the_shapes_nobody_measured(two):
    slow, _ = backend("slow", 90, predict=lambda batch, m, k, device: 2e-6 * batch)
    fast, _ = backend("fast", 70, predict=lambda batch, m, k, device: 1e-6 * m)
    silent = two[0][0]
    rungs = (slow, silent, fast)
    names = [each.spec.name for each in ranked(rungs, torch.randn(2, 64, 96).half())]
    assert names == ["slow", "first", "fast"]
    names = [each.spec.name for each in ranked(rungs, torch.randn(64, 2, 96).half())]
    assert names == ["fast", "first", "slow"]


def test_an_exception_in_a_backends_check_is_a_reason(monkeypatch):
    def broken(a, b, c):
        raise KeyError("stride")

    choice = KernelChoice("auto")
    fussy, _ = backend("fussy", 90, rejects=broken)
    choice._ladders[CPU] = (fussy, Loaded(TORCH, torch_syrk))
    choice(torch.randn(4, 8))
    assert choice.launches == {"torch": 1}
    choice._ladders[CPU] = (fussy,)
    with pytest.raises(RuntimeError, match="its check of operands failed: KeyError"):
        choice(torch.randn(4, 8))


def test_deterministic_choices_know_no_verdicts(monkeypatch, two):
    """Asked for operands on a GPU, where verdicts are looked up; of them this needs no more than shapes."""
    assert NewtonSchulz(deterministic=True).kernel.deterministic
    asked = []
    monkeypatch.setattr(verdicts, "find", lambda device, key: asked.append(key) or (Verdict("second", "large"),))
    monkeypatch.setattr(ladder, "computes", lambda device: True)
    with FakeTensorMode():
        a = torch.empty(2, 64, 96, dtype=torch.float16, device="cuda:0")
    for deterministic, first in ((False, "second"), (True, "first")):
        choice = KernelChoice("auto", deterministic=deterministic)
        choice._ladders[a.device] = two[0]
        asked.clear()
        assert choice.order(a, None, None)[0].spec.name == first
        assert bool(asked) != deterministic
        assert choice._measures(a.device) != deterministic


def test_deterministic_matrices_begin_at_addresses_alike(monkeypatch):
    """cuBLAS chooses by alignment too: the second matrix of an odd stack would get other bits than alone."""
    parts = []
    monkeypatch.setattr(NewtonSchulz, "_iterate", lambda self, x, schedule: parts.append(x) or x)
    ns = NewtonSchulz(deterministic=True)
    ns._fresh(torch.empty(3, 5, 7, device="meta"), ns.schedule())
    assert [part.shape for part in parts] == [(1, 5, 7)] * 3
    assert [part.storage_offset() for part in parts] == [0] * 3


def test_tuning_needs_a_gpu():
    with pytest.raises(ValueError, match="tune measures on a CUDA device, got cpu"):
        tune([(1, 64, 64)], device="cpu")


def test_a_configuration_reaches_the_kernel(two):
    (_, second), calls = two
    with_config(second.fn, "small")(torch.randn(4, 8))
    with_config(second.fn, None)(torch.randn(4, 8))
    assert calls["second"] == ["small", None]


def test_the_environment_turns_graphs_off(monkeypatch):
    for value, on in (("0", False), ("off", False), ("", True), ("1", True)):
        monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", value)
        assert environment.read_settings().ns_cuda_graph is on


def test_keys_of_inexact_and_of_whole_products():
    """Where nothing is saved, as with A Aᵀ alone, both kinds share what was measured."""
    x, r = torch.randn(16, 64, 96).half(), torch.randn(16, 64, 64).half()
    assert verdicts.operands_key(x, None, None, exact=False) == verdicts.operands_key(x, None, None)
    assert verdicts.operands_key(r, None, r, exact=False) == "float16 k · c 16x64x64 ~"
    assert verdicts.operands_key(r, r, None, exact=False) == "float16 k k · 16x64x64 ~"
    assert verdicts.product_key(r, x) == "float16 k k product 16x64x64x96"
    assert verdicts.product_key(x, x.mT) == "float16 k m product 16x64x96x64"


@pytest.fixture
def measured(two, monkeypatch):
    """A choice that goes by verdicts on a CPU too, and the configurations in which its second backend multiplied."""
    monkeypatch.setattr(KernelChoice, "_measures", lambda self, device: True)
    calls = []

    def product(a, b, *, out, config):
        calls.append(config)
        return torch.bmm(a, b, out=out)

    rungs = (
        two[0][0],
        Loaded(
            dataclasses.replace(two[0][1].spec, product=ProductSpec(lambda: product, lambda a, b, out: ("tile-1",))),
            two[0][1].fn,
        ),
    )
    choice = KernelChoice("auto")
    choice._ladders[CPU] = rungs
    return choice, calls


def test_a_whole_product_runs_where_it_was_measured_to_be_faster(measured):
    """Of the kernels that are there: a verdict on another one's time says nothing here."""
    choice, _ = measured
    r = torch.randn(2, 64, 64).half()
    half = verdicts.operands_key(r, r, None, exact=False)
    whole = verdicts.product_key(r, r)
    assert not choice.prefers_whole(r, r, r)
    verdicts.add(CPU, {half: Verdict("second", "large", 5.0)}, keep=False)
    assert not choice.prefers_whole(r, r, r)
    verdicts.add(CPU, {whole: Verdict(verdicts.BMM, None, 4.0)}, keep=False)
    assert choice.prefers_whole(r, r, r)
    verdicts.add(CPU, {whole: Verdict(verdicts.BMM, None, 6.0)}, keep=False)
    assert not choice.prefers_whole(r, r, r)
    verdicts.add(CPU, {whole: Verdict("absent", "x", 1.0)}, keep=False)
    assert not choice.prefers_whole(r, r, r)


def test_products_go_to_what_was_measured_and_else_to_torch(measured):
    choice, calls = measured
    a, b = torch.randn(2, 64, 64), torch.randn(2, 64, 96)
    out = torch.empty(2, 64, 96)
    key = verdicts.product_key(a, b)
    for verdict, ran in (
        (None, []),
        # Once to check it.
        (Verdict("second", "tile-1", 1.0), ["tile-1", "tile-1"]),
        (Verdict("second", "tile-1", 2.0), ["tile-1"]),
        (Verdict("second", "gone", 1.0), []),
        (Verdict("absent", "tile-1", 1.0), []),
        (Verdict(verdicts.BMM, None, 1.0), []),
    ):
        calls.clear()
        if verdict is not None:
            verdicts.add(CPU, {key: verdict}, keep=False)
        choice.multiply(a, b, out=out)
        assert calls == ran, verdict


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_is_checked_before_it_runs(measured, by_columns):
    """An optional package may be broken in any way; cuBLAS then multiplies."""
    choice, calls = measured
    wrong = []

    def load():
        def product(a, b, *, out, config):
            wrong.append(config)
            return torch.bmm(a, b, out=out).add_(1.0)

        return product

    first, second = choice._ladders[CPU]
    spec = dataclasses.replace(second.spec, product=ProductSpec(load, lambda a, b, out: ("tile-1",)))
    choice._ladders[CPU] = (first, Loaded(spec, second.fn))
    a, b, out = torch.randn(2, 64, 64), torch.randn(2, 64, 96), torch.empty(2, 64, 96)
    if by_columns:
        b, out = b.mT.contiguous().mT, out.mT.contiguous().mT
    verdicts.add(CPU, {verdicts.product_key(a, b): Verdict("second", "tile-1", 1.0)}, keep=False)
    with pytest.warns(
        RuntimeWarning, match="product of 'second' in tile-1 is left out on cpu: it computes wrong values"
    ):
        choice.multiply(a, b, out=out)
    torch.testing.assert_close(out, a @ b)
    assert wrong == ["tile-1"]
    assert not calls


def test_loose_kernels_run_where_they_may(two):
    """``syrk`` promises D == D.mT; Newton-Schulz does not need it."""
    loose_calls = []

    def loose(a, b=None, c=None, **options):
        # The check at load is of other sizes.
        loose_calls.extend([options.get("config")] * (a.shape[1] == 64))
        return torch_syrk(a, b, c, **{k: v for k, v in options.items() if k != "config"})

    spec = dataclasses.replace(two[0][0].spec, load_loose=lambda: loose)
    choice = KernelChoice("auto")
    choice._ladders[CPU] = (Loaded(spec, two[0][0].fn), two[0][1])
    r = torch.randn(2, 64, 64).half()
    choice(r, r)
    assert not loose_calls
    choice(r, r, exact=False)
    assert loose_calls == [None]
    assert choice.launches == {"first": 2}


def _not_there():
    raise ImportError("no quack")


def _raises(*operands, **options):
    raise AssertionError("no such tile")


@pytest.mark.parametrize(
    ("load", "reason"), [(_not_there, "no quack"), (lambda: _raises, "no such tile")], ids=["load", "run"]
)
def test_a_product_that_does_not_run_is_left_out_with_one_warning(measured, load, reason):
    """A verdict that ships names what worked with other versions; here it must not end a step."""
    choice, _ = measured
    _, second = choice._ladders[CPU]
    spec = dataclasses.replace(second.spec, product=ProductSpec(load, lambda a, b, out: ("tile-1",)))
    choice._ladders[CPU] = (Loaded(spec, second.fn),)
    a, b, out = torch.randn(2, 64, 64).half(), torch.randn(2, 64, 96).half(), torch.empty(2, 64, 96).half()
    verdicts.add(CPU, {verdicts.product_key(a, b): Verdict("second", "tile-1", 1.0)}, keep=False)
    with pytest.warns(RuntimeWarning, match=f"tile-1 is left out on cpu: it failed: .*{reason}") as given:
        found = [dataclasses.replace(choice, _products={}).multiply(a, b, out=out).clone() for _ in range(2)]
    assert all(torch.equal(each, torch.bmm(a, b)) for each in found)
    assert len(given) == 1


def test_a_product_is_checked_in_the_layout_that_it_gets(measured):
    """X Xᵀ has a column-major second factor and a row-major result, which a check of X alone does not try."""
    choice, _ = measured
    _, second = choice._ladders[CPU]

    def product(a, b, *, out, config):
        return torch.bmm(a, b, out=out).mul_(1.0 if (b.stride(-1) == 1) == (out.stride(-1) == 1) else 1.01)

    spec = dataclasses.replace(second.spec, product=ProductSpec(lambda: product, lambda a, b, out: ("tile-1",)))
    choice._ladders[CPU] = (Loaded(spec, second.fn),)
    x, out = torch.randn(2, 64, 96).half(), torch.empty(2, 64, 64).half()
    verdicts.add(CPU, {verdicts.product_key(x, x.mT): Verdict("second", "tile-1", 1.0)}, keep=False)
    with pytest.warns(RuntimeWarning, match="computes wrong values"):
        choice.multiply(x, x.mT, out=out)
    assert torch.equal(out, torch.bmm(x, x.mT))


def _wrong_loose(a, b=None, c=None, **options):
    return torch_syrk(a, b, c, **options).mul_(1.01)


@pytest.mark.parametrize(
    ("load", "reason"),
    [(_not_there, "no quack"), (lambda: _raises, "no such tile"), (lambda: _wrong_loose, "wrong values")],
    ids=["does not load", "does not run", "wrong"],
)
def test_an_inexact_kernel_that_fails_leaves_the_exact_one(two, load, reason):
    choice = KernelChoice("auto")
    (first, _), calls = two
    choice._ladders[CPU] = (Loaded(dataclasses.replace(first.spec, load_loose=load), first.fn),)
    r = torch.randn(2, 64, 64).half()
    with pytest.warns(RuntimeWarning, match=f"inexact form of kernel 'first' is left out on cpu: .*{reason}") as given:
        found = [choice(r, r, exact=False) for _ in range(2)]
    assert all(torch.equal(each, torch_syrk(r, r)) for each in found)
    assert len(given) == 1
    assert len(calls["first"]) == 2


def test_nothing_is_checked_in_a_capture(monkeypatch, two):
    """A check reads its result, which ends the user's capture; what was not checked before does not run there."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    unasked = ProductSpec(lambda: pytest.fail("loaded"), lambda a, b, out: ())
    options = {"dtype": torch.float16, "columns": (False, False), "device": device}
    assert products.checked_product("second", unasked, "tile-1", **options) is None
    untried = {"load_loose": lambda: pytest.fail("loaded"), "normalize": lambda: pytest.fail("loaded")}
    spec = dataclasses.replace(two[0][0].spec, **untried)
    assert loose.loose_kernel(spec, device) is None
    assert normalizers.normalizer_of([spec], device) is normalize_into
    assert not any(map(len, (products._extras, loose._extras, normalizers._extras)))
