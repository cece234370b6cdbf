"""The checklist of docs/decisions/0001, training: gradients, optimizers and scaler, and the modules that hold them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from dmuon_fsdp.compat import AUTOGRAD_KEEPS_SUBCLASSES
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.test_owned_tensor import NAMES, assert_same, full, give_gradients, mesh_of, own, plain_toy, sharded_toy

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
