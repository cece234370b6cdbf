"""HSDP on NCCL: two replicas, or one, on two GPUs; python -m pytest tests/gpu on a machine with GPUs."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 1024  # a bf16 gradient of 2 MiB goes out where autograd left it


class Stack(nn.Module):
    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False)) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def build(model: nn.Module, replicas: int, policy: MixedPrecisionPolicy, *, reshard: bool = True) -> nn.Module:
    mesh = init_device_mesh(
        "cuda", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    dmuon.dedicate_params(model, mesh["shard"], lambda name, p: p.ndim == 2, replicate_mesh=mesh["replicate"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * step + rank)
    return torch.randn(64, WIDTH, device="cuda", generator=generator)


def gradients(replicas: int) -> None:
    """Of the first step, against the mean over all ranks' batches in one process."""
    torch.manual_seed(0)
    single = Stack(4).cuda()
    model = build(copy.deepcopy(single), replicas, MixedPrecisionPolicy())
    model(batch(dist.get_rank(), 0)).backward()
    for rank in range(dist.get_world_size()):
        (single(batch(rank, 0)) / dist.get_world_size()).backward()
    reference = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        got, want = parameter.grad.full_tensor(), reference[name].grad
        assert (got - want).norm() <= 1e-5 * want.norm(), name


def stress(replicas: int, steps: int) -> float:
    """Garbage in freed memory between step and forward; after every step all ranks compute with the same bits."""
    torch.manual_seed(0)
    model = build(
        Stack(24).cuda(), replicas, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    optimizer = dmuon.Muon(model, lr=0.02)
    peaks = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step)).backward()
        optimizer.step()
        garbage = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(24)]
        del garbage
        if step % 100 == 0:
            gc.collect()
        # Exact sums of the bits, so that one collective compares all weights.
        sums = []
        for group in dmuon_groups(model):
            group.make_ready()
            sums += [m.unsharded.detach().view(torch.int16).long().sum() for m in group.members]
            group.rest()
        mine = torch.stack(sums)
        most, least = mine.clone(), mine.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        assert torch.equal(most, least), f"the ranks' weights differ after step {step}"
        peaks.append(torch.cuda.memory_allocated())
    assert peaks[-1] <= peaks[10], "memory grows"
    return float(sums[0])


def dmuon_groups(model: nn.Module):
    from dmuon_fsdp.api import registration_of

    return registration_of(model).state.groups


def same_bits_both_ways() -> None:
    """Waiting for the publish in the step or not, resident weights or not."""

    def train(replicate_async: bool, reshard: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = build(Stack(6).cuda(), 2, policy, reshard=reshard)
        ns = dmuon.NewtonSchulz(deterministic=True)
        optimizer = dmuon.Muon(model, lr=0.02, replicate_async=replicate_async, ns_backend=ns)
        for step in range(20):
            optimizer.zero_grad()
            model(batch(dist.get_rank(), step)).backward()
            optimizer.step()
        return [member.owned.full_tensor().detach() for member in dmuon.dedicated_params(model)]

    first = train(True, True)
    for cell in ((False, True), (True, False)):
        for got, want in zip(train(*cell), first, strict=True):
            assert torch.equal(got, want), cell


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_are_the_mean_over_all_ranks(ranks, replicas):
    ranks(2, gradients, replicas, backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("replicas", [1, 2])
def test_five_hundred_steps_beside_garbage(ranks, replicas):
    ranks(2, stress, replicas, 500, backend="nccl", timeout_s=170)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_async_publish_and_both_memory_modes_give_the_same_bits(ranks):
    ranks(2, same_bits_both_ways, backend="nccl")


def same_bits_cast_once_or_twice() -> None:
    """What an owner frees after forward and casts again in backward, beside garbage in the freed memory."""

    def train(reshard: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = build(Stack(12).cuda(), 1, policy, reshard=reshard)
        optimizer = dmuon.Muon(model, lr=0.02, ns_backend=dmuon.NewtonSchulz(deterministic=True))
        for step in range(50):
            optimizer.zero_grad()
            loss = model(batch(dist.get_rank(), step))
            garbage = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(24)]
            del garbage
            loss.backward()
            optimizer.step()
        return [member.owned.full_tensor().detach() for member in dmuon.dedicated_params(model)]

    for got, want in zip(train(True), train(False), strict=True):
        assert got.isfinite().all()
        assert torch.equal(got, want)


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_that_are_cast_again_in_backward_are_the_same(ranks, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    ranks(world_size, same_bits_cast_once_or_twice, backend="nccl")
