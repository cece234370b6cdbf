"""The kernels that ship compiled: what is in the archives, that the tables choose just that, how it is launched."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_core.notices import warn_once
from dmuon_kernels import probes, routes
from dmuon_kernels.aot import manifest, shipped
from dmuon_kernels.aot.layout import Layout
from dmuon_kernels.aot.manifest import TRITON, dump, parse, read_cubin, read_manifest, source_hashes
from dmuon_kernels.aot.table import ARCHITECTURES, tabled_launches
from dmuon_kernels.aot.variant import canonical, signature_of, variant_of
from dmuon_kernels.triton_config import parse_config
from dmuon_kernels.triton_launch import Operands, Scalars, choose, plan

BUILD_AGAIN = "the kernels or their tables changed: run tools/build_cubins.py, with Triton 3.6.0"
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
ELF_ABI = 7
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def shipping():
    found = read_manifest()
    assert found is not None
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES)
def artefacts(request, shipping):
    """An architecture, and what ships for it."""
    return request.param, shipping.artefacts[request.param]


def test_cubins_are_of_these_sources(shipping):
    """A changed kernel must not meet a compiled one from before: it would be launched with other arguments."""
    assert shipping.sources == source_hashes(), BUILD_AGAIN
    assert shipping.triton == TRITON


def test_every_kernel_that_the_tables_choose_ships(artefacts):
    """Where nothing can be compiled, a hole is an error in the middle of a step."""
    architecture, found = artefacts
    launches = tabled_launches(architecture)
    assert found.keys() == launches.keys(), BUILD_AGAIN
    for variant, launch in launches.items():
        assert found[variant].parameters == signature_of(launch, variant), BUILD_AGAIN


def test_cubins_are_what_was_built_for_drivers_before_cuda_13_1(artefacts):
    """ABI 8 loads on the newest drivers only; the low byte of the flags names the architecture in ABI 7."""
    architecture, found = artefacts
    for artefact in found.values():
        cubin = read_cubin(architecture, artefact)
        assert cubin[:4] == b"\x7fELF"
        assert cubin[8] == ELF_ABI
        (flags,) = struct.unpack_from("<I", cubin, 48)
        assert flags & 0xFF == architecture


def test_nothing_spills_and_shared_memory_fits(artefacts):
    architecture, found = artefacts
    assert all(each.stack == 0 for each in found.values())
    assert all(0 < each.registers <= 255 for each in found.values())
    assert all(0 < each.shared <= SHARED_LIMIT[architecture] for each in found.values())


def test_parameters_are_those_of_the_cubins(artefacts):
    """One parameter too few shifts all that follow: the kernel writes to an address made of strides."""
    architecture, found = artefacts
    for artefact in found.values():
        layout = Layout.of(list(artefact.parameters.values()))
        assert list(layout.sizes) == _parameter_sizes(read_cubin(architecture, artefact))


def _parameter_sizes(cubin):
    """The sizes of a kernel's parameters as its ELF section ``.nv.info.<kernel>`` has them, in order."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    text = cubin[sections[names][4] :]
    found = {}
    for name, _, _, _, offset, length in sections:
        if text[name : text.index(b"\0", name)].startswith(b".nv.info."):
            found |= dict(_parameters(cubin[offset : offset + length]))
    return [found[ordinal] for ordinal in range(len(found))]


def _parameters(info):
    """Ordinal and size of each parameter; other attributes have four bytes, or as many more as these say."""
    place = 0
    while place < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == 4:
            if attribute == 0x17:  # EIATTR_KPARAM_INFO
                _, ordinal, _, word = struct.unpack_from("<IHHI", info, place)
                yield ordinal, word >> 18
            place += length


def test_descriptors_have_their_boxes(shipping):
    """The box of a tensor map and the tile of the kernel must be one: the engine moves what the map says."""
    for artefact in shipping.artefacts[90].values():
        kinds = {name: kind for name, kind in artefact.parameters.items() if kind.startswith("tensordesc")}
        assert kinds.keys() == artefact.tensor_maps.keys()
        for name, kind in kinds.items():
            tensor_map = artefact.tensor_maps[name]
            block = json.loads(kind[kind.index("[") : -1])
            assert list(tensor_map.box[:-1]) == block[:-1]
            # A box has at most 128 bytes in a row where it is swizzled; the kernel then moves several.
            assert tensor_map.box[-1] * tensor_map.element_bytes in (2 * block[-1], 128)


def test_manifest_is_read_as_it_was_written(shipping):
    assert parse(json.loads(dump(shipping))) == shipping


def test_manifest_of_another_format_is_refused():
    with pytest.raises(ValueError, match="format 2"):
        parse({"format": 2})


