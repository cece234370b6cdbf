"""Masters: a wider copy of a parameter that the optimizer steps in its place, in its state under ``"master"``.

The live weight is the truth. What was written to it outside of a step goes into its master before the next one; where
it still is the master, rounded, the master keeps the digits that the weight has not.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_fsdp.compat import copy_all
from dmuon_fsdp.runtime.layout import local_of
from dmuon_fsdp.runtime.parameter import DedicatedParam

KEY = "master"


def master_dtypes(members: Sequence[DedicatedParam]) -> dict[nn.Parameter, torch.dtype]:
    """Of the parameters that have a master: one asked for, in another dtype than their own."""
    wanted = {member.param: member.spec.treatment.master_dtype for member in members}
    return {parameter: dtype for parameter, dtype in wanted.items() if dtype not in (None, parameter.dtype)}  # type: ignore[misc]


class Masters:
    """This rank's parts of the masters, brought up to date before a step and written back after it."""

    def __init__(self) -> None:
        self._written: dict[DedicatedParam, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}

    def of(
        self, members: Sequence[DedicatedParam], state: MutableMapping[Tensor, Mapping[str, Any]]
    ) -> dict[DedicatedParam, Tensor]:
        """The masters of those of ``members`` that have one, up to date."""
        masters = {member: local_of(state[member.param][KEY]) for member in members if KEY in state[member.param]}
        for member, master in masters.items():
            if self._changed(member):
                weight = member.owned.local
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))
        return masters

    def write_back(self, masters: Mapping[DedicatedParam, Tensor]) -> None:
        """The parameters become their masters, rounded."""
        copy_all([member.owned.local for member in masters], list(masters.values()))
        for member in masters:
            self._written[member] = weakref.ref(member.owned.local), member.owned.stamp

    def _changed(self, member: DedicatedParam) -> bool:
        known = self._written.get(member)
        return known is None or known[0]() is not member.owned.local or known[1] != member.owned.stamp

    def forget(self) -> None:
        """State was loaded: compare again before the next step."""
        self._written.clear()
