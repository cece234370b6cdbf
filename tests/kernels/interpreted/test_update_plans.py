"""Plans of the fused update, interpreted: found again while tensors look the same, never when one looks different."""

from __future__ import annotations

import pytest
import torch

from dmuon_core import NewtonSchulz, fused_plans, muon_update_, update_plans, workspace
from dmuon_core.testing import relative_error

pytestmark = pytest.mark.usefixtures("fused")
PRESENT, ABSENT = torch.ones(()), torch.zeros(())
SHAPE = (24, 40)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def newton_schulz(*, fused: bool = True) -> NewtonSchulz:
    ns = NewtonSchulz(kernel="torch")
    if not fused:
        ns.update_fns = lambda device: None
    return ns


@pytest.fixture
def made(monkeypatch):
    """The plans that were made."""
    found = []
    monkeypatch.setattr(fused_plans, "fuse", lambda *args, run=fused_plans.fuse: found.append(args) or run(*args))
    return found


def look(**changes):
    """The lists of two parameters, one entry of which may be changed."""
    lists = {
        "weights": [gaussian(*SHAPE, seed=i) for i in range(2)],
        "grads": [gaussian(*SHAPE, seed=10 + i) for i in range(2)],
        "buffers": [gaussian(*SHAPE, seed=20 + i) for i in range(2)],
        "views": [None, None],
        "presence": [PRESENT, None],
        "copies": [torch.empty(SHAPE, dtype=torch.float16), None],
    }
    for name, change in changes.items():
        lists[name][0] = change(lists[name][0])
    return lists


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


