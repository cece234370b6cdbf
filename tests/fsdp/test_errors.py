"""What users get wrong: an error that names the thing and the remedy, on every rank alike, before any collective.

One run of two ranks commits every mistake; ranks that talked to each other would not both end.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import dmuon
from fsdp.models import Toy, is_projection, next_token_loss, world_mesh, wrap
from ranks.harness import run_ranks


class Odd(nn.Module):
    """One parameter that cannot be dedicated, beside one that can."""

    def __init__(self, parameter):
        super().__init__()
        self.fine = nn.Linear(4, 4, bias=False)
        self.odd = parameter

    def forward(self, x):
        return self.fine(x)


class Quantized(torch.Tensor):
    """A tensor subclass of somebody."""


def parameter(data):
    return nn.Parameter(data, requires_grad=data.is_floating_point() or data.is_complex())


ODD = {
    "1-D": parameter(torch.zeros(4)),
    "0-D": parameter(torch.zeros(())),
    "3-D": parameter(torch.zeros(2, 4, 4)),
    "complex": parameter(torch.zeros(4, 4, dtype=torch.complex64)),
    "integer": parameter(torch.zeros(4, 4, dtype=torch.int8)),
    "sparse": parameter(torch.eye(4).to_sparse()),
    "subclass": parameter(torch.zeros(4, 4).as_subclass(Quantized)),
}


def dedicate_odd(kind):
    dmuon.dedicate_params(Odd(ODD[kind]), world_mesh(), lambda name, p: True)


def shard_first():
    model = Toy()
    fully_shard(model.blocks[0], mesh=world_mesh())
    dmuon.dedicate_params(model, world_mesh(), is_projection)


def dedicate_twice():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: name.endswith("q.weight"))
    dmuon.dedicate_params(model, world_mesh(), is_projection)


def dedicate_twice_after_sharding():
    dmuon.dedicate_params(wrap(Toy()), world_mesh(), is_projection)


def dedicate_a_part_of_a_dedicated_model():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    dmuon.dedicate_params(model.blocks[0], world_mesh(), lambda name, p: p.ndim == 1)


def dedicate_around_a_dedicated_part():
    model = Toy()
    dmuon.dedicate_params(model.blocks[0], world_mesh(), lambda name, p: p.ndim == 2)
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "blocks.1" in name and p.ndim == 2)


def optimizer_without_dedicating():
    dmuon.Muon(Toy())


def optimizer_of_parameters():
    dmuon.Muon(wrap(Toy()).parameters())


def optimizer_around_the_model():
    dmuon.Muon(nn.Sequential(wrap(Toy()), nn.Linear(97, 2)))


def no_boundary():
    dmuon.dedicate_params(Toy(), world_mesh(), is_projection, hook_boundary_predicate=lambda module: False)


def mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    dmuon.dedicate_params(Toy(), mesh, is_projection)


def mesh_none():
    dmuon.dedicate_params(Toy(), None, is_projection)


def mesh_is_a_group():
    dmuon.dedicate_params(Toy(), dist.group.WORLD, is_projection)


def mesh_disagrees():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    fully_shard(model.blocks[0], mesh=DeviceMesh("cpu", [1, 0]))


def mesh_runs_backwards():
    dmuon.dedicate_params(Toy(), DeviceMesh("cpu", [1, 0]), is_projection)


def offload():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    fully_shard(model.blocks[1], mesh=world_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def dtypes_disagree():
    model = Toy()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    dmuon.dedicate_params(model, world_mesh(), is_projection, mp_policy=policy)
    fully_shard(model, mesh=world_mesh())


def group_policy_unknown():
    dmuon.dedicate_params(Toy(), world_mesh(), is_projection, process_group_policy="own")


def argument_unknown():
    dmuon.dedicate_params(Toy(), world_mesh(), is_projection, reshard=True)


def wrong_type(name, value):
    dmuon.dedicate_params(Toy(), world_mesh(), is_projection, **{name: value})


def predicate_is_a_name():
    dmuon.dedicate_params(Toy(), world_mesh(), "proj")


def parameters_for_a_model():
    dmuon.dedicate_params(Toy().parameters(), world_mesh(), is_projection)


def nobody_synchronizes():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh())
    dmuon.Muon(model)


def unsynchronized_unknown():
    dmuon.Muon(wrap(Toy()), unsynchronized="sum")


def shard_after_the_optimizer():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    optimizer = dmuon.Muon(model, unsynchronized="average")
    fully_shard(model, mesh=world_mesh())
    del optimizer


def group_matches_nothing():
    dmuon.Muon(wrap(Toy()), param_groups=[{"params": "blocks.*.query.weight", "group_name": "attention"}])


def group_has_a_foreign_parameter():
    dmuon.Muon(wrap(Toy()), param_groups=[{"params": [nn.Parameter(torch.zeros(3, 5))]}])


def group_without_params():
    dmuon.Muon(wrap(Toy()), param_groups=[{"group_name": "attention", "lr": 0.1}])


def group_option_unknown():
    dmuon.Muon(wrap(Toy()), param_groups=[{"params": "blocks.0.*", "group_name": "first", "muon_learning_rate": 0.1}])


def momentum_dtype_is_a_name():
    dmuon.Muon(wrap(Toy()), momentum_dtype="bf16")


def option_out_of_range():
    dmuon.Muon(wrap(Toy()), param_groups=[{"params": "blocks.0.*", "group_name": "first", "muon_momentum": -1.0}])


def adjust_unknown():
    dmuon.Muon(wrap(Toy()), adjust_lr_fn="muon")


def kernel_unknown():
    dmuon.Muon(wrap(Toy()), ns_backend="svd")


def model_changed_after_dedicating():
    model = Toy()
    dmuon.dedicate_params(model, world_mesh(), is_projection)
    model.blocks[0].q = nn.Identity()
    fully_shard(model, mesh=world_mesh())


def mixed_dtypes_without_a_compute_dtype():
    model = wrap(Toy())
    model.blocks[0].q.to(torch.bfloat16)
    next_token_loss(model, dist.get_rank())


def copied_after_dedicating():
    import copy

    copy.deepcopy(wrap(Toy()))


def reset_parameters_of_a_dedicated_module():
    wrap(Toy()).blocks[0].q.reset_parameters()


def pickled():
    import io

    torch.save(wrap(Toy()).state_dict(), io.BytesIO())


def meta_left_alone():
    with torch.device("meta"):
        model = Toy()

    def all_but_norms(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()

    dmuon.init_weights(wrap(model), all_but_norms)


def reset_parameters_missing():
    with torch.device("meta"):
        model = Odd(nn.Parameter(torch.zeros(4)))
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: "fine" in name)
    fully_shard(model, mesh=world_mesh())
    dmuon.init_weights(model)


# situation: (function, arguments, type of the error, what it says)
MISTAKES = {
    "fully_shard before dedicate_params": (
        shard_first, (), ValueError, ["'blocks.0.q.weight' is sharded already", "dedicate_params before fully_shard"]),
    "dedicated twice": (
        dedicate_twice, (), ValueError, ["dedicated already: 'blocks.0.q.weight', 'blocks.1.q.weight'", "different"]),
    "dedicated twice, sharded": (dedicate_twice_after_sharding, (), ValueError, ["dedicated already", "one call"]),
    "a part of a dedicated model": (
        dedicate_a_part_of_a_dedicated_model, (), ValueError, ["Toy", "Block", "same module each time"]),
    "around a dedicated part": (
        dedicate_around_a_dedicated_part, (), ValueError, ["Toy", "Block", "same module each time"]),
    "optimizer without dedicate_params": (
        optimizer_without_dedicating, (), ValueError, ["Toy has no dedicated parameters", "dedicate_params(model"]),
    "optimizer of a module around": (
        optimizer_around_the_model, (), ValueError, ["a Sequential", "FSDPToy", "same module"]),
    "optimizer of parameters": (optimizer_of_parameters, (), TypeError, ["takes the model"]),
    **{kind: (dedicate_odd, (kind,), ValueError, ["'odd'", "predicate"]) for kind in ODD},
    "no boundary": (no_boundary, (), ValueError, ["'blocks.0.q.weight'", "['blocks', 'blocks.0', 'blocks.0.q']",
                                                  "hook_boundary_strict=False"]),
    "mesh of two dimensions": (
        mesh_of_two_dimensions, (), ValueError, ["1-D", "('replicate', 'shard')", "mesh['shard']"]),
    "mesh None": (mesh_none, (), ValueError, ["1-D DeviceMesh, got None", "init_device_mesh"]),
    "mesh is a group": (mesh_is_a_group, (), ValueError, ["1-D DeviceMesh, got <", "init_device_mesh"]),
    "mesh disagrees": (mesh_disagrees, (), ValueError, ["'blocks.0'", "[1, 0]", "[0, 1]", "give both the same: a 1-D"]),
    "mesh runs backwards": (mesh_runs_backwards, (), ValueError, ["[1, 0]", "[0, 1]", "init_device_mesh"]),
    "CPU offload": (offload, (), ValueError, ["'blocks.1'", "CPUOffloadPolicy", "OffloadPolicy()"]),
    "dtypes disagree": (
        dtypes_disagree, (), ValueError, ["'blocks.0'", "param_dtype=torch.bfloat16", "None", "make them equal"]),
    "group policy": (group_policy_unknown, (), ValueError, ["'isolated' or 'shared', got 'own'"]),
    "unknown argument": (argument_unknown, (), TypeError, ["reshard"]),
    "reshard_after_forward": (wrong_type, ("reshard_after_forward", 2), TypeError, ["bool or None, got 2"]),
    "planning": (wrong_type, ("planning", {"balance": "time"}), TypeError, ["PlanningOptions or None", "'balance'"]),
    "mp_policy": (wrong_type, ("mp_policy", torch.bfloat16), TypeError, ["MixedPrecisionPolicy or None", "bfloat16"]),
    "predicate is a name": (predicate_is_a_name, (), TypeError, ["predicate(name, param)", "got 'proj'"]),
    "parameters for a model": (parameters_for_a_model, (), TypeError, ["model must be Module"]),
    "nobody synchronizes": (
        nobody_synchronizes, (), ValueError, ["'embed.weight'", "'norm.weight'", "2 ranks", "unsynchronized="]),
    "unsynchronized unknown": (unsynchronized_unknown, (), ValueError, ["None or 'average', got 'sum'"]),
    "fully_shard after the optimizer": (
        shard_after_the_optimizer, (), ValueError, ["after dmuon.Muon", "dedicate_params, fully_shard, Muon"]),
    "group matches nothing": (
        group_matches_nothing, (), ValueError, ["'blocks.*.query.weight'", "'attention'", "unwrapped model"]),
    "group of foreign parameter": (group_has_a_foreign_parameter, (), ValueError, ["(3, 5)", "'group0'"]),
    "group without params": (group_without_params, (), ValueError, ["'attention'", "'params'"]),
    "group option unknown": (
        group_option_unknown, (), ValueError, ["'first'", "'muon_learning_rate'", "muon_lr", "adamw_betas"]),
    "momentum_dtype": (momentum_dtype_is_a_name, (), ValueError, ["momentum_dtype", "torch.dtype, got 'bf16'"]),
    "option out of range": (option_out_of_range, (), ValueError, ["'first/muon'", "momentum must be >= 0, got -1.0"]),
    "adjust_lr_fn unknown": (adjust_unknown, (), ValueError, ["'match_rms_adamw'", "got 'muon'"]),
    "Newton-Schulz unknown": (kernel_unknown, (), ValueError, ["'gram'", "'direct'", "'svd'"]),
    "model changed": (
        model_changed_after_dedicating, (), ValueError, ["'blocks.0.q.weight'", "change the model first"]),
    "mixed dtypes": (
        mixed_dtypes_without_a_compute_dtype, (), ValueError, ["blocks.0.q.weight torch.bfloat16", "param_dtype"]),
    "deepcopy": (copied_after_dedicating, (), (AssertionError, ValueError), ["deepcopy"]),
    "reset_parameters": (
        reset_parameters_of_a_dedicated_module, (), ValueError, ["'blocks.0.q.weight'", "dmuon.init_weights(model)"]),
    "torch.save": (pickled, (), ValueError, ["'blocks.0.", "torch.distributed.checkpoint"]),
    "left on meta": (meta_left_alone, (), ValueError, ["'blocks.0.norm1.weight' is not initialised"]),
    "no reset_parameters": (reset_parameters_missing, (), ValueError, ["Odd", "no reset_parameters", "init_weights"]),
}  # fmt: skip


def make_every_mistake():
    said = {}
    for situation, (function, arguments, _, _) in MISTAKES.items():
        try:
            function(*arguments)
        except Exception as error:
            said[situation] = (type(error), str(error))
    return said


@pytest.fixture(scope="module")
def said():
    return run_ranks(2, make_every_mistake)


@pytest.mark.parametrize("situation", MISTAKES)
def test_a_mistake_is_named_with_its_remedy_on_every_rank(said, situation):
    *_, kind, parts = MISTAKES[situation]
    for on_rank in said:
        assert situation in on_rank, "accepted"
        error, message = on_rank[situation]
        assert issubclass(error, kind), message
        for part in parts:
            assert part in message


def test_no_model_at_all():
    with pytest.raises(ValueError, match="was given no model"):
        dmuon.Muon([])
