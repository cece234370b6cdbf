"""The checklist of docs/decisions/0001: what torch does with parameters that are whole on one rank."""

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
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmuon_fsdp.compat import AUTOGRAD_KEEPS_SUBCLASSES
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


# --- gradients


def clip_cases(sizes):
    mesh = mesh_of(*sizes)
    model, reference = sharded_toy(mesh)
    for norm_type in (1.0, 2.0, math.inf):
        for max_norm in (0.1, 1e9):
            for foreach in (True,) if norm_type == math.inf and sizes == (4,) else (None, True, False):
                give_gradients(model, reference, mesh)
                got = full(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach))
                want = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
                torch.testing.assert_close(got, want)
                exactly = {"rtol": 0, "atol": 0} if max_norm == 1e9 else {}
                assert_same(model, reference, lambda p: p.grad, **exactly)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (1, 3)], ids=str)
def test_clip_grad_norm(ranks, sizes):
    """torch's own, on the mix that model.parameters() is. Four ranks leave one without a row of FSDP2's six; the inf
    norm of its shard raises there in torch unless the shard is in one list with ours, as with foreach=True."""
    ranks(math.prod(sizes), clip_cases, sizes)


def norms_of_parts(sizes):
    mesh = mesh_of(*sizes)
    model, reference = sharded_toy(mesh)
    norms = {}
    for owned, rest in ((3.0, 0.0), (0.0, 4.0), (3.0, 4.0)):
        give_gradients(model, reference, mesh)
        for name, param in model.named_parameters():
            wanted = {"first.weight": owned, "rest.weight": rest}.get(name, 0.0)
            param.grad.mul_(wanted / full(param.grad).norm().item())
        norms[owned, rest] = full(nn.utils.clip_grad_norm_(model.parameters(), 1e9)).item()
    give_gradients(model, reference, mesh)
    if model.second.weight.is_owner:
        model.second.weight.grad.local[0, 0] = math.nan
    norms["nan"] = full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()
    return norms


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_no_gradient_counts_twice_on_hsdp(ranks, sizes):
    """Replicas counted again give √2 too much, in the part that is wrong only."""
    for norms in ranks(4, norms_of_parts, sizes):
        assert norms[3.0, 0.0] == pytest.approx(3.0, rel=1e-5)
        assert norms[0.0, 4.0] == pytest.approx(4.0, rel=1e-5)
        assert norms[3.0, 4.0] == pytest.approx(5.0, rel=1e-5)
        assert math.isnan(norms["nan"])


def scaled_steps(sizes, where):
    mesh = mesh_of(*sizes)
    model, reference = sharded_toy(mesh)
    # FSDP2's first: torch reduces found_inf as the first gradient of a list is laid out.
    parameters = sorted(model.parameters(), key=lambda p: isinstance(p, OwnedTensor))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_gradients(model, reference, mesh)
    param = model.get_parameter(where)
    if where in NAMES and param.is_owner:
        param.grad.local[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(model, reference)
    skipped_scale = scaler.get_scale()

    give_gradients(model, reference, mesh)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for plain in reference.parameters():
            plain.sub_(plain.grad, alpha=0.1 / skipped_scale)
    assert_same(model, reference)
    return skipped_scale


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("where", NAMES[:2])
def test_grad_scaler_skips_on_all_ranks(ranks, sizes, where):
    """An infinity on one owner. On 2×2 torch reduced it along the shard dimension only, and one row stepped."""
    assert ranks(math.prod(sizes), scaled_steps, sizes, where) == [2.0] * math.prod(sizes)


def adamw_steps(sizes):
    mesh = mesh_of(*sizes)
    for mode in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model, reference = sharded_toy(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **mode)
        oracle = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
        for step in range(3):
            give_gradients(model, reference, mesh, seed=step)
            optimizer.step()
            oracle.step()
        assert_same(model, reference, rtol=1e-5, atol=1e-6)
        for param in (model.get_parameter(name) for name in NAMES):
            moment = optimizer.state[param]["exp_avg_sq"]
            assert isinstance(moment, OwnedTensor)
            assert moment.local.shape == param.local.shape


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_adamw_over_all_parameters(ranks, sizes):
    """A foreach list of a plain tensor and a DTensor fails in torch (pytorch#183207); ours are all DTensors."""
    ranks(math.prod(sizes), adamw_steps, sizes)


def autograd_through():
    mesh = mesh_of(2)
    weight = torch.arange(6.0).view(3, 2)
    param = nn.Parameter(own(weight, mesh, 1))
    if not AUTOGRAD_KEEPS_SUBCLASSES:
        with pytest.raises(ValueError, match=r"'w' needs torch 2\.12"):
            param.full_tensor().sum().backward()
        return
    for _ in range(2):
        (param.full_tensor() * weight).sum().backward()
    assert isinstance(param.grad, OwnedTensor)
    torch.testing.assert_close(param.grad.full_tensor(), 2 * weight)
    param.grad = None
    param.to_local().square().sum().backward()
    torch.testing.assert_close(param.grad.full_tensor(), 2 * weight)


def test_reading_is_differentiable(ranks):
    """A penalty on full_tensor() lost its gradient without an error."""
    ranks(2, autograd_through)


# --- modules


def module_conversions():
    mesh = mesh_of(2)
    model, reference = sharded_toy(mesh)
    give_gradients(model, reference, mesh)
    kept = model.first.weight
    graph = kept.full_tensor().grad_fn  # holds a gradient accumulator, which torch must find to swap tensors
    assert graph is not None
    model.to(torch.bfloat16)
    assert model.first.weight is kept
    assert model.first.weight.dtype == model.first.weight.grad.dtype == torch.bfloat16
    assert_same(model, reference.to(torch.bfloat16), rtol=0, atol=0)
    assert_same(model, reference, lambda p: p.grad, rtol=0, atol=0)

    twin = copy.deepcopy(nn.ModuleList([model.first, model.second]))
    assert isinstance(twin[0].weight, OwnedTensor)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.home == model.first.weight.home
    with torch.no_grad():
        twin[0].weight.zero_()
    assert_same(model, reference, rtol=0, atol=0)

    layer = nn.Linear(3, 4, bias=False, device="meta")
    layer.weight = nn.Parameter(own(layer.weight, mesh, 1))
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, OwnedTensor)
    assert layer.weight.local.shape == ((4, 3) if dist.get_rank() == 1 else (0, 3))
    with torch.no_grad():
        nn.init.ones_(layer.weight)
    torch.testing.assert_close(layer.weight.full_tensor().detach(), torch.ones(4, 3))


