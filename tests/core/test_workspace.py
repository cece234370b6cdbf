"""Plans in memory that stays, tried on a CPU: the same products, the same results, nothing of another run in them."""

import gc
import itertools
import sys
import weakref

import pytest
import torch

from dmuon_core import POLAR_EXPRESS, NewtonSchulz, get_ns_backend, muon_update_, newton_schulz, workspace
from dmuon_core.batching import Piece, Stack, _cuts, by_shape, by_short_side, least_room, padded, workspace_bytes
from dmuon_core.iteration import FreshArithmetic, iterate
from dmuon_core.normalize import normalize, normalize_into
from dmuon_core.syrk.ladder import KernelChoice
from dmuon_core.testing import judge, relative_error

CPU = torch.device("cpu")


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def on_cpu(monkeypatch):
    """Newton-Schulz in half precision takes the workspace on a CPU too."""
    monkeypatch.setattr(NewtonSchulz, "_has_workspace", lambda self, device: not self.deterministic)
    monkeypatch.setattr(sys.modules["dmuon_core.newton_schulz"], "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(workspace, "_arenas", {})


@pytest.mark.parametrize("form", ["gram", "direct"])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (33, 40), (40, 33), (1, 50), (50, 1), (67, 67)], ids=str)
@pytest.mark.usefixtures("on_cpu")
def test_the_workspace_computes_the_polynomial(shape, form):
    """Padding, the transposed layout and the rotating buffers: a buffer reused too early is wrong everywhere."""
    x = gaussian(3, *shape)
    ns = NewtonSchulz(form)
    got = ns(x)
    assert got.dtype == x.dtype
    for one, result in zip(x, got, strict=True):
        verdict = judge(one, result, POLAR_EXPRESS.triples)
        assert verdict.error <= 0.02, verdict
        assert verdict.sigma_max <= verdict.sigma_bound
    assert ns.kernel.launches.total() == (14 if ns.form(min(shape), max(shape)) == "gram" else 10)


