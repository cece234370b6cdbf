"""The checklist of docs/decisions/0001, what an OwnedTensor is: facts, what torch derives or refuses, beside TP."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmuon_fsdp.runtime.owned_tensor import OwnedTensor

NAMES = ("first.weight", "second.weight", "narrow.weight")


class Toy(nn.Module):
    """Three matrices to dedicate, uneven ones and one of two rows, beside a matrix and a norm that stay with FSDP2."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.second = nn.Linear(7, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.rest = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.narrow(self.rest(self.norm(self.second(self.first(x)))))


def mesh_of(*sizes):
    names = ("replicate", "shard") if len(sizes) == 2 else ("shard",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def plain_toy(seed=0):
    torch.manual_seed(seed)
    return Toy()


def parent_of(model, name):
    path, leaf = name.rsplit(".", 1)
    return model.get_submodule(path), leaf


def own(tensor, mesh, owner, name="w"):
    """``tensor``, the same on all ranks, owned by ``owner``."""
    mine = tensor.detach().clone() if dist.get_rank() == owner else None
    return OwnedTensor.wrap(
        mine, shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, mesh=mesh, owner=owner, name=name
    )


def sharded_toy(mesh, shift=0, seed=0):
    """The toy with owners (i + shift) % ranks, and the plain one with the same values."""
    reference = plain_toy(seed)
    model = copy.deepcopy(reference)
    for i, name in enumerate(NAMES):
        module, leaf = parent_of(model, name)
        owned = own(getattr(module, leaf), mesh, (i + shift) % mesh.size(), name)
        setattr(module, leaf, nn.Parameter(owned))
    fully_shard(model, mesh=mesh, ignored_params={model.get_parameter(name) for name in NAMES})
    return model, reference


def give_gradients(model, reference, mesh, seed=1):
    """The same gradient on both sides."""
    generator = torch.Generator().manual_seed(seed)
    fsdp_placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        plain.grad = torch.randn(plain.shape, generator=generator)
        if isinstance(param, OwnedTensor):
            param.grad = own(plain.grad, mesh, param.owner, name)
        else:
            param.grad = distribute_tensor(plain.grad, mesh, fsdp_placements)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model, reference, what=lambda p: p.detach(), **tolerance):
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-7}
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(param, OwnedTensor) == (name in NAMES)
        torch.testing.assert_close(full(what(param)), what(plain), msg=lambda m, n=name: f"{n}: {m}", **tolerance)


# --- what it is


def facts_on_every_rank():
    mesh = mesh_of(3)
    weight = torch.arange(35.0).view(7, 5)
    param = nn.Parameter(own(weight, mesh, 1, "layers.0.weight"))
    assert isinstance(param, nn.Parameter)
    assert isinstance(param, OwnedTensor)
    assert param.is_leaf
    assert param.requires_grad
    assert (param.shape, param.stride(), param.dtype, param.device) == (
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
    )
    assert param.owner == 1
    assert param.is_owner == (dist.get_rank() == 1)
    assert param.local.shape == ((7, 5) if param.is_owner else (0, 5))
    torch.testing.assert_close(param.full_tensor().detach(), weight)
    assert param.full_tensor().data_ptr() != param.local.data_ptr()
    replicated = param.redistribute(placements=[Replicate()])
    torch.testing.assert_close(replicated.to_local().detach(), weight)
    return repr(param), str(nn.ParameterList([param]))


def test_metadata_is_true_on_every_rank(ranks):
    printed = ranks(3, facts_on_every_rank)
    for rank, (one, many) in enumerate(printed):
        where = "here" if rank == 1 else "elsewhere"
        assert one == (
            f"OwnedTensor('layers.0.weight', owner=1 ({where}), shape=(7, 5), dtype=torch.float32, device=cpu, "
            "requires_grad=True)"
        )
        assert "OwnedTensor" in many or "7x5" in many


