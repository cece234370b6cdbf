"""What the fused passes of an update launch, planned once by shapes, strides and dtypes: only addresses change.

Legend: m ≤ n.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.batching import Piece, Stack
from dmuon_core.formulas import lr_scale
from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.syrk.contract import TABLE, Kind, Layout
from dmuon_core.targets import Inputs, matrix_shapes
from dmuon_core.views import MatrixView
from dmuon_core.workspace import Part, arrange

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROW_WISE_VIEWS = ("matrix", "split", "heads")
"""Their matrices are rows of the parameter: parts of its memory whatever its strides."""

_Row = tuple[int, tuple[int, ...]]
"""Of the table: the parameter's position, and what is added to where its tensors begin."""


def takes(inputs: Inputs, i: int) -> bool:
    """Whether the kernels know the dtypes of parameter ``i``, on one device, and find its matrices where they lie."""
    weight, buffer, copy = inputs.weights[i], inputs.buffers[i], inputs.copies[i]
    tensors = [x for x in (weight, inputs.grads[i], buffer, copy, inputs.presence[i]) if x is not None]
    if not weight.numel() or any(x.dtype not in _DTYPES or x.device != weight.device or x.is_neg() for x in tensors):
        return False
    return weight.is_contiguous() and buffer.is_contiguous() and (copy is None or copy.is_contiguous())


