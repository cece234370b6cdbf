"""Run a function on several ranks, each a process of its own, and bring back what each returned.

    got = run_ranks(3, train, layers=1, steps=4)  # got[r] is what train(layers=1, steps=4) returned on rank r

Every call starts fresh processes, so nothing leaks from one case into the next and a rank that hangs can be killed.
They are forked from a server that has imported torch already, which costs about a tenth of what a new interpreter
costs. A rank finds an initialised default process group, one torch thread, and only the loopback interface.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

GROUP_TIMEOUT_S = 60.0
CASE_TIMEOUT_S = 120.0
# How long the others may go on after the first failure: long enough to report an error of their own, short against
# the group's timeout, in which they would sit in a collective that the failed rank will never join.
GRACE_S = 5.0
PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",  # the constructor of every optimizer imports it
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]


@dataclass(frozen=True)
class Case:
    """What every rank of one call is told. The function travels by file and name: test files are no package."""

    world_size: int
    module: str
    file: str
    function: str
    arguments: bytes
    backend: str
    group_timeout_s: float
    scratch: str

    @classmethod
    def of(cls, world_size: int, fn: Callable[..., Any], arguments: Any, **options: Any) -> Case:
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is local: move it to the top level of its file")
        return cls(
            world_size=world_size,
            module=fn.__module__,
            file=fn.__code__.co_filename,
            function=fn.__qualname__,
            arguments=pickle.dumps(arguments),
            **options,
        )


@dataclass
class Rank:
    """One process and what is known of it. ``problem`` is empty for a rank that returned."""

    index: int
    process: Any
    inbox: Connection
    result: Any = None
    problem: str = ""
    done: bool = field(default=False)


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = CASE_TIMEOUT_S,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    env: Sequence[Mapping[str, str]] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return their results in the order of the ranks.

    Args:
        fn: a function at the top level of its file; it, its arguments and its result are pickled.
        backend: "gloo" on the CPU, or "nccl" with one GPU per rank.
        timeout_s: after this many seconds every rank is killed and its stack is reported.
        group_timeout_s: the timeout of the process group.
        env: one mapping per rank of environment variables that its interpreter starts with (PYTHONHASHSEED is read
            only then). Such ranks are new interpreters and cost seconds.

    Raises:
        AssertionError: some rank raised, died or did not end; the message has one section per such rank.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        case = Case.of(
            world_size, fn, (args, kwargs), backend=backend, group_timeout_s=group_timeout_s, scratch=scratch
        )
        ranks = [_start(case, index, env[index] if env else None) for index in range(world_size)]
        try:
            _collect(ranks, timeout_s)
            _say_where_they_are(ranks, Path(scratch))
        finally:
            _stop(ranks)
    _raise_problems(ranks)
    return [rank.result for rank in ranks]


def _start(case: Case, index: int, env: Mapping[str, str] | None) -> Rank:
    inbox, outbox = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver" if env is None else "spawn")
    if env is None:
        context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_work, args=(case, index, outbox), name=f"rank {index}")
    with _environment(env or {}):
        process.start()
    outbox.close()  # the rank holds the only other end, so its death reads as an end of file
    return Rank(index, process, inbox)


class _environment:
    """Variables set while a process starts; the process inherits them."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.values}
        os.environ.update(self.values)

    def __exit__(self, *exc_info: object) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- in the parent


def _collect(ranks: list[Rank], timeout_s: float) -> None:
    """Read reports until every rank is done, or the time is up, or the grace after a first failure is over."""
    deadline = time.monotonic() + timeout_s
    while open_ranks := {rank.inbox: rank for rank in ranks if not rank.done}:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for inbox in ready:
            rank = open_ranks[inbox]  # type: ignore[index]
            _read_report(rank)
            if rank.problem:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _read_report(rank: Rank) -> None:
    rank.done = True
    try:
        ok, payload = rank.inbox.recv()
    except EOFError:
        rank.process.join(GRACE_S)
        rank.problem = f"died without a report, exit code {rank.process.exitcode}"
        return
    if ok:
        rank.result = pickle.loads(payload)
    else:
        rank.problem = f"raised\n{payload}"


def _say_where_they_are(ranks: list[Rank], scratch: Path) -> None:
    """Give the ranks up that are still running, and add to theirs and to a crashed rank's problem its stack."""
    stuck = [rank for rank in ranks if not rank.done]
    for rank in stuck:
        rank.problem = "did not end and was killed"
        os.kill(rank.process.pid, signal.SIGUSR1)
    if stuck:
        time.sleep(0.5)  # the handler writes within milliseconds, also while the rank waits in a collective
    for rank in ranks:
        file = _stack_file(scratch, rank.index)
        if rank.problem and file.exists() and file.stat().st_size:
            rank.problem += f"; it was at\n{file.read_text()}"


def _stop(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.inbox.close()
    for rank in ranks:
        if not rank.problem:
            rank.process.join(GRACE_S)
        rank.process.kill()
        rank.process.join()
        rank.process.close()


def _raise_problems(ranks: list[Rank]) -> None:
    failed = [rank for rank in ranks if rank.problem]
    if failed:
        sections = [f"--- rank {rank.index} of {len(ranks)} {rank.problem.rstrip()}" for rank in failed]
        raise AssertionError("\n".join(sections))


# --- in the rank


def _work(case: Case, index: int, outbox: Connection) -> None:
    import torch

    # Of a crash in a thread that is not Python's, faulthandler knows nothing: torch writes all native stacks to stderr.
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # type: ignore[attr-defined]
    with _stack_file(Path(case.scratch), index).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        faulthandler.enable(file=stack)
        try:
            report = (True, pickle.dumps(_call(case, index)))
        except BaseException:
            report = (False, traceback.format_exc())
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable()
    outbox.send(report)
    if report[0]:
        _wait_for_all(outbox)  # a rank that failed closes its connections at once, which ends what waits for it


def _call(case: Case, index: int) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    module = _load(case.module, case.file)
    args, kwargs = pickle.loads(case.arguments)
    if case.backend == "nccl":
        torch.cuda.set_device(index)
    dist.init_process_group(
        case.backend,
        init_method=f"file://{case.scratch}/rendezvous",
        rank=index,
        world_size=case.world_size,
        timeout=timedelta(seconds=case.group_timeout_s),
    )
    return getattr(module, case.function)(*args, **kwargs)


def _wait_for_all(outbox: Connection) -> None:
    """Stay until the parent has every report: a rank that closes its connections early fails one that still works."""
    import torch.distributed as dist

    with contextlib.suppress(EOFError, OSError):
        outbox.recv()
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(name: str, file: str) -> ModuleType:
    """Import a test file under the name it has in the parent, so that what it defines can be pickled both ways."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _stack_file(scratch: Path, index: int) -> Path:
    return scratch / f"stack.{index}"