def test_module_conversions(ranks):
    ranks(2, module_conversions)


def load_plain():
    mesh = mesh_of(2)
    model, _ = sharded_toy(mesh)
    other = plain_toy(seed=5)
    names = {f"{name}" for name in NAMES}
    values = {name: value for name, value in other.state_dict().items() if name in names}

    model.load_state_dict(values, strict=False)
    for name in NAMES:
        torch.testing.assert_close(model.get_parameter(name).full_tensor().detach(), values[name])

    wrong = {**values, "first.weight": torch.zeros(1, 5)}
    with pytest.raises(RuntimeError, match=r"size mismatch for first.weight"):
        model.load_state_dict(wrong, strict=False)
    with pytest.raises(ValueError, match="cannot take values of shape"):
        model.first.weight.detach().copy_(torch.zeros(1, 5))

    model.first.weight.data = 3 * values["first.weight"]
    torch.testing.assert_close(model.first.weight.full_tensor().detach(), 3 * values["first.weight"])
    with pytest.raises(ValueError, match=r"call module.to\(dtype\)"):
        model.first.weight.data = values["first.weight"].double()
    nn.ModuleList([model.first]).share_memory()
    assert model.first.weight.local.is_shared()

    even = {name: distribute_tensor(2 * value, mesh, [Shard(0)]) for name, value in values.items()}
    model.load_state_dict(even, strict=False)
    for name in NAMES:
        torch.testing.assert_close(model.get_parameter(name).full_tensor().detach(), 2 * values[name])

    homes = {name: model.get_parameter(name) for name in NAMES}
    for source in (values, even, {name: homes[name].detach() for name in NAMES}):
        model.load_state_dict(source, strict=False, assign=True)
        for name in NAMES:
            adopted = homes[name].adopt(model.get_parameter(name))
            assert adopted.home == homes[name].home
            torch.testing.assert_close(adopted.full_tensor().detach(), full(source[name]))


def test_load_state_dict(ranks):
    """Of full tensors, DTensors and its own state dict; with assign=True the runtime adopts what torch left there."""
    ranks(2, load_plain)


WRITES = {
    "mul_": lambda p: p.mul_(2),
    "alias": lambda p: p.detach().add_(1),
    "data": lambda p: p.data.add_(1),
    "data =": lambda p: setattr(p, "data", torch.ones(4, 3)),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.ones(4, 3)),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "fused": lambda p: fused_step(p),
    "local": lambda p: p.local.add_(1),
    "checkpoint": lambda p: p.__get_tensor_shard__(None).copy_(torch.ones_like(p.local)),
    "to": lambda p: nn.ParameterList([p]).to(torch.bfloat16),
}
READS = {
    "full": lambda p: p.full_tensor(),
    "clone": lambda p: p.clone(),
    "norm": lambda p: p.norm(),
    "mul": lambda p: p * 2,
}


def fused_step(param):
    param.grad = torch.zeros_like(param)
    torch.optim.AdamW([param], fused=True).step()


def stamps():
    mesh = mesh_of(2)
    for table, changes in ((WRITES, True), (READS, False)):
        for how, use in table.items():
            param = nn.Parameter(own(torch.ones(4, 3), mesh, 0))
            alias, before = param.detach(), param.stamp
            with torch.no_grad():
                use(param)
            if param.is_owner:
                assert (param.stamp != before) == changes, how
                assert how == "to" or alias.stamp == param.stamp, how


def test_every_write_changes_the_stamp(ranks):
    """Dispatch hides a write to the local tensor from its version counter, and a bucket kept stale weights."""
    ranks(2, stamps)


class Swapped:
    """Hooks that put plain weights in while a module computes, as the runtime's will."""

    def __init__(self, module):
        self.module = module
        self.rest = module._parameters["weight"]
        module.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.reshard)

    @torch._dynamo.disable
    def unshard(self, module, args):
        del module._parameters["weight"]
        module.weight = self.rest.full_tensor().detach()

    @torch._dynamo.disable
    def reshard(self, module, args, output):
        del module.weight
        module._parameters["weight"] = self.rest


def compiled_module():
    mesh = mesh_of(2)
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4, bias=False), torch.randn(2, 3)
    want = layer(x)
    layer.weight = nn.Parameter(own(layer.weight, mesh, 1))
    Swapped(layer)
    torch.testing.assert_close(layer(x), want)
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), want)
    assert isinstance(layer.weight, OwnedTensor)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(compiled(x), 2 * want)


def test_compile_of_a_module_that_swaps_its_weights(ranks):
    ranks(2, compiled_module)


# --- checkpoints


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
