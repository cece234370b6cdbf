"""The seam into fully_shard: whoever calls it, FSDP2's parameters and ours are disjoint and complete, and torch's own
functions come back."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init
import torch.distributed.fsdp._fully_shard._fully_shard as fsdp_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as imported_before_dmuon
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_fsdp.compat import fsdp_controls, param_groups, seam_complaint
from dmuon_fsdp.runtime import binding
from dmuon_fsdp.runtime.controls import ACTS, NEUTRAL, WHOLE_MODEL
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from fsdp.models import Block, Toy, Twins, groups_of, is_projection, next_token_loss, tokens, world_mesh, wrap

REFUSED = {"set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"}


def under_alias():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._composable.fsdp import fully_shard
    return fully_shard


def by_third_module():
    """A stack that took the name out of torch when it was imported itself."""
    stack = types.ModuleType("some_training_stack")
    exec("from torch.distributed.fsdp import fully_shard\ndef shard(*a, **k): return fully_shard(*a, **k)", vars(stack))
    sys.modules[stack.__name__] = stack
    return stack.shard


def fsdp_parameters(model):
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in param_groups(m)]
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def disjoint_and_complete():
    results = []
    for fully_shard in (imported_before_dmuon, under_alias(), by_third_module()):
        model, mesh = Toy(), world_mesh()
        plan = dmuon.dedicate_params(model, mesh, is_projection)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        theirs = fsdp_parameters(model)
        ours = [member.param for member in dmuon.dedicated_params(model)]
        every = list(model.parameters())
        assert not {id(p) for p in theirs} & {id(p) for p in ours}
        assert {id(p) for p in (*theirs, *ours)} == {id(p) for p in every}
        assert len(theirs) + len(ours) == len(every)
        results.append((len(theirs), len(ours), len(plan)))
        assert all(type(p) is nn.Parameter or isinstance(p, DTensor) for p in theirs)
        assert not any(isinstance(p, OwnedTensor) for p in theirs)
    return results


def test_parameters_are_disjoint_and_complete_however_fully_shard_was_imported(ranks):
    """A patch of the name in one module once left every earlier import as it was."""
    assert ranks(2, disjoint_and_complete)[0] == [(12, 14, 14)] * 3


# --- installing


PLACES = [
    (fsdp_init, "_get_managed_states"),
    (fsdp_module, "_validate_module"),
    (fsdp_module, "_init_param_group"),
    (FSDPState, "_root_post_backward_final_callback"),
    *[(FSDPModule, name) for name in fsdp_controls()],
]


def seam_functions():
    return [vars(place)[name] for place, name in PLACES]


def test_uninstalling_restores_the_very_functions_and_installing_twice_wraps_once():
    before = seam_functions()
    dmuon.install_patch()
    once = seam_functions()
    dmuon.install_patch()
    assert seam_functions() == once
    assert all(new is not old for new, old in zip(once, before, strict=True))
    dmuon.uninstall_patch()
    dmuon.uninstall_patch()
    assert all(new is old for new, old in zip(seam_functions(), before, strict=True))


def test_a_torch_that_does_not_fit_is_refused_with_version_range_and_the_way_without(monkeypatch):
    assert seam_complaint() is None
    before = seam_functions()
    monkeypatch.setattr(fsdp_init, "_get_managed_states", lambda modules: None)
    with pytest.raises(RuntimeError) as refusal:
        dmuon.install_patch()
    for part in (torch.__version__, "ignored_params", "2.11 to", "patch=False", "dmuon.ignored_params(model)"):
        assert part in str(refusal.value)
    monkeypatch.undo()
    assert seam_functions() == before


@pytest.mark.parametrize("name", ["_validate_module", "_init_param_group"])
def test_a_missing_function_of_torch_is_a_complaint(monkeypatch, name):
    monkeypatch.delattr(fsdp_module, name)
    assert name in seam_complaint()


def every_control_has_an_answer():
    dmuon.dedicate_params(model := Toy(), world_mesh(), is_projection)
    fully_shard = imported_before_dmuon
    fully_shard(model, mesh=world_mesh())
    messages = {}
    for name in REFUSED:
        with pytest.raises(NotImplementedError) as refusal:
            getattr(model, name)(None)
        messages[name] = str(refusal.value)
    return messages


def test_every_public_method_of_fsdp_module_acts_is_neutral_or_is_refused(ranks):
    """A setter that loops over FSDP2's own groups does nothing, silently, where all parameters are dedicated."""
    known = {*ACTS, *NEUTRAL, *WHOLE_MODEL}
    assert set(fsdp_controls()) - known <= REFUSED
    assert not REFUSED & known
    messages = ranks(1, every_control_has_an_answer)[0]
    assert all(f"FSDPModule.{name}" in message for name, message in messages.items())


