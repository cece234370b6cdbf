"""Who owns what, and where hooks go: pure functions of names, shapes and module trees."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon_core import MatrixView
from dmuon_fsdp import PlanningOptions, plan_owners
from dmuon_fsdp.optim.groups import Entry, build_groups
from dmuon_fsdp.planning.assign import Item, assign, loads
from dmuon_fsdp.planning.boundaries import boundary_of, find_boundaries
from dmuon_fsdp.planning.names import canonical, named_places
from dmuon_fsdp.planning.plan import Assignment, Owner, OwnershipPlan, ParamSpec
from dmuon_fsdp.planning.policy import Treatment
from dmuon_fsdp.planning.select import select_params
from dmuon_fsdp.runtime.binding import warn_about_imbalance

NUMEL = PlanningOptions(balance="numel")


def sums(shapes, owners, ranks):
    total = [0] * ranks
    for name, shape in shapes.items():
        total[owners[name]] += torch.Size(shape).numel()
    return total


def best_possible(sizes, ranks):
    """The smallest load of the most loaded rank, by trying every assignment."""
    return min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(sizes))
    )


# --- owners


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sizes", [[7, 5, 4, 3, 3, 2], [9, 9, 9, 1], [5, 5, 4, 4, 3, 3, 3], [8], [6, 6, 6, 6]])
def test_the_most_loaded_rank_is_within_the_bound_of_lpt(sizes, ranks):
    """Graham's bound, 4/3 − 1/(3·ranks) of the best there is, found by brute force."""
    shapes = {f"w{i}": (size, 10) for i, size in enumerate(sizes)}
    owners = plan_owners(shapes, ranks, NUMEL)
    bound = (4 / 3 - 1 / (3 * ranks)) * best_possible([10 * size for size in sizes], ranks)
    assert max(sums(shapes, owners, ranks)) <= bound + 1e-9
    assert list(owners) == list(shapes)


@pytest.mark.parametrize("balance", ["time", "numel"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_transformer_is_balanced_to_two_per_cent(balance, ranks):
    shapes = {}
    for layer in range(32):
        for name, shape in (("q", (4096, 4096)), ("k", (1024, 4096)), ("v", (1024, 4096)), ("o", (4096, 4096))):
            shapes[f"layers.{layer}.{name}"] = shape
        for name, shape in (("gate", (11008, 4096)), ("up", (11008, 4096)), ("down", (4096, 11008))):
            shapes[f"layers.{layer}.{name}"] = shape
    options = PlanningOptions(balance=balance)
    owners = plan_owners(shapes, ranks, options)
    items = [Item(name, shape, 0) for name, shape in shapes.items()]
    work = loads(items, owners, ranks, options)
    assert max(work) <= 1.02 * sum(work) / ranks


def test_more_ranks_than_matrices_gives_each_matrix_a_rank_of_its_own():
    owners = plan_owners({f"w{i}": (64, 64) for i in range(3)}, 8)
    assert len(set(owners.values())) == 3


def test_equal_matrices_go_to_the_same_ranks_under_every_hash_seed():
    """Ties once broke by the order of a set."""
    program = (
        "from dmuon_fsdp import plan_owners\n"
        "shapes = {f'blocks.{i}.{n}': (64, 64) for i in range(6) for n in ('q', 'k', 'v', 'o')}\n"
        "print(sorted(plan_owners(shapes, 5).items()))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "12345")
    }
    assert len(printed) == 1


def test_ten_thousand_parameters_on_four_thousand_ranks_take_less_than_two_seconds():
    """A public predecessor was quadratic there: 27 s for 2,800 parameters."""
    shapes = {f"layers.{i}.w{j}": (1024 + 64 * j, 1024 * (1 + i % 3)) for i in range(1250) for j in range(8)}
    start = time.perf_counter()
    owners = plan_owners(shapes, 4096)
    assert time.perf_counter() - start < 2
    assert len(owners) == 10_000


def test_a_memory_bound_that_fills_most_ranks_does_not_make_planning_quadratic():
    shapes = {f"w{i}": (1024, 1024) for i in range(10_000)}
    start = time.perf_counter()
    owners = plan_owners(shapes, 4096, PlanningOptions(max_bytes_per_rank=3 * 4 * 1024 * 1024))
    assert time.perf_counter() - start < 2
    assert max(list(owners.values()).count(rank) for rank in range(4096)) == 3


def test_the_memory_bound_holds_where_the_best_balance_would_break_it():
    items = [Item("small", (10, 10), 400), Item("wide0", (6, 10), 800), Item("wide1", (6, 10), 800)]
    free = assign(items, 2, NUMEL)
    bound = assign(items, 2, PlanningOptions(balance="numel", max_bytes_per_rank=1200))
    assert free["wide0"] == free["wide1"]  # 1600 bytes
    assert bound["wide0"] != bound["wide1"]


def test_a_memory_bound_that_cannot_hold_names_the_matrix_and_the_remedy():
    with pytest.raises(ValueError, match=r"'big' \(40000 bytes\) fits no rank.*max_bytes_per_rank=39999.*more ranks"):
        plan_owners({"big": (100, 100)}, 2, PlanningOptions(max_bytes_per_rank=39_999))


def test_small_matrices_of_one_boundary_share_an_owner_up_to_the_limit():
    items = [Item(f"{group}.{i}", (4, 10), 160, group) for group in ("a", "b") for i in range(4)]
    owners = assign(items, 4, PlanningOptions(pack_below=100))
    assert owners["a.0"] == owners["a.1"] != owners["a.2"]  # two of 40 stay below 100, three do not
    assert owners["a.2"] == owners["a.3"]
    assert len(set(owners.values())) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "bytes"}, "'time' or 'numel', got 'bytes'"),
        ({"max_bytes_per_rank": 0}, "must be positive, got 0"),
        ({"pack_below": -1}, ">= 0, got -1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PlanningOptions(**options)


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="ranks must be positive, got 0"):
        plan_owners({"w": (2, 2)}, 0)


