"""The fused passes of an update, interpreted: against torch, and what only tables of addresses can get wrong."""

from __future__ import annotations

import pytest
import torch

from dmuon_core import MatrixView, NewtonSchulz, fused_plans, muon_update_
from dmuon_core.batching import workspace_bytes
from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import UpdateFns
from dmuon_core.syrk.updates import UpdateStacks, _complaint
from dmuon_core.testing import relative_error
from dmuon_kernels import update as module
from dmuon_kernels.update import TRITON_UPDATE, triton_apply, triton_direct

PRESENT, ABSENT = torch.ones(()), torch.zeros(())


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def out_like(x_BMN: torch.Tensor, by_columns: bool) -> torch.Tensor:
    batch, m, n = (x_BMN.shape[0], *(-(-size // 16) * 16 for size in x_BMN.shape[1:]))
    shape = (batch, n, m) if by_columns else (batch, m, n)
    out = torch.full(shape, float("nan"), dtype=torch.float16)
    return out.mT if by_columns else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_the_check_that_core_makes_at_load(dtype):
    """Whatever the user's default dtype is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert _complaint(TRITON_UPDATE, torch.device("cpu")) is None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_and_direction_equal_torch(dtype, nesterov):
    """Several shapes and layouts; some tall, some cut from a larger stack, one without gradient."""
    cases = [
        (gaussian(2, 12, 20), False, None),
        (gaussian(2, 20, 12, seed=1).mT, True, PRESENT),
        (gaussian(4, 12, 20, seed=2)[1:3], False, PRESENT),
        (gaussian(2, 12, 20, seed=3), False, ABSENT),
        (gaussian(1, 20, 1030, seed=4), False, None),
        (gaussian(3, 130, 300, seed=5).mT, True, PRESENT),
    ]
    for i, (x, by_columns, presence) in enumerate(cases):
        grad = x.to(dtype)
        mine, theirs = (torch.empty_like(x, dtype=torch.float32).copy_(x.flip(0)) for _ in "12")
        out, want = (out_like(x, by_columns) for _ in "12")
        UpdateStacks(grad, mine, mine, presence=presence).direct(TRITON_UPDATE, out, momentum=0.95, nesterov=nesterov)
        direction = momentum_(theirs, grad, momentum=0.95, nesterov=nesterov, presence=presence)
        normalize_into([direction], [want])
        assert relative_error(mine, theirs) <= 1e-7, i
        assert presence is not ABSENT or torch.equal(mine, x.flip(0))
        assert float((out.float() - want.float()).abs().max()) <= torch.finfo(torch.float16).eps, i
        assert not out[:, grad.shape[1] :].any()
        assert not out[:, :, grad.shape[2] :].any()


def direct(grad, buffer, out, *, presence=None, momentum=0.95, nesterov=False):
    UpdateStacks(grad, buffer, buffer, presence=presence).direct(
        TRITON_UPDATE, out, momentum=momentum, nesterov=nesterov
    )


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1.0, 1e20, 5e37])
def test_the_whole_range(scale):
    grad = gaussian(2, 24, 1100) * scale
    out = out_like(grad, False)
    direct(grad, torch.zeros_like(grad), out, momentum=0.5)
    want = out_like(grad, False)
    normalize_into([grad.double()], [want])
    assert relative_error(out[:, :24, :1100], want[:, :24, :1100]) <= 1e-3


def test_a_buffer_in_bfloat16_is_read_as_it_was_stored():
    """The second pass takes momentum from memory: a direction of the unrounded one would have another norm."""
    grad, buffer = gaussian(1, 16, 64), gaussian(1, 16, 64, seed=1).bfloat16()
    out = out_like(grad, False)
    new = torch.lerp(buffer.float(), grad, 0.05)
    direct(grad, buffer, out)
    assert torch.allclose(buffer.float(), new, rtol=2**-7, atol=0.0)  # the interpreter cuts off instead of rounding
    assert abs(float(out.float().norm()) - 1) <= 1e-3


def test_an_infinite_gradient_that_nobody_has_leaves_everything_alone():
    grad, buffer = torch.full((1, 16, 16), float("inf")), gaussian(1, 16, 16)
    weight = gaussian(1, 16, 16, seed=1)
    before = buffer.clone(), weight.clone()
    out = out_like(grad, False)
    stacks = UpdateStacks(grad, buffer, weight, presence=ABSENT)
    stacks.direct(TRITON_UPDATE, out, momentum=0.95, nesterov=True)
    stacks.apply(TRITON_UPDATE, out, lr=0.1, weight_decay=0.1)
    assert torch.equal(buffer, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_apply_equals_torch_and_fills_the_copies(dtype, factor_dtype):
    turned = gaussian(3, 130, 300).mT.contiguous().mT
    cases = [
        (gaussian(2, 12, 20), gaussian(2, 12, 20, seed=1), None, None, 0.5),
        (gaussian(1, 20, 1030), gaussian(1, 20, 1030, seed=1), PRESENT, torch.float16, 1.0),
        (gaussian(3, 130, 300, seed=2), turned, PRESENT, torch.float16, 2.0),
        (gaussian(2, 12, 20, seed=3), gaussian(2, 12, 20, seed=4), ABSENT, torch.float16, 0.5),
        (gaussian(2, 20, 12, seed=7).mT, gaussian(2, 12, 20, seed=5), None, torch.float32, 3.0),
    ]
    for i, (weight, factor, presence, copy_dtype, scale) in enumerate(cases):
        got, factor = weight.to(dtype), factor.to(factor_dtype)
        want, wide = got.clone(), got.double()
        copy = None if copy_dtype is None else torch.empty_like(got, dtype=copy_dtype)
        stacks = UpdateStacks(got, got, got, copy, presence, scale)
        stacks.apply(TRITON_UPDATE, factor, lr=0.25, weight_decay=0.125)
        apply_(wide, factor, lr=0.25, weight_decay=0.125, scale=scale, presence=presence)
        want.copy_(wide)
        assert torch.allclose(got.float(), want.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6), i
        assert copy is None or torch.equal(copy, got.to(copy_dtype)), i


def test_a_gradient_that_is_one_number_for_a_whole_stack():
    grad = gaussian(16, 16).expand(3, 16, 16)
    buffer, out = torch.zeros(3, 16, 16), out_like(grad, False)
    direct(grad, buffer, out, momentum=0.0)
    assert torch.equal(buffer, grad)


def test_addresses_that_are_no_multiple_of_16_bytes():
    grad = gaussian(1, 12 * 20 + 1).flatten()[1:].view(1, 12, 20)
    buffer = torch.zeros(1, 12, 20)
    direct(grad, buffer, out_like(grad, False), momentum=0.0)
    assert torch.equal(buffer, grad)


@pytest.mark.usefixtures("fused")
def test_a_pass_that_fails_leaves_a_trace(monkeypatch):
    """Weights that were written by then count as changed: autograd refuses a backward through what they were."""
    applied = []

    def apply(table, *args, **kwargs):
        if applied:
            raise RuntimeError("out of memory")
        applied.append(table)
        triton_apply(table, *args, **kwargs)

    ns = NewtonSchulz(kernel="torch")
    monkeypatch.setattr(ns, "update_fns", lambda device: UpdateFns(triton_direct, apply))
    weights = [gaussian(16, 32), gaussian(24, 40)]
    before = [weight.clone() for weight in weights]
    buffers, grads = [torch.zeros_like(w) for w in weights], [w.clone() for w in weights]
    with pytest.raises(RuntimeError, match="out of memory"):
        muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=ns)
    for weight, start in zip(weights, before, strict=True):
        assert weight._version > 0 or torch.equal(weight, start)


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, name, kernel, launches):
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]


@pytest.mark.usefixtures("fused")
def test_matrices_of_one_kind_go_in_one_launch(monkeypatch):
    """A hundred small matrices, a stack of experts among them: two launches before Newton-Schulz, one after it."""
    launches = []
    for name in ("momentum_kernel", "direction_kernel", "apply_kernel"):
        monkeypatch.setattr(module, name, Counted(name, getattr(module, name), launches))
    shapes = [(8, 16)] * 99 + [(3, 8, 16)]
    grads, buffers, weights = ([gaussian(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(3))
    views = [None] * 99 + ["batched"]
    ns = NewtonSchulz(kernel="torch")
    muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=ns, views=views)
    assert launches == ["momentum_kernel", "direction_kernel", "apply_kernel"]


VIEWS = {
    "matrix": (MatrixView(), (40, 24)),
    "experts": (MatrixView.batched(), (5, 24, 40)),
    "convolution": (MatrixView.flattened(), (24, 5, 3, 3)),
    "uneven split": (MatrixView.split(32, 16, 16), (64, 24)),
    "heads": (MatrixView.heads(4), (64, 24)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.usefixtures("fused")
def test_a_whole_update_equals_the_one_in_torch(view, monkeypatch):
    """Through the workspace, in batches that cut through stacks, with momentum over two steps, copies and versions."""
    plans = []
    monkeypatch.setattr(fused_plans, "fuse", lambda *args, run=fused_plans.fuse: plans.append(run(*args)) or plans[-1])
    parsed, shape = VIEWS[view]
    ns, plain = (NewtonSchulz(kernel="torch") for _ in range(2))
    ns.workspace_mib = plain.workspace_mib = 2 * workspace_bytes(24, 40) / 2**20
    plain.update_fns = lambda device: None
    runs = []
    for each in (ns, plain):
        weights = [gaussian(*shape, seed=i) for i in range(2)]
        buffers = [torch.zeros(shape) for _ in weights]
        copies = [torch.empty(shape, dtype=torch.float16), None]
        version = weights[0]._version
        for step in range(2):
            grads = [gaussian(*shape, seed=10 * step + i) for i in range(2)]
            muon_update_(
                weights, grads, buffers, lr=0.1, newton_schulz=each, views=[parsed] * 2, copies=copies,
                adjust_lr_fn="match_rms_adamw", presence=[PRESENT, None],
            )  # fmt: skip
        assert weights[0]._version > version
        assert torch.equal(copies[0], weights[0].half())
        runs.append((weights, buffers))
    (weights, buffers), (wants, momenta) = runs
    (plan,) = plans
    counts = [part.count for batch in plan.batches for part in batch.parts]
    assert view != "experts" or any(count % 5 for count in counts), "no batch cuts through a stack"
    for got, want in zip(buffers, momenta, strict=True):
        assert relative_error(got, want) <= 1e-7
    for i, (got, want) in enumerate(zip(weights, wants, strict=True)):
        assert relative_error(got - gaussian(*shape, seed=i), want - gaussian(*shape, seed=i)) <= 3e-3
