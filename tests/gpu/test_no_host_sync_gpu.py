"""A training step never makes the host wait for the device: python -m pytest tests/gpu on a machine with GPUs.

Two checks, each after warm-up. In torch's sync debug mode every copy to the host, ``.item()`` and copy of unpinned
memory raises. And behind a device that sleeps the host must be through the step before it wakes, which also finds what
that mode does not see: waits for events, streams and the device.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from fsdp.models import FEED_FORWARD, WIDTH, Toy, is_projection, on_all_cells, tokens, world_mesh, wrap

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WARM_UP = 3  # Newton-Schulz runs eagerly, is captured, is replayed
ASLEEP = 10**9  # cycles, half a second of an H200: ten steps' host time


class FeedForward(nn.Module):
    """Three projections and a norm, of operators that are known not to synchronize."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x_BTD):
        h_BTD = self.norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


def routes():
    return [dmuon.ParamPolicy("*.gate.*", route="adamw"), dmuon.ParamPolicy("*.up.*", route="sharded_adamw")]


def masters():
    return [dmuon.ParamPolicy("*", master_dtype=torch.float32)]


def rates():
    return {name: torch.tensor(0.01, device="cuda") for name in ("lr", "adamw_lr")}


CELLS = {
    "plain": {},
    "clip_grad_norm_": {"clips": True},
    "max_grad_norm": {"options": lambda: {"max_grad_norm": 1.0}},
    "masters": {"dtype": torch.bfloat16, "policies": masters},
    "routes": {"policies": routes},
    "lr on the device": {"options": rates},
    "lr on the device, routes, clipped": {"policies": routes, "options": lambda: {"max_grad_norm": 1.0, **rates()}},
    "averaged": {"all_sharded": False, "options": lambda: {"unsynchronized": "average"}},
}


def train(name):
    steps = Steps(**CELLS[name])
    for _ in range(WARM_UP):
        steps()
    with synchronizing_raises():
        steps()
    # Once for the allocators: memory that a busy device has not given back yet comes from the driver, which may wait.
    for _ in range(2):
        awake = put_to_sleep()
        steps()
        waited = awake.query()
    assert not waited, "the host waited for the device"
    torch.cuda.synchronize()
    assert torch.isfinite(steps.loss), "it trains on garbage"


def train_all():
    on_all_cells(({"name": name} for name in CELLS), train)


class Steps:
    """A model, its optimizer and a batch; a call is one training step."""

    def __init__(self, *, clips=False, dtype=torch.float32, policies=list, options=dict, all_sharded=True):
        torch.manual_seed(0)
        model = Toy(block=FeedForward).to("cuda", dtype)
        if all_sharded:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            self.model = wrap(model, dedicate={"param_policy": policies()}, mp_policy=policy)
        else:
            self.model = _with_loose_parameters(model)
        self.optimizer = dmuon.Muon(self.model, **options())
        self.clips = clips
        batch = tokens(dist.get_rank()).cuda()
        self.inputs, self.targets = batch[:, :-1], batch[:, 1:].flatten()

    def __call__(self):
        self.optimizer.zero_grad()
        self.loss = F.cross_entropy(self.model(self.inputs).float().flatten(0, 1), self.targets)
        self.loss.backward()
        if self.clips:
            dmuon.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()


def _with_loose_parameters(model):
    """What is outside of the blocks is nobody's."""
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


@contextlib.contextmanager
def synchronizing_raises():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def put_to_sleep():
    """An event that is there when the device wakes."""
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    return torch.cuda.current_stream().record_event()


def test_both_checks_find_what_they_are_for():
    x = torch.ones(1, device="cuda")
    with synchronizing_raises(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()
    x.add_(1)  # the first launch of a kernel loads it, which waits for the device
    awake = put_to_sleep()
    x.add_(1)
    assert not awake.query()
    torch.cuda.current_stream().synchronize()
    assert awake.query()


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_does_not_make_the_host_wait(ranks, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    ranks(world_size, train_all, backend="nccl")
