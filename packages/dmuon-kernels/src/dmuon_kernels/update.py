"""The passes of an update over memory, each one kernel for many matrices. Importing this module imports triton.

Legend: B matrices, M rows, N columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from dmuon_core.syrk.contract import UpdateFns
from dmuon_kernels.normalize import PARTS, PROGRAMS, tile_of
from dmuon_kernels.update_kernel import apply_kernel, direction_kernel, momentum_kernel

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_NOTHING = 0  # an address that no kernel reads


def triton_direct(
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    presence: Sequence[Tensor | None],
) -> None:
    """Momentum in place, and the direction normalized into ``outs`` (:class:`dmuon_core.syrk.contract.DirectFn`)."""
    for call, table in _with_tables(_grouped(grads, buffers, outs, presence)):
        grad_BMN, buffer_BMN, out_BMN, present = call.first
        assert out_BMN is not None, "every direction goes somewhere"
        by_columns = out_BMN.stride(2) != 1
        if by_columns:
            grad_BMN, buffer_BMN, out_BMN = grad_BMN.mT, buffer_BMN.mT, out_BMN.mT
        rows, columns = grad_BMN.shape[1:]
        tile_rows, tile_columns = tile_of(columns)
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        # Of the shape alone: how the sum is cut decides its bits.
        parts = min(tiles, PARTS)
        programs = min(tiles, max(1, PROGRAMS // call.items))
        with _on(grad_BMN.device):
            sums = torch.empty(call.items, parts, dtype=torch.float32, device=grad_BMN.device)
            exponents = torch.empty(call.items, parts, dtype=torch.int32, device=grad_BMN.device)
            strides = (*grad_BMN.stride()[1:], *buffer_BMN.stride()[1:])
            types = {"GRAD": _TYPES[grad_BMN.dtype], "BUFFER": _TYPES[buffer_BMN.dtype]}
            options = {"NESTEROV": nesterov, "ALIGNED": call.aligned, "ROWS": tile_rows, "COLUMNS": tile_columns}
            momentum_kernel[(call.items * parts,)](
                table, sums, exponents, rows, columns, parts, *strides, momentum, 1 - momentum,
                PRESENCE=None if present is None else _TYPES[present.dtype], **types, **options, num_warps=4,
            )  # fmt: skip
            direction_kernel[(call.items * programs,)](
                table, sums, exponents, rows, columns, *out_BMN.shape[1:], parts, programs, *strides,
                out_BMN.stride(1), momentum,
                OUT=_TYPES[out_BMN.dtype], PARTS=PARTS, **types, **options, num_warps=4,
            )  # fmt: skip


def triton_apply(
    weights: Sequence[Tensor],
    factors: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    *,
    lr: float | Tensor,
    weight_decay: float,
    scales: Sequence[float],
    presence: Sequence[Tensor | None],
) -> None:
    """The step, and the new weights in ``copies`` (:class:`dmuon_core.syrk.contract.ApplyFn`)."""
    reads_lr = isinstance(lr, Tensor) and lr.device.type != "cpu"
    rate = 0.0 if reads_lr else float(lr)
    for call, table in _with_tables(_grouped(weights, factors, copies, presence, scales)):
        weight_BMN, factor_BMN, copy_BMN, present = call.first
        if weight_BMN.stride(2) != 1:
            weight_BMN, factor_BMN = weight_BMN.mT, factor_BMN.mT
            copy_BMN = None if copy_BMN is None else copy_BMN.mT
        rows, columns = weight_BMN.shape[1:]
        tile_rows, tile_columns = tile_of(columns)
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        programs = min(tiles, max(1, PROGRAMS // call.items))
        with _on(weight_BMN.device):
            apply_kernel[(call.items * programs,)](
                table, lr.reshape(1).float() if isinstance(lr, Tensor) and reads_lr else table,
                rows, columns, programs, *weight_BMN.stride()[1:], *factor_BMN.stride()[1:],
                *((0, 0) if copy_BMN is None else copy_BMN.stride()[1:]),
                rate, weight_decay, call.scale,
                WEIGHT=_TYPES[weight_BMN.dtype], FACTOR=_TYPES[factor_BMN.dtype],
                COPY=None if copy_BMN is None else _TYPES[copy_BMN.dtype],
                PRESENCE=None if present is None else _TYPES[present.dtype],
                READS_LR=reads_lr, ALIGNED=call.aligned, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=4,
            )  # fmt: skip


TRITON_UPDATE = UpdateFns(triton_direct, triton_apply)


@dataclass
class _Call:
    """Matrices that one launch takes: of one shape, layout and dtypes.

    Attributes:
        first: the first stack's tensors, which say all that is not an address.
        addresses: of every matrix the four of a table's row.
    """

    first: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    scale: float
    addresses: list[int]

    @property
    def items(self) -> int:
        return len(self.addresses) // 4

    @property
    def aligned(self) -> bool:
        return all(found % 16 == 0 for at in (0, 1, 3) for found in self.addresses[at::4])


def _grouped(
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    lasts: Sequence[Tensor | None],
    presence: Sequence[Tensor | None],
    scales: Sequence[float] | None = None,
) -> list[_Call]:
    """The matrices of all stacks, by what a launch cannot mix."""
    calls: dict[object, _Call] = {}
    for i, (first, second, last, present) in enumerate(zip(firsts, seconds, lasts, presence, strict=True)):
        count = first.shape[0]
        if not first.numel():
            continue
        scale = 1.0 if scales is None else scales[i]
        key = scale, _look(first), _look(second), _look(last), None if present is None else present.dtype
        call = calls.get(key)
        if call is None:
            call = calls[key] = _Call((first, second, last, present), scale, [])
        at = _NOTHING if present is None else present.data_ptr()
        parts = _addresses(first, count), _addresses(second, count), _addresses(last, count)
        for a, b, c in zip(*parts, strict=True):
            call.addresses += (a, b, at, c)
    return list(calls.values())


def _look(x_BMN: Tensor | None) -> object:
    return None if x_BMN is None else (x_BMN.shape[1:], x_BMN.stride()[1:], x_BMN.dtype)


def _addresses(x_BMN: Tensor | None, count: int) -> Sequence[int]:
    """Of every matrix of a stack."""
    if x_BMN is None:
        return [_NOTHING] * count
    first, step = x_BMN.data_ptr(), x_BMN.stride(0) * x_BMN.element_size()
    return [first + i * step for i in range(count)]


def _with_tables(calls: Sequence[_Call]) -> Iterator[tuple[_Call, Tensor]]:
    """Every call and its table, int64 [items, 4]: all on their way in one copy, for which the host does not wait."""
    if not calls:
        return
    device = calls[0].first[0].device
    addresses = [found for call in calls for found in call.addresses]
    # torch keeps pinned memory until the copy is done.
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    table = table.to(device, non_blocking=True)
    yield from zip(calls, table.split([len(call.addresses) for call in calls]), strict=True)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
