"""Predictions of bytes and step time: against hand counts, the planner and the cost model, and docs/simulation.md."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from dmuon_core.cost import DeviceModel, muon_seconds
from dmuon_fsdp import PlanningOptions, plan_owners
from dmuon_fsdp.cli import main
from dmuon_fsdp.planning.published import MODELS, ModelShapes, model_shapes
from dmuon_fsdp.planning.simulate import Assumptions, Mesh, Traffic, simulate

DOC = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"

# The costliest is c, so it goes to rank 0; a to rank 1; b to rank 1 of two, to rank 2 of four.
A = B = 256 * 256
C = 256 * 1024
TOY = ModelShapes(
    "toy",
    matrices={"layers.0.a": (256, 256), "layers.0.b": (256, 256), "layers.0.c": (256, 1024)},
    others={"embed": (1000,)},
)


# --- published shapes


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_the_published_total(name):
    model = model_shapes(name)
    assert model.parameters == model.published
    assert model.source


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3-8b", 32 * 7),
        ("llama3-70b", 80 * 7),
        ("qwen3-30b-a3b", 48 * (4 + 1 + 128 * 3)),
        ("deepseek-v3", 61 * 5 + 3 * 3 + 58 * (1 + (256 + 1) * 3)),
    ],
)
def test_every_matrix_of_a_block_is_dedicated_and_nothing_else(name, count):
    model = model_shapes(name)
    assert len(model.matrices) == count
    assert all(".layers." in matrix and len(shape) == 2 for matrix, shape in model.matrices.items())
    assert [other for other, shape in model.others.items() if len(shape) == 2] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("name", "weight", "shape"),
    [
        ("llama3-8b", "model.layers.31.self_attn.k_proj.weight", (1024, 4096)),
        ("llama3-70b", "model.layers.79.mlp.down_proj.weight", (8192, 28672)),
        ("qwen3-30b-a3b", "model.layers.0.self_attn.q_proj.weight", (4096, 2048)),
        ("qwen3-30b-a3b", "model.layers.47.mlp.experts.127.up_proj.weight", (768, 2048)),
        ("deepseek-v3", "model.layers.2.mlp.gate_proj.weight", (18432, 7168)),
        ("deepseek-v3", "model.layers.3.mlp.shared_experts.down_proj.weight", (7168, 2048)),
        ("deepseek-v3", "model.layers.60.self_attn.q_b_proj.weight", (24576, 1536)),
        ("deepseek-v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
    ],
)
def test_a_weight_has_its_published_shape(name, weight, shape):
    assert model_shapes(name).matrices[weight] == shape


# --- bytes


def test_bytes_of_three_matrices_on_two_ranks():
    """Rank 0 owns c, rank 1 owns a and b; the 1000 other elements are FSDP2's, 500 a rank."""
    found = simulate(TOY, Mesh(shard=2))
    assert (found.matrices.low, found.matrices.high, found.idle_ranks) == (1, 2, 0)
    # Owner: fp32 master and momentum, bf16 bucket. FSDP2: fp32 weight and two moments.
    assert found.rest_bytes.high == C * (4 + 4 + 2) + 500 * 12
    assert found.rest_bytes.low == (A + B) * (4 + 4 + 2) + 500 * 12
    assert found.fsdp2_rest_bytes == (A + B + C + 1000) // 2 * 12
    # Rank 1 receives c and half of the other elements, in bf16; it sends as much in the reduction.
    most = C * 2 + 500 * 2
    assert found.traffic == Traffic(forward=most, backward=most, reduce_shard=most)
    least = (A + B) * 2 + 500 * 2
    assert found.mean_traffic.forward == (most + least) / 2
    half = (A + B + C + 1000) // 2 * 2
    assert found.fsdp2_traffic == Traffic(forward=half, backward=half, reduce_shard=half)


def test_bytes_on_two_copies_of_two_shards():
    """Ranks 0 to 3 own c, a, b, nothing; coordinate 0 of the shards holds c and b, coordinate 1 holds a."""
    found = simulate(TOY, Mesh(shard=2, replicate=2))
    assert (found.matrices.low, found.matrices.high, found.idle_ranks) == (0, 1, 1)
    assert found.rest_bytes.high == C * (4 + 4) + (C + B) * 2 + 500 * 12
    assert found.rest_bytes.low == A * 2 + 500 * 12
    # Coordinate 1 receives c and b. Between copies rank 2 sends c to its owner; the other elements take an
    # all-reduce, twice (R - 1)/R of 500. Rank 2 receives the new c.
    foreign = (C + B) * 2 + 500 * 2
    want = Traffic(foreign, foreign, foreign, reduce_replica=C * 2 + 2 * 0.5 * 500 * 2, publish=C * 2)
    assert found.traffic == want
    half = (A + B + C + 1000) // 2 * 2
    assert found.fsdp2_traffic == Traffic(half, half, half, reduce_replica=2 * 0.5 * half)


