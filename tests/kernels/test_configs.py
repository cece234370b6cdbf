"""Configurations as values: their labels, and which one a shape gets."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
import torch

from dmuon_core.syrk.tuning import TIE
from dmuon_core.syrk.verdicts import BMM
from dmuon_kernels import probes, specs
from dmuon_kernels.probes import has_aligned_rows, quack_rejects, tma_complaint
from dmuon_kernels.quack_config import (
    SM90_CANDIDATES,
    QuackConfig,
    choose_quack_config,
    parse_product_config,
    parse_quack_config,
    quack_candidates,
)
from dmuon_kernels.triton_config import (
    CONFIGS,
    TmaConfig,
    choose_tma_config,
    count_tiles,
    parse_config,
    tma_candidates,
)

SHAPES = [(m, k, batch) for m in (64, 256, 512, 1024, 2048, 4096, 8192) for k in (m, 4 * m) for batch in (1, 2, 8, 16)]
TMA = {config for m, _, batch in SHAPES for config in tma_candidates(m, batch)}


@pytest.mark.parametrize("config", [*CONFIGS.values(), *sorted(TMA, key=lambda c: c.label)], ids=lambda c: c.label)
def test_a_label_names_one_configuration(config):
    """Verdict files keep labels only, so one that lost a field would run another kernel than was measured."""
    assert parse_config(config.label) == config


@pytest.mark.parametrize("config", SM90_CANDIDATES, ids=lambda config: config.label)
def test_a_label_names_one_quack_configuration(config):
    assert parse_quack_config(config.label) == config


@pytest.mark.parametrize("label", ["", "tma-128x128x64-w4-s3-u64-g8", "pointer-64x64-w4-s4-p", "quack-64x64-c1x1"])
def test_other_labels_raise(label):
    with pytest.raises(ValueError, match="names no Triton configuration"):
        parse_config(label)
    with pytest.raises(ValueError, match="names no quack configuration"):
        parse_quack_config(label[:-1])


def test_tiles_of_quack_must_be_square():
    """quack takes others too, and leaves parts of the result unwritten."""
    with pytest.raises(ValueError, match="forms 128x256"):
        QuackConfig(128, 256)
    with pytest.raises(ValueError, match="must form squares"):
        parse_quack_config("quack-128x256-c1x2")


@pytest.mark.parametrize(("m", "k", "batch"), SHAPES)
def test_what_a_shape_gets_by_default_is_among_what_is_timed(m, k, batch):
    assert choose_tma_config(m, k, batch) in tma_candidates(m, batch)
    for k_major in (True, False):
        chosen = choose_quack_config((9, 0), m, k, batch, k_major=k_major)
        assert chosen in quack_candidates((9, 0), k_major=k_major)


def test_quack_never_gets_m_major_operands_in_tiles_of_192():
    """CUTLASS's compiler aborts on them, which no try can catch."""
    assert QuackConfig(192, 192) in quack_candidates((9, 0), k_major=True)
    assert QuackConfig(192, 192) not in quack_candidates((9, 0), k_major=False)


def test_other_architectures_get_what_quack_takes_there():
    assert choose_quack_config((10, 0), 4096, 4096, 1, k_major=True) == QuackConfig(256, 256, 2, 2)
    assert choose_quack_config((12, 0), 4096, 4096, 1, k_major=True) == QuackConfig(128, 128, pingpong=True)
    assert quack_candidates((10, 0), k_major=True) == ()


def test_tiny_products_have_no_descriptors():
    assert choose_tma_config(32, 64, 1) is None
    assert tma_candidates(32, 1) == ()


@pytest.mark.parametrize(("tile", "tiles"), [((128, 128), 36), ((64, 128), 72), ((64, 64), 136), ((128, 256), 20)])
def test_tiles_are_counted_in_squares(tile, tiles):
    assert count_tiles(TmaConfig(*tile, 64, 4, 3), 1000, 1) == tiles
    assert count_tiles(TmaConfig(*tile, 64, 4, 3), 1000, 3) == 3 * tiles