def wrap_refusals():
    mesh = mesh_of(2)
    mine = dist.get_rank() == 1
    said = []
    for local, owner in (
        (None, 1),
        (torch.zeros(2, 2), 1),
        (torch.zeros(3, 2), 1),
        (torch.zeros(2, 2, dtype=torch.float64) if mine else None, 1),
        (None, 5),
    ):
        try:
            OwnedTensor.wrap(local, shape=(2, 2), dtype=torch.float32, device="cpu", mesh=mesh, owner=owner, name="w")
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_wrap_refuses_what_disagrees(ranks):
    elsewhere, owner = ranks(2, wrap_refusals)
    assert owner[0] == "rank 1 owns 'w' but gives no tensor for it"
    assert elsewhere[0] == ""
    assert owner[1] == ""
    assert elsewhere[1] == "'w' belongs to rank 1, but rank 0 gives values of it"
    assert owner[2] == (
        "'w' should be (2, 2) of torch.float32 on cpu at its owner, it is (3, 2) of torch.float32 on cpu"
    )
    assert "torch.float64" in owner[3]
    assert owner[4] == elsewhere[4] == "rank 5 is to own 'w' but is not in the mesh [0, 1]"


def derived_tensors():
    mesh = mesh_of(2)
    param = nn.Parameter(own(torch.ones(4, 3), mesh, 0))
    with torch.no_grad():
        derived = {
            "detach": param.detach(),
            "view_as": param.view_as(param),
            "expand_as": param.expand_as(param),
            "clone": param.clone(),
            "zeros_like": torch.zeros_like(param),
            "empty_like": torch.empty_like(param, dtype=torch.bfloat16),
            "full_like": torch.full_like(param, 3.0),
            "to": param.to(torch.bfloat16),
            "cpu": param.cpu(),
            "data": param.data,
            "new_zeros": param.new_zeros(param.shape),
            "mul": param * 2,
            "isnan": param.isnan(),
            "where": torch.where(param.isnan(), 0.0, param),
            "addcmul": torch.addcmul(param, param, param),
            "foreach": torch._foreach_mul([param], 2.0)[0],
            "deepcopy": copy.deepcopy(param),
        }
    for how, tensor in derived.items():
        assert isinstance(tensor, OwnedTensor), how
        assert tensor.home == param.home, how
        assert tensor.shape == param.shape, how
        assert tensor.local.untyped_storage().nbytes() == (0 if dist.get_rank() else tensor.numel() * tensor.itemsize)
    assert derived["detach"].local.data_ptr() == param.local.data_ptr()
    assert type(param.new_zeros(())) is torch.Tensor
    torch.testing.assert_close(derived["mul"].full_tensor(), torch.full((4, 3), 2.0))
    torch.testing.assert_close(derived["addcmul"].full_tensor(), torch.full((4, 3), 2.0))


def test_what_torch_derives_keeps_the_home_and_costs_nothing_elsewhere(ranks):
    """An expanded placeholder became full size on every rank in clone, zeros_like and to(dtype)."""
    ranks(2, derived_tensors)


REFUSED = {
    "index": lambda p: p[0],
    "slice": lambda p: p[:2],
    "setitem": lambda p: p.__setitem__((0, 0), 1.0),
    "transpose": lambda p: p.t(),
    "view": lambda p: p.view(-1),
    "linear": lambda p: F.linear(torch.ones(1, 3), p),
    "matmul": lambda p: p @ torch.ones(3, 1),
    "normal_": lambda p: nn.init.normal_(p),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
    "bernoulli": lambda p: torch.bernoulli(p),
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "row_sum": lambda p: p.sum(dim=1),
    "row_norm": lambda p: torch.linalg.vector_norm(p, dim=1),
    "smallest": lambda p: torch.linalg.vector_norm(p, -math.inf),
    "equal": lambda p: torch.equal(p, p),
    "cat": lambda p: torch.cat([p, p]),
    "plain": lambda p: p + torch.ones(4, 3),
    "row": lambda p: p * torch.ones(3),
    "into_plain": lambda p: torch.ones(4, 3).copy_(p),
    "resize": lambda p: p.detach().resize_(2, 3),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "to_even": lambda p: p.redistribute(placements=[Shard(1)]),
    "torch.save": lambda p: torch.save({"w": p}, io.BytesIO()),
    "torch.save of the data": lambda p: torch.save(p.detach(), io.BytesIO()),
}