def test_replicas_without_shards_gather_nothing():
    found = simulate(TOY, Mesh(shard=1, replicate=2))
    assert found.traffic == Traffic(reduce_replica=C * 2 + 1000 * 2, publish=C * 2)
    assert found.rest_bytes.high == C * 8 + (A + B + C) * 2 + 1000 * 12


def test_z2_gathers_once():
    found = simulate(TOY, Mesh(shard=2), Assumptions(free_after_forward=False))
    assert found.traffic.backward == found.fsdp2_traffic.backward == 0
    assert found.traffic.forward == C * 2 + 500 * 2


def test_dtypes_count():
    found = simulate(TOY, Mesh(shard=2), Assumptions(compute_bytes=4, reduce_bytes=8, momentum_bytes=2))
    assert found.traffic.forward == 4 * (C + 500)
    assert found.traffic.reduce_shard == 8 * (C + 500)
    assert found.rest_bytes.high == C * (4 + 2 + 4) + 500 * 12


def test_fsdp2_pads_every_shard_to_the_largest():
    """Three rows on two ranks are two rows each; two rows on eight ranks one row each, of which six are empty."""
    model = ModelShapes("padded", matrices={"a": (3, 10)}, others={"b": (2, 10)})
    two = simulate(model, Mesh(shard=2))
    assert two.fsdp2_traffic.forward == (2 + 1) * 10 * 2
    eight = simulate(model, Mesh(shard=8))
    assert eight.fsdp2_traffic.forward == 7 * (1 + 1) * 10 * 2
    assert eight.fsdp2_rest_bytes == 20 * 12
    assert eight.traffic.forward == 3 * 10 * 2 + 7 * 10 * 2


@pytest.mark.parametrize("mesh", [Mesh(8), Mesh(64), Mesh(8, replicate=4)])
def test_the_mean_rank_moves_what_fsdp2_moves_where_nothing_is_padded(mesh):
    """A broadcast and a reduction of every matrix cost the mean rank an all-gather and a reduce-scatter, and between
    copies reduce and publish are an all-reduce."""
    found = simulate(model_shapes("llama3-8b"), mesh)
    assert found.mean_traffic.forward == pytest.approx(found.fsdp2_traffic.forward, rel=1e-12)
    assert found.mean_traffic.reduce_shard == pytest.approx(found.fsdp2_traffic.reduce_shard, rel=1e-12)
    between = found.mean_traffic.reduce_replica + found.mean_traffic.publish
    assert between == pytest.approx(found.fsdp2_traffic.reduce_replica, rel=1e-12)


# --- seconds


def test_seconds_are_the_cost_models():
    device = DeviceModel(flops=1e12, bandwidth=1e12)
    found = simulate(TOY, Mesh(shard=2), Assumptions(device=device))
    one, two = (muon_seconds(shapes, device=device) for shapes in ([(256, 1024)], [(256, 256)] * 2))
    assert (found.muon_seconds.high, found.muon_seconds.low) == (max(one, two), min(one, two))
    assert found.muon_seconds.mean == pytest.approx((one + two) / 2)
    assert found.imbalance == pytest.approx(max(one, two) / ((one + two) / 2) - 1)
    assert found.largest_matrix_seconds == one
    assert found.adamw_seconds == 500 * 28 / 1e12
    assert found.step_seconds == found.muon_seconds.high + found.adamw_seconds
    assert found.fsdp2_step_seconds == (A + B + C + 1000) // 2 * 28 / 1e12


def test_owners_are_the_planners():
    """Loads per rank are those of ``plan_owners``, with its options."""
    model = model_shapes("llama3-70b")
    for options in (PlanningOptions(), PlanningOptions(balance="numel")):
        owners = plan_owners(model.matrices, 64, options)
        per_rank = [[] for _ in range(64)]
        for name, rank in owners.items():
            per_rank[rank].append(model.matrices[name])
        found = simulate(model, Mesh(64), Assumptions(planning=options))
        assert found.muon_seconds.high == pytest.approx(max(map(muon_seconds, per_rank)))
        elements = [sum(map(prod, shapes)) for shapes in per_rank]
        assert found.traffic.forward - found.fsdp2_traffic.forward == pytest.approx(
            2 * (model.dedicated_parameters / 64 - min(elements)), rel=1e-9
        )
        assert (found.matrices.low, found.matrices.high) == (min(map(len, per_rank)), max(map(len, per_rank)))


def test_a_bound_on_memory_reaches_the_planner():
    with pytest.raises(ValueError, match="max_bytes_per_rank"):
        simulate(TOY, Mesh(shard=2), Assumptions(planning=PlanningOptions(max_bytes_per_rank=1000)))


