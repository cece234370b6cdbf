"""What is asked of parameters by name: routes, matrix views and dtypes, against one process. Case 5 is here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon_fsdp.planning.policy import Treatment, as_policies, treat
from fsdp.models import (
    FEED_FORWARD,
    WIDTH,
    Block,
    Toy,
    Twins,
    close,
    next_token_loss,
    on_all_cells,
    world_mesh,
)
from fsdp.test_hsdp import grid
from fsdp.test_unused import Experts

# --- values


def test_a_later_policy_wins_field_by_field():
    policies = (
        dmuon.ParamPolicy("*", param_dtype=torch.bfloat16, route="adamw"),
        dmuon.ParamPolicy("*.q", route="muon"),
        dmuon.ParamPolicy("b.*", view="split(2, 2)"),
    )
    got = treat(policies, [["a.q"], ["b.k"], ["x", "b.q"]])
    split = dmuon.MatrixView.split(2, 2)
    assert got == [
        Treatment("muon", None, torch.bfloat16),
        Treatment("adamw", split, torch.bfloat16),
        Treatment("muon", split, torch.bfloat16),
    ]


def test_the_mapping_form_says_the_same():
    mapping = {
        "defaults": {"route": "muon", "param_dtype": "bf16", "grad_dtype": None, "optim_dtype": torch.float32},
        "overrides": [
            {"name": ["embed", "wte"], "set": {"route": "sharded_adamw"}},
            {"contains": "[0]", "set": {"param_dtype": "torch.float32", "grad_dtype": "fp32"}},
        ],
    }
    got = treat(as_policies(mapping), [["embed.weight"], ["h[0].q"], ["h0.q"]])
    assert got == [
        Treatment("sharded_adamw", None, torch.bfloat16),
        Treatment("muon", None, torch.float32, torch.float32),
        Treatment("muon", None, torch.bfloat16),
    ]
    assert treat(as_policies({"defaults": {"route": "adamw"}}), []) == []


BAD = {
    "route": (lambda: dmuon.ParamPolicy("*", route="muno"), ValueError, ["'muno'", "sharded_adamw"]),
    "view": (lambda: dmuon.ParamPolicy("*", view="conv"), ValueError, ["'conv'", "flattened"]),
    "dtype": (lambda: dmuon.ParamPolicy("*", param_dtype=torch.int8), ValueError, ["param_dtype", "int8"]),
    "match": (lambda: dmuon.ParamPolicy(3), ValueError, ["match", "3"]),
    "field": (lambda: dmuon.ParamPolicy("*", rout="muon"), TypeError, ["rout"]),
    "no policy": (lambda: as_policies(["*.q"]), TypeError, ["ParamPolicy", "'*.q'"]),
    "top": (lambda: as_policies({"default": {}}), ValueError, ["'default'", "'defaults'"]),
    "default field": (lambda: as_policies({"defaults": {"rout": "x"}}), ValueError, ["'rout'", "'route'"]),
    "override": (lambda: as_policies({"overrides": [{"name": "a"}]}), ValueError, ["[0]", "'set'"]),
    "state dtype": (lambda: as_policies({"defaults": {"optim_dtype": "bf16"}}), ValueError, ["momentum_dtype"]),
    "no cast": (lambda: as_policies({"defaults": {"cast_forward_inputs": False}}), ValueError, ["param_dtype"]),
    "nothing": (lambda: treat([dmuon.ParamPolicy("*.w")], [["a.q"]]), ValueError, ["'*.w'", "predicate"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_policy_cannot_say(case):
    call, kind, words = BAD[case]
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


def select(model, *policies, predicate=lambda name, p: True):
    from dmuon_fsdp.planning.select import select_params

    return select_params(model, predicate, None, strict=False, policies=policies)


REFUSED = {
    "1-D under Muon": ((), ["'embed.weight'", "'blocks.0.norm1.weight'", "adamw"]),
    "view of a vector": (
        (dmuon.ParamPolicy("*", route="adamw"), dmuon.ParamPolicy("*.q.*", route="muon", view="batched")),
        ["'blocks.0.q.weight'", "3 dimensions"],
    ),
    "split that does not add up": (
        (dmuon.ParamPolicy("*", route="adamw"), dmuon.ParamPolicy("*.up.*", route="muon", view="split(100, 70)")),
        ["'blocks.0.up.weight'", "170", "176"],
    ),
    "view without Muon": (
        (dmuon.ParamPolicy("*", route="adamw"), dmuon.ParamPolicy("lm_head*", view="matrix")),
        ["'lm_head.weight'", "'adamw'"],
    ),
    "dtypes of what FSDP2 has": (
        (dmuon.ParamPolicy("*", route="sharded_adamw"), dmuon.ParamPolicy("embed*", reduce_dtype=torch.float32)),
        ["'embed.weight'", "mp_policy of fully_shard", "embed*"],
    ),
    "narrow master": (
        (dmuon.ParamPolicy("*", route="adamw", master_dtype=torch.bfloat16),),
        ["'embed.weight'", "wider"],
    ),
    "two outputs": (
        (
            dmuon.ParamPolicy("*", route="adamw", output_dtype=torch.float32),
            dmuon.ParamPolicy("*.q.*", output_dtype=torch.bfloat16),
        ),
        ["'blocks.0.q.weight'", "'blocks.0'", "output_dtype"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_policy_cannot_do_to_a_parameter_is_refused_at_dedicate_params(case):
    policies, words = REFUSED[case]
    with pytest.raises(ValueError, match=r".") as error:
        select(Toy(), *policies)
    assert any(word in str(error.value) for word in words[:2])
    assert words[-1] in str(error.value)


# --- routes

ALL_ROUTES = [
    dmuon.ParamPolicy("*norm*", route="adamw"),
    dmuon.ParamPolicy("*.gate.weight", route="adamw"),
    dmuon.ParamPolicy("embed.weight", route="sharded_adamw"),
    dmuon.ParamPolicy("lm_head.weight", route="sharded_adamw"),
]
AS_A_MAPPING = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"name": ["norm", ".gate."], "set": {"route": "adamw"}},
        {"name": ["embed", "lm_head", "wte"], "set": {"route": "sharded_adamw"}},
    ],
}


def everything(name, parameter):
    return True


def wrap_on_grid(model, *, replicas, shards, policy, predicate=everything, **options):
    mesh = grid(replicas, shards, "named")
    dmuon.dedicate_params(
        model, mesh["shard"], predicate, replicate_mesh=mesh["replicate"], param_policy=policy, **options
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_routes(*, replicas, shards, policy):
    twins = Twins(wrapping=wrap_on_grid, replicas=replicas, shards=shards, policy=policy)
    twins.optimizers(weight_decay=0.1)
    twins.backward()
    twins.check_gradients()
    twins.train(4)
    twins.check_weights()
    twins.check_at_rest()
    # torch's fused AdamW leaves no trace of its writes: what follows them would never see a new weight.
    owned = [member for member in dmuon.dedicated_params(twins.model) if member.is_owner]
    stamps = [member.owned.stamp for member in owned]
    twins.train(1)
    assert all(member.owned.stamp != stamp for member, stamp in zip(owned, stamps, strict=True))
    by_route = {}
    for name, parameter, _ in twins.pairs():
        by_route.setdefault(type(parameter.data).__name__, []).append(name)
    assert by_route["DTensor"] == ["embed.weight", "lm_head.weight"]
    routes = {member.fqn: member.route for member in dmuon.dedicated_params(twins.model)}
    assert sum(route == "muon" for route in routes.values()) == 2 * 6
    assert routes["blocks.1.norm1.bias"] == routes["blocks.0.gate.weight"] == "adamw"
    groups = {group["group_name"]: group["param_names"] for group in twins.optimizer.param_groups}
    assert {name for name, route in routes.items() if route == "muon"} == set(groups["muon"])
    assert "embed.weight" in groups["adamw"]
    assert "norm.bias" in groups["adamw"]


def run_routes():
    world_size = dist.get_world_size()
    cells = [{"replicas": 1, "shards": world_size, "policy": policy} for policy in (ALL_ROUTES, AS_A_MAPPING)]
    if world_size == 4:
        cells = [{"replicas": 2, "shards": 2, "policy": ALL_ROUTES}]
    on_all_cells(cells, check_routes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_routes_train_as_one_process(ranks, world_size):
    ranks(world_size, run_routes)


def check_unused(*, users):
    """An AdamW matrix with an owner, which some steps or ranks do without."""
    policy = [dmuon.ParamPolicy("*.expert.weight", route="adamw")]
    twins = Twins(Experts, dedicate={"param_policy": policy})
    twins.optimizers()
    weights = [block.expert.weight for block in twins.model.blocks]
    before = [weight.full_tensor() for weight in weights]
    for step in range(5):
        twins.zero_grad()

        def loss(model, rank, step=step):
            return next_token_loss(model, rank, step, use=[users(rank, step)] * 2)

        twins.backward(loss)
        twins.step()
    twins.check_weights()
    untouched = all(torch.equal(weight.full_tensor(), was) for weight, was in zip(weights, before, strict=True))
    steps = [twins.optimizer.state[weight]["step"].item() for weight in weights if weight.is_owner]
    return untouched, steps


def run_unused():
    results = {}
    for name, users in (
        ("nobody", lambda rank, step: False),
        ("rank 1", lambda rank, step: rank == 1),
        ("every other step", lambda rank, step: step % 2 == 0),
    ):
        on_all_cells([{"users": users}], lambda users, name=name: results.update({name: check_unused(users=users)}))
    return results


def test_adamw_of_an_owner_leaves_alone_what_nobody_used(ranks):
    """A zero gradient would decay the weight and its moments."""
    for results in ranks(2, run_unused):
        assert results["nobody"][0]
        assert not results["rank 1"][0]
        assert all(step == 0 for step in results["nobody"][1])
        assert all(step == 3 for step in results["every other step"][1])


# --- views


class Mixed(nn.Module):
    """A stack of experts, a fused projection, heads and convolutions, two of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, 32) / 8)
        self.back = nn.Parameter(torch.randn(4, 32, WIDTH) / 8)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * 16, bias=False)
        self.o = nn.Linear(16, WIDTH, bias=False)
        self.conv, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, bias=False)

    def forward(self, x_BTD):
        h_BTD = self.norm(x_BTD)
        up = torch.einsum("btd,edf->ebtf", h_BTD, self.experts)
        x_BTD = x_BTD + torch.einsum("ebtf,efd->btd", F.silu(up), self.back)
        q, k, v = self.qkv(h_BTD).split([WIDTH, 16, 16], dim=-1)
        x_BTD = x_BTD + self.o(v * torch.tanh(k)) * torch.sigmoid(q)
        image = h_BTD.unflatten(-1, (16, 2, 2)).flatten(0, 1)
        x_BTD = x_BTD + self.conv2(F.silu(self.conv(image))).reshape(x_BTD.shape)
        padded = F.pad(h_BTD.transpose(1, 2), (3, 0))
        return x_BTD + self.depthwise(padded).transpose(1, 2)


