"""Ownership on NCCL against one process: python -m pytest tests/gpu on a machine with GPUs."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon_core import Muon as SingleProcessMuon

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Layers(nn.Module):
    """ModuleDict layers, `proj` names, a head left out."""

    def __init__(self, d: int = 256, ff: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up_proj": nn.Linear(d, ff, bias=False),
                    "down_proj": nn.Linear(ff, d, bias=False),
                    "norm": nn.LayerNorm(d),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down_proj"](torch.tanh(layer["up_proj"](layer["norm"](x))))
        return self.head(x).mean()


def train(steps: int = 5):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    model = Layers().cuda()
    single = copy.deepcopy(model)
    dedicated = set(dmuon.dedicate_params(model, mesh, lambda name, p: "proj" in name))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ns = {"dtype": torch.float32, "deterministic": True}
    optimizer = dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(**ns))
    oracle = SingleProcessMuon(
        [
            {
                "params": [p for n, p in single.named_parameters() if n in dedicated],
                "lr": 0.02,
                "weight_decay": 0.0,
                "adjust_lr_fn": "match_rms_adamw",
            },
            {
                "params": [p for n, p in single.named_parameters() if n not in dedicated],
                "algorithm": "adamw",
                "lr": 1e-3,
                "weight_decay": 0.01,
            },
        ],
        ns_backend=dmuon.NewtonSchulz(**ns),
    )
    worst_gradient = worst_weight = 0.0
    for step in range(steps):
        batches = [
            torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + r)).cuda() for r in range(world)
        ]
        for each in (optimizer, oracle):
            each.zero_grad()
        model(batches[rank]).backward()
        (sum(single(batch) for batch in batches) / world).backward()
        pairs = list(zip(model.parameters(), single.parameters(), strict=True))
        worst_gradient = max(worst_gradient, *(distance(p.grad.full_tensor(), q.grad) for p, q in pairs))
        optimizer.step()
        oracle.step()
        worst_weight = max(worst_weight, *(distance(p.full_tensor(), q) for p, q in pairs))
    return worst_gradient, worst_weight


def distance(got, want) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_and_weights_equal_one_process(ranks, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    for worst_gradient, worst_weight in ranks(world_size, train, backend="nccl"):
        assert worst_gradient <= 1e-4  # the weights of the two runs drift apart by reduction order alone
        assert worst_weight <= 5e-3


def steps_with_given_gradients(steps: int = 3):
    """Owners' weights, and the single-process ones, after steps on the same small integers."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Layers().cuda()
    single = copy.deepcopy(model)
    dmuon.dedicate_params(model, mesh, lambda name, p: "proj" in name)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(deterministic=True))
    oracle = SingleProcessMuon(
        [p for n, p in single.named_parameters() if "proj" in n],
        lr=0.02,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
        ns_backend=dmuon.NewtonSchulz(deterministic=True),
    )
    wanted = dict(single.named_parameters())
    for step in range(steps):
        for i, member in enumerate(dmuon.dedicated_params(model)):
            generator = torch.Generator().manual_seed(100 * step + i)
            grad = torch.randint(-3, 4, member.shape, generator=generator).float().cuda()
            wanted[member.fqn].grad = grad
            member.param.grad = torch.zeros_like(member.param)
            if member.is_owner:
                member.param.grad.local.copy_(grad)
        optimizer.step()
        oracle.step()
    owned = dmuon.owned_params(model)
    return [bool(torch.equal(member.param.local, wanted[member.fqn])) for member in owned]


@pytest.mark.parametrize("world_size", [1, 2])
def test_bitwise_where_the_reduced_gradient_is_given(ranks, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    equal = [one for rank in ranks(world_size, steps_with_given_gradients, backend="nccl") for one in rank]
    assert len(equal) == 6
    assert all(equal)