@dataclass(frozen=True)
class Call:
    """Of each pass: the rows ``[start:stop]`` of the table, whose factors are in one part of a batch."""

    kind: Kind
    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class FusedBatch:
    """What goes through Newton-Schulz together."""

    parts: tuple[Part, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class FusedPlan:
    """An update of some parameters on one device: all of it that does not change from step to step.

    Attributes:
        indices: the parameters, by their number in the inputs.
        strided: those of them whose gradients must be made contiguous first.
        batches: one after the other.
        parameter: int64 ``[rows]``, of every row of the table the position in ``indices``.
        offsets: int64 ``[rows, len(TABLE)]``, bytes from where that parameter's tensors begin; and the slots.
    """

    indices: tuple[int, ...]
    strided: tuple[int, ...]
    batches: tuple[FusedBatch, ...]
    parameter: Tensor
    offsets: Tensor

    def of(self, column: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What this plan's parameters have in a list of all. Indices ascend: as many as there are is all of them."""
        return column if len(self.indices) == len(column) else [column[i] for i in self.indices]

    def table(self, inputs: Inputs, grads: Sequence[Tensor]) -> Tensor:
        """The rows of all batches, on the CPU."""
        columns = grads, inputs.buffers, inputs.weights, inputs.copies, inputs.presence
        begins = [[0 if x is None else x.data_ptr() for x in self.of(column)] for column in columns]
        begins.append([0] * len(self.indices))  # a slot is no address
        # Kernels count on rows that lie one after the other.
        return (torch.tensor(begins, dtype=torch.int64, device="cpu").T[self.parameter] + self.offsets).contiguous()


def fuse(
    inputs: Inputs, indices: Sequence[int], views: Sequence[MatrixView], adjust_lr_fn: str | None, ns: NewtonSchulz
) -> FusedPlan:
    """The plan for parameters that :func:`takes` is true for; all on one device."""
    blocks = [_blocks_of(inputs, i, views[i], adjust_lr_fn) for i in indices]
    places = [(position, block) for position, those in enumerate(blocks) for block in those]
    device = inputs.weights[indices[0]].device
    batches: list[FusedBatch] = []
    rows: list[_Row] = []
    for pieces in ns.batches([block.stack(device) for _, block in places]):
        batches.append(_batch_of([(*places[piece.stack], piece) for piece in pieces], rows))
    return FusedPlan(
        tuple(indices),
        tuple(i for i in indices if not _lies_as_it_is(inputs.grads[i], views[i])),
        tuple(batches),
        torch.tensor([position for position, _ in rows], dtype=torch.int64, device="cpu"),
        torch.tensor([offsets for _, offsets in rows], dtype=torch.int64, device="cpu").view(-1, len(TABLE)),
    )


def _batch_of(pieces: Sequence[tuple[int, _Block, Piece]], rows: list[_Row]) -> FusedBatch:
    """Of pieces of blocks, each with its parameter's position. Appends to ``rows``, those of one launch in a row."""
    parts, slots = arrange([block.part(piece) for _, block, piece in pieces])
    alike: dict[tuple[Kind, int], list[_Row]] = {}
    for (position, block, piece), slot in zip(pieces, slots, strict=True):
        those = alike.setdefault((block.kind, slot.part), [])
        for k in range(piece.start, piece.stop):
            those.append((position, (*block.offsets(k), slot.start + k - piece.start)))
    calls = []
    for (kind, part), those in alike.items():
        calls.append(Call(kind, part, len(rows), len(rows) + len(those)))
        rows += those
    return FusedBatch(parts, tuple(calls))


def _lies_as_it_is(grad: Tensor, view: MatrixView) -> bool:
    """Whether the view's matrices are parts of the gradient's memory."""
    stack = view.kind == "batched" and grad.ndim == 3
    return stack or view.kind in _ROW_WISE_VIEWS or grad.is_contiguous()


@dataclass(frozen=True)
class _Region:
    """Matrices ``[count, m, n]``, m ≤ n, in a tensor: bytes from its begin to the first and between two of them."""

    count: int
    m: int
    n: int
    begin: int
    step: int
    layout: Layout


@functools.lru_cache(maxsize=4096)
def _regions(view: MatrixView, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> tuple[_Region, ...]:
    return tuple(
        _region(block) for block in view.to_matrices(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    )


def _region(block: Tensor) -> _Region:
    block = block.mT if block.shape[1] > block.shape[2] else block
    size = block.element_size()
    count, m, n = block.shape
    layout = Layout(block.stride(1), block.stride(2), block.dtype)
    return _Region(count, m, n, int(block.storage_offset()) * size, block.stride(0) * size, layout)


@dataclass(frozen=True)
class _Block:
    """Matrices of one parameter: where they lie in its gradient, buffer, weight and copy."""

    regions: tuple[_Region, _Region, _Region, _Region | None]
    kind: Kind

    def stack(self, device: torch.device) -> Stack:
        grad = self.regions[0]
        return Stack(grad.count, grad.m, grad.n, self.kind.buffer.dtype, device)

    def part(self, piece: Piece) -> Part:
        layout = self.kind.grad
        row_major = layout.column_stride == 1 or layout.row_stride != 1
        return Part(piece.stop - piece.start, self.kind.m, self.kind.n, row_major)

    def offsets(self, k: int) -> Iterator[int]:
        """Of the matrix with this number, in the order of the table; one number is the presence of all."""
        yield from (0 if region is None else region.begin + k * region.step for region in self.regions)
        yield 0


def _blocks_of(inputs: Inputs, i: int, view: MatrixView, adjust_lr_fn: str | None) -> list[_Block]:
    weight, grad, copy, presence = inputs.weights[i], inputs.grads[i], inputs.copies[i], inputs.presence[i]
    strides = grad.stride() if _lies_as_it_is(grad, view) else weight.stride()
    those = (
        _regions(view, weight.shape, strides, grad.dtype),
        _regions_of(inputs.buffers[i], view),
        _regions_of(weight, view),
    )
    copies = [None] * len(those[0]) if copy is None else _regions_of(copy, view)
    blocks = []
    for (_, rows, columns), grads, buffers, weights, copied in zip(
        matrix_shapes(view, weight.shape), *those, copies, strict=True
    ):
        kind = Kind(
            grads.m,
            grads.n,
            grads.layout,
            buffers.layout,
            weights.layout,
            None if copied is None else copied.layout,
            None if presence is None else presence.dtype,
            lr_scale(adjust_lr_fn, rows, columns),
        )
        blocks.append(_Block((grads, buffers, weights, copied), kind))
    return blocks


def _regions_of(x: Tensor, view: MatrixView) -> tuple[_Region, ...]:
    return _regions(view, x.shape, x.stride(), x.dtype)
