"""The fused passes of an update on a GPU: against torch's own, around real Newton-Schulz, and beyond 2^31 entries."""

import pytest
import torch

from dmuon_core import MatrixView, NewtonSchulz, muon_update_
from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.testing import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def fns():
    pytest.importorskip("triton", reason="Triton is not installed")
    from dmuon_kernels.update import TRITON_UPDATE

    return TRITON_UPDATE


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def out_like(x_BMN):
    batch, m, n = (x_BMN.shape[0], *(-(-size // 16) * 16 for size in x_BMN.shape[1:]))
    by_columns = x_BMN.stride(2) != 1 and x_BMN.stride(1) == 1
    shape = (batch, n, m) if by_columns else (batch, m, n)
    out = torch.full(shape, float("nan"), dtype=torch.float16, device="cuda")
    return out.mT if by_columns else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_direction_equal_torch(dtype, nesterov):
    present, absent = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    grads = [
        gaussian(2, 12, 20, dtype=dtype),
        gaussian(2, 20, 12, seed=1, dtype=dtype).mT,
        gaussian(4, 12, 20, seed=2, dtype=dtype)[1:3],
        gaussian(3, 1000, 3000, seed=3, dtype=dtype),
        gaussian(3, 3000, 1000, seed=3, dtype=dtype).mT,
        gaussian(1, 12 * 20 + 1, seed=4, dtype=dtype)[:, 1:].view(1, 12, 20),
    ]
    presence = [None, present, absent, present, None, None]
    mine, theirs = ([torch.empty_like(x, dtype=torch.float32).copy_(x.flip(0)) for x in grads] for _ in "12")
    outs, wants = ([out_like(x) for x in grads] for _ in "12")
    fns().direct(grads, mine, outs, momentum=0.95, nesterov=nesterov, presence=presence)
    directions = [
        momentum_(buffer, grad, momentum=0.95, nesterov=nesterov, presence=each)
        for buffer, grad, each in zip(theirs, grads, presence, strict=True)
    ]
    normalize_into(directions, wants)
    assert torch.equal(mine[2], theirs[2])
    for i, (got, want) in enumerate(zip(mine, theirs, strict=True)):
        assert relative_error(got, want) <= 1e-7, i
    for i, (got, want) in enumerate(zip(outs, wants, strict=True)):
        assert float((got.float() - want.float()).abs().max()) <= torch.finfo(torch.float16).eps * float(want.max()), i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("on_device", [True, False])
def test_apply_equals_torch_and_fills_the_copies(dtype, copy_dtype, on_device):
    present, absent = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    weights = [gaussian(2, 12, 20, dtype=dtype), gaussian(3, 1000, 3000, dtype=dtype), gaussian(2, 12, 20, dtype=dtype)]
    factors = [gaussian(*w.shape, seed=i, dtype=torch.float16) for i, w in enumerate(weights)]
    factors[1] = factors[1].mT.contiguous().mT
    presence, scales = [None, present, absent], [0.5, 1.0, 2.0]
    copies = [torch.empty_like(w, dtype=copy_dtype) for w in weights]
    lr = torch.tensor([0.25], device="cuda") if on_device else 0.25
    wants = [w.double() for w in weights]
    fns().apply(weights, factors, copies, lr=lr, weight_decay=0.125, scales=scales, presence=presence)
    for i, (got, want, factor) in enumerate(zip(weights, wants, factors, strict=True)):
        apply_(want, factor, lr=0.25, weight_decay=0.125, scale=scales[i], presence=presence[i])
        assert torch.allclose(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6), i
        assert torch.equal(copies[i], got.to(copy_dtype)), i


def test_more_entries_than_fit_32_bits():
    rows, columns = 36_000, 60_000
    grad, buffer = torch.ones(1, rows, columns, device="cuda"), torch.zeros(1, rows, columns, device="cuda")
    out = torch.zeros(1, rows, columns, dtype=torch.float16, device="cuda")
    fns().direct([grad], [buffer], [out], momentum=0.5, nesterov=False, presence=[None])
    assert float(buffer.min()) == float(buffer.max()) == 0.5
    want = torch.tensor((rows * columns) ** -0.5, dtype=torch.float16)
    assert abs(float(out.min()) - float(want)) <= 1e-7
    assert float(out.max()) == float(out.min())
    fns().apply([buffer], [out.zero_()], [None], lr=1.0, weight_decay=0.5, scales=[1.0], presence=[None])
    assert float(buffer.min()) == float(buffer.max()) == 0.25


VIEWS = {
    "matrix": (MatrixView(), (768, 256)),
    "experts": (MatrixView.batched(), (5, 128, 384)),
    "convolution": (MatrixView.flattened(), (128, 24, 3, 3)),
    "uneven split": (MatrixView.split(256, 128, 128), (512, 256)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_whole_update_equals_the_one_in_torch(view, monkeypatch):
    """Four steps: eager, captured, replayed; the addresses of gradients change from step to step."""
    fns()
    parsed, shape = VIEWS[view]
    ns, plain = NewtonSchulz(), NewtonSchulz()
    assert ns.update_fns(torch.device("cuda", 0)) is not None
    monkeypatch.setattr(plain, "update_fns", lambda device: None)
    runs, kept = [], []
    for each in (ns, plain):
        weights = [gaussian(*shape, seed=i) for i in range(3)]
        buffers = [torch.zeros(shape, device="cuda") for _ in weights]
        copies = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in weights]
        for step in range(4):
            grads = [gaussian(*shape, seed=10 * step + i) for i in range(3)]
            kept += grads  # so that the next ones lie elsewhere
            muon_update_(weights, grads, buffers, lr=0.1, newton_schulz=each, views=[parsed] * 3, copies=copies)
        assert all(torch.equal(copy, weight.bfloat16()) for copy, weight in zip(copies, weights, strict=True))
        runs.append((weights, buffers))
    for got, want in zip(runs[0][1], runs[1][1], strict=True):
        assert relative_error(got, want) <= 1e-6
    for i, (got, want) in enumerate(zip(runs[0][0], runs[1][0], strict=True)):
        start = gaussian(*shape, seed=i)
        assert relative_error(got - start, want - start) <= 1e-2


def test_a_graph_of_the_users_own_holds_the_update():
    """Inside a capture the passes of torch run: fused ones read addresses that a replay would not send again."""
    ns = NewtonSchulz()
    grad = gaussian(256, 512, seed=1)
    runs = []
    for captured in (False, True):
        weight, buffer = gaussian(256, 512), torch.zeros(256, 512, device="cuda")

        def step(weight=weight, buffer=buffer):
            muon_update_([weight], [grad], [buffer], lr=0.1, newton_schulz=ns)

        step()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            # What pinned memory the capture may have left is someone else's by the replay.
            kept = [torch.full((64,), -1, dtype=torch.int64, pin_memory=True) for _ in range(64)]
            graph.replay()
            del kept
        else:
            step()
        torch.cuda.synchronize()
        runs.append(weight)
    assert relative_error(runs[1] - gaussian(256, 512), runs[0] - gaussian(256, 512)) <= 1e-2


def test_nothing_waits_for_the_device():
    ns = NewtonSchulz()
    weights = [gaussian(256, 512, seed=i) for i in range(4)]
    buffers = [torch.zeros_like(w) for w in weights]
    present = torch.ones((), device="cuda")
    rate = torch.tensor(0.1, device="cuda")
    grads = [[gaussian(256, 512, seed=10 * step + i) for i in range(4)] for step in range(6)]
    for step in range(3):
        muon_update_(weights, grads[step], buffers, lr=rate, newton_schulz=ns, presence=[present] * 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            muon_update_(weights, grads[step], buffers, lr=rate, newton_schulz=ns, presence=[present] * 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
