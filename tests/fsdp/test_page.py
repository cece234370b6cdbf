"""The scripts of the ordered page, taken out of it at run time and run as they stand.

The page is not part of this repository: ``DMUON_PAGE`` names its file, else the folder beside the clone is looked at.
Where there is no GPU, ``cuda`` and ``nccl`` become ``cpu`` and ``gloo``.
"""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmuon_core import Muon

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(os.environ.get("DMUON_PAGE", ROOT.parent / "shared" / "seed" / "quickstart.zh.txt"))
LINE = re.compile(r"^step +(\d+)  loss=(-?\d+\.\d{4})$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason=f"the page is not there ({PAGE.name}); DMUON_PAGE names it")


def script(name: str) -> str:
    """The code block under the heading ``name``: from its first import to the last line that is Python."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("import torch\n", text.index(f"\n{name}"))
    lines = []
    for line in text[start:].splitlines():
        if re.match(r"[^\x00-\x7f]", line):
            break
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def on_this_device(code: str) -> str:
    if torch.cuda.is_available():
        return code
    code = re.sub(r"^ *(local_rank = .*|torch\.cuda\.set_device\(.*\))\n", "", code, flags=re.MULTILINE)
    return code.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"').replace(".cuda()", "")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(script("model.py"), encoding="utf-8")
    for name in ("train_fsdp2.py", "train_hsdp.py"):
        (tmp_path / name).write_text(on_this_device(script(name)), encoding="utf-8")
    return tmp_path


def losses_of(folder: Path, name: str, ranks: int) -> dict[int, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--local_addr=127.0.0.1"]
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launch, *rendezvous, name], cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in LINE.findall(done.stdout)}


@pytest.fixture(scope="module")
def want(tmp_path_factory) -> dict[int, float]:
    """The same training in one process: every rank of the page draws the same batch, so the mean changes nothing."""
    file = tmp_path_factory.mktemp("page") / "model.py"
    file.write_text(script("model.py"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("page_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(42)
    model = module.TinyMLP().to(device)
    matrices = [p for n, p in model.named_parameters() if "proj" in n]
    rest = [p for n, p in model.named_parameters() if "proj" not in n]
    optimizer = Muon(
        [
            {"params": matrices, "lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
            {"params": rest, "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        ]
    )
    losses = {}
    for step in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 512, device=device))
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


@pytest.mark.parametrize("ranks", [1, 2] if torch.cuda.is_available() else [2])
def test_train_fsdp2_as_it_stands(folder, want, ranks):
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check(losses_of(folder, "train_fsdp2.py", ranks), want)


def check(got: dict[int, float], want: dict[int, float]) -> None:
    assert sorted(got) == [0, 5, 10, 15]
    for step, loss in got.items():
        # The summed output crosses zero; its size over the run is what a deviation counts against.
        assert loss == pytest.approx(want[step], abs=5e-3 * max(map(abs, want.values()))), (step, got, want)


@pytest.mark.parametrize("ranks", [2] if torch.cuda.is_available() else [2, 4])
def test_train_hsdp_as_it_stands(folder, want, ranks):
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check(losses_of(folder, "train_hsdp.py", ranks), want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two nodes are two launchers on one machine, without GPUs")
def test_train_hsdp_on_two_nodes(folder, want):
    """Two launchers that meet through c10d, as on two machines; each starts two ranks, one replica."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--rdzv_id=page"]
    meeting = ["--local_addr=127.0.0.1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [*launch, *meeting, "train_hsdp.py"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        done = [node.communicate(timeout=180) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], done[0][1][-2000:] + done[1][1][-2000:]
    printed = [LINE.findall(out) for out, _ in done]
    assert sorted(map(len, printed)) == [0, 4], "rank 0 alone prints"
    check({int(step): float(loss) for lines in printed for step, loss in lines}, want)
