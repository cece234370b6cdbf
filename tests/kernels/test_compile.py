"""What the interpreter runs need not compile: every kind of variant is built for SM80, SM86 and SM90, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block can have."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile with")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).parent / "compile_variants.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def builds(compiled):
    return compiled["products"]


def test_every_architecture_is_built(builds):
    assert {build["capability"] for build in builds} == set(SHARED_LIMIT)


def test_shared_memory_fits_the_architecture(builds):
    """A configuration of the H200 once did not launch on SM86, which has less than half its shared memory."""
    too_large = [b for b in builds if b["shared"] > SHARED_LIMIT[b["capability"]]]
    assert not too_large


def test_nothing_spills(compiled):
    builds = compiled["products"] + compiled["passes"]
    if not all(build["resources"] for build in builds):
        pytest.skip("this Triton comes without cuobjdump")
    spilling = [b for b in builds if b["resources"]["STACK"] or b["resources"]["LOCAL"]]
    assert not spilling


def test_aligned_operands_are_pipelined(builds):
    """Where Triton does not see that rows start at multiples of 16 bytes it loads entry by entry, four times slower."""
    for build in builds:
        config = build["variant"]["config"]
        step = 2 * (config["tile_m"] + config.get("tile_n", config["tile_m"])) * config["tile_k"]
        assert build["shared"] >= 2 * step or not build["variant"]["aligned"]


def test_products_run_on_tensor_cores(builds):
    assert all(build["tensor_cores"] for build in builds)


def test_descriptors_load_and_store_through_the_tensor_memory_engine(builds):
    """Without that they are pointer loads in disguise, a fifth slower."""
    described = [build for build in builds if "general" in build["variant"]]
    assert described
    assert all(build["bulk_copies"] for build in described)


def test_normalizing_loads_vectors(compiled):
    """Entry by entry it runs at a quarter of the bandwidth. A transposed input is loaded along its columns."""
    assert compiled["passes"]
    assert all(found["vectors"] >= 8 for found in compiled["passes"])
