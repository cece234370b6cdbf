"""The fused passes of an update, interpreted: against torch, and what only tables of addresses can get wrong."""

from __future__ import annotations

import sys

import pytest
import torch

from dmuon_core import MatrixView, NewtonSchulz, fused_passes, muon_update_
from dmuon_core.batching import workspace_bytes
from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import UpdateFns
from dmuon_core.syrk.updates import _complaint
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
    """Stacks of several shapes and layouts in one call; some tall, some cut from a larger one, one without gradient."""
    layouts = [
        (gaussian(2, 12, 20), False),
        (gaussian(2, 20, 12, seed=1).mT, True),
        (gaussian(4, 12, 20, seed=2)[1:3], False),
        (gaussian(2, 12, 20, seed=3), False),
        (gaussian(1, 20, 1030, seed=4), False),
        (gaussian(3, 130, 300, seed=5).mT, True),
    ]
    presence = [None, PRESENT, PRESENT, ABSENT, None, PRESENT]
    grads = [x.to(dtype) for x, _ in layouts]
    mine, theirs = ([torch.empty_like(x, dtype=torch.float32).copy_(x.flip(0)) for x, _ in layouts] for _ in "12")
    outs, wants = ([out_like(x, by_columns) for x, by_columns in layouts] for _ in "12")
    triton_direct(grads, mine, outs, momentum=0.95, nesterov=nesterov, presence=presence)
    directions = [
        momentum_(buffer, grad, momentum=0.95, nesterov=nesterov, presence=present)
        for buffer, grad, present in zip(theirs, grads, presence, strict=True)
    ]
    normalize_into(directions, wants)
    for i, (got, want) in enumerate(zip(mine, theirs, strict=True)):
        assert relative_error(got, want) <= 1e-7, i
    assert torch.equal(mine[3], layouts[3][0].flip(0))
    for i, (got, want) in enumerate(zip(outs, wants, strict=True)):
        assert float((got.float() - want.float()).abs().max()) <= torch.finfo(torch.float16).eps, i
        assert not got[:, grads[i].shape[1] :].any()
        assert not got[:, :, grads[i].shape[2] :].any()


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1.0, 1e20, 5e37])
def test_the_whole_range(scale):
    grad = gaussian(2, 24, 1100) * scale
    out = out_like(grad, False)
    triton_direct([grad], [torch.zeros_like(grad)], [out], momentum=0.5, nesterov=False, presence=[None])
    want = out_like(grad, False)
    normalize_into([grad.double()], [want])
    assert relative_error(out[:, :24, :1100], want[:, :24, :1100]) <= 1e-3


def test_a_buffer_in_bfloat16_is_read_as_it_was_stored():
    """The second pass takes momentum from memory: a direction of the unrounded one would have another norm."""
    grad, buffer = gaussian(1, 16, 64), gaussian(1, 16, 64, seed=1).bfloat16()
    out = out_like(grad, False)
    new = torch.lerp(buffer.float(), grad, 0.05)
    triton_direct([grad], [buffer], [out], momentum=0.95, nesterov=False, presence=[None])
    assert torch.allclose(buffer.float(), new, rtol=2**-7, atol=0.0)  # the interpreter cuts off instead of rounding
    assert abs(float(out.float().norm()) - 1) <= 1e-3


