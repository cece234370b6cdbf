"""The backends of this package, as values: what the entry points name. Importing this imports no kernel."""

from __future__ import annotations

from dmuon_core.syrk.contract import SyrkFn, SyrkSpec
from dmuon_kernels.probes import not_carried, probe_cute_sm80, probe_quack, probe_triton, triton_rejects

CONTRACT = 1
"""The kernel contract these backends are written for. Not core's number: a newer core must see the difference."""


def _load_quack() -> SyrkFn:
    raise NotImplementedError(not_carried("quack"))


def _load_cute_sm80() -> SyrkFn:
    raise NotImplementedError(not_carried("cute_sm80"))


def _load_triton() -> SyrkFn:
    from dmuon_kernels.triton_syrk import triton_syrk

    return triton_syrk


QUACK = SyrkSpec("quack", CONTRACT, "Tri Dao quack", 90, probe_quack, _load_quack)
CUTE_SM80 = SyrkSpec("cute_sm80", CONTRACT, "DMuon internal", 80, probe_cute_sm80, _load_cute_sm80)
TRITON = SyrkSpec("triton", CONTRACT, "DMuon internal", 70, probe_triton, _load_triton, triton_rejects)
