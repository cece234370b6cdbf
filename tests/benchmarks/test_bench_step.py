"""The benchmark of whole steps, tried on CPU ranks: its figures mean something only if all variants train one model."""

from __future__ import annotations

import json

import bench_step
import pytest
import torch
from bench_models import TINY, LanguageModel, MixtureOfExperts, is_matrix
from step_profile import Kernel, Profile, markdown

from ranks.harness import run_ranks


def options_of(*arguments: str):
    return bench_step.parse(["--cpu", "--micro-batch", "64", "--rounds", "1", "--steps", "3", *arguments])


def compare(folder: str, model: str, *arguments: str):
    chosen = options_of("--model", model, "--profile", *arguments)
    chosen.out, chosen.markdown = (bench_step.Path(folder, f"{model}.{end}") for end in ("json", "md"))
    bench_step.run(chosen)


def compare_models(folder: str):
    compare(folder, "dense-3b", "--tokens", "64", "--variants", "fsdp2", "dmuon-z2")
    compare(folder, "moe", "--tokens", "64", "128", "--variants", *bench_step.OURS, "torch-muon")
    # A variant whose first loss is another's is refused: its times would be those of another model.
    chosen = options_of("--variants", "fsdp2")
    mesh = bench_step.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    data = {64: bench_step.micro_batches(64, "cpu", chosen)}
    with pytest.raises(AssertionError, match="begins with the loss"):
        bench_step.measure("fsdp2", mesh, data, bench_step.Results(first_loss=1.0), chosen)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    run_ranks(2, compare_models, str(folder))
    return {
        model: (json.loads((folder / f"{model}.json").read_text()), (folder / f"{model}.md").read_text())
        for model in ("dense-3b", "moe")
    }


def test_every_variant_has_a_row_for_every_number_of_tokens(reports):
    for model, wanted in (
        ("dense-3b", {(64, "fsdp2"), (64, "dmuon-z2")}),
        ("moe", {(tokens, variant) for tokens in (64, 128) for variant in bench_step.OURS}),
    ):
        report, text = reports[model]
        assert {(row["tokens"], row["variant"]) for row in report["rows"]} == wanted
        for row in report["rows"]:
            assert f"| {row['replicas']} | {row['tokens']} | {row['variant']} | {row['step_ms']:.1f} |" in text
            assert row["step_ratio"] == 1.0 or row["variant"] != "fsdp2"
            assert 0 < row["optimizer_ms"] <= row["step_ms"]


def test_a_peer_that_cannot_run_says_why(reports):
    """It must neither end the comparison nor be missing without a word. torch's Muon takes no stacks of experts."""
    report, text = reports["moe"]
    assert "only supports 2D" in report["reasons"]["1"]["torch-muon"]
    assert "torch-muon (replicas 1) did not run: ValueError" in text


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
