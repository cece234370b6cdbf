"""HSDP: owners over all ranks of all replicas, two-stage reduction, publish to the other replicas after the step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from fsdp.models import Toy, Twins, next_token_loss

MESHES = [(1, 4), (2, 2), (4, 1), (1, 1), (2, 3)]


def grid(replicas: int, shards: int, kind: str) -> DeviceMesh:
    """The 2-D mesh that fully_shard gets, which has names: made as such, or a slice of a 3-D one."""
    if kind == "sliced":
        parent = init_device_mesh("cpu", (1, replicas, shards), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
        return parent["dp_replicate", "dp_shard"]
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def dimensions(mesh: DeviceMesh, kind: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Its two dimensions: slices of it, or meshes of their own without names, over the same process groups."""
    if kind == "unnamed":
        replicate, shard = (DeviceMesh.from_group(mesh.get_group(dim), "cpu") for dim in range(2))
        return replicate, shard
    assert mesh.mesh_dim_names is not None
    replicate_name, shard_name = mesh.mesh_dim_names
    return mesh[replicate_name], mesh[shard_name]


def wrap_hsdp(model, *, replicas: int, shards: int, kind: str = "named", dedicate=None, **shard):
    mesh = grid(replicas, shards, kind)
    replicate, row = dimensions(mesh, kind)
    dmuon.dedicate_params(
        model,
        row,
        lambda name, p: "blocks." in name and p.ndim == 2,
        replicate_mesh=replicate,
        **(dedicate or {}),
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **shard)
    return fully_shard(model, mesh=mesh, **shard)


def check_replicas(twins: Twins) -> None:
    """What a forward computes with is the same on all ranks, bit for bit."""
    twins.model.eval()
    with torch.no_grad():
        next_token_loss(twins.model, 0)
    for group in twins.registration.state.groups:
        group.make_ready()
        for member in group.members:
            weight = member.unsharded.detach()
            expected = member.owned.full_tensor().detach()
            assert torch.equal(weight, expected), f"{member.fqn} differs on rank {dist.get_rank()}"
        group.rest()
    twins.model.train()


def trains_as_one_process(replicas: int, shards: int, kind: str, steps: int) -> None:
    twins = Twins(wrapping=wrap_hsdp, replicas=replicas, shards=shards, kind=kind)
    twins.optimizers(weight_decay=0.1)
    twins.backward()
    twins.check_gradients()
    twins.step()
    check_replicas(twins)
    for step in range(1, steps):
        twins.zero_grad()
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        twins.step()
    twins.check_weights()
    check_replicas(twins)
    twins.check_at_rest()
    traffic = twins.registration.state.traffics[0]
    if replicas == 1:
        assert traffic.publishes == traffic.replica_reduces == 0
    else:
        assert traffic.replica_reduces == traffic.reduces == steps * len(twins.registration.state.groups)


