"""The backends of this package, as values: what the entry points name. Importing this imports no kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import NormalizeFn, ProductFn, ProductSpec, SyrkFn, SyrkSpec, UpdateFns
from dmuon_kernels import routes
from dmuon_kernels.probes import (
    SM90,
    has_tma,
    is_k_major,
    not_carried,
    probe_cute_sm80,
    probe_quack,
    quack_multiplies,
    quack_rejects,
    tma_complaint,
)
from dmuon_kernels.quack_config import PRODUCT_CANDIDATES, quack_candidates
from dmuon_kernels.triton_config import tma_candidates

CONTRACT = 1
"""The kernel contract these backends are written for. Not core's number: a newer core must see the difference."""


def _load_quack() -> SyrkFn:
    from dmuon_kernels.quack_syrk import quack_syrk

    return quack_syrk


def _load_loose_quack() -> SyrkFn:
    from dmuon_kernels.quack_syrk import quack_syrk

    return functools.partial(quack_syrk, exact=False)


def _load_quack_product() -> ProductFn:
    from dmuon_kernels.quack_product import quack_product

    return quack_product


def _load_cute_sm80() -> SyrkFn:
    raise NotImplementedError(not_carried("cute_sm80"))


def _load_triton() -> SyrkFn:
    from dmuon_kernels.triton_syrk import triton_syrk

    return triton_syrk


def _load_normalize() -> NormalizeFn:
    if routes.lasting_compiler_complaint() is not None:
        # It does not ship compiled.
        return normalize_into
    from dmuon_kernels.normalize import triton_normalize_into

    return triton_normalize_into


def _load_update() -> UpdateFns | None:
    if routes.lasting_compiler_complaint() is not None:
        # It does not ship compiled.
        return None
    from dmuon_kernels.update import TRITON_UPDATE

    return TRITON_UPDATE


def quack_configs(a: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[str, ...]:
    """The labels of quack's configurations that are worth timing for these operands."""
    capability = torch.cuda.get_device_capability(a.device)
    return tuple(config.label for config in quack_candidates(capability, k_major=is_k_major(a, b)))


def quack_product_configs(a: Tensor, b: Tensor, out: Tensor) -> tuple[str, ...]:
    """The labels of quack's configurations for A B that are worth timing; none where it does not take the operands."""
    if torch.cuda.get_device_capability(a.device) != SM90 or not quack_multiplies(a, b, out):
        return ()
    return tuple(config.label for config in PRODUCT_CANDIDATES)


def triton_configs(a: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[str, ...]:
    """The labels of the Triton configurations worth timing for these operands, with a row-major result."""
    if not has_tma(a.device) or a.numel() == 0:
        return ()
    batch, m = a.shape[:-2].numel(), a.shape[-2]
    complaint = tma_complaint(_as_batch(a), None if b is None else _as_batch(b), None if c is None else _as_batch(c))
    return () if complaint or m % 8 else tuple(config.label for config in tma_candidates(m, batch))


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]."""
    return x.reshape(-1, *x.shape[-2:])


QUACK = SyrkSpec(
    "quack",
    CONTRACT,
    "Tri Dao quack",
    90,
    probe_quack,
    _load_quack,
    quack_rejects,
    quack_configs,
    normalize=_load_normalize,
    update=_load_update,
    load_loose=_load_loose_quack,
    product=ProductSpec(_load_quack_product, quack_product_configs),
)
CUTE_SM80 = SyrkSpec("cute_sm80", CONTRACT, "DMuon internal", 80, probe_cute_sm80, _load_cute_sm80)
TRITON = SyrkSpec(
    "triton",
    CONTRACT,
    "DMuon internal",
    70,
    routes.probe_triton,
    _load_triton,
    routes.rejects,
    triton_configs,
    normalize=_load_normalize,
    update=_load_update,
    notes=routes.describe,
)
