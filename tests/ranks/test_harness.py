"""The harness itself: every other distributed test trusts it to end, and to say what happened."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist


def rank_and_sum(base: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(base + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such layer")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def first_of_a_set() -> tuple[str, list[str]]:
    return os.environ["PYTHONHASHSEED"], list({"q", "k", "v", "o", "up", "down"})


def threads_and_backend() -> tuple[int, str]:
    return torch.get_num_threads(), dist.get_backend()


def test_results_come_back_in_the_order_of_the_ranks(ranks):
    """Results once came in the order in which ranks finished."""
    got = ranks(3, rank_and_sum, 1)
    assert [rank for rank, _ in got] == [0, 1, 2]
    assert all(total.item() == 6.0 for _, total in got)


def test_world_of_one(ranks):
    assert ranks(1, threads_and_backend) == [(1, "gloo")]


def test_a_rank_that_raises_is_named_with_its_traceback(ranks):
    """The other ranks sit in a barrier then; waiting out the group's timeout would cost a minute per failure."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 3 raised") as failure:
        ranks(3, raise_on, 1)
    assert "no such layer" in str(failure.value)
    assert "in raise_on" in str(failure.value)
    assert time.monotonic() - start < 20


def test_a_rank_that_hangs_is_killed_and_its_stack_shown(ranks):
    with pytest.raises(AssertionError, match="rank 0 of 2 did not end") as failure:
        ranks(2, hang_on, 0, timeout_s=4)
    assert "in hang_on" in str(failure.value)
    assert "rank 1" not in str(failure.value)


def test_a_rank_that_dies_is_named_with_its_exit_code(ranks):
    with pytest.raises(AssertionError, match="rank 1 of 2 died without a report, exit code 7"):
        ranks(2, die_on, 1)


def test_environment_of_the_interpreter_is_per_rank(ranks):
    """A hash seed set after the start of an interpreter has no effect, so such ranks are spawned, not forked."""
    seeds = [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}]
    (seed_0, order_0), (seed_1, order_1) = ranks(2, first_of_a_set, env=seeds)
    assert (seed_0, seed_1) == ("1", "2")
    assert order_0 != order_1
    assert "PYTHONHASHSEED" not in os.environ or os.environ["PYTHONHASHSEED"] not in {"1", "2"}


def test_a_local_function_is_refused_before_any_process_starts(ranks):
    with pytest.raises(ValueError, match="top level"):
        ranks(2, lambda: None)


def crash():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_leaves_native_stacks(ranks, capfd):
    """Of one in a thread of gloo there was nothing but its number."""
    with pytest.raises(AssertionError, match="rank 1 of 2 died without a report"):
        ranks(2, crash, env=[{}, {}])  # forked ones write where the server of forks does
    assert "c10d::ProcessGroupGloo::runLoop" in capfd.readouterr().err