def test_time_and_elements_differ_where_shapes_do():
    """Newton-Schulz costs m²·n: a square matrix is dearer than a flat one of as many elements."""
    shapes = {"square": (8192, 8192), **{f"flat{i}": (512, 131072) for i in range(3)}}
    by_numel = sums(shapes, plan_owners(shapes, 2, NUMEL), 2)
    by_time = plan_owners(shapes, 2)
    assert by_numel[0] == by_numel[1]
    assert [name for name, owner in by_time.items() if owner == by_time["square"]] == ["square"]


# --- boundaries


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))


def blocks(count=2):
    return [Block() for _ in range(count)]


class Decoder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def boundaries(model, predicate=lambda name, p: p.ndim == 2, hook=None, strict=True):
    specs = select_params(model, predicate, hook, strict=strict)
    return {spec.fqn: spec.boundary for spec in specs}


def in_layers(prefix):
    return {
        f"{prefix}.{i}.{name}.weight": f"{prefix}.{i}"
        for i in range(2)
        for name in ("q", "mlp.0", "mlp.2", "experts.0", "experts.1")
    }


@pytest.mark.parametrize("name", ["layers", "blocks", "h", "transformer_blocks"])
def test_the_elements_of_a_stack_are_boundaries_whatever_its_name(name):
    assert boundaries(Decoder(**{name: nn.ModuleList(blocks())})) == in_layers(name)


def test_a_stack_deeper_in_the_tree():
    model = Decoder(encoder=Decoder(layer=nn.ModuleList(blocks())), lm_head=nn.Linear(4, 9))
    assert boundaries(model) == {**in_layers("encoder.layer"), "lm_head.weight": "lm_head"}


def test_a_sequential_of_blocks_and_a_module_dict_with_numbers_are_stacks():
    assert boundaries(Decoder(body=nn.Sequential(*blocks()))) == in_layers("body")
    numbered = nn.ModuleDict({str(i): block for i, block in enumerate(blocks())})
    assert boundaries(Decoder(body=numbered)) == in_layers("body")


def test_layers_that_are_module_dicts_are_boundaries_themselves():
    layers = nn.ModuleList(
        nn.ModuleDict({"up_proj": nn.Linear(4, 8, bias=False), "down_proj": nn.Linear(8, 4, bias=False)})
        for _ in range(2)
    )
    found = boundaries(Decoder(layers=layers))
    assert found == {f"layers.{i}.{name}.weight": f"layers.{i}" for i in range(2) for name in ("up_proj", "down_proj")}


def test_a_list_of_linears_is_no_stack():
    """Hooks on each Linear would be one collective per matrix."""
    assert boundaries(Decoder(projections=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))) == {
        "projections.0.weight": "projections.0",  # no ancestor is a block: each is its own
        "projections.1.weight": "projections.1",
    }
    inside = Decoder(layers=nn.ModuleList(blocks()))
    assert "layers.0.experts.0" not in set(boundaries(inside).values())


