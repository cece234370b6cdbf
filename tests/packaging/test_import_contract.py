"""Importing our packages has no side effect: large stacks import everything long before they use it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from workshop import IMPORTS

ALL = tuple(name for names in IMPORTS.values() for name in names)

# What a process has that an import could touch, as comparable values. torch is imported before the first look, and so
# are its FSDP2, DTensor and optimizers, which dmuon is about: what those do on import is torch's.
STATE = """
import atexit, hashlib, json, logging, os, signal, sys, threading, warnings
import torch
import torch.distributed as dist
if "dmuon" in NAMES:
    import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.tensor, torch.optim

events = []
sys.addaudithook(lambda name, args: events.append(name) if name in
    ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn") else None)

def state():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "reduced": [cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction],
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cuda started": torch.cuda.is_initialized(),
        "process group": dist.is_initialized(),
        "atexit": atexit._ncallbacks(),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.displayhook)],
        "root handlers": len(logging.getLogger().handlers),
        "warning filters": len(warnings.filters),
        "environment": hashlib.sha256(repr(sorted(os.environ.items())).encode()).hexdigest(),
        "threads": threading.active_count(),
        "events": len(events),
    }

before = state()
"""

# Python 3.12 and newer warn of a fork in a process with threads, which numpy's import starts.
FORKING = ("-W", "ignore:This process:DeprecationWarning")


def run_python(code: str, names: tuple[str, ...] = ALL) -> str:
    """Run ``code`` in a process of its own; return stdout, which nobody else may have written to."""
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", *FORKING, "-c", f"NAMES = {names!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_nothing_changes() -> None:
    """A flag changed or CUDA started by an import, before the launcher has set devices, is found days later."""
    code = """
after = {}
for name in NAMES:
    __import__(name)
    after[name] = state()
print(json.dumps([before, after]))
"""
    before, after = json.loads(run_python(STATE + code))
    for name in ALL:
        assert after[name] == before, name
        assert not after[name]["cuda started"]
        assert not after[name]["process group"]


def test_twice() -> None:
    """A second import and a reload, as notebooks and plugin loaders do it, work and change nothing either."""
    again = """
import importlib
for name in NAMES * 2:
    importlib.reload(importlib.import_module(name))
assert state() == before, (before, state())
"""
    run_python(STATE + again)


def test_in_a_forked_worker() -> None:
    """Data loaders fork: the import must work in the child, whether or not the parent did it first."""
    fork = """
import os, sys
import torch
def child():
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for name in NAMES:
                __import__(name)
            import dmuon_core
            dmuon_core.get_backend_status()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
child()
for name in NAMES:
    __import__(name)
child()
"""
    run_python(fork)


def test_import_is_quick() -> None:
    """`import dmuon_core` costs little over torch itself; the bound is several times what it takes."""
    code = """
import os, time
import torch
for _ in range(3):
    if os.fork() == 0:
        start = time.perf_counter()
        import dmuon_core
        print(time.perf_counter() - start, flush=True)
        os._exit(0)
    os.wait()
"""
    assert statistics.median(map(float, run_python(code).split())) < 0.2


def test_compilers_stay_unloaded() -> None:
    """dmuon_kernels alone must not cost a compiler's import, nor fail where one is broken."""
    code = """
import sys
import torch
if "dmuon" in NAMES:
    import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.tensor, torch.optim
before = set(sys.modules)
for name in NAMES:
    __import__(name)
import dmuon_core
dmuon_core.get_backend_status()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded & {"triton", "quack", "cutlass", "cuda", "numpy"}))
"""
    assert run_python(code).split() == []