def test_more_ranks_than_matrices_stop_at_the_largest_matrix():
    found = simulate(model_shapes("llama3-8b"), Mesh(4096))
    assert found.idle_ranks == 4096 - 224
    assert found.muon_seconds.high == found.largest_matrix_seconds
    assert found.muon_seconds.low == 0
    assert found.muon_seconds.mean < found.muon_seconds.high / 10


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth"),
    [
        (8, 1, 300e9),
        (16, 1, 300e9),  # eight ports give 360
        (8, 8, 45e9),
        (4, 4, 90e9),
        (2, 4, 300e9),
        (4096, 2, 180e9),
        (2, 4096, 45e9),
    ],
)
def test_a_group_has_the_ports_of_its_ranks_in_a_node(ranks, stride, bandwidth):
    assert Assumptions().bandwidth(ranks, stride) == bandwidth


def test_communication_takes_bytes_over_bandwidth():
    found = simulate(TOY, Mesh(shard=8, replicate=2))
    moved = found.traffic
    within = moved.forward + moved.backward + moved.reduce_shard
    assert found.communication_seconds == pytest.approx(within / 300e9 + moved.reduce_replica / 45e9)
    assert found.publish_seconds == pytest.approx(moved.publish / 45e9)
    assert moved.publish == C * 2


@pytest.mark.parametrize("mesh", [(0, 1), (8, 0), (8, 3), (-8, -1)])
def test_a_mesh_that_does_not_divide_is_refused(mesh):
    with pytest.raises(ValueError, match="cannot be divided"):
        Mesh.of(*mesh)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ValueError, match="without matrices"):
        simulate(ModelShapes("none", {}, {"b": (3,)}), Mesh(2))


def test_the_largest_model_on_4096_ranks_takes_seconds():
    """45,090 matrices: about 1.5 s on a slow core; a search over all ranks per matrix would take minutes."""
    model = model_shapes("deepseek-v3")
    begin = time.perf_counter()
    found = simulate(model, Mesh(4096))
    assert time.perf_counter() - begin < 20
    assert found.matrices.mean * 4096 == len(model.matrices)


def test_the_model_of_the_step_benchmark():
    """docs/simulation.md holds this prediction beside the measurement of docs/benchmarks."""
    block = {"q": (2048, 2048), "k": (2048, 2048), "v": (2048, 2048), "o": (2048, 2048)}
    block |= {"gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    matrices = {f"layers.{i}.{name}": shape for i in range(12) for name, shape in block.items()}
    model = ModelShapes("benchmark", matrices, {"embed": (32_000, 2048), "head": (32_000, 2048)})
    found = simulate(model, Mesh(2))
    said = re.search(r"predicts ([\d.]+) ms\s+for the optimizer step and ([\d.]+) ms", DOC.read_text(encoding="utf-8"))
    assert [f"{1e3 * found.step_seconds:.1f}", f"{1e3 * found.fsdp2_step_seconds:.1f}"] == list(said.groups())


# --- command line and documentation


def test_json_holds_every_figure(capsys):
    main(["plan", "--model", "llama3-8b", "--ranks", "16", "--replicate", "2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["assumptions"]["compute_bytes"] == 2
    [one] = told["predictions"]
    assert one["mesh"] == {"shard": 8, "replicate": 2}
    found = simulate(model_shapes("llama3-8b"), Mesh(8, replicate=2))
    assert one["muon_seconds"]["high"] == found.muon_seconds.high
    assert one["traffic"]["publish"] == found.traffic.publish
    assert one["step_seconds"] == found.step_seconds


def test_text_names_its_assumptions(capsys):
    main(["plan", "--model", "llama3-8b", "--ranks", "8"])
    told = capsys.readouterr().out
    assert told.startswith("A prediction from shapes and a cost model, not a measurement.")
    for line in Assumptions().lines():
        assert f"  - {line}\n" in told
    assert Counter(line.split()[0] for line in told.splitlines() if line)["llama3-8b"] == 3
    assert all(len(line) <= 130 for line in told.splitlines())


def test_a_rank_that_overflows_its_memory_is_marked(capsys):
    main(["plan", "--model", "deepseek-v3", "--ranks", "8"])
    assert "1007!" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-7", "--ranks", "8"], "unknown model 'gpt-7'; known: llama3-8b"),
        (["--model", "llama3-8b", "--ranks", "8", "--replicate", "3"], "cannot be divided into 3 copies"),
        (["--model", "llama3-8b", "--ranks", "0"], "0 ranks"),
        (["--model", "llama3-8b"], "--ranks"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_documentation_shows_what_the_command_prints(capsys):
    """The page is generated: run the commands it shows and paste what they print."""
    blocks = re.findall(r"```text\n\$ dmuon ([^\n]+)\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert [command for command, _ in blocks] == [
        "plan --model all --ranks 8 64 512 4096",
        "plan --model all --ranks 64 512 4096 --replicate 8",
    ]
    for command, shown in blocks:
        main(shlex.split(command))
        assert capsys.readouterr().out == shown
