"""dmuon_core.Muon against torch.optim.Muon, the rule in float64, and torch.optim.AdamW; groups, state, errors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from dmuon_core import KELLER, POLAR_EXPRESS, Muon, NewtonSchulz, as_coefficients
from dmuon_core.testing import relative_error

KELLER_TRIPLE = KELLER.triples[0]
SHAPES = ((24, 40), (40, 24), (16, 16), (1, 32))


def parameters(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer, params, steps: int = 5, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_grads(params, step)
        optimizer.step()


def movement(params, reference) -> torch.Tensor:
    return torch.cat([(p - q).flatten().double() for p, q in zip(params, reference, strict=True)])


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_muon_within_bf16_rounding(nesterov, adjust_lr_fn):
    options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours, theirs, start = parameters(), parameters(), parameters()
    ns = NewtonSchulz("direct", dtype=torch.bfloat16)
    run(Muon(ours, ns_coefficients=KELLER_TRIPLE, ns_backend=ns, **options), ours)
    run(torch.optim.Muon(theirs, ns_coefficients=KELLER_TRIPLE, **options), theirs)
    # bf16 rounds to 2^-9 relative; fifteen products on an ill-conditioned square matrix amplify that about tenfold.
    assert relative_error(movement(ours, start), movement(theirs, start)) <= 0.03


def float64_rule(params, steps, *, lr, weight_decay, momentum, triple):
    """torch.optim.Muon's rule, written out in float64."""
    a, b, c = triple
    weights = [p.detach().double() for p in params]
    buffers = [torch.zeros_like(w) for w in weights]
    for step in range(steps):
        set_grads(params, step)
        for w, m, p in zip(weights, buffers, params, strict=True):
            g = p.grad.double()
            m.mul_(momentum).add_(g)
            x = g + momentum * m
            tall = x.shape[0] > x.shape[1]
            x = x.mT if tall else x
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.mT
                x = a * x + (b * gram + c * gram @ gram) @ x
            scale = max(1.0, w.shape[0] / w.shape[1]) ** 0.5
            w.mul_(1 - lr * weight_decay).sub_(lr * scale * (x.mT if tall else x))
    return weights


@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_equals_the_rule_in_float64(backend):
    ours = parameters()
    ns = NewtonSchulz(backend, dtype=torch.float32)
    run(Muon(ours, lr=0.02, ns_coefficients=KELLER_TRIPLE, ns_backend=ns), ours)
    want = float64_rule(parameters(), 5, lr=0.02, weight_decay=0.1, momentum=0.95, triple=KELLER_TRIPLE)
    for p, w in zip(ours, want, strict=True):
        assert relative_error(p, w) <= 1e-5


def test_loads_the_state_of_torch_muon_and_back():
    ours, theirs = parameters(), parameters()
    reference = torch.optim.Muon(theirs, lr=0.02)
    run(reference, theirs, steps=3)
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    optimizer = Muon(ours, lr=0.5, ns_backend=NewtonSchulz("direct", dtype=torch.bfloat16))
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert optimizer.param_groups[0]["ns_coefficients"] == KELLER_TRIPLE
    middle = copy.deepcopy(theirs)
    run(optimizer, ours, start=3, steps=2)
    run(reference, theirs, start=3, steps=2)
    assert relative_error(movement(ours, middle), movement(theirs, middle)) <= 0.03
    torch.optim.Muon(theirs).load_state_dict(optimizer.state_dict())


def test_state_of_torch_muon_leaves_our_own_options_alone():
    """A saved group without ``view`` once put the default in its place: heads became one matrix."""
    theirs = parameters(shapes=[(24, 40)])
    reference = torch.optim.Muon(theirs)
    run(reference, theirs, steps=1)
    optimizer = Muon([{"params": parameters(shapes=[(24, 40)]), "view": "heads(3)"}])
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["view"] == "heads(3)"
    assert optimizer.param_groups[0]["ns_coefficients"] == KELLER_TRIPLE


def test_hooks_see_and_change_what_is_loaded():
    params = parameters(shapes=[(24, 40)])
    optimizer = Muon(params)
    run(optimizer, params, steps=1)
    ones = {
        "state": {0: {"momentum_buffer": torch.ones(24, 40)}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    optimizer.register_load_state_dict_pre_hook(lambda *_: ones)
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["momentum_buffer"].clone()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], torch.ones(24, 40))
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], seen[0])


