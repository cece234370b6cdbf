"""The checklist of docs/decisions/0001, checkpoints: torch's DCP, its getters and setters."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.test_owned_tensor import NAMES, assert_same, give_gradients, mesh_of, own, plain_toy, sharded_toy

SAVED = ("plain", "getter", "async", "blocking")


def save_all(folder, sizes, shift):
    model, _ = sharded_toy(mesh_of(*sizes), shift, seed=3)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/plain")
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/getter")
    pending = dcp.async_save(model.state_dict(), checkpoint_id=f"{folder}/async")
    zero(model)
    pending.result()
    model, _ = sharded_toy(mesh_of(*sizes), shift, seed=3)
    stager = BlockingAsyncStager(cache_staged_state_dict=False)
    pending = dcp.async_save(model.state_dict(), checkpoint_id=f"{folder}/blocking", async_stager=stager)
    zero(model)
    pending.result()


def zero(model):
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


def load_all(folder, sizes, shift):
    model, _ = sharded_toy(mesh_of(*sizes), shift, seed=0)
    want = plain_toy(seed=3)
    for kind in SAVED:
        zero(model)
        dcp.load(model.state_dict(), checkpoint_id=f"{folder}/{kind}")
        assert_same(model, want, rtol=0, atol=0)
        values = model.state_dict()
        dcp.load(values, checkpoint_id=f"{folder}/{kind}")
        set_model_state_dict(model, values)
        assert_same(model, want, rtol=0, atol=0)


def load_unwrapped(folder):
    model, want = plain_toy(seed=0), plain_toy(seed=3)
    for kind in SAVED:
        zero(model)
        dcp.load(model.state_dict(), checkpoint_id=f"{folder}/{kind}")
        for got, wanted in zip(model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_dcp_on_another_world_and_owner_map(ranks, sizes, tmp_path):
    """async_save's staging turned an OwnedTensor into an even DTensor, which stored a slice; weights written after
    the call must not be in it either."""
    ranks(math.prod(sizes), save_all, str(tmp_path), sizes, 0)
    ranks(3, load_all, str(tmp_path), (3,), 1)
    ranks(4, load_all, str(tmp_path), (2, 2), 2)
    ranks(1, load_unwrapped, str(tmp_path))


def getters():
    mesh = mesh_of(2)
    model, reference = sharded_toy(mesh)
    want = reference.state_dict()
    sharded = get_model_state_dict(model)
    assert sharded.keys() == want.keys()
    assert all(isinstance(sharded[name], OwnedTensor) for name in NAMES)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(offloaded[name], OwnedTensor) for name in NAMES)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert whole.keys() == want.keys()
    for name, value in whole.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, want[name], rtol=0, atol=0)
    on_rank_0 = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain_toy(seed=9).load_state_dict(on_rank_0, strict=True)
        for name, value in on_rank_0.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=0)
    else:
        assert on_rank_0 == {}
    torch.save(whole, io.BytesIO())


def test_torchs_getters(ranks):
    ranks(2, getters)


def setters(sizes):
    mesh = mesh_of(*sizes)
    want = plain_toy(seed=7)
    values = want.state_dict()
    for options, given in (
        (StateDictOptions(full_state_dict=True), values),
        (
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            values if dist.get_rank() == 0 else {},
        ),
    ):
        model, _ = sharded_toy(mesh, shift=1)
        set_model_state_dict(model, dict(given), options=options)
        assert_same(model, want, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_torchs_setter_of_a_full_state_dict(ranks, sizes):
    """torch slices the full tensor by the placements. Taken for even shards, the matrix of two rows on two ranks had
    its first row written over both, without an error."""
    ranks(math.prod(sizes), setters, sizes)


def optimizer_pair(mesh, shift):
    model, reference = sharded_toy(mesh, shift)
    return model, reference, *(torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))


def save_optimizer(folder):
    mesh = mesh_of(2)
    model, reference, optimizer, oracle = optimizer_pair(mesh, shift=0)
    for step in range(2):
        give_gradients(model, reference, mesh, seed=step)
        optimizer.step()
        oracle.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, plain in reference.named_parameters():
        torch.testing.assert_close(whole["state"][name]["exp_avg"], oracle.state[plain]["exp_avg"])


def resume_optimizer(folder):
    mesh = mesh_of(3)
    model, reference, optimizer, oracle = optimizer_pair(mesh, shift=1)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(3):
        give_gradients(model, reference, mesh, seed=step)
        oracle.step()
    optimizer.step()
    assert_same(model, reference, rtol=1e-5, atol=1e-6)


def test_optimizer_state_on_another_world_and_owner_map(ranks, tmp_path):
    """The moments of AdamW, which zeros_like made. Two steps on two ranks and a third on three, against one process."""
    ranks(2, save_optimizer, str(tmp_path))
    ranks(3, resume_optimizer, str(tmp_path))


def even_shards_from_placements():
    """What loaders of other stacks do: Accelerate, torchtune."""
    mesh = mesh_of(2)
    param = own(torch.ones(4, 3), mesh, 1)
    values = torch.arange(12.0).view(4, 3)
    even = distribute_tensor(values, param.device_mesh, param.placements)
    torch.testing.assert_close(even.full_tensor(), values)
    torch.testing.assert_close(param.adopt(even).full_tensor(), values)
    with pytest.raises(AssertionError, match="shard"):
        DTensor.from_local(param.local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def test_a_plain_dtensor_made_from_the_placements_is_right_or_refused(ranks):
    """One around the uneven local tensor would be taken for even shards; torch's check of placements stops it."""
    ranks(2, even_shards_from_placements)


def save_from_a_child(folder):
    model, _ = sharded_toy(mesh_of(2), seed=3)
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save(model.state_dict(), checkpoint_id=folder, async_checkpointer_type=kind).result()


def load_once(folder):
    model, _ = sharded_toy(mesh_of(2), shift=1)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert_same(model, plain_toy(seed=3), rtol=0, atol=0)


def test_async_save_in_a_child_process(ranks, tmp_path):
    """The state dict is pickled into the child, which writes for its rank. Pickling into a file raises."""
    ranks(2, save_from_a_child, str(tmp_path))
    ranks(2, load_once, str(tmp_path))
