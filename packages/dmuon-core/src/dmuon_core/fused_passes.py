"""The update in fused kernels, batch by batch: two passes over memory before Newton-Schulz, one after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dmuon_core.batching import Piece
from dmuon_core.formulas import lr_scale
from dmuon_core.newton_schulz import NewtonSchulz, Schedule
from dmuon_core.syrk.contract import UpdateFns
from dmuon_core.targets import Options, Target

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def takes(target: Target) -> bool:
    """Whether every matrix of the target is a part of its memory, in dtypes that the kernels know, on one device."""
    weight, grad, buffer = target.weight, target.grad, target.buffer
    tensors = [x for x in (weight, grad, buffer, target.copy, target.presence) if x is not None]
    if any(x.dtype not in _DTYPES or x.device != weight.device for x in tensors):
        return False
    return weight.is_contiguous() and buffer.is_contiguous() and (target.copy is None or target.copy.is_contiguous())


def update_(targets: Sequence[Target], options: Options, ns: NewtonSchulz, schedule: Schedule, fns: UpdateFns) -> None:
    """One step on every target that :func:`takes` is true for; all on one device."""
    places = [(target, j) for target in targets for j in range(len(target.shapes))]
    blocks: dict[Target, list[_Block]] = {}

    def piece_of(piece: Piece) -> _Block:
        target, j = places[piece.stack]
        if target not in blocks:  # when it is due: the device has work by then
            blocks[target] = _blocks_of(target, options)
        return blocks[target][j].cut(piece)

    for batch in ns.batches([stack for target in targets for stack in target.stacks]):
        _step([piece_of(piece) for piece in batch], options, ns, schedule, fns)


def _step(pieces: Sequence[_Block], options: Options, ns: NewtonSchulz, schedule: Schedule, fns: UpdateFns) -> None:
    grads, presence = [piece.grad for piece in pieces], [piece.presence for piece in pieces]
    # torch does not see what is written: autograd must refuse a backward through the weights of before.
    increment_version([x for piece in pieces for x in (piece.weight, piece.buffer, piece.copy) if x is not None])

    def write(outs: Sequence[Tensor]) -> None:
        buffers = [piece.buffer for piece in pieces]
        momentum, nesterov = options.momentum, options.nesterov
        fns.direct(grads, buffers, outs, momentum=momentum, nesterov=nesterov, presence=presence)

    with ns.factors(grads, schedule, write=write) as factors:
        fns.apply(
            [piece.weight for piece in pieces],
            factors,
            [piece.copy for piece in pieces],
            lr=options.lr,
            weight_decay=options.weight_decay,
            scales=[piece.scale for piece in pieces],
            presence=presence,
        )


@dataclass(frozen=True, eq=False)
class _Block:
    """Matrices of one target, ``[count, m, n]``, m ≤ n, in the target's memory."""

    weight: Tensor
    grad: Tensor
    buffer: Tensor
    copy: Tensor | None
    presence: Tensor | None
    scale: float

    def cut(self, piece: Piece) -> _Block:
        if piece.stop - piece.start == self.weight.shape[0]:
            return self
        at = slice(piece.start, piece.stop)
        copy = None if self.copy is None else self.copy[at]
        return _Block(self.weight[at], self.grad[at], self.buffer[at], copy, self.presence, self.scale)


def _blocks_of(target: Target, options: Options) -> list[_Block]:
    shapes = target.shapes
    copies = [None] * len(shapes) if target.copy is None else target.blocks(target.copy)
    scales = [lr_scale(options.adjust_lr_fn, rows, columns) for _, rows, columns in shapes]
    parts = target.blocks(target.weight), target.blocks(target.grad), target.blocks(target.buffer)
    return [
        _Block(weight, grad, buffer, copy, target.presence, scale)
        for weight, grad, buffer, copy, scale in zip(*parts, copies, scales, strict=True)
    ]
