"""The update in torch, parameter by parameter, around Newton-Schulz batch by batch: what works on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_core.batching import Batch, Piece
from dmuon_core.formulas import apply_, lr_scale, momentum_
from dmuon_core.newton_schulz import NewtonSchulz, Schedule
from dmuon_core.targets import Options, Target


def update_(targets: Sequence[Target], options: Options, ns: NewtonSchulz, schedule: Schedule) -> None:
    """One step on every target."""
    places = [(i, j) for i, target in enumerate(targets) for j in range(len(target.shapes))]
    pending = _Pending(targets, places, options, ns.dtype)
    for batch in ns.batches([stack for target in targets for stack in target.stacks]):
        with ns.factors([pending.matrices(piece) for piece in batch], schedule) as factors:
            pending.add(batch, factors)


class _Pending:
    """The parameters of one step, each applied when the factors of all its matrices are there.

    Batches cut across parameters, and a batch's factors are there for a moment only. So momentum is taken when a
    parameter's first matrix is due, and its update is applied with its last: no more directions and factors exist at a
    time than a batch needs.
    """

    def __init__(
        self, targets: Sequence[Target], places: Sequence[tuple[int, int]], options: Options, dtype: torch.dtype
    ) -> None:
        self._targets = targets
        self._places = places
        self._options = options
        self._wide = torch.promote_types(dtype, torch.float32)
        self._left = [sum(count for count, _, _ in target.shapes) for target in targets]
        self._tall = [[rows > columns for _, rows, columns in target.shapes] for target in targets]
        self._factors: list[list[list[Tensor]]] = [[[] for _ in target.shapes] for target in targets]
        self._directions: dict[int, list[Tensor]] = {}

    def matrices(self, piece: Piece) -> Tensor:
        """``[count, m, n]``, m ≤ n, of the direction."""
        i, j = self._places[piece.stack]
        if i not in self._directions:
            target = self._targets[i]
            self._directions[i] = target.blocks(
                momentum_(
                    target.buffer,
                    target.grad,
                    momentum=self._options.momentum,
                    nesterov=self._options.nesterov,
                    presence=target.presence,
                )
            )
        return self._directions[i][j][piece.start : piece.stop]

    def add(self, batch: Batch, factors: Sequence[Tensor]) -> None:
        """Take the factors of a batch: apply what is complete, keep the others."""
        added = []
        for piece, factor in zip(batch, factors, strict=True):
            i, j = self._places[piece.stack]
            self._factors[i][j].append(factor.mT if self._tall[i][j] else factor)
            self._left[i] -= piece.stop - piece.start
            added.append((i, j))
        for i, j in dict.fromkeys(added):
            if self._left[i]:
                self._factors[i][j][-1] = self._factors[i][j][-1].clone()
        for i in dict.fromkeys(i for i, _ in added):
            if not self._left[i]:
                self._apply(i, [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._factors[i]])
                self._factors[i] = []
                del self._directions[i]

    def _apply(self, i: int, blocks: Sequence[Tensor]) -> None:
        target, options = self._targets[i], self._options
        scales = [lr_scale(options.adjust_lr_fn, rows, columns) for _, rows, columns in target.shapes]
        if len(set(scales)) > 1:
            blocks = [block.to(self._wide) * scale for block, scale in zip(blocks, scales, strict=True)]
            scales = [1.0]
        apply_(
            target.weight,
            target.view.from_matrices(blocks, target.weight.shape),
            lr=options.lr,
            weight_decay=options.weight_decay,
            scale=scales[0],
            presence=target.presence,
        )
        if target.copy is not None:
            target.copy.copy_(target.weight)
