"""What a training step costs, counted where there is no GPU: collectives, bytes, products, operators of torch.

Collectives and bytes follow from the plan: an owner's bucket of a group is broadcast when the group is gathered,
reduced when it has its gradients, and broadcast to the owner's column when the owner publishes.
"""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import dmuon
from fsdp.models import Toy, is_projection, next_token_loss, world_mesh


def toy(depth: int):
    torch.manual_seed(0)
    return Toy(depth=depth)


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def dedicated_and_sharded(model, mesh, **options):
    if mesh.ndim == 1:
        plan = dmuon.dedicate_params(model, mesh, is_projection)
    else:
        plan = dmuon.dedicate_params(model, mesh["shard"], is_projection, replicate_mesh=mesh["replicate"])
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    model = sharded(model, mesh, **options)
    buckets = Counter()
    for name, owner in plan.items():
        buckets[name.rsplit(".", 2)[0], owner.replicate, owner.shard] += sizes[name]
    return model, dict(buckets)


def third_step(model, optimizer):
    """The operators that this rank calls in forward and backward and in the step, once everything is allocated."""
    for step in range(2):
        next_token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        next_token_loss(model, dist.get_rank(), 2).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as step:
        optimizer.step()
    return run, step


def collectives(run) -> Counter:
    """Calls of the process groups, by operation."""
    return Counter(event.name for event in run.events() if event.name.startswith("c10d::"))


def elements(run, operation: str) -> int:
    """How many elements this rank passed to ``operation`` of gloo."""
    return sum(torch.Size(e.input_shapes[0]).numel() for e in run.events() if e.name == f"gloo:{operation}")


def operators(run) -> int:
    """Operators of torch that were called from outside of one."""
    names = [(event.name, event.cpu_parent) for event in run.events() if event.name.startswith("aten::")]
    return sum(parent is None or not parent.name.startswith("aten::") for _, parent in names)


def products(optimizer) -> int:
    return sum(map(int, re.findall(r"launches: torch (\d+)", dmuon.get_ns_backend(optimizer))))


def plan_in_numbers(reshard: bool):
    model, buckets = dedicated_and_sharded(toy(3), world_mesh(), reshard_after_forward=reshard)
    run, step = third_step(model, dmuon.Muon(model, lr=0.01))
    gathers = 2 if reshard else 1
    assert collectives(step) == {}
    calls = collectives(run)
    assert calls["c10d::broadcast_"] == gathers * len(buckets)
    assert calls["c10d::reduce_"] == len(buckets)
    assert elements(run, "broadcast") == gathers * sum(buckets.values())
    presence = len(dmuon.dedicated_params(model))  # one element of a parameter says whether a rank had its gradient
    assert elements(run, "reduce") == sum(buckets.values()) + presence


@pytest.mark.parametrize("reshard", [True, False])
def test_traffic_is_that_of_the_plan(ranks, reshard):
    """A bucket goes out once when its group is gathered and comes back once; the step itself sends nothing."""
    ranks(2, plan_in_numbers, reshard)


def hsdp_in_numbers():
    model, buckets = dedicated_and_sharded(toy(3), world_mesh(2))
    run, step = third_step(model, dmuon.Muon(model, lr=0.01))
    column = [bucket for bucket in buckets if bucket[2] == dist.get_rank() % 2]
    calls = collectives(run)
    assert calls["c10d::broadcast_"] == 2 * len(buckets)
    assert calls["c10d::reduce_"] == len(buckets) + len(column)
    assert collectives(step) == {"c10d::broadcast_": len(column)}


def test_traffic_of_hsdp_is_that_of_the_plan(ranks):
    """Over replicas go the buckets of a rank's own column alone: reduced once, published once."""
    ranks(4, hsdp_in_numbers)


def counted_beside_fsdp2(depth: int):
    fully = sharded(toy(depth), world_mesh())
    alone, _ = third_step(fully, torch.optim.AdamW(fully.parameters()))
    model, _ = dedicated_and_sharded(toy(depth), world_mesh())
    optimizer = dmuon.Muon(model, lr=0.01)
    run, _ = third_step(model, optimizer)
    before = products(optimizer)
    optimizer.step()
    return operators(alone), operators(run), products(optimizer) - before


def test_no_more_operators_than_fsdp2_alone(ranks):
    """What the host launches in forward and backward decides the speed of small batches."""
    for alone, ours, _ in ranks(2, counted_beside_fsdp2, 3):
        assert ours <= alone


def test_products_do_not_grow_with_the_depth(ranks):
    """Matrices of one shape are one batch, however many a rank owns."""
    (shallow,), (deep,) = ranks(1, counted_beside_fsdp2, 1), ranks(1, counted_beside_fsdp2, 4)
    assert shallow[2] == deep[2] > 0