def trains_on_every_kind_of_mesh(replicas: int, shards: int) -> None:
    for kind, steps in (("named", 4), ("sliced", 2), ("unnamed", 2)):
        trains_as_one_process(replicas, shards, kind, steps)


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_gradients_and_weights_are_those_of_one_process(ranks, replicas, shards):
    """On slices of a 3-D parent too, and on meshes without names over the same groups."""
    ranks(replicas * shards, trains_on_every_kind_of_mesh, replicas, shards)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def train_twenty(replicate_async: bool, reshard: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap_hsdp(Toy(), replicas=2, shards=2, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, lr=0.02, replicate_async=replicate_async)
    for step in range(20):
        optimizer.zero_grad()
        next_token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        junk = [torch.full((64, 64), float("nan")) for _ in range(8)]
        del junk
    dmuon.wait_for_publish(model)
    return weights_of(model)


def all_ways_agree() -> None:
    first = train_twenty(True, True)
    for cell in ((False, True), (True, False), (False, False)):
        for name, weight in train_twenty(*cell).items():
            assert torch.equal(weight, first[name]), f"{name} differs with replicate_async, reshard = {cell}"


def test_async_and_waiting_publish_and_both_memory_modes_give_the_same_bits(ranks):
    ranks(4, all_ways_agree, timeout_s=170)


def accumulates(control: str) -> None:
    """Three micro-batches without the replicate stage (or without any), the fourth with everything."""
    twins = Twins(wrapping=wrap_hsdp, replicas=2, shards=2)
    twins.optimizers()
    traffic = twins.registration.state.traffics[0]
    groups = len(twins.registration.state.groups)
    for micro in range(4):
        last = micro == 3
        if control == "all_reduce":
            twins.model.set_requires_all_reduce(last)
        elif control == "gradient_sync":
            twins.model.set_requires_gradient_sync(last)

        def loss(model, rank, micro=micro):
            return next_token_loss(model, rank, micro) / 4

        if control == "no_sync" and not last:
            with dmuon.no_sync(twins.model):
                twins.backward(loss)
        else:
            twins.backward(loss)
        if not last:
            with pytest.raises(RuntimeError, match="not reduced"):
                twins.optimizer.step()
    assert traffic.replica_reduces == groups
    assert traffic.reduces == groups * (4 if control == "all_reduce" else 1)
    twins.check_gradients()
    twins.step()
    twins.check_weights()


@pytest.mark.parametrize("control", ["all_reduce", "gradient_sync", "no_sync"])
def test_accumulation_as_fsdp2s_switches_say(ranks, control):
    ranks(4, accumulates, control)


def partial_sums_are_wide() -> float:
    """256 and 1, added up in bf16, are 256."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    torch.nn.init.zeros_(model[0].weight)
    mesh = grid(2, 1, "named")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    dmuon.dedicate_params(model, mesh["shard"], lambda name, p: True, replicate_mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for index, size in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_all_reduce(index == 2)
        (model(torch.ones(1, 4, dtype=torch.bfloat16)) * size).sum().backward()
    return model[0].weight.grad.full_tensor()[0, 0].item()


def test_partial_sums_are_added_in_fp32(ranks):
    # 258 is a bf16 number, 257 is not: added one by one in bf16, both ones are lost.
    assert ranks(2, partial_sums_are_wide) == [258.0, 258.0]


def write_outside(how: str) -> None:
    twins = Twins(wrapping=wrap_hsdp, replicas=2, shards=2)
    twins.optimizers()
    twins.train(1)
    member = dmuon.dedicated_params(twins.model)[0]
    if how == "operator":
        with torch.no_grad():
            member.param.mul_(0.5)
    elif how == "load_state_dict":
        state = {name: p.full_tensor() * 0.5 for name, p in twins.model.state_dict().items() if name == member.fqn}
        twins.model.load_state_dict(state, strict=False)
    elif member.is_owner:
        member.owned.local.mul_(0.5)
    if how == "local, published":
        dmuon.publish(twins.model)
    check_replicas(twins)


@pytest.mark.parametrize("how", ["operator", "load_state_dict", "local, published"])
def test_writes_outside_of_a_step_reach_the_replicas(ranks, how):
    ranks(4, write_outside, how)


def write_on_the_owner_alone() -> str:
    twins = Twins(wrapping=wrap_hsdp, replicas=2, shards=2)
    twins.optimizers()
    twins.train(1)
    member = dmuon.dedicated_params(twins.model)[0]
    if not member.is_owner:
        return ""
    member.owned.local.mul_(0.5)
    try:
        twins.registration.state.groups[0].gather()
    except RuntimeError as error:
        return str(error)
    return "not noticed"


def test_a_write_on_the_owner_alone_is_noticed_before_a_collective_and_names_the_remedy(ranks):
    said = [text for text in ranks(4, write_on_the_owner_alone) if text]
    assert len(said) == 1
    assert "dmuon.publish(model)" in said[0]


def hand_set_gradients(replicas: int, shards: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap_hsdp(Toy(), replicas=replicas, shards=shards)
    optimizer = dmuon.Muon(model, lr=0.02)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for member in dmuon.dedicated_params(model):
            grad = torch.randn(member.shape, generator=generator)
            member.param.grad = member.owned.like(grad if member.is_owner else grad[:0])
        optimizer.step()
    return weights_of(model)


def test_a_step_from_given_gradients_does_not_depend_on_the_mesh(ranks):
    want = ranks(1, hand_set_gradients, 1, 1)[0]
    for got in ranks(4, hand_set_gradients, 2, 2):
        for name, weight in got.items():
            assert torch.equal(weight, want[name]), name


def refused(case: str) -> str:
    mesh = grid(2, 2, "named")
    replicate, shard = mesh["replicate"], mesh["shard"]
    model = Toy()
    try:
        if case == "same":
            dmuon.dedicate_params(model, shard, lambda name, p: True, replicate_mesh=shard)
        elif case == "2-D":
            dmuon.dedicate_params(model, mesh, lambda name, p: True)
        elif case == "cover":
            dmuon.dedicate_params(model, shard, lambda name, p: "blocks" in name and p.ndim == 2)
            fully_shard(model.blocks[0], mesh=mesh)
        elif case == "not a mesh":
            dmuon.dedicate_params(model, shard, lambda name, p: True, replicate_mesh=replicate.get_group())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("same", "two dimensions of one mesh"),
        ("2-D", "replicate_mesh"),
        ("cover", "replicate_mesh=hsdp['replicate']"),
        ("not a mesh", "replicate_mesh must be a 1-D DeviceMesh"),
    ],
)
def test_wrong_meshes_are_refused_on_all_ranks(ranks, case, words):
    for text in ranks(4, refused, case):
        assert words in text


class Sum(torch.nn.Module):
    """Two matrices whose gradients autograd keeps in one piece of memory, and one whose gradient flows on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x):
        return torch.sin(self.a.unsqueeze(0) + self.b.unsqueeze(0)) @ (x + self.c.unsqueeze(0))


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(Sum() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients_in_shared_memory(accumulate: bool) -> None:
    from dmuon_fsdp.runtime import reduction

    reduction.DIRECT_FROM = 0
    twins = Twins(Sums, wrapping=wrap_hsdp, replicas=1, shards=2)

    def loss(model, rank):
        return model(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(rank)))

    if accumulate:
        for _ in range(2):
            with dmuon.no_sync(twins.model):
                loss(twins.model, twins.rank).backward()
    loss(twins.model, twins.rank).backward()
    # In one backward: torch itself adds a second one into the memory that both gradients share.
    total = sum(loss(twins.reference, rank) for rank in range(2)) / 2
    (total * (3 if accumulate else 1)).backward()
    twins.check_gradients()


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_that_share_memory_are_reduced_apart(ranks, accumulate):
    """The collective once wrote into memory that another gradient was still read from."""
    ranks(2, gradients_in_shared_memory, accumulate)


