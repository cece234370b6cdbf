"""Which axes of a parameter form the matrix that Muon orthogonalizes, as a value with an exact inverse."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["matrix", "batched", "flattened", "split", "heads"]

_TEXT = re.compile(r"(?P<kind>[a-z]+)(\((?P<sizes>\d+( *, *\d+)*)\))?")


@dataclass(frozen=True)
class MatrixView:
    """How a parameter is read as matrices.

    Made by the constructors below; ``str(view)`` is a text that :meth:`parse` reads back, so a view can stand in a
    checkpoint.

    ======================  =========================  ==========================================
    view                    parameter                  matrices
    ======================  =========================  ==========================================
    ``matrix()``            ``[m, n]``                 one ``[m, n]``
    ``batched()``           ``[..., m, n]``            one for every leading index (experts)
    ``flattened()``         ``[out, in, *kernel]``     one ``[out, in·kernel]`` (convolutions)
    ``split(r0, r1, …)``    ``[r0 + r1 + …, n]``       one ``[ri, n]`` each (fused QKV rows)
    ``heads(h)``            ``[h·d, n]``               ``h`` of ``[d, n]``
    ======================  =========================  ==========================================
    """

    kind: Kind = "matrix"
    sizes: tuple[int, ...] = ()

    @classmethod
    def matrix(cls) -> MatrixView:
        return cls("matrix")

    @classmethod
    def batched(cls) -> MatrixView:
        return cls("batched")

    @classmethod
    def flattened(cls) -> MatrixView:
        return cls("flattened")

    @classmethod
    def split(cls, *sizes: int) -> MatrixView:
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"a split view takes the row counts of the parts, positive integers, got {sizes}")
        return cls("split", sizes)

    @classmethod
    def heads(cls, count: int) -> MatrixView:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"a heads view takes the number of heads, a positive integer, got {count!r}")
        return cls("heads", (count,))

    @classmethod
    def parse(cls, view: MatrixView | str | None) -> MatrixView:
        """The view that a text such as ``"split(64, 32, 32)"`` names; a view comes back, None is ``matrix``."""
        if view is None or isinstance(view, MatrixView):
            return view or cls()
        found = _TEXT.fullmatch(view.strip()) if isinstance(view, str) else None
        kinds: dict[str, Callable[..., MatrixView]] = {
            "matrix": cls.matrix,
            "batched": cls.batched,
            "flattened": cls.flattened,
            "split": cls.split,
            "heads": cls.heads,
        }
        if not found or found["kind"] not in kinds:
            raise ValueError(f"unknown view {view!r}; known: matrix, batched, flattened, split(r0, r1, …), heads(h)")
        sizes = [int(size) for size in found["sizes"].split(",")] if found["sizes"] else []
        try:
            return kinds[found["kind"]](*sizes)
        except TypeError:
            raise ValueError(f"view {view!r}: wrong number of sizes") from None

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.sizes))})" if self.sizes else self.kind

    def check(self, shape: Sequence[int], name: str) -> None:
        """Raise ValueError, naming the parameter, where ``shape`` cannot be read this way."""
        complaint = self._complaint(tuple(shape))
        if complaint:
            raise ValueError(f"{name}, shape {tuple(shape)}, cannot be read as {self}: {complaint}")

    def _complaint(self, shape: tuple[int, ...]) -> str | None:
        rank = len(shape)
        if self.kind == "batched":
            return None if rank >= 3 else "it needs 3 dimensions or more, [..., m, n]"
        if self.kind == "flattened":
            return _flattened_complaint(shape)
        if rank != 2:
            return (
                f'it has {rank} dimension{"s" * (rank != 1)}, not 2; give its group view="batched" (a stack of '
                f'matrices) or "flattened" (a convolution), or algorithm="adamw"'
            )
        if self.kind == "split" and sum(self.sizes) != shape[0]:
            return f"the parts add up to {sum(self.sizes)} rows, not {shape[0]}"
        if self.kind == "heads" and shape[0] % self.sizes[0]:
            return f"{shape[0]} rows do not divide into {self.sizes[0]} heads"
        return None

    def matrix_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """(count, m, n) of every block that :meth:`to_matrices` gives for a parameter of ``shape``."""
        return tuple((block.shape[0], block.shape[1], block.shape[2]) for block in self.to_matrices(_shape_only(shape)))

    def to_matrices(self, x: Tensor) -> tuple[Tensor, ...]:
        """The matrices of ``x`` as blocks ``[count, m, n]``, views of its memory where its strides allow."""
        if self.kind == "matrix":
            return (x.unsqueeze(0),)
        if self.kind == "batched":
            return (x.flatten(0, -3),)
        if self.kind == "flattened":
            return (x.flatten(1).unsqueeze(0),)
        if self.kind == "heads":
            return (x.reshape(self.sizes[0], -1, x.shape[1]),)
        return tuple(part.unsqueeze(0) for part in torch.split(x, list(self.sizes)))

    def from_matrices(self, blocks: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The exact inverse: blocks of :meth:`to_matrices` as one tensor of ``shape``."""
        whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
        return whole.reshape(tuple(shape))


def _shape_only(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")


def _flattened_complaint(shape: tuple[int, ...]) -> str | None:
    if len(shape) < 3:
        return "it needs 3 dimensions or more, [out, in, *kernel]"
    if shape[1] == 1:
        return 'a depthwise kernel (one input channel a group) is no matrix; use algorithm="adamw"'
    return None