def experts(width=4):
    return nn.ModuleList(
        Decoder(w1=nn.Linear(width, width, bias=False), w2=nn.Linear(width, width, bias=False)) for _ in range(3)
    )


@pytest.mark.parametrize("path", ["mlp", "block_sparse_moe"])
def test_experts_in_a_list_belong_to_their_layer(path):
    """A boundary at an expert is one that a rank without tokens for it never enters: the others wait for it."""
    layer = [Decoder(q=nn.Linear(4, 4), **{path: Decoder(gate=nn.Linear(4, 3), experts=experts())}) for _ in range(2)]
    found = boundaries(Decoder(model=Decoder(layers=nn.ModuleList(layer))))
    assert set(found.values()) == {"model.layers.0", "model.layers.1"}
    assert found[f"model.layers.1.{path}.experts.2.w1.weight"] == "model.layers.1"
    wrapped = nn.ModuleList(checkpoint_wrapper(each) for each in layer)
    assert boundaries(Decoder(model=Decoder(layers=wrapped))) == found


def test_a_stack_in_a_stack_takes_the_outer_elements():
    stages = nn.ModuleList(Decoder(blocks=nn.ModuleList(blocks())) for _ in range(2))
    assert set(boundaries(Decoder(stages=stages)).values()) == {"stages.0", "stages.1"}


def test_a_predicate_puts_boundaries_on_the_inner_elements_of_a_stack():
    stages = nn.ModuleList(Decoder(blocks=nn.ModuleList(blocks())) for _ in range(2))
    found = boundaries(Decoder(stages=stages), hook=lambda module: isinstance(module, Block))
    assert found == {**in_layers("stages.0.blocks"), **in_layers("stages.1.blocks")}


def test_a_predicate_replaces_the_rule():
    model = Decoder(layers=nn.ModuleList(blocks()))
    found = boundaries(model, hook=lambda module: isinstance(module, nn.ModuleList) and len(module) == 2)
    assert set(found.values()) == {"layers", "layers.0.experts", "layers.1.experts"}


def test_no_boundary_under_a_strict_predicate_names_parameter_and_path():
    model = Decoder(layers=nn.ModuleList(blocks()))
    with pytest.raises(ValueError, match=r"no hook boundary for 'layers\.0\.q\.weight'.*'layers\.0', 'layers\.0\.q'"):
        boundaries(model, hook=lambda module: False)


def test_no_boundary_under_a_lax_predicate_takes_the_parameters_own_module():
    model = Decoder(layers=nn.ModuleList(blocks()))
    found = boundaries(model, hook=lambda module: False, strict=False)
    assert found["layers.0.q.weight"] == "layers.0.q"


def test_a_parameter_shared_over_boundaries_belongs_to_their_common_ancestor():
    model = Decoder(layers=nn.ModuleList(blocks(3)), lm_head=nn.Linear(4, 4, bias=False))
    model.layers[2].q.weight = model.layers[1].q.weight
    assert boundaries(model)["layers.1.q.weight"] == "layers"
    model.lm_head.weight = model.layers[0].q.weight
    assert boundaries(model)["layers.0.q.weight"] == ""
    inside = Decoder(layers=nn.ModuleList(blocks(2)))
    inside.layers[0].mlp[0].weight = inside.layers[0].q.weight
    assert boundaries(inside)["layers.0.q.weight"] == "layers.0"


def test_a_shared_parameter_is_one_spec_with_aliases():
    model = Decoder(embed=nn.Embedding(9, 4), lm_head=nn.Linear(4, 9, bias=False))
    model.lm_head.weight = model.embed.weight
    (spec,) = select_params(model, lambda name, p: "head" in name, None, strict=True)
    assert (spec.fqn, spec.aliases) == ("embed.weight", ("lm_head.weight",))


def test_boundary_of_places_outside_every_boundary():
    assert boundary_of(["a.b.weight"], {"a"}, strict=True) == "a"
    assert boundary_of(["b.weight"], {"a"}, strict=True) is None
    assert boundary_of(["weight"], set(), strict=False) == ""
    assert boundary_of(["layers.1.w", "layers.10.w"], {"layers.1", "layers.10"}, strict=False) == "layers"


