"""What is installed, where from, what runs and why not the rest: the text for a bug report."""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import dmuon_core
from dmuon_core.testing import judge

OURS = {"dmuon-core": "dmuon_core", "dmuon-kernels": "dmuon_kernels", "dmuon-fsdp": "dmuon_fsdp"}
OPTIONAL = {
    "triton": "comes with torch on Linux and CUDA",
    "quack-kernels": "extra dmuon-kernels[quack]",
    "nvidia-cutlass-dsl": "extra dmuon-kernels[quack] or dmuon-kernels[cute]",
}


def examine() -> tuple[list[str], bool]:
    """The report, line by line, and whether the self-test passed."""
    tested, passed = _self_test()
    sections = [
        ("versions", _versions()),
        ("devices", _devices()),
        ("Newton-Schulz", _kernels()),
        ("FSDP2", _seam()),
        ("self-test", tested),
    ]
    lines: list[str] = []
    for title, rows in sections:
        lines.append(title)
        lines.extend(f"  {row}" for row in rows)
    return lines, passed


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    for distribution, package in OURS.items():
        yield f"{distribution} {_version(distribution)}{_location(package)}"
    for distribution, remedy in OPTIONAL.items():
        version = _version(distribution)
        yield f"{distribution} {version}" if version != _ABSENT else f"{distribution} {_ABSENT} ({remedy})"


_ABSENT = "not installed"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _location(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return f", imported from {Path(spec.origin).parent}" if spec is not None and spec.origin else ""


def _devices() -> Iterator[str]:
    yield f"CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "no CUDA device that torch sees"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index} {facts.name}, SM{facts.major}{facts.minor}, {facts.multi_processor_count} SMs, "
            f"{facts.total_memory / 2**30:.0f} GiB"
        )


def _kernels() -> Iterator[str]:
    try:
        yield dmuon_core.get_ns_backend()
    except RuntimeError as error:
        yield f"none: {error}"
    for name, status in dmuon_core.get_backend_status().items():
        how = f", {status['notes']}" if status["notes"] else ""
        yield f"{name:<10} {status['reason'] or 'available'}{how}  [{status['distribution']}]"


def _seam() -> Iterator[str]:
    from dmuon_fsdp.compat import seam_complaint

    complaint = seam_complaint()
    if complaint is None:
        yield f"the seam fits torch {torch.__version__}"
    else:
        yield f"the seam does not fit torch {torch.__version__}: {complaint}; the patch-free way is ignored_params"


def _self_test() -> tuple[list[str], bool]:
    rows, passed = [], True
    for name, test in (("Newton-Schulz", _test_newton_schulz), ("ownership, one rank", _test_ownership)):
        begin = time.perf_counter()
        try:
            outcome = test()
        except Exception as error:
            outcome, passed = f"FAILED, {type(error).__name__}: {error}", False
        rows.append(f"{name}: {outcome} ({time.perf_counter() - begin:.1f} s)")
    return rows, passed


def _test_newton_schulz() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(0))
    ns = dmuon_core.NewtonSchulz()
    verdict = judge(x, ns(x.to(device)).cpu(), ns.schedule().triples)
    if verdict.error > 0.02 or verdict.sigma_max > verdict.sigma_bound:
        raise AssertionError(
            f"error {verdict.error:.2g} against float64, largest singular value {verdict.sigma_max:.3f}"
        )
    return f"right, error {verdict.error:.1e} against float64 in half precision"


def _test_ownership() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from dmuon_fsdp.api import dedicate_params
    from dmuon_fsdp.optim.muon import Muon

    if dist.is_initialized():
        return "left out, a process group exists already"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
            dedicate_params(model, mesh, lambda name, p: p.ndim == 2)
            fully_shard(model, mesh=mesh)
            optimizer = Muon(model, lr=0.02)
            losses = [_step(model, optimizer) for _ in range(8)]
        finally:
            dist.destroy_process_group()
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    return f"right, loss {losses[0]:.3f} → {losses[-1]:.3f}"


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.ones(8, 16)
    loss = (model(x) - x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
