"""The code of docs/checkpoints.md, block by block, on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from fsdp.models import Toy
from fsdp.resuming import Run, assert_same

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def run_the_page(folder):
    os.chdir(folder)
    run = Run()
    run.train(range(2))
    scheduler = LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    names = {
        "model": run.model,
        "optimizer": run.optimizer,
        "scheduler": scheduler,
        "train_some_steps": lambda: run.train([7]),
    }
    saved = run.everything()
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        if "load" in block:
            run.train([5])  # so that there is something to load
        exec(compile(block, str(PAGE), "exec"), names)
        if "load_checkpoint" in block or "set_" in block:
            assert_same(run.everything(), saved)
            assert names["extra"]["step"] == 100
        if "load_pretrained" in block:
            for name, value in torch.load("published.pt").items():
                assert torch.equal(run.weights()[name], value)
    assert Path("run/step-200/.metadata").exists()
    dist.barrier()
    return len(blocks)


def test_the_page(ranks, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    for name in ("run", "published"):
        (tmp_path / name).mkdir()
    torch.manual_seed(3)
    values = Toy().state_dict()
    save_file(values, tmp_path / "published" / "model.safetensors")
    torch.save(values, tmp_path / "published.pt")
    assert ranks(2, run_the_page, str(tmp_path)) == [7, 7]