def test_no_hook_goes_on_what_nobody_calls():
    """Hooks of a ParameterList never fire: its parameters stayed at rest in the forward that reads them."""

    class Moe(Decoder):
        def forward(self, x):
            return x

    def parts():
        up = nn.ParameterDict({"up": nn.Parameter(torch.zeros(4, 4))})
        return nn.ModuleDict({"lists": up, "gate": nn.Linear(4, 4, bias=False)})

    moe = boundaries(Decoder(moe=Moe(experts=parts())))
    assert moe == {"moe.experts.lists.up": "moe", "moe.experts.gate.weight": "moe.experts.gate"}
    bare = boundaries(Decoder(experts=nn.ParameterList([torch.zeros(4, 4)])))
    assert bare == {"experts.0": ""}
    layers = Decoder(layers=nn.ModuleList(parts() for _ in range(2)))
    gates = boundaries(layers, lambda name, p: "gate" in name)
    assert set(gates.values()) == {"layers.0", "layers.1"}, "a layer without a forward is driven by its children"
    # Its backward once came before anything that gathers, and found buffers without memory.
    with pytest.raises(ValueError, match=r"'layers\.0\.lists\.up' is read from outside of its boundary 'layers\.0'"):
        boundaries(layers)


def test_ten_thousand_parameters_are_grouped_in_one_pass_a_pattern():
    parameter = nn.Parameter(torch.empty(0))
    entries = [Entry((f"layers.{i}.w",), parameter, "muon", True, None) for i in range(10_000)]
    begin = time.perf_counter()
    groups = build_groups(entries, [{"params": ["layers.*[02468].w", "layers.*"]}], {"lr": 1.0}, {"lr": 1.0})
    assert time.perf_counter() - begin < 2, "searching a list for every parameter takes four times as long"
    assert [len(group["params"]) for group in groups] == [10_000]


# --- names


def test_names_are_those_of_the_unwrapped_model():
    model = Decoder(layers=nn.ModuleList(blocks()))
    wanted = [name for name, *_ in named_places(model)]
    wrapped = copy.deepcopy(model)
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1])
    assert [name for name, *_ in named_places(wrapped)] == wanted
    assert [name for name, *_ in named_places(torch.compile(wrapped))] == wanted
    assert find_boundaries(wrapped, None) == {"layers.0", "layers.1"}


def test_only_the_names_that_wrappers_add_are_dropped():
    assert canonical("_orig_mod.layers.0._checkpoint_wrapped_module.module.weight") == "layers.0.module.weight"


# --- the plan


def test_the_plan_is_a_mapping_by_name_that_describes_itself():
    assignment = Assignment.of((spec("x.a", boundary="x"), spec("lm_head", boundary="")), 2, PlanningOptions())
    bound = []
    plan = OwnershipPlan(lambda: assignment, lambda: bound.append(True))
    assert dict(plan) == {"x.a": Owner(0), "lm_head": Owner(1)}
    assert len(plan) == 2
    text = plan.describe()
    for part in ("2 dedicated parameters in 2 groups on 2 ranks", "x.a [8, 8] → rank 0", "(root)", "mean: 1.000"):
        assert part in text
    assert not bound, "looking at a plan puts nothing to work"
    assert plan.bind() is plan
    assert bound == [True]


def test_an_uneven_plan_is_warned_about_and_an_even_one_is_not(caplog):
    for count, warned in ((5, True), (8, False)):
        caplog.clear()
        plan = Assignment.of(tuple(spec(f"w{i}", (64, 64)) for i in range(count)), 4, PlanningOptions())
        warn_about_imbalance(plan)
        assert bool(caplog.records) is warned
        assert not warned or "60 % more" in caplog.text


def spec(name, shape=(8, 8), boundary=""):
    return ParamSpec(name, (), shape, torch.float32, boundary)


def test_the_digest_sees_everything_that_ranks_must_agree_on():
    base = (spec("a", boundary="x"), spec("b", boundary="x"))
    digest = Assignment.of(base, 2, PlanningOptions()).digest()
    bf16 = torch.bfloat16
    treatments = [
        Treatment("adamw"),
        Treatment(view=MatrixView.heads(2)),
        Treatment(param_dtype=bf16),
        Treatment(reduce_dtype=bf16),
        Treatment(output_dtype=bf16),
        Treatment(master_dtype=torch.float64),
    ]
    others = [
        (base[1], base[0]),
        (spec("a", (8, 9), "x"), base[1]),
        (spec("a", boundary="y"), base[1]),
        (ParamSpec("a", (), (8, 8), torch.bfloat16, "x"), base[1]),
        base[:1],
        *((replace(base[0], treatment=treatment), base[1]) for treatment in treatments),
    ]
    digests = {Assignment.of(specs, 2, PlanningOptions()).digest() for specs in others}
    assert digest not in digests
    assert len(digests) == len(others)
    assert Assignment.of(base, 2, PlanningOptions()).digest() == digest