def refusals():
    mesh = mesh_of(2)
    said = {}
    for how, use in REFUSED.items():
        param = nn.Parameter(own(torch.ones(4, 3), mesh, 1, "layers.0.weight"))
        with torch.no_grad():
            try:
                said[how] = f"returned {use(param)!r}"
            except ValueError as error:
                said[how] = str(error)
            except Exception as error:
                said[how] = f"{type(error)} {error}"
    return said


def test_what_needs_values_raises_on_every_rank_and_says_what_to_do(ranks):
    """On the owner too: it would go on alone while the others wait for it."""
    for said in ranks(2, refusals):
        for how, message in said.items():
            assert "'layers.0.weight' (4×3, whole on rank 1 only)" in message, f"{how}: {message}"
            remedies = ("full_tensor()", "Replicate()", "dmuon.", "get_model_state_dict(")
            assert any(remedy in message for remedy in remedies), f"{how}: {message}"


def two_owners():
    mesh = mesh_of(2)
    one, other = own(torch.ones(4, 3), mesh, 0, "one"), own(torch.ones(4, 3), mesh, 1, "other")
    with pytest.raises(ValueError, match="'one'"):
        one.add_(other)
    with pytest.raises(ValueError, match="'one'"):
        torch._foreach_add_([one, one], [one, other])
    with pytest.raises(ValueError, match="'one'"):
        torch._foreach_copy_([one], [torch.ones(4, 3)])
    with pytest.raises(ValueError, match="'one'"):
        torch.maximum(one, distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    one.copy_(other * 5)
    torch.testing.assert_close(one.full_tensor(), torch.full((4, 3), 5.0))


def test_tensors_of_two_owners_do_not_mix_silently(ranks):
    """Without a check the ranks that own neither add nothing to nothing and go on."""
    ranks(2, two_owners)


# --- tensor parallelism


def tensor_parallel(folder, placement):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    mine = distribute_tensor(whole, mesh["tp"], [placement]).to_local().clone()
    param = nn.Parameter(
        OwnedTensor.wrap(
            mine if mesh.get_local_rank("dp") == 1 else None,
            shape=whole.shape,
            dtype=whole.dtype,
            device="cpu",
            mesh=mesh,
            owner=2,
            name="w",
            tensor_parallel=[placement],
        )
    )
    beside = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    with torch.no_grad():
        torch.testing.assert_close(param.full_tensor(), whole)
        param.grad, beside.grad = param.detach().clone(), beside.clone()
        norm = full(nn.utils.clip_grad_norm_([param, beside], 1.0))
        torch.testing.assert_close(norm, whole.norm() * math.sqrt(2))
        torch.testing.assert_close(param.grad.full_tensor(), whole / norm)
        dcp.save({"w": param.detach()}, checkpoint_id=folder)
        again = torch.zeros_like(param)
        dcp.load({"w": again}, checkpoint_id=folder)
        torch.testing.assert_close(again.full_tensor(), whole)
        param.copy_(2 * whole)
        torch.testing.assert_close(param.full_tensor(), 2 * whole)
    plain = torch.zeros(7, 5)
    if dist.get_rank() == 0:
        dcp.load({"w": plain}, checkpoint_id=folder, no_dist=True)
        torch.testing.assert_close(plain, whole)
    return param.owner


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_beside_tensor_parallelism(ranks, placement, tmp_path):
    """Each tensor-parallel coordinate has an owner of its own, and the clip sees one mesh."""
    assert ranks(4, tensor_parallel, str(tmp_path), placement) == [2, 3, 2, 3]