def test_whole_tiles_fill_the_multiprocessors():
    config = TmaConfig(128, 128, 64, 4, 3, split=4)
    assert config.whole_tiles(136, 132) == 0
    tail = TmaConfig(128, 128, 64, 4, 3, split=4, tail=True)
    assert [tail.whole_tiles(n, 132) for n in (131, 132, 136, 270)] == [0, 132, 132, 264]
    assert TmaConfig(128, 128, 64, 4, 3).whole_tiles(136, 132) == 136


HALF = torch.float16


def test_descriptors_need_rows_at_multiples_of_16_bytes():
    x = torch.zeros(3, 64, 64, dtype=HALF)
    assert tma_complaint(x, x.mT, x, x) is None
    assert "takes out" in tma_complaint(x, None, None, x.mT)
    assert "takes c" in tma_complaint(x, None, x.mT, x)
    assert "takes a" in tma_complaint(torch.zeros(3, 64, 68, dtype=HALF)[..., :64], None, None)
    assert "takes a" in tma_complaint(torch.zeros(3, 64, 72, dtype=HALF)[..., 1:65], None, None)
    assert "K of 0" in tma_complaint(x[..., :0], None, None)
    assert tma_complaint(x[:1].expand(3, 64, 64), None, None) is None
    assert tma_complaint(torch.zeros(1, 64, 64, dtype=HALF).as_strided((1, 64, 64), (7, 64, 1)), None, None) is None


def test_quack_takes_aligned_rows():
    x = torch.zeros(2, 64, 64, dtype=HALF)
    assert quack_rejects(x, x.mT, x) is None
    assert has_aligned_rows(x[:1].expand(2, 64, 64))
    assert "takes c" in quack_rejects(x, None, x.mT)
    assert "takes b" in quack_rejects(x, x[:, ::2, ::2], None)
    assert "K of 0" in quack_rejects(x[..., :0], None, None)
    assert "M in multiples of 8, got 63" in quack_rejects(x[:, :63], None, None)
    assert "float32" in quack_rejects(x.float(), None, None)


def test_specs_name_what_can_be_timed(monkeypatch):
    x = torch.zeros(1, 1024, 1024, dtype=HALF)
    assert specs.TRITON.configs(x, None, None) == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(specs, "has_tma", lambda device: True)
    labels = specs.TRITON.configs(x, None, x)
    assert [parse_config(label) for label in labels] == list(tma_candidates(1024, 1))
    assert specs.TRITON.configs(x[:, :1020], None, None) == ()
    assert specs.TRITON.configs(x[..., 1:], None, None) == ()
    assert [parse_quack_config(label) for label in specs.QUACK.configs(x, None, None)] == list(SM90_CANDIDATES)


def test_descriptors_are_for_sm90_only(monkeypatch):
    probes.has_tma.cache_clear()
    capability = {0: (9, 0), 1: (8, 0), 2: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    assert [probes.has_tma(torch.device("cuda", i)) for i in capability] == [True, False, False]
    assert not probes.has_tma(torch.device("cpu"))
    probes.has_tma.cache_clear()


def test_shipped_verdicts_name_configurations_that_exist():
    """A label that its backend does not know is passed over in silence, and the measurement with it."""
    text = resources.files("dmuon_core.syrk").joinpath("shipped_verdicts.json").read_text(encoding="utf-8")
    parse = {"triton": parse_config, "quack": parse_quack_config, "product": parse_product_config}
    key_form = re.compile(r"(float16|bfloat16) [km] ([km·] [c·]|[km] product) \d+x\d+x\d+(x\d+)?( ~)?")
    for page in json.loads(text)["hardware"].values():
        assert page
        for key, rows in page.items():
            assert key_form.fullmatch(key), key
            ranked = [us * (1.0 if kernel == BMM else TIE) for kernel, _, us in rows]
            assert ranked == sorted(ranked)
            for kernel, label, _ in rows:
                if label is not None:
                    assert parse["product" if "product" in key else kernel](label).label == label
                else:
                    assert "product" not in key or kernel == BMM
