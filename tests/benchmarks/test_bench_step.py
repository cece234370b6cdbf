"""The benchmark of whole steps, tried on CPU ranks: its figures mean something only if all variants train one model."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path

import bench_step
import pytest
import step_times
import step_turns
import torch
import torch.distributed as dist
from bench_models import TINY, LanguageModel, MixtureOfExperts, is_matrix
from step_profile import Kernel, Profile, Span, markdown, occupancy
from step_turns import Turns

from ranks.harness import run_ranks


def options_of(*arguments: str):
    return bench_step.parse(["--cpu", "--micro-batch", "64", "--rounds", "1", "--steps", "3", *arguments])


def compare(folder: str, model: str, *arguments: str):
    chosen = options_of("--model", model, "--profile", *arguments)
    chosen.out, chosen.markdown = (Path(folder, f"{model}.{end}") for end in ("json", "md"))
    turns = Path(folder, model)
    turns.mkdir(exist_ok=True)
    bench_step.run(chosen, Turns(turns))


def compare_models(folder: str):
    compare(folder, "dense-3b", "--tokens", "128", "--variants", "fsdp2", "dmuon-z2", "--trace", f"{folder}/traces")
    compare(folder, "moe", "--tokens", "64", "128", "--variants", *bench_step.OURS, "torch-muon")
    # A variant whose first loss is another's is refused: its times would be those of another model.
    chosen = options_of("--variants", "fsdp2")
    mesh = bench_step.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    data = {64: bench_step.micro_batches(64, "cpu", chosen)}
    with pytest.raises(AssertionError, match="begins with the loss"):
        bench_step.measure("fsdp2", mesh, data, bench_step.Results(first_loss=1.0), chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    run_ranks(2, compare_models, str(folder))
    return folder


@pytest.fixture(scope="module")
def reports(folder):
    return {
        model: (json.loads((folder / f"{model}.json").read_text()), (folder / f"{model}.md").read_text())
        for model in ("dense-3b", "moe")
    }


def test_every_variant_has_a_row_for_every_number_of_tokens(reports):
    for model, wanted in (
        ("dense-3b", {(128, "fsdp2"), (128, "dmuon-z2")}),
        ("moe", {(tokens, variant) for tokens in (64, 128) for variant in bench_step.OURS}),
    ):
        report, text = reports[model]
        assert {(row["tokens"], row["variant"]) for row in report["rows"]} == wanted
        for row in report["rows"]:
            assert f"| {row['replicas']} | {row['tokens']} | {row['variant']} | {row['step_ms']:.1f} |" in text
            assert row["step_ratio"] == 1.0 or row["variant"] != "fsdp2"
            assert 0 < row["optimizer_ms"] <= row["step_ms"]


def test_what_the_host_takes_is_of_one_micro_batch(reports):
    """Of a whole step it would grow with the tokens, though the host's work for a micro-batch does not."""
    report, text = reports["moe"]
    for variant in bench_step.OURS:
        one, two = (row for row in report["rows"] if row["variant"] == variant)
        for part in ("host_forward_backward_ms", "host_optimizer_ms", "optimizer_ms"):
            assert one[f"idle_start_{part}"] == two[f"idle_start_{part}"] > 0
            assert f" | {one[f'idle_start_{part}']:.1f} | " in text


def late_forward():
    chosen = options_of()
    mesh = bench_step.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    trained = bench_step.build("fsdp2", chosen.sizes, mesh)
    if dist.get_rank() == 1:
        trained.model.register_forward_pre_hook(lambda *_: time.sleep(0.3))
    return step_times.started_idle(trained, bench_step.micro_batches(64, "cpu", chosen)[0])


def test_host_time_is_the_slowest_rank_s_and_its_part_s_alone():
    """A host that is slow in forward, on one rank, must be seen there and not be charged to the optimizer."""
    for figures in run_ranks(2, late_forward):
        assert figures["idle_start_host_forward_backward_ms"] >= 300
        assert figures["idle_start_host_optimizer_ms"] < 300
        assert figures["idle_start_optimizer_ms"] < 300


def test_a_trace_holds_one_whole_step(folder):
    """Two steps, or half of one, would mislead whoever measures in it."""
    files = {file.name: file for file in (folder / "traces").iterdir()}
    assert files.keys() == {f"{variant}-replicas1-tokens128.json.gz" for variant in ("fsdp2", "dmuon-z2")}
    for name, file in files.items():
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        count = Counter(event.get("name") for event in events if event.get("ph") == "X")
        assert count["aten::embedding"] == count["aten::embedding_backward"] == 2  # micro-batches
        optimizer = "AdamW" if name.startswith("fsdp2") else "Muon"
        assert count[f"Optimizer.step#{optimizer}.step"] == 1