DAMAGED = [
    [],
    {},
    {"format": 1},
    {"format": 1, "triton": "3.6.0", "sources": {}, "signatures": 3, "artefacts": {}},
    {"format": 1, "triton": "3.6.0", "sources": {}, "signatures": [], "artefacts": {"90": [{}]}},
]


@pytest.mark.parametrize("document", DAMAGED, ids=str)
def test_damaged_manifest_is_a_reason(document, monkeypatch, tmp_path):
    """Triton's compiler may still be there: a probe that raises would take it away too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(manifest, "_FOLDER", tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    read_manifest.cache_clear()
    try:
        assert "the manifest is damaged" in shipped.complaint(CUDA)
    finally:
        read_manifest.cache_clear()


def test_installation_without_sources_is_a_reason(monkeypatch, tmp_path):
    """Some packagers keep byte code alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(shipped.driver, "functions", dict)
    monkeypatch.setattr(manifest, "_PACKAGE", tmp_path)
    source_hashes.cache_clear()
    try:
        assert "tma_kernel.py" in shipped.complaint(CUDA)
    finally:
        source_hashes.cache_clear()


WITHOUT_LZMA = """
import sys
sys.modules["_lzma"] = None
import torch
from dmuon_kernels import specs
from dmuon_kernels.aot import shipped
torch.cuda.get_device_capability = lambda device=None: (9, 0)
print(shipped.complaint(torch.device("cuda", 0)))
"""


def test_python_without_lzma():
    """One built where the library's headers were missing has none; quack and Triton's compiler do not need it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LZMA], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "this Python was built without lzma, which unpacks them"


def test_damaged_archive_is_named(artefacts):
    architecture, found = artefacts
    first = next(iter(found.values()))
    with pytest.raises(ValueError, match=rf"sm_{architecture}\.xz is damaged"):
        read_cubin(architecture, replace(first, offset=first.offset + 1))


REBUILD = Path(__file__).parent / "rebuild_cubins.py"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """The same few kernels from two processes with other folders and other hashes of strings."""
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile with")
    runs = []
    for seed in ("1", "2"):
        folder = tmp_path_factory.mktemp("triton")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, REBUILD], env=environment, cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    return runs


def test_a_build_repeats_itself(rebuilt):
    """Paths or the order of a set in a cubin would make every build another one, and hashes worthless."""
    first, second = rebuilt
    assert first == second


def test_what_ships_can_be_built_again(rebuilt, shipping):
    """The proof that the archives hold what the sources say."""
    if rebuilt[0]["triton"] != TRITON:
        pytest.skip(f"Triton {rebuilt[0]['triton']} makes other cubins than {TRITON}")
    for architecture, place, digest, complaint in rebuilt[0]["kernels"]:
        assert complaint is None
        variant = list(tabled_launches(architecture))[place]
        assert shipping.artefacts[architecture][variant].sha256 == digest


KINDS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "*fp16": ctypes.c_uint64}


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=30))
def test_layout_is_that_of_a_c_struct(kinds):
    """C's alignment is the oracle: with the two scratch pointers at the end, which are null."""
    types = [*(KINDS[kind] for kind in kinds), ctypes.c_uint64, ctypes.c_uint64]
    fields = [(f"f{i}", kind) for i, kind in enumerate(types)]
    mirror = type("Mirror", (ctypes.Structure,), {"_fields_": fields})
    layout = Layout.of(kinds)
    assert list(layout.offsets) == [getattr(mirror, name).offset for name, _ in fields]
    values = [float(i) if kind == "fp32" else i + 1 for i, kind in enumerate(kinds)]
    packed = mirror.from_buffer_copy(layout.pack(values).ljust(ctypes.sizeof(mirror), b"\0"))
    assert [getattr(packed, name) for name, _ in fields] == [*values, 0, 0]


def test_tensor_maps_are_aligned():
    layout = Layout.of(["i32", "tensordesc<fp16[1, 64, 64]>", "fp32"])
    assert layout.sizes == (4, 128, 4, 4, 4, 8, 8, 8, 4, 8, 8)
    assert layout.offsets[1] == 64
    packed = layout.pack([7, bytes(range(128)), 1, 2, 3, 4, 5, 6, 0.5])
    assert packed[64:192] == bytes(range(128))


def test_number_that_does_not_fit_is_not_cut_off():
    with pytest.raises(struct.error):
        Layout.of(["i32"]).pack([2**31])


def _tensor(*shape, **options):
    return torch.empty(*shape, dtype=torch.float16, device="meta", **options)


def _plan(a, b=None, c=None, d=None, alpha=1.0, beta=0.0, config="pointer-64x64-w4-s4"):
    d = _tensor(a.shape[0], a.shape[1], a.shape[1]) if d is None else d
    x = Operands(a, b, c, d, Scalars.of(alpha, beta))
    return plan(x, parse_config(config), 132)