VIEWS = [
    dmuon.ParamPolicy("*.experts", view="batched"),
    dmuon.ParamPolicy("*.back", view=dmuon.MatrixView.batched()),
    dmuon.ParamPolicy("*.qkv.weight", view=f"split({WIDTH}, 16, 16)"),
    dmuon.ParamPolicy("*.o.weight", view="heads(4)"),
    dmuon.ParamPolicy("*.conv*.weight", view="flattened"),
    dmuon.ParamPolicy("*.depthwise.weight", route="adamw"),
]


class MixedToy(Toy):
    def __init__(self) -> None:
        super().__init__(Mixed)


def in_blocks(name, parameter):
    return "blocks." in name and parameter.ndim >= 2


def check_views(replicas, shards):
    twins = Twins(MixedToy, wrapping=wrap_on_grid, replicas=replicas, shards=shards, policy=VIEWS, predicate=in_blocks)
    twins.optimizers(weight_decay=0.1)
    twins.backward()
    twins.check_gradients()
    twins.train(3)
    twins.check_weights()
    twins.check_at_rest()
    return sorted({member.owner for member in dmuon.dedicated_params(twins.model)})


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 2)])
def test_views_train_as_one_process(ranks, replicas, shards):
    """Batched over layers or flattened over experts, updates are wrong by half."""
    owners = ranks(replicas * shards, check_views, replicas, shards)
    assert len(owners[0]) == replicas * shards, "the plan uses every rank"


