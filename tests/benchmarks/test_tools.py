"""The scripts that measure kernels, tried on a CPU: a table of kernels that compute different things says nothing."""

from __future__ import annotations

import json
from importlib import resources

import bench_syrk
import measure_verdicts
import pytest
import torch

from dmuon_core.syrk.ladder import KernelChoice

CPU = torch.device("cpu")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("data", ["randn", "real"])
@pytest.mark.parametrize("shape", [(2, 64, 96), (2, 64, 64)], ids=str)
def test_every_column_computes_the_same_product(shape, data, exact):
    kinds = []
    for product in bench_syrk.products(shape, torch.float16, data, KernelChoice.of("auto"), exact, CPU):
        kinds.append(product.kind)
        assert {"bmm", "auto"} <= product.runs.keys()
        for name, run in product.runs.items():
            error = float((run()[0].float() - product.want).norm() / product.want.norm())
            # Rounding to half precision is 2^-12 in the mean; a mirrored commutator comes on top.
            assert error <= 1e-3, (product.kind, name)
        cells = bench_syrk.row(product, "float16", data, dict.fromkeys(product.runs, product.flops))
        assert len(cells) == len(bench_syrk.HEADER)
    square = ["gram", "polynomial", "product", "factor", "apply"]
    assert kinds == (["gram", "apply"] if shape[1] != shape[2] else square)


def test_what_ships_is_written_as_the_tool_writes_it():
    """Else the next measurement would change every line of the file."""
    text = resources.files("dmuon_core.syrk").joinpath("shipped_verdicts.json").read_text(encoding="utf-8")
    assert measure_verdicts.written(json.loads(text)) == text
