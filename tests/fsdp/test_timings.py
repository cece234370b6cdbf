"""Timings of a step: off by default, and what they say of a wait."""

from __future__ import annotations

import time

import pytest
import torch

import dmuon
from fsdp.models import Toy, Twins, next_token_loss, wrap


class Late:
    """A collective that takes its time."""

    def __init__(self, work, seconds: float) -> None:
        self.work, self.seconds = work, seconds

    def wait(self) -> None:
        time.sleep(self.seconds)
        self.work.wait()


def timings(seconds: float) -> dict[str, float]:
    from dmuon_fsdp.runtime import group

    original = group.broadcast_from_owners
    group.broadcast_from_owners = lambda *args: tuple(Late(work, seconds) for work in original(*args))
    twins = Twins()
    twins.optimizers()
    with pytest.raises(RuntimeError, match="record_timings"):
        twins.optimizer.last_step_timings()
    twins.optimizer.record_timings()
    for step in range(2):
        twins.zero_grad()
        next_token_loss(twins.model, twins.rank, step).backward()
        twins.optimizer.step()
    got = twins.optimizer.last_step_timings()
    twins.optimizer.record_timings(False)
    with pytest.raises(RuntimeError, match="record_timings"):
        twins.optimizer.last_step_timings()
    return got


def test_a_wait_for_weights_is_exposed(ranks):
    quick, slow = ranks(2, timings, 0.0), ranks(2, timings, 0.02)
    for rank in range(2):
        assert {"wait for gather", "wait for reduce", "muon", "adamw", "publish"} <= set(slow[rank])
        # Two blocks, gathered in forward and in backward, each from at least one owner; the second step only.
        assert 60 <= slow[rank]["wait for gather"] <= 1000
        assert quick[rank]["wait for gather"] < slow[rank]["wait for gather"] / 2
        assert all(value >= 0 for value in slow[rank].values())


def timings_of_nothing_dedicated() -> set[str]:
    with pytest.warns(UserWarning, match="nothing is dedicated"):
        model = wrap(Toy(), predicate=lambda name, parameter: False)
    optimizer = dmuon.Muon(model)
    optimizer.record_timings()
    next_token_loss(model, 0).backward()
    optimizer.step()
    return set(optimizer.last_step_timings())


def test_a_model_without_dedicated_parameters_has_timings_too(ranks):
    """Without groups there was nowhere to record, and reading the timings asked for what had been done."""
    (names,) = ranks(1, timings_of_nothing_dedicated)
    assert "adamw" in names


def ranges_of_a_profile() -> set[str]:
    twins = Twins()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next_token_loss(twins.model, twins.rank).backward()
    return {event.key for event in profile.key_averages() if event.key.startswith("dmuon::")}


def test_a_profile_names_every_group(ranks):
    """Ranges are made only while a profile is recorded: then none may be missing, in backward either."""
    (found,) = ranks(1, ranges_of_a_profile)
    assert found == {f"dmuon::{what} blocks.{index}" for what in ("gather", "reduce") for index in (0, 1)}