CHANGES = {
    "view": {"views": lambda _: "heads(4)"},
    "weight's dtype": {"weights": lambda x: x.bfloat16()},
    "gradient's strides": {"grads": by_columns},
    "gradient's dtype": {"grads": lambda x: x.bfloat16()},
    "buffer's dtype": {"buffers": lambda x: x.bfloat16()},
    "presence's dtype": {"presence": lambda x: x.half()},
    "no presence": {"presence": lambda _: None},
    "nobody's gradient": {"presence": lambda _: ABSENT},
    "copy's dtype": {"copies": lambda x: x.float()},
    "no copy": {"copies": lambda _: None},
    "weight by columns": {"weights": by_columns},
    "buffer by columns": {"buffers": by_columns},
    "copy by columns": {"copies": by_columns},
    "negative gradient": {"grads": lambda x: torch.complex(x, x).conj().imag},
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_thing_that_looks_different_is_another_plan(change):
    """After a step of the common look: a plan of that one would read or write elsewhere, or as another dtype."""
    ns, plain = newton_schulz(), newton_schulz(fused=False)
    muon_update_(**look(), lr=0.1, newton_schulz=ns)
    got, want = look(**CHANGES[change]), look(**CHANGES[change])
    muon_update_(**got, lr=0.1, newton_schulz=ns)
    muon_update_(**want, lr=0.1, newton_schulz=plain)
    for i in range(2):
        # The interpreter cuts bfloat16 off instead of rounding it.
        halves = torch.bfloat16 in (got["weights"][i].dtype, got["buffers"][i].dtype)
        assert relative_error(got["buffers"][i], want["buffers"][i]) <= (1e-2 if halves else 1e-6), i
        assert relative_error(got["weights"][i], want["weights"][i]) <= (1e-2 if halves else 1e-3), i
    if got["copies"][0] is not None:
        assert relative_error(got["copies"][0], got["weights"][0]) <= 1e-3


def test_every_look_is_planned_once_and_other_options_too(made):
    ns = newton_schulz()
    for _ in range(3):
        muon_update_(**look(), lr=0.1, newton_schulz=ns)
        muon_update_(**look(), lr=0.2, momentum=0.5, nesterov=False, weight_decay=0.0, newton_schulz=ns, ns_steps=3)
        muon_update_(**look(), lr=0.1, newton_schulz=ns, adjust_lr_fn="match_rms_adamw")
        muon_update_(**look(), lr=0.1, newton_schulz=newton_schulz())
    assert len(made) == 2 + 3  # ns by two scales, and each of the three others


def test_more_groups_than_one_would_think(made):
    """Learning rates by layer: groups step in turn, so that a cache too small for all of them never hits."""
    ns = newton_schulz()
    for _ in range(2):
        for size in range(40):
            lists = [[gaussian(8, 8 + size)] for _ in range(3)]
            muon_update_(*lists, lr=0.1, newton_schulz=ns)
    assert len(made) == 40


def test_the_latest_plans_are_kept_and_no_more(monkeypatch):
    """Routed experts give another look in every step: what is kept must not grow with them."""
    monkeypatch.setattr(update_plans, "_KEPT", 3)
    ns = newton_schulz()

    def plan(size: int) -> update_plans.UpdatePlan:
        lists = [[torch.empty(8, size)] for _ in range(3)]
        return update_plans.plan_of(update_plans.Inputs.of(*lists, None, None, None), None, ns)

    made = [plan(8 + size) for size in range(10)]
    assert len(set(map(id, made))) == 10
    assert len(update_plans._plans[ns]) == 3
    assert [plan(8 + size) for size in (9, 8, 7)] == made[:6:-1]


def test_gradients_that_a_view_reads_in_place_and_those_that_it_cannot(made):
    """Transposed ones under rows and stacks as they are; a convolution's in channels-last is made contiguous."""
    shapes = [(64, 96), (64, 96), (8, 32, 48), (8, 4, 3, 3)]
    views = [None, "heads(4)", "batched", "flattened"]
    grads = [gaussian(*shape, seed=i) for i, shape in enumerate(shapes)]
    others = [by_columns(grad) for grad in grads[:3]] + [grads[3].to(memory_format=torch.channels_last)]
    results = []
    for each in (grads, others):
        weights, buffers = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        muon_update_(weights, each, buffers, lr=0.1, newton_schulz=newton_schulz(), views=views)
        results.append((weights, buffers))
    assert [fused_plans.fuse(*args).strided for args in list(made)] == [(), (3,)]
    for got, want in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(got, want)
    for got, want in zip(results[0][0], results[1][0], strict=True):
        assert relative_error(got, want) <= 3e-3


def test_empty_parameters_beside_others():
    """Some adjust_lr_fn have no value for a matrix without columns."""
    shapes = [(8, 0), (8, 16), (0, 8), (8, 2, 0), (2, 0, 3, 0)]
    views = [None, None, None, "flattened", "batched"]
    weights, grads, buffers = ([gaussian(*shape) for shape in shapes] for _ in range(3))
    before = weights[1].clone()
    muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=newton_schulz(), views=views)
    assert not torch.equal(weights[1], before)


def test_a_first_step_in_inference_mode(monkeypatch):
    """What stays for later steps must not belong to the mode."""
    monkeypatch.setattr(workspace, "_arenas", {})
    ns = newton_schulz()
    with torch.inference_mode():
        muon_update_(**look(), lr=0.1, newton_schulz=ns)
    got, want = look(), look()
    muon_update_(**got, lr=0.1, newton_schulz=ns)
    muon_update_(**want, lr=0.1, newton_schulz=newton_schulz(fused=False))
    assert relative_error(got["weights"][0], want["weights"][0]) <= 1e-3


def test_a_compiler_that_meets_the_update():
    """It leaves the fused passes alone, for one shape and the next."""
    ns = newton_schulz()
    compiled = torch.compile(lambda *lists: muon_update_(*lists, lr=0.1, newton_schulz=ns), backend="eager")
    for shape in ((8, 16), (12, 20), (16, 600)):
        got, want = ([[gaussian(*shape, seed=i)] for i in range(3)] for _ in range(2))
        compiled(*got)
        muon_update_(*want, lr=0.1, newton_schulz=newton_schulz(fused=False))
        assert relative_error(got[0][0], want[0][0]) <= 1e-3