PAIR = "tma-128x128x64-w4-s3-u128-g8-k1"


def test_one_kernel_serves_a_given_b_and_none(shipping):
    """The compiler's kernel has one descriptor for both where it can; here B's is A's again."""
    a = _tensor(2, 256, 512)
    alone, both = canonical(_plan(a, config=PAIR)), canonical(_plan(a, _tensor(2, 256, 512), config=PAIR))
    assert alone.arguments["b_desc"] is alone.arguments["a_desc"]
    assert variant_of(alone) == variant_of(both)
    assert variant_of(alone) in shipping.artefacts[90]


def test_scalars_of_two_kinds_become_tensors(shipping):
    """Kernels ship for two floats and for two tensors."""
    a, c, beta = _tensor(2, 256, 512), _tensor(2, 256, 256), torch.empty(2, device="meta")
    for config, architecture in (("pointer-64x64-w4-s4", 80), (PAIR, 90)):
        for scalars in ({"alpha": 2.0, "beta": beta}, {"alpha": beta, "beta": 2.0}):
            launch = canonical(_plan(a, None, c, **scalars, config=config))
            assert all(isinstance(launch.arguments[name], torch.Tensor) for name in ("alpha", "beta"))
            assert variant_of(launch) in shipping.artefacts[architecture]


def test_strides_that_no_kernel_ships_for():
    a, d = _tensor(2, 64, 128), _tensor(2, 64, 64)
    assert variant_of(_plan(a)) is not None
    assert variant_of(_plan(a.mT)) is not None
    assert variant_of(_plan(a, _tensor(2, 128, 64).mT)) is None
    assert variant_of(_plan(a, d=d.mT)) is None
    assert variant_of(_plan(a, None, _tensor(2, 64, 64).mT, beta=1.0)) is None
    far = _tensor(2, 256, 2**31)[..., :256]
    assert variant_of(_plan(_tensor(2, 256, 512), d=far, config=PAIR)) is None


def test_sizes_that_no_kernel_ships_for():
    """They are i32 there; packing such a launch would raise in the middle of a step."""
    assert variant_of(_plan(_tensor(1, 64, 2**31 - 8))) is not None
    assert variant_of(_plan(_tensor(1, 64, 2**31))) is None


def test_kernel_that_masks_k_takes_every_k(shipping):
    """On 9.0 no other ships with pointers, since descriptors take what is in a hurry."""
    variant = variant_of(_plan(_tensor(2, 64, 128)))
    assert dict(variant.constants)["EVEN_K"]
    assert variant in shipping.artefacts[80]
    assert variant not in shipping.artefacts[90]
    assert shipped._masking_k(variant) in shipping.artefacts[90]


LAYOUTS = {
    "rows": lambda *shape: _tensor(*shape),
    "columns": lambda batch, m, n: _tensor(batch, n, m).mT,
    "padded rows": lambda batch, m, n: _tensor(batch, m, n + 8)[..., :n],
    "odd rows": lambda batch, m, n: _tensor(batch, m, n + 3)[..., :n],
    "odd columns": lambda batch, m, n: _tensor(batch, n, m + 1)[..., :m].mT,
    "one matrix": lambda batch, m, n: _tensor(1, m, n).expand(batch, m, n),
    "nothing": lambda *shape: None,
}
SCALARS = st.sampled_from(["float", "0-d", "per item"])


def _scalar(kind, batch):
    return {"float": 0.5, "0-d": torch.empty((), device="meta"), "per item": torch.empty(batch, device="meta")}[kind]


@settings(max_examples=300)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    batch=st.integers(1, 70),
    m=st.sampled_from([1, 2, 31, 32, 33, 64, 96, 500, 512, 768, 1000, 1024, 2048, 3001, 4096, 8192, 16384]),
    k=st.sampled_from([0, 1, 8, 63, 64, 100, 512, 1024, 4096, 8192, 28672]),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    out=st.sampled_from(["rows", "padded rows", "odd rows"]),
    kinds=st.tuples(SCALARS, SCALARS),
    multiprocessors=st.sampled_from([1, 78, 108, 114, 132]),
)
def test_whatever_is_not_rejected_has_a_kernel(architecture, batch, m, k, layouts, out, kinds, multiprocessors):
    """Where nothing can be compiled, an operand that is accepted and finds no kernel ends a training run."""
    shapes = [(batch, m, k), (batch, m, k), (batch, m, m)]
    a, b, c = (LAYOUTS[layout](*shape) for layout, shape in zip(layouts, shapes, strict=True))
    if a is None or probes.triton_rejects(a, b, c) or routes.shipped_rejects(a, b, c):
        return
    alpha, beta = _scalar(kinds[0], batch), 0.0 if c is None else _scalar(kinds[1], batch)
    x = Operands(a, b, c, LAYOUTS[out](batch, m, m), Scalars.of(alpha, beta))
    launch = canonical(plan(x, choose(x, descriptors=architecture == 90), multiprocessors))
    variant = variant_of(launch)
    assert {variant, shipped._masking_k(variant)} & read_manifest().artefacts[architecture].keys(), variant.label