def moved_between_steps() -> None:
    torch.manual_seed(0)
    mesh = grid(2, 1, "named")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    dmuon.dedicate_params(model, mesh["shard"], lambda name, p: True, replicate_mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model(torch.ones(1, 8)).detach()
    model.double()
    assert torch.allclose(model(torch.ones(1, 8)).detach().float(), before)


def test_a_model_may_change_its_dtype_between_steps(ranks):
    """``module.to`` exchanges the tensor inside a Parameter, which only its owner saw."""
    ranks(2, moved_between_steps, group_timeout_s=20)


class Dropping(Toy):
    """Leaves its last block out where it is told to."""

    drops = False

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in list(self.blocks)[: -1 if self.drops else None]:
            x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD))


def last_micro_batch_skips_a_block() -> None:
    twins = Twins(Dropping, wrapping=wrap_hsdp, replicas=2, shards=1)
    twins.optimizers()
    with dmuon.no_sync(twins.model):
        twins.backward()
    twins.model.drops = twins.reference.drops = True
    twins.backward()
    twins.check_gradients()
    twins.step()
    twins.check_weights()


def test_the_last_micro_batch_may_skip_a_block(ranks):
    """Its gradients from the micro-batches before were once kept for good."""
    ranks(2, last_micro_batch_skips_a_block)


def run_step_that_fails_between_its_groups(replicas):
    """Muon has stepped and left its weights for the next forward, AdamW fails on every rank."""
    twins = Twins(wrapping=wrap_hsdp, replicas=replicas, shards=2 // replicas)
    twins.optimizers()
    twins.train(2)
    twins.backward()
    with pytest.MonkeyPatch.context() as patch:

        def fail(*args):
            raise MemoryError("no memory for AdamW")

        patch.setattr("dmuon_fsdp.optim.muon.adamw_on_parts", fail)
        with pytest.raises(MemoryError):
            twins.optimizer.step()
    twins.zero_grad()
    if replicas > 1:
        with pytest.raises(RuntimeError, match=r"dmuon\.publish"):
            next_token_loss(twins.model, 0)
        dmuon.reset(twins.model)
        dmuon.publish(twins.model)
    check_replicas(twins)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_fails_in_the_middle_leaves_no_two_weights(ranks, replicas):
    """Weights noted as sent before they were: replicas computed with different ones, and nothing said so."""
    ranks(2, run_step_that_fails_between_its_groups, replicas)