# --- models that are none of our business


class Container(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up_proj": nn.Linear(8, 16, bias=False), "down_proj": nn.Linear(16, 8, bias=False)})
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down_proj"](layer["up_proj"](x))
        return x


def untouched_models():
    fully_shard = imported_before_dmuon
    dmuon.install_patch()
    mesh = world_mesh()
    model = Toy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_all_reduce_hook(lambda reduced: None)  # refused only where parameters are dedicated
    model.set_requires_gradient_sync(False)
    next_token_loss(model, dist.get_rank()).backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    next_token_loss(model, dist.get_rank()).backward()
    assert len(fsdp_parameters(model)) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(Container().layers[0], mesh=mesh)
    other = Container()
    dmuon.dedicate_params(other, mesh, lambda name, p: "layers.0" in name)
    fully_shard(other.layers[0], mesh=mesh)
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(other.layers[1], mesh=mesh)
    return [dist.get_rank()]


def test_models_and_containers_without_dedicated_parameters_keep_torchs_own_path(ranks):
    assert ranks(2, untouched_models) == [[0], [1]]


class Normed(Container):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer["norm"] = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down_proj"](layer["up_proj"](layer["norm"](x)))
        return x


def containers_train(mesh_option):
    def wrapping(model):
        mesh = world_mesh()
        dmuon.dedicate_params(model, mesh, lambda name, p: "proj" in name)
        for layer in model.layers:
            imported_before_dmuon(layer, mesh=mesh, reshard_after_forward=mesh_option)
        return imported_before_dmuon(model, mesh=mesh)

    twins = Twins(Normed, wrapping=wrapping)
    twins.optimizers()
    twins.train(3, lambda model, rank, step=0: model(tokens(rank, step, 8).float() / 97).square().mean())
    twins.check_weights()
    twins.check_at_rest()
    return len(fsdp_parameters(twins.model)), len(dmuon.dedicated_params(twins.model))


@pytest.mark.parametrize("reshard", [True, False])
def test_layers_that_are_containers_train_like_any_other(ranks, reshard):
    assert ranks(2, containers_train, reshard) == [(4, 4)] * 2


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


def stages_of_blocks():
    def wrapping(model):
        mesh = world_mesh()
        dmuon.dedicate_params(model, mesh, lambda name, p: p.ndim == 2 and "embed" not in name)
        for stage in model.blocks:
            for block in stage.blocks:
                imported_before_dmuon(block, mesh=mesh)
        return imported_before_dmuon(model, mesh=mesh)

    twins = Twins(lambda: Toy(Stage), wrapping=wrapping)
    twins.backward()
    twins.check_gradients()
    return {group.name: group.frees_after_forward for group in twins.registration.state.groups}


def test_a_stage_of_sharded_blocks_is_freed_after_its_forward_and_what_is_the_roots_is_kept(ranks):
    """Boundaries are the stages; as parts of the root alone, both would stay whole from forward to backward."""
    for found in ranks(2, stages_of_blocks):
        assert found == {"blocks.0": True, "blocks.1": True, "lm_head": False}


# --- two models, users' ignored parameters, the way without a patch


def two_models_train():
    policy = Twins()
    reward = Twins(lambda: Toy(depth=1), predicate=lambda name, p: name.endswith(("q.weight", "up.weight")))
    for twins in (policy, reward):
        twins.optimizers()
    for step in range(2):
        for twins in (policy, reward):
            twins.zero_grad()
        for twins in (policy, reward):
            twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        for twins in (reward, policy):
            twins.step()
    for twins in (policy, reward):
        twins.check_weights()
        twins.check_at_rest()
    return len(dmuon.dedicated_params(policy.model)), len(dmuon.dedicated_params(reward.model))


def test_two_models_in_one_process_do_not_meet(ranks):
    assert ranks(2, two_models_train) == [(14, 2)] * 2


def without_a_patch():
    before = seam_functions()

    def wrapping(model):
        mesh = world_mesh()
        dmuon.dedicate_params(model, mesh, is_projection, patch=False)
        for module in (*model.blocks, model):
            imported_before_dmuon(module, mesh=mesh, ignored_params=dmuon.ignored_params(model))
        return model

    twins = Twins(wrapping=wrapping)
    twins.optimizers()
    twins.train(2)
    twins.check_weights()
    twins.check_at_rest()
    assert all(new is old for new, old in zip(seam_functions(), before, strict=True))
    forgotten = Toy()
    dmuon.dedicate_params(forgotten, world_mesh(), is_projection, patch=False)
    imported_before_dmuon(forgotten, mesh=world_mesh())
    with pytest.raises(ValueError, match=r"blocks.0.q.weight.*ignored_params=dmuon.ignored_params\(model\)"):
        dmuon.Muon(forgotten)


def test_the_way_without_a_patch_trains_alike_and_says_what_was_forgotten(ranks):
    ranks(2, without_a_patch)


# --- wrappers between dedicate_params and fully_shard


def policies_through_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    found = {}
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for kind in ("shard the wrapper", "wrap the sharded", "wrap the model"):
        model, mesh = Toy(), world_mesh()
        dmuon.dedicate_params(model, mesh, is_projection)
        outer = nn.Sequential(model) if kind == "wrap the model" else model
        for i, block in enumerate(model.blocks):
            if kind == "shard the wrapper":
                model.blocks[i] = checkpoint_wrapper(block)
                imported_before_dmuon(model.blocks[i], mesh=mesh, mp_policy=bf16, reshard_after_forward=False)
            elif kind == "wrap the sharded":
                model.blocks[i] = checkpoint_wrapper(
                    imported_before_dmuon(block, mesh=mesh, mp_policy=bf16, reshard_after_forward=False)
                )
        of_outer = {"mp_policy": bf16, "reshard_after_forward": False} if kind == "wrap the model" else {}
        imported_before_dmuon(outer, mesh=mesh, **of_outer)
        found[kind] = [group.policy for group in groups_of(model).values()]
    return found


def test_policies_are_those_of_the_covering_call_whatever_wraps_what(ranks):
    found = ranks(1, policies_through_wrappers)[0]
    for kind, policies in found.items():
        assert len(policies) == 2
        for policy in policies:
            assert policy.param_dtype is torch.bfloat16, kind
            assert policy.reshard_after_forward is False, kind


def ignored_stays_ignored():
    torch.manual_seed(0)
    model, mesh = Toy(), init_device_mesh("cpu", (dist.get_world_size(),))
    bias = model.norm.bias
    dmuon.dedicate_params(model, mesh, is_projection)
    for block in model.blocks:
        imported_before_dmuon(block, mesh=mesh)
    imported_before_dmuon(model, mesh=mesh, ignored_params={bias})
    assert model.norm.bias is bias
    assert type(bias.data) is torch.Tensor
    assert id(bias) not in {id(p) for p in fsdp_parameters(model)}
    assert isinstance(model.norm.weight, DTensor)


def test_a_users_own_ignored_parameters_stay_ignored(ranks):
    ranks(2, ignored_stays_ignored)


def visits(depth):
    """How many names of modules are made while a stack is dedicated and sharded block by block."""
    visited = []
    original = binding.canonical

    def counted(name):
        visited.append(name)
        return original(name)

    binding.canonical = counted
    try:
        model = wrap(Toy(depth=depth))
    finally:
        binding.canonical = original
    return len(visited), len(list(model.modules()))


def test_a_call_of_fully_shard_walks_the_model_once(ranks):
    """Once per block and call, 80 blocks took nine seconds to wrap, FSDP2 alone less than one."""
    depth = 12
    for visited, modules in ranks(1, visits, depth=depth):
        assert visited <= (depth + 3) * modules  # one walk a call, two to bind