def test_layouts_that_need_the_compiler_are_rejected():
    rows, columns, square = _tensor(2, 64, 96), _tensor(2, 96, 64).mT, _tensor(2, 64, 64)
    assert routes.shipped_rejects(rows, rows, square) is None
    assert routes.shipped_rejects(columns, columns, None) is None
    for operands in ((rows, columns, None), (columns, None, square), (rows, None, square.mT)):
        assert "nothing can be compiled" in routes.shipped_rejects(*operands)


@pytest.fixture
def damaged(monkeypatch):
    """An installation on an H200 whose archives are damaged, where nothing was loaded yet."""

    def fail(architecture, artefact):
        raise ValueError("sm_90.xz is damaged")

    monkeypatch.setattr(shipped, "_usable_architecture", lambda device: 90)
    monkeypatch.setattr(shipped, "read_cubin", fail)
    monkeypatch.setattr(shipped, "_loaded", {})
    monkeypatch.setattr(shipped, "_broken", {})
    warn_once.cache_clear()


def test_first_kernel_that_does_not_load_leaves_all_to_the_compiler(damaged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    launch = _plan(_tensor(2, 256, 512), config=PAIR)
    with pytest.warns(RuntimeWarning, match=r"sm_90 are left out: sm_90\.xz is damaged"):
        assert shipped.find(launch, CUDA) is None
    assert shipped.find(launch, CUDA) is None
    assert "did not load: sm_90.xz is damaged" in shipped.complaint(CUDA)


def test_later_kernel_that_does_not_load_raises(damaged):
    """After a success, another way in silence would change what a training run computes with."""
    shipped._loaded[90, variant_of(_plan(_tensor(2, 64, 128)))] = object()
    with pytest.raises(ValueError, match="damaged"):
        shipped.find(_plan(_tensor(2, 256, 512), config=PAIR), CUDA)


@pytest.fixture
def card(monkeypatch):
    """Pretend that there is an H200, and say what its two ways to a kernel lack."""

    def pretend(compiler, archive):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(routes, "compiler_complaint", lambda: compiler)
        monkeypatch.setattr(shipped, "complaint", lambda device: archive)

    return pretend


def test_either_way_to_a_kernel_is_enough(card):
    card(None, None)
    assert routes.probe_triton(CUDA) is None
    assert routes.describe(CUDA).startswith("shipped kernels, others compiled by Triton")
    card("no compiler", None)
    assert routes.probe_triton(CUDA) is None
    assert routes.describe(CUDA).startswith("shipped kernels only: no compiler")
    card(None, "none ship")
    assert routes.probe_triton(CUDA) is None
    assert routes.describe(CUDA).startswith("compiled by Triton; of the kernels that ship, none ship")


def test_neither_way_is_a_reason_with_both(card):
    card("no compiler", "none ship")
    reason = routes.probe_triton(CUDA)
    assert "no compiler" in reason
    assert "none ship" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_machine_without_a_driver(card, monkeypatch):
    """What is really there: this test's machine has no driver, and says so."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "cuda" in shipped.complaint(CUDA)


def test_capability_without_cubins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert shipped.complaint(CUDA) == "none ship for compute capability 12.0"


def test_kernels_of_other_sources_are_not_taken(monkeypatch):
    """In a checkout whose kernels are being worked on, an old cubin would hide the new code."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(shipped.driver, "functions", dict)
    monkeypatch.setattr(shipped, "source_hashes", dict)
    assert "other sources" in shipped.complaint(CUDA)


def test_reason_is_looked_for_once(monkeypatch):
    """It is asked for at every launch, and looks for files."""
    asked = []
    monkeypatch.setattr(routes, "compiler_complaint", lambda: asked.append(1))
    routes.lasting_compiler_complaint.cache_clear()
    try:
        assert [routes.lasting_compiler_complaint() for _ in range(3)] == [None] * 3
        assert len(asked) == 1
    finally:
        routes.lasting_compiler_complaint.cache_clear()


def test_sources_are_all_that_the_kernels_import():
    """A module that the kernels take functions from, and that is not hashed, could change unseen."""
    package = Path(probes.__file__).parent
    for name in manifest.SOURCES:
        lines = (package / name).read_text().splitlines()
        imported = {
            line.split()[1].rpartition(".")[2] + ".py" for line in lines if line.startswith("from dmuon_kernels")
        }
        assert imported <= set(manifest.SOURCES)