def test_the_plan_counts_the_matrices_of_a_view():
    from dmuon_fsdp.planning.assign import loads
    from dmuon_fsdp.planning.options import PlanningOptions

    experts = nn.Module()
    experts.stack = nn.Parameter(torch.empty(8, 256, 512, device="meta"))
    experts.flat = nn.Parameter(torch.empty(8 * 256, 512, device="meta"))
    experts.norm = nn.Parameter(torch.empty(512, device="meta"))
    experts.table = nn.Parameter(torch.empty(2048, 512, device="meta"))
    specs = select(
        experts,
        dmuon.ParamPolicy("stack", view="batched"),
        dmuon.ParamPolicy("norm", route="adamw"),
        dmuon.ParamPolicy("table", route="adamw"),
    )
    items = [spec.item for spec in specs]
    owners = {item.name: rank for rank, item in enumerate(items)}
    stack, flat, norm, table = loads(items, owners, 4, PlanningOptions())
    assert stack < flat, "eight small matrices cost less than one large"
    assert norm < table < stack, "AdamW is a pass over memory"


# --- dtypes


class Router(Block):
    """Reads one of its matrices in fp32 whatever the others compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.seen: set[tuple[str, torch.dtype]] = set()

    def forward(self, x_BTD):
        self.seen.update({("router", self.router.weight.dtype), ("q", self.q.weight.dtype), ("x", x_BTD.dtype)})
        weights = torch.softmax(F.linear(x_BTD.float(), self.router.weight.float()), -1).to(x_BTD.dtype)
        return super().forward(x_BTD * weights.max(-1, keepdim=True).values)


class RouterToy(Toy):
    def __init__(self) -> None:
        super().__init__(Router)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def check_router_in_fp32():
    policy = [dmuon.ParamPolicy("*.router.weight", param_dtype=torch.float32)]
    twins = Twins(RouterToy, mp_policy=BF16, dedicate={"param_policy": policy})
    twins.optimizers(lr=0.005)
    twins.train(3)
    for name, parameter, reference in twins.pairs():
        if name in twins.registration.params:
            close(name, parameter.full_tensor(), reference, 3e-2)  # bf16 compute
    twins.check_at_rest()
    return twins.model.blocks[1].seen


def test_one_matrix_of_a_boundary_computes_in_another_dtype(ranks):
    for seen in ranks(2, check_router_in_fp32):
        bf16 = torch.bfloat16
        assert seen == {("router", torch.float32), ("q", bf16), ("x", bf16)}


class Bf16Linear(nn.Linear):
    """Stored in bf16, computes in fp32."""

    def forward(self, x):
        return F.linear(x, self.weight.float())


class StoredBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Bf16Linear(WIDTH, FEED_FORWARD, bias=False, dtype=torch.bfloat16)


class Stored(Toy):
    def __init__(self) -> None:
        super().__init__(StoredBlock)


def check_stored_dtypes():
    twins = Twins(Stored)
    twins.optimizers()
    twins.train(3)
    for member in dmuon.dedicated_params(twins.model):
        expected = torch.bfloat16 if "gate" in member.fqn else torch.float32
        assert member.param.dtype == member.unsharded.dtype == expected
        assert twins.optimizer.state[member.param]["momentum_buffer"].dtype == torch.float32
    for name, parameter, reference in twins.pairs():
        close(name, parameter.full_tensor().float(), reference.float(), 3e-2)  # a bf16 gradient


def test_parameters_stored_in_different_dtypes_share_a_boundary(ranks):
    """They have buckets of their own, since one has one dtype."""
    ranks(2, check_stored_dtypes)


def alone(model, **options):
    """No FSDP2 that would cast."""
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: p.ndim == 2, **options).bind()
    return model


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2))
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return x


def casts(options):
    model = alone(Two(), **options)
    loss = model(torch.randn(3, WIDTH)).float().square().mean()
    loss.backward()
    grads = {p.grad.dtype for p in model.parameters()}
    return model.seen, grads


CASTING = {
    "policy of the call": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)},
        [torch.float32, torch.float32],
    ),
    "policy by name": (
        {
            "param_policy": [
                dmuon.ParamPolicy("blocks.0.*", param_dtype=torch.bfloat16),
                dmuon.ParamPolicy("blocks.1.*", param_dtype=torch.float32, output_dtype=torch.float64),
            ]
        },
        [torch.bfloat16, torch.float64],
    ),
}


def run_casts():
    return {name: casts(options) for name, (options, _) in CASTING.items()}


def test_inputs_and_outputs_are_cast_where_no_fully_shard_does_it(ranks):
    for got in ranks(2, run_casts):
        for name, (_, expected) in CASTING.items():
            assert got[name] == (expected, {torch.float32}), name


def reduced_in():
    """256 from one rank and 1 from the other: 257 in fp32, 256 in bf16."""
    found = {}
    for name, dtype in (("wide", torch.float32), ("narrow", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        policy = [dmuon.ParamPolicy("*", param_dtype=torch.bfloat16, reduce_dtype=dtype)]
        dmuon.dedicate_params(model, world_mesh(), everything, param_policy=policy)
        fully_shard(model, mesh=world_mesh())
        (model(torch.ones(1, 4)) * (256.0 if dist.get_rank() else 1.0)).sum().backward()
        found[name] = 2 * model[0].weight.grad.full_tensor()[0, 0].item()
    return found


def test_gradients_are_reduced_in_the_dtype_asked_for(ranks):
    for found in ranks(2, reduced_in):
        assert found == {"wide": 257.0, "narrow": 256.0}


def two_output_dtypes():
    model = Toy()
    policy = [dmuon.ParamPolicy("*", output_dtype=torch.bfloat16)]
    dmuon.dedicate_params(model, world_mesh(), in_blocks, param_policy=policy)
    theirs = MixedPrecisionPolicy(output_dtype=torch.float32)
    try:
        fully_shard(model.blocks[0], mesh=world_mesh(), mp_policy=theirs)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_an_output_dtype_that_fully_shard_contradicts(ranks):
    for said in ranks(2, two_output_dtypes):
        assert "'blocks.0'" in said
        assert "bfloat16" in said
        assert "float32" in said