def test_an_infinite_gradient_that_nobody_has_leaves_everything_alone():
    grad, buffer = torch.full((1, 16, 16), float("inf")), gaussian(1, 16, 16)
    weight = gaussian(1, 16, 16, seed=1)
    before = buffer.clone(), weight.clone()
    out = out_like(grad, False)
    triton_direct([grad], [buffer], [out], momentum=0.95, nesterov=True, presence=[ABSENT])
    triton_apply([weight], [out], [None], lr=0.1, weight_decay=0.1, scales=[1.0], presence=[ABSENT])
    assert torch.equal(buffer, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_apply_equals_torch_and_fills_the_copies(dtype, factor_dtype):
    shapes = [(2, 12, 20), (1, 20, 1030), (3, 130, 300)]
    weights = [gaussian(*shape).to(dtype) for shape in shapes]
    weights.append(weights[0].clone())
    weights.append(gaussian(2, 20, 12, seed=7).to(dtype).mT)
    factors = [gaussian(*w.shape, seed=i).to(factor_dtype) for i, w in enumerate(weights)]
    factors[2] = factors[2].mT.contiguous().mT
    presence = [None, PRESENT, PRESENT, ABSENT, None]
    copies = [None, *(torch.empty_like(w, dtype=torch.float16) for w in weights[1:])]
    scales = [0.5, 1.0, 2.0, 0.5, 3.0]
    wants = [w.clone() for w in weights]
    triton_apply(weights, factors, copies, lr=0.25, weight_decay=0.125, scales=scales, presence=presence)
    for want, factor, present, scale in zip(wants, factors, presence, scales, strict=True):
        wide = want.double()
        apply_(wide, factor, lr=0.25, weight_decay=0.125, scale=scale, presence=present)
        want.copy_(wide)
    for i, (got, want, copy) in enumerate(zip(weights, wants, copies, strict=True)):
        assert torch.allclose(got.float(), want.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6), i
        assert copy is None or torch.equal(copy, got.half()), i


def test_a_gradient_that_is_one_number_for_a_whole_stack():
    grad = gaussian(16, 16).expand(3, 16, 16)
    buffer, out = torch.zeros(3, 16, 16), out_like(grad, False)
    triton_direct([grad], [buffer], [out], momentum=0.0, nesterov=False, presence=[None])
    assert torch.equal(buffer, grad)


def test_a_pass_that_fails_leaves_a_trace(monkeypatch):
    """Weights that were written by then count as changed: autograd refuses a backward through what they were."""
    monkeypatch.setattr(NewtonSchulz, "_has_workspace", lambda self, device: True)
    monkeypatch.setattr(sys.modules[NewtonSchulz.__module__], "_multiprocessors", lambda device: 4)
    applied = []

    def apply(weights, *args, **kwargs):
        if applied:
            raise RuntimeError("out of memory")
        applied.append(weights)
        triton_apply(weights, *args, **kwargs)

    ns = NewtonSchulz(kernel="torch")
    monkeypatch.setattr(ns, "update_fns", lambda device: UpdateFns(triton_direct, apply))
    weights = [gaussian(16, 32), gaussian(24, 40)]
    before = [weight.clone() for weight in weights]
    buffers, grads = [torch.zeros_like(w) for w in weights], [w.clone() for w in weights]
    with pytest.raises(RuntimeError, match="out of memory"):
        muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=ns)
    for weight, start in zip(weights, before, strict=True):
        assert weight._version > 0 or torch.equal(weight, start)


def test_addresses_that_are_no_multiple_of_16_bytes():
    grad = gaussian(1, 12 * 20 + 1).flatten()[1:].view(1, 12, 20)
    buffer = torch.zeros(1, 12, 20)
    out = out_like(grad, False)
    triton_direct([grad], [buffer], [out], momentum=0.0, nesterov=False, presence=[None])
    assert torch.equal(buffer, grad)


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, name, kernel, launches):
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]


def test_matrices_of_one_kind_go_in_one_launch(monkeypatch):
    """A hundred small matrices: two launches for their momentum and direction, one for their step."""
    launches = []
    for name in ("momentum_kernel", "direction_kernel", "apply_kernel"):
        monkeypatch.setattr(module, name, Counted(name, getattr(module, name), launches))
    count = 100
    grads, buffers, weights = ([gaussian(1, 8, 16, seed=i) for i in range(count)] for _ in range(3))
    outs = [out_like(grad, False) for grad in grads]
    nothing = [None] * count
    triton_direct(grads, buffers, outs, momentum=0.9, nesterov=True, presence=nothing)
    factors = [out[:, :8, :16] for out in outs]
    triton_apply(weights, factors, nothing, lr=0.1, weight_decay=0.0, scales=[1.0] * count, presence=nothing)
    assert launches == ["momentum_kernel", "direction_kernel", "apply_kernel"]


VIEWS = {
    "matrix": (MatrixView(), (40, 24)),
    "experts": (MatrixView.batched(), (5, 24, 40)),
    "convolution": (MatrixView.flattened(), (24, 5, 3, 3)),
    "uneven split": (MatrixView.split(32, 16, 16), (64, 24)),
    "heads": (MatrixView.heads(4), (64, 24)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_whole_update_equals_the_one_in_torch(view, monkeypatch):
    """Through the workspace, in batches that cut through stacks, with momentum over two steps, copies and versions."""
    cuts = []
    cut = fused_passes._Block.cut
    monkeypatch.setattr(
        fused_passes._Block, "cut", lambda block, piece: cuts.append((block, piece)) or cut(block, piece)
    )
    parsed, shape = VIEWS[view]
    monkeypatch.setattr(NewtonSchulz, "_has_workspace", lambda self, device: True)
    monkeypatch.setattr(sys.modules[NewtonSchulz.__module__], "_multiprocessors", lambda device: 4)
    ns, plain = (NewtonSchulz(kernel="torch") for _ in range(2))
    ns.workspace_mib = plain.workspace_mib = 2 * workspace_bytes(24, 40) / 2**20
    monkeypatch.setattr(NewtonSchulz, "update_fns", lambda self, device: TRITON_UPDATE if self is ns else None)
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
    shorter = [piece for block, piece in cuts if piece.stop - piece.start < block.weight.shape[0]]
    assert bool(shorter) == (view == "experts")
    for got, want in zip(buffers, momenta, strict=True):
        assert relative_error(got, want) <= 1e-7
    for i, (got, want) in enumerate(zip(weights, wants, strict=True)):
        assert relative_error(got - gaussian(*shape, seed=i), want - gaussian(*shape, seed=i)) <= 3e-3