@pytest.mark.parametrize("restarts", [(), (1,), (2,), (4,), (1, 2), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("form", ["gram", "direct"])
@pytest.mark.usefixtures("on_cpu")
def test_matrices_that_share_memory_with_what_comes_next(form, restarts):
    """M×M buffers lie where X will be: for every length of a segment Q must be outside of what it is used to write."""
    for lengths in ((32,), (128,), (160, 96, 32), (512, 40)):
        inputs = [normalize(gaussian(2, 32, n, seed=n), torch.float32, exact=True) for n in lengths]
        triples = POLAR_EXPRESS.triples
        bounds = (0, *(restarts if form == "gram" else ()), len(triples))
        segments = tuple(triples[i:j] for i, j in itertools.pairwise(bounds))
        kernel = KernelChoice.of("torch")
        options = {"form": form, "segments": segments, "dtype": torch.float16, "kernel": kernel, "graphs": False}
        parts, _ = workspace.arrange([workspace.part_of(x) for x in inputs])
        recipe = workspace.Recipe(form, segments, torch.float16, parts)
        assert recipe.shares == (form == "direct" or sum(lengths) >= 2 * 32 * len(lengths)), lengths
        with workspace.factors(inputs, **options) as factors:
            for x, factor in zip(inputs, factors, strict=True):
                (want,) = iterate(form, [x.half()], segments, FreshArithmetic(kernel))
                # Without restarts roundings grow; a wrong buffer gives 1.
                assert relative_error(factor, want) <= 0.05, lengths


@pytest.mark.usefixtures("on_cpu")
def test_results_do_not_change_when_the_plan_runs_again():
    """A view of the plan's memory would."""
    ns = NewtonSchulz()
    first = ns(gaussian(24, 40))
    kept = first.clone()
    half = ns.orthogonalize(gaussian(24, 40, seed=1), ns.schedule())
    half_kept = half.clone()
    ns(gaussian(24, 40, seed=2))
    ns(gaussian(96, 100, seed=3))
    assert torch.equal(first, kept)
    assert torch.equal(half, half_kept)
    assert torch.equal(ns(gaussian(24, 40)), kept)


@pytest.mark.usefixtures("on_cpu")
def test_plans_that_are_let_go_are_freed_and_made_anew():
    """Else a benchmark counts one variant's graphs as the next one's."""
    ns = NewtonSchulz()
    kept = ns(gaussian(24, 40))
    plans = [weakref.ref(plan) for arena in workspace._arenas.values() for plan in arena._plans.values()]
    assert len(plans) == 1
    workspace.forget()
    gc.collect()
    assert plans[0]() is None
    assert torch.equal(ns(gaussian(24, 40)), kept)


@pytest.mark.usefixtures("on_cpu")
def test_memory_is_taken_for_the_time_of_a_run(monkeypatch):
    """What a step took used to stay, half a GiB that activations would have had."""
    monkeypatch.setattr(workspace, "KEPT", 0)
    ns = NewtonSchulz()

    def held():
        (arena,) = workspace._arenas.values()
        return sum(plan._memory.untyped_storage().nbytes() for plan in arena._plans.values())

    for shape in ((2, 24, 40), (3, 96, 100), (1, 24, 40), (3, 96, 100)):
        with ns.factors([gaussian(*shape)], ns.schedule()):
            assert held() == shape[0] * workspace_bytes(*shape[1:], form=ns.form(*shape[1:]))
        assert held() == 0
    with pytest.raises(ZeroDivisionError), ns.factors([gaussian(1, 24, 40)], ns.schedule()):
        raise ZeroDivisionError
    assert held() == 0


@pytest.mark.usefixtures("on_cpu")
def test_memory_may_lie_elsewhere_in_every_run(monkeypatch):
    """An address that was kept would be read after it was given back."""
    monkeypatch.setattr(workspace, "KEPT", 0)
    ns = NewtonSchulz()
    x = gaussian(2, 24, 40)
    want = ns(x)
    places, blockers = [], []
    take = workspace.Plan.take_memory

    def taken(plan):
        take(plan)
        places.append(plan._memory.data_ptr())

    monkeypatch.setattr(workspace.Plan, "take_memory", taken)
    ((plan,),) = (arena._plans.values() for arena in workspace._arenas.values())
    for _ in range(4):
        assert torch.equal(ns(x), want)
        # In every place that is free and fits.
        blockers += [torch.full((plan.recipe.nbytes,), 255, dtype=torch.uint8) for _ in range(8)]
    assert len(set(places)) > 1, "what this test is about"


class Replay:
    """In place of a CUDA graph: runs what it was made of, where that was."""

    def __init__(self, run):
        self.replay = run


@pytest.mark.parametrize(
    ("places", "captured"),
    [("AAAA", "A"), ("ABABAB", "AB"), ("ABCABC", "ABC"), ("ABCDE", ""), ("ABCDEABCDE", ""), ("AABBCCDDEEAA", "ABCDEA")],
)
@pytest.mark.usefixtures("on_cpu")
def test_a_place_that_comes_back_is_captured_once(monkeypatch, places, captured):
    """Where two batches of a step lie in two places in turn, the last one alone never is where the plan was last."""
    ns, x = NewtonSchulz(), gaussian(24, 40)
    want = ns(x)
    ((plan,),) = (arena._plans.values() for arena in workspace._arenas.values())
    here, seen = "", []

    def capture(run):
        seen.append(here)
        return Replay(run)

    monkeypatch.setattr(workspace.Plan, "place", property(lambda plan: ord(here)))
    plan._capture = capture
    plan._places.clear()
    for here in places:  # noqa: B007 (read by what is above)
        assert torch.equal(ns(x), want)
    assert "".join(seen) == captured


@pytest.mark.usefixtures("on_cpu")
def test_factors_inside_the_context_of_others_are_refused():
    """They would write over those, or free them."""
    ns = NewtonSchulz()
    with ns.factors([gaussian(1, 24, 40)], ns.schedule()), pytest.raises(RuntimeError, match="leave its `factors`"):
        ns(gaussian(24, 40))
    assert ns(gaussian(24, 40)).isfinite().all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kept", [0, workspace.KEPT])
def test_padding_does_not_read_what_another_plan_left(monkeypatch, kept):
    monkeypatch.setattr(workspace, "KEPT", kept)
    ns = NewtonSchulz()
    want = ns(gaussian(7, 11))
    take, taken = workspace.Plan.take_memory, []

    def left_by_another(plan):
        take(plan)
        plan._memory.view(torch.float16).fill_(float("nan"))
        taken.append(plan)

    monkeypatch.setattr(workspace.Plan, "take_memory", left_by_another)
    assert torch.equal(ns(gaussian(7, 11)), want)
    assert taken


@pytest.mark.usefixtures("on_cpu")
def test_zero_and_non_finite():
    x = torch.stack([gaussian(16, 24), torch.zeros(16, 24), gaussian(16, 24)])
    x[2, 3, 5] = float("inf")
    got = newton_schulz(x)
    assert got[0].norm() > 1
    assert torch.equal(got[1], torch.zeros(16, 24))
    assert not torch.isfinite(got[2]).any()


@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalizing_into_place_equals_normalizing(dtype, scale):
    """Squares in fp32 overflow from 1e19 on and vanish below 1e-22."""
    x = (gaussian(2, 12, 20).sign() * scale).to(dtype)
    out = torch.full((2, 20, 12), float("nan"), dtype=torch.float16).mT
    normalize_into([x[:1], x[1:]], [out[:1], out[1:]])
    want = normalize(x, torch.float16, exact=True)
    assert relative_error(out, want) <= 1e-3
    assert float(out[0].double().norm()) == pytest.approx(1.0, abs=1e-3)


def test_matrices_of_one_short_side_share_the_recurrence():
    kernel = KernelChoice.of("torch")
    options = {"form": "gram", "segments": NewtonSchulz().schedule().segments, "dtype": torch.float16}
    matrices = [gaussian(2, 32, 48), gaussian(1, 48, 32, seed=1).mT, gaussian(3, 32, 80, seed=2), gaussian(1, 32, 48)]
    with workspace.factors(matrices, kernel=kernel, graphs=False, **options) as got:
        assert [tuple(y.shape) for y in got] == [tuple(x.shape) for x in matrices]
        # Three stacks (one of them transposed) take two Gram products each; the recurrence takes twelve for all.
        assert kernel.launches.total() == 3 * 2 + 12
        for x, y in zip(matrices, got, strict=True):
            products = FreshArithmetic(KernelChoice.of("torch"))
            (want,) = iterate("gram", (normalize(x, torch.float16, exact=True),), options["segments"], products)
            assert relative_error(y, want) <= 0.01


@pytest.mark.usefixtures("on_cpu")
def test_a_step_over_many_batches_equals_one_at_a_time():
    """Split views, stacks cut by the budget, and factors that a later batch overwrites."""
    shapes = [(24, 40), (40, 24), (96, 24), (6, 24, 40), (64, 64), (24, 8)]
    views = [None, None, "split(24, 48, 24)", "batched", None, None]
    grads = [gaussian(*shape, seed=i) for i, shape in enumerate(shapes)]
    ns = NewtonSchulz(workspace_mib=1)
    ns.workspace_mib = 4 * workspace_bytes(24, 40) / 2**20
    together = [gaussian(*shape, seed=50 + i) for i, shape in enumerate(shapes)]
    alone = [w.clone() for w in together]
    muon_update_(together, grads, [torch.zeros(s) for s in shapes], lr=0.1, newton_schulz=ns, views=views)
    plain = NewtonSchulz(deterministic=True)
    for weight, grad, view in zip(alone, grads, views, strict=True):
        muon_update_([weight], [grad], [torch.zeros_like(weight)], lr=0.1, newton_schulz=plain, views=[view])
    for a, b in zip(together, alone, strict=True):
        assert relative_error(a, b) <= 2e-3


def stack(count, rows, columns, dtype=torch.float32):
    return Stack(count, rows, columns, dtype, CPU)


def test_batches_cover_every_matrix_once_and_fit_the_budget():
    stacks = [stack(5, 64, 256), stack(3, 256, 64), stack(2, 64, 64), stack(4, 128, 128), stack(0, 8, 8)]
    budget = 4 * workspace_bytes(64, 256)
    batches = by_short_side(stacks, budget=budget, sms=lambda device: 132)
    seen = [(p.stack, i) for batch in batches for p in batch for i in range(p.start, p.stop)]
    assert sorted(seen) == [(s, i) for s, each in enumerate(stacks) for i in range(each.count)]
    for batch in batches:
        assert len({stacks[p.stack].short for p in batch}) == 1
        assert bytes_of_plan(batch, stacks) <= budget
    assert len(batches) >= 4


def bytes_of_plan(batch, stacks):
    parts = tuple(workspace.Part(p.stop - p.start, stacks[p.stack].short, stacks[p.stack].long, True) for p in batch)
    return workspace.Recipe("gram", (POLAR_EXPRESS.triples,), torch.float16, parts).nbytes


def test_what_a_plan_takes_is_within_the_budget_for_mixed_long_sides():
    """Of one matrix sharing memory may be the better, of the whole batch not."""
    stacks = [stack(7, 1024, 1664), stack(5, 1024, 3072), stack(6, 1024, 4096)]
    for budget in (24, 60, 97, 120):
        batches = by_short_side(stacks, budget=budget * 2**20, sms=lambda device: 132)
        assert max(bytes_of_plan(batch, stacks) for batch in batches) <= budget * 2**20, budget


@pytest.mark.parametrize("count", [1, 5, 9, 11])
def test_cuts_are_the_best_of_all(count):
    sizes = [(3, 1)] * count
    seconds = {n: (n // 3 + 1) * 1.0 + 0.01 * n for n in range(1, 12)}

    def fitting(left):
        if not left:
            yield ()
        for first in range(1, left + 1):
            if first == 1 or least_room("gram", 3 * first, first) <= 55:
                yield from ((first, *rest) for rest in fitting(left - first))

    got = [stop - start for start, stop in _cuts(sizes, 55, "gram", seconds.__getitem__)]
    assert sum(got) == count
    assert sum(map(seconds.get, got)) == pytest.approx(min(sum(map(seconds.get, each)) for each in fitting(count)))


def test_equal_cuts_are_preferred_to_others_that_take_as_long():
    """Every other length of a batch is another plan, another graph."""
    batches = by_short_side([stack(24, 2048, 2048)], budget=512 * 2**20, sms=lambda device: 132)
    lengths = [sum(p.stop - p.start for p in batch) for batch in batches]
    assert len(set(lengths)) == 1, lengths


def test_a_matrix_over_the_budget_goes_alone():
    batches = by_short_side([stack(3, 512, 512)], budget=1, sms=lambda device: 132)
    assert batches == [(Piece(0, i, i + 1),) for i in range(3)]


def test_batches_under_a_budget_fill_waves():
    """Of 16 matrices of 512 rows 13 fill a wave; where all 16 fit there is nothing to gain from cutting."""
    size = workspace_bytes(512, 2048)
    sizes = [
        [p.stop - p.start for p in batch]
        for batch in by_short_side([stack(26, 512, 2048)], budget=16 * size, sms=lambda device: 132)
    ]
    assert list(itertools.chain(*sizes)) == [13, 13]
    assert by_short_side([stack(16, 512, 2048)], budget=16 * size, sms=lambda d: 132) == [(Piece(0, 0, 16),)]


def test_batches_elsewhere_are_of_equal_shape():
    stacks = [stack(1, 24, 40), stack(1, 40, 24), stack(2, 24, 8), stack(1, 24, 40, torch.float64)]
    assert by_shape(stacks) == [(Piece(0, 0, 1), Piece(1, 0, 1)), (Piece(2, 0, 2),), (Piece(3, 0, 1),)]
    assert padded(1) == padded(16) == 16
    assert padded(17) == 32


def test_a_workspace_must_be_positive():
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="workspace_mib must be positive"):
            NewtonSchulz(workspace_mib=wrong)


@pytest.mark.usefixtures("on_cpu")
def test_square_matrices_take_the_direct_form_and_are_the_more_accurate():
    """20 m³ against 22 m³, and an error of 0.001 against 0.014 on Gaussian input."""
    ns = NewtonSchulz()
    assert [ns.form(100, n) for n in (100, 120, 124, 400)] == ["direct", "direct", "gram", "gram"]
    assert NewtonSchulz("direct").form(100, 400) == "direct"
    x = gaussian(256, 256)
    assert judge(x, ns(x), POLAR_EXPRESS.triples).error <= 0.002
    assert get_ns_backend(ns).startswith("Gram and direct NS · kernel=torch")
    ns(gaussian(32, 64))
    assert get_ns_backend(ns).startswith("Gram and direct NS · kernel=torch")


def test_forms_do_not_share_a_batch():
    stacks = [stack(2, 64, 64), stack(2, 64, 256)]
    batches = by_short_side(stacks, budget=2**30, sms=lambda device: 132, form=NewtonSchulz().form)
    assert batches == [(Piece(0, 0, 2),), (Piece(1, 0, 2),)]