def test_exposed_and_idle_time_of_overlapping_kernels():
    """Overlap of streams must not count twice, nor a gap that another stream fills."""
    spans = [
        Span("gemm", 1000.0, 3000.0),
        Span("ncclDevKernel_AllGather", 2000.0, 5000.0),
        Span("add", 2500.0, 2600.0),
        Span("gemm", 4000.0, 6000.0),  # NCCL was alone from 3000 to 4000
        Span("Memcpy DtoD", 9000.0, 9500.0),  # nothing ran from 6000 to 9000
        Span("ncclDevKernel_Broadcast", 9500.0, 10_000.0),  # alone
    ]
    assert occupancy(reversed(spans)) == {"exposed_communication_ms": 1.5, "idle_ms": 3.0}
    assert occupancy([]) == {"exposed_communication_ms": 0.0, "idle_ms": 0.0}


def test_a_peer_that_cannot_run_says_why(reports):
    """It must neither end the comparison nor be missing without a word. torch's Muon takes no stacks of experts."""
    report, text = reports["moe"]
    assert "only supports 2D" in report["reasons"]["1"]["torch-muon"]
    assert "torch-muon (replicas 1) did not run: ValueError" in text


def adamw(division):
    return [torch.optim.AdamW([*division.matrices.values(), *division.rest], lr=1e-4)]


def starved(division):
    """Finds no memory on rank 1 alone; the others go on to the next collective."""
    if dist.get_rank() == 1:
        torch.empty(2**60)
    return adamw(division)


def compare_with_one_starved(folder: str):
    step_turns.PATIENCE_S = 0.5
    bench_step.PEERS |= {"starved": starved, "last": adamw}
    compare(folder, "dense-1b", "--tokens", "64", "--variants", "fsdp2", "starved", "last")


def test_a_variant_that_fails_on_one_rank_costs_neither_what_was_measured_nor_the_rest(tmp_path):
    """The others wait for it in a collective, and a rank that went on would meet them there with another variant's."""
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, compare_with_one_starved, str(tmp_path))
    before = json.loads((tmp_path / "dense-1b.json").read_text())
    assert [row["variant"] for row in before["rows"]] == ["fsdp2"]
    run_ranks(2, compare_with_one_starved, str(tmp_path))  # what torchrun --max-restarts does
    after = json.loads((tmp_path / "dense-1b.json").read_text())
    assert {row["variant"] for row in after["rows"]} == {"fsdp2", "last"}
    assert before["rows"][0] in after["rows"]
    assert after["reasons"]["1"].keys() == {"starved"}
    assert "rank 1: RuntimeError" in after["reasons"]["1"]["starved"]
    assert "memory" in after["reasons"]["1"]["starved"]


def test_the_optimizer_step_is_taken_apart(reports):
    for report, text in reports.values():
        for profile in report["profiles"]["1"].values():
            names = {kernel["name"] for kernel in profile["kernels"]}
            assert names & {"aten::mm", "aten::bmm", "aten::baddbmm"}
            assert "aten::cross_entropy_loss" not in names  # forward is not in it
            first = profile["kernels"][0]
            assert f"`{first['name']}` | {first['launches']} |" in text


def test_static_experts_are_a_mixture_of_two():
    """Tokens reach their experts by reshaping alone, where a wrong roll mixes tokens of other places."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(experts=4, d=8, ff=12).double()
    x_BTD = torch.randn(2, 8, 8, dtype=torch.float64)
    weights = layer.router(x_BTD).softmax(-1)
    want = torch.zeros_like(x_BTD)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(8)).tolist():
        for e in (t % 4, (t + 1) % 4):
            gate, up, down = (stack[e] for stack in layer.experts.parameters())
            hidden = torch.nn.functional.silu(gate @ x_BTD[b, t]) * (up @ x_BTD[b, t])
            want[b, t] += weights[b, t, e] * (down @ hidden)
    torch.testing.assert_close(layer(x_BTD), want, rtol=1e-12, atol=1e-12)  # fp64: order of sums only


@pytest.mark.parametrize("model", TINY)
def test_matrices_are_those_of_layers(model):
    """By their shape alone the embedding and the head would go to Muon too."""
    named = dict(LanguageModel(TINY[model]).named_parameters())
    matrices = {name for name, parameter in named.items() if is_matrix(name, parameter)}
    assert {name.rsplit(".weight")[0].rsplit(".")[-1] for name in matrices} == {
        f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert len(matrices) == 7 * TINY[model].layers


def test_what_a_table_leaves_out_is_in_its_sum():
    profile = Profile(tuple(Kernel(f"k|{i}", i, 10.0 * i) for i in (3, 2, 1)), busy_ms=0.06)
    assert markdown(profile, rows=1).splitlines()[2:] == [
        "| `k¦3` | 3 | 30.0 |",
        "| 2 others | 3 | 30.0 |",
        "| all | 6 | 60.0 |",
    ]


@pytest.mark.parametrize("tokens", ["100", "8", "0"])
def test_tokens_that_are_no_whole_micro_batches_are_refused(tokens):
    with pytest.raises(SystemExit, match=f"{tokens} tokens must be whole micro-batches"):
        options_of("--tokens", "64", tokens)
