"""The fused passes of an update on a GPU: against torch's own, around real Newton-Schulz, and beyond 2^31 entries."""

import pytest
import torch

from dmuon_core import MatrixView, NewtonSchulz, muon_update_
from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.updates import UpdateStacks
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
    cases = [
        (gaussian(2, 12, 20, dtype=dtype), None),
        (gaussian(2, 20, 12, seed=1, dtype=dtype).mT, present),
        (gaussian(4, 12, 20, seed=2, dtype=dtype)[1:3], absent),
        (gaussian(3, 1000, 3000, seed=3, dtype=dtype), present),
        (gaussian(3, 3000, 1000, seed=3, dtype=dtype).mT, None),
        (gaussian(1, 12 * 20 + 1, seed=4, dtype=dtype)[:, 1:].view(1, 12, 20), None),
    ]
    for i, (grad, presence) in enumerate(cases):
        mine, theirs = (torch.empty_like(grad, dtype=torch.float32).copy_(grad.flip(0)) for _ in "12")
        out, want = (out_like(grad) for _ in "12")
        UpdateStacks(grad, mine, mine, presence=presence).direct(fns(), out, momentum=0.95, nesterov=nesterov)
        direction = momentum_(theirs, grad, momentum=0.95, nesterov=nesterov, presence=presence)
        normalize_into([direction], [want])
        assert relative_error(mine, theirs) <= 1e-7, i
        assert presence is not absent or torch.equal(mine, theirs)
        assert float((out.float() - want.float()).abs().max()) <= torch.finfo(torch.float16).eps * float(want.max()), i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("on_device", [True, False])
def test_apply_equals_torch_and_fills_the_copies(dtype, copy_dtype, on_device):
    present, absent = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    lr = torch.tensor([0.25], device="cuda") if on_device else 0.25
    turned = gaussian(3, 1000, 3000, seed=1, dtype=torch.float16).mT.contiguous().mT
    cases = [
        (gaussian(2, 12, 20, dtype=dtype), gaussian(2, 12, 20, seed=1, dtype=torch.float16), None, 0.5),
        (gaussian(3, 1000, 3000, dtype=dtype), turned, present, 1.0),
        (gaussian(2, 12, 20, dtype=dtype), gaussian(2, 12, 20, seed=2, dtype=torch.float16), absent, 2.0),
    ]
    for i, (weight, factor, presence, scale) in enumerate(cases):
        want, copy = weight.double(), torch.empty_like(weight, dtype=copy_dtype)
        UpdateStacks(weight, weight, weight, copy, presence, scale).apply(fns(), factor, lr=lr, weight_decay=0.125)
        apply_(want, factor, lr=0.25, weight_decay=0.125, scale=scale, presence=presence)
        assert torch.allclose(weight.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6), i
        assert torch.equal(copy, weight.to(copy_dtype)), i


def test_more_entries_than_fit_32_bits():
    rows, columns = 36_000, 60_000
    grad, buffer = torch.ones(1, rows, columns, device="cuda"), torch.zeros(1, rows, columns, device="cuda")
    out = torch.zeros(1, rows, columns, dtype=torch.float16, device="cuda")
    stacks = UpdateStacks(grad, buffer, buffer)
    stacks.direct(fns(), out, momentum=0.5, nesterov=False)
    assert float(buffer.min()) == float(buffer.max()) == 0.5
    want = torch.tensor((rows * columns) ** -0.5, dtype=torch.float16)
    assert abs(float(out.min()) - float(want)) <= 1e-7
    assert float(out.max()) == float(out.min())
    stacks.apply(fns(), out.zero_(), lr=1.0, weight_decay=0.5)
    assert float(buffer.min()) == float(buffer.max()) == 0.25


def test_slots_beyond_32_bits():
    """A stack of many matrices is longer than 2^31 entries, although none of them is."""
    count, rows, columns = 33_000, 256, 256
    grad = torch.ones(count, rows, columns, device="cuda", dtype=torch.bfloat16)
    buffer, out = torch.zeros_like(grad), torch.zeros(count, rows, columns, dtype=torch.float16, device="cuda")
    stacks = UpdateStacks(grad, buffer, grad)
    stacks.direct(fns(), out, momentum=0.5, nesterov=False)
    assert float(out[-1].min()) == float(out[-1].max()) == float(out[0].min()) == 2**-8
    stacks.apply(fns(), out, lr=256.0, weight_decay=0.0)
    assert float(grad[-1].abs().max()) == 0


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_weights_on_two_devices_neither_of_them_always_current():
    fns()
    ns, plain = NewtonSchulz(), NewtonSchulz()
    plain.update_fns = lambda device: None
    for current in (0, 1):
        runs = []
        with torch.cuda.device(current):
            for each in (ns, plain):
                lists = [[gaussian(128, 256, seed=10 * i + j).to(f"cuda:{j}") for j in range(2)] for i in range(3)]
                muon_update_(*lists, lr=0.1, newton_schulz=each)
                runs.append([*lists[0], *lists[2]])
        for got, want in zip(*runs, strict=True):
            assert relative_error(got, want) <= 2e-3