@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, KELLER, (KELLER_TRIPLE,) * 5])
def test_checkpoints_hold_plain_types(coefficients):
    """A coefficient set in a group once made torch.load refuse the file."""
    file = io.BytesIO()
    torch.save(Muon(parameters(), ns_coefficients=coefficients).state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["param_groups"][0]["ns_coefficients"]
    assert as_coefficients(saved).take(5) == as_coefficients(coefficients).take(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumed_equals_uninterrupted_bitwise(dtype):
    straight, first = parameters(dtype), parameters(dtype)
    run(Muon(straight, lr=0.02), straight, steps=5)
    optimizer = Muon(first, lr=0.02)
    run(optimizer, first, steps=3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = Muon(second, lr=0.9)
    resumed.load_state_dict(torch.load(file, map_location="cpu"))
    # torch casts loaded state to the parameter's dtype; momentum must keep its own.
    assert all(resumed.state[p]["momentum_buffer"].dtype == torch.float32 for p in second)
    run(resumed, second, start=3, steps=2)
    assert all(torch.equal(p, q) for p, q in zip(straight, second, strict=True))


def test_momentum_dtype():
    for dtype, given, want in (
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ):
        params = parameters(dtype)
        optimizer = Muon(params, momentum_dtype=given)
        run(optimizer, params, steps=1)
        assert optimizer.state[params[0]]["momentum_buffer"].dtype == want


def test_adamw_groups_are_torch_adamw():
    ours, theirs = parameters(shapes=[(8,), (4, 6), ()]), parameters(shapes=[(8,), (4, 6), ()])
    matrices = parameters()
    optimizer = Muon(
        [
            {"params": matrices},
            {"params": ours, "algorithm": "adamw", "lr": 3e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)},
        ],
        lr=0.02,
    )
    reference = torch.optim.AdamW(theirs, lr=3e-3, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(4):
        set_grads([*ours], step)
        set_grads([*theirs], step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_without_gradient_stay_untouched():
    """No decay, no momentum, no state."""
    params = parameters()
    optimizer = Muon(params, lr=0.1, weight_decay=0.5)
    set_grads(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


def test_closure_schedulers_hooks_and_tensor_lr():
    params = parameters()
    optimizer = Muon(params, lr=torch.tensor(0.02))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        set_grads(params, 0)
        return torch.tensor(3.5)

    assert optimizer.step(closure).item() == 3.5
    assert calls == ["post"]
    floats = parameters()
    reference = Muon(floats, lr=0.02)
    set_grads(floats, 0)
    reference.step()
    assert relative_error(movement(params, floats), torch.zeros(())) <= 1e-5
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda epoch: 0.5**epoch)
    reference.step()
    scheduler.step()
    assert reference.param_groups[0]["lr"] == pytest.approx(0.01)


def test_views_in_groups_survive_a_checkpoint():
    experts = nn.Parameter(torch.randn(3, 8, 12))
    optimizer = Muon([{"params": [experts], "view": "batched"}], lr=0.1)
    run(optimizer, [experts], steps=1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert state["param_groups"][0]["view"] == "batched"
    Muon([{"params": [experts], "view": "batched"}]).load_state_dict(state)


def test_copies_and_pickles():
    params = parameters()
    optimizer = Muon(params, lr=0.02, ns_backend=NewtonSchulz(dtype=torch.float32))
    run(optimizer, params, steps=2)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twins = twin.param_groups[0]["params"]
        assert twin.newton_schulz.dtype == torch.float32
        run(twin, twins, start=2, steps=1)
    run(optimizer, params, start=2, steps=1)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [
        ((8,), {}, r'blocks\.0\.w, shape \(8,\).*algorithm="adamw"'),
        ((2, 3, 4), {}, r'blocks\.0\.w.*view="batched"'),
        ((64, 1, 4), {"view": "flattened"}, r"blocks\.0\.w.*depthwise"),
        ((4, 4), {"view": "diagonal"}, "unknown view 'diagonal'"),
        ((4, 4), {"algorithm": "sgd"}, "algorithm must be one of 'muon', 'adamw', got 'sgd'"),
        ((4, 4), {"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ((4, 4), {"lr": torch.tensor([1.0, 2.0])}, "must have one element"),
        ((4, 4), {"momentum": -0.1}, "momentum must be >= 0"),
        ((4, 4), {"weight_decay": float("nan")}, "weight_decay must be >= 0"),
        ((4, 4), {"lr": "fast"}, "lr must be >= 0, got 'fast'"),
        ((4, 4), {"view": 5}, "unknown view 5"),
        ((4, 4), {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ((4, 4), {"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
        ((4, 4), {"adjust_lr_fn": "rms"}, "adjust_lr_fn must be None or one of"),
        ((4, 4), {"ns_steps": 0}, "ns_steps must be a positive integer"),
        ((4, 4), {"ns_coefficients": ((5.18, -5.18, 2.59),) * 5}, 'use backend="direct"'),
    ],
)
def test_bad_groups_name_what_is_wrong_and_change_nothing(shape, group, message):
    good = parameters()
    optimizer = Muon([("good", good[0])], lr=0.1)
    bad = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("blocks.0.w", bad)], **group})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("blocks.0.w", bad)], **group}])


def test_parameters_that_are_no_plain_floats():
    with pytest.raises(ValueError, match=r"params\[0\] is torch.complex64"):
        Muon([nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))])

    class Tagged(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=r"params\[0\] is a Tagged.*dmuon\.Muon"):
        Muon([torch.zeros(4, 4).as_subclass(Tagged).requires_grad_()])
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Muon([{"params": list(embedding.parameters()), "algorithm": "adamw"}])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_non_finite_gradients_propagate_as_in_torch():
    params = parameters(shapes=[(8, 12)])
    optimizer = Muon(params)
    set_grads(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert torch.isnan(params[0]).any()


def test_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizer = Muon(
        [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 1e-2}], lr=0.02, weight_decay=0.0
    )
    x = torch.randn(256, 16)
    y = x.sum(1, keepdim=True).sin()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
