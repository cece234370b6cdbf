"""The fused passes of an update that a backend brings: loaded, checked against core's own, and kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import Kind, Layout, SyrkSpec, UpdateFns
from dmuon_core.syrk.extras import CheckedExtras

_extras: CheckedExtras[UpdateFns | None] = CheckedExtras()


def update_of(specs: Iterable[SyrkSpec], device: torch.device) -> UpdateFns | None:
    """The fused passes of the first of ``specs`` that brings some which load and compute right."""
    for spec in specs:
        if spec.update is not None:
            warning = f"the fused update of {spec.name!r} is left out on {device}"
            found = _extras.get(spec, device, spec.update, lambda fns: _complaint(fns, device), warning=warning)
            if found is not None:
                return found
    return None


@dataclass(frozen=True, eq=False)
class UpdateStacks:
    """Stacks ``[B, M, N]`` of one shape: a launch of the passes on plain tensors.

    A ``grad`` and a ``buffer`` are what ``direct`` needs, a ``weight`` what ``apply`` does. The table begins with the
    last matrix, so that a row's number is not its slot.
    """

    grad: Tensor
    buffer: Tensor
    weight: Tensor
    copy: Tensor | None = None
    presence: Tensor | None = None
    scale: float = 1.0

    def direct(self, fns: UpdateFns, out: Tensor, *, momentum: float, nesterov: bool) -> None:
        table, aligned = self._table()
        fns.direct(table, self._kind(), out, momentum=momentum, nesterov=nesterov, aligned=aligned)

    def apply(self, fns: UpdateFns, factor: Tensor, *, lr: float | Tensor, weight_decay: float) -> None:
        table, aligned = self._table()
        fns.apply(table, self._kind(), factor, lr=lr, weight_decay=weight_decay, aligned=aligned)

    def _kind(self) -> Kind:
        grad, buffer, weight = (_layout(x) for x in (self.grad, self.buffer, self.weight))
        presence = None if self.presence is None else self.presence.dtype
        copy = None if self.copy is None else _layout(self.copy)
        _, m, n = self.grad.shape
        return Kind(m, n, grad, buffer, weight, copy, presence, self.scale)

    def _table(self) -> tuple[Tensor, bool]:
        """Of :data:`TABLE`, and whether it is aligned."""
        count = self.grad.shape[0]
        columns = [_addresses(x, count) for x in (self.grad, self.buffer, self.weight, self.copy)]
        aligned = not any(address % 16 for column in columns for address in column)
        columns += [[0 if self.presence is None else self.presence.data_ptr()] * count, list(range(count))]
        table = torch.tensor(columns, dtype=torch.int64, device="cpu").T.flip(0).contiguous()
        return table.to(self.grad.device), aligned


def _layout(x_BMN: Tensor) -> Layout:
    return Layout(x_BMN.stride(1), x_BMN.stride(2), x_BMN.dtype)


def _addresses(x_BMN: Tensor | None, count: int) -> list[int]:
    if x_BMN is None:
        return [0] * count
    return [x_BMN.data_ptr() + i * x_BMN.stride(0) * x_BMN.element_size() for i in range(count)]


def _complaint(fns: UpdateFns | None, device: torch.device) -> str | None:
    """Why stacks of small matrices do not come out as core computes them.

    Both layouts, padding, several scales, with a copy and without, a learning rate on the device, rows in another order
    than slots, and a parameter that nobody has a gradient for.
    """
    if fns is None:
        return None
    absent = torch.zeros((), dtype=torch.float32, device=device)
    cases = (False, True, None, 2.0), (True, False, None, 3.0), (False, True, absent, 2.0)
    right = all(_computes_right(fns, device, *case) for case in cases)
    return None if right else "it computes wrong values in the check at load"


def _computes_right(
    fns: UpdateFns, device: torch.device, turned: bool, copied: bool, presence: Tensor | None, scale: float
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, grad, buffer = torch.randn((3, 3, 20, 40), dtype=torch.float32, device="cpu", generator=generator).to(
        device
    )
    lr = torch.full((), 0.5, dtype=torch.float32, device=device)
    out, want_out = (torch.empty(3, 32, 48, dtype=torch.float16, device=device) for _ in range(2))
    copy = torch.empty_like(weight, dtype=torch.float16) if copied else None
    if turned:
        weight, grad, buffer = (x.mT.contiguous().mT for x in (weight, grad, buffer))
        out, want_out = (x.mT.contiguous().mT for x in (out, want_out))
    want_weight, want_buffer = weight.clone(), buffer.clone()

    stacks = UpdateStacks(grad, buffer, weight, copy, presence, scale)
    stacks.direct(fns, out, momentum=0.9, nesterov=True)
    factor = out[:, :20, :40]
    stacks.apply(fns, factor, lr=lr, weight_decay=0.1)

    direction = momentum_(want_buffer, grad, momentum=0.9, nesterov=True, presence=presence)
    normalize_into([direction], [want_out])
    apply_(want_weight, factor, lr=lr, weight_decay=0.1, scale=scale, presence=presence)

    # Entries of out are around 1/28 in half precision, the others around 1 in float32: a few roundings.
    close = torch.allclose(out, want_out, rtol=0.0, atol=1e-4)
    close = close and torch.allclose(buffer, want_buffer, rtol=1e-5, atol=1e-5)
    close = close and torch.allclose(weight, want_weight, rtol=1e-5, atol=1e-5)
    exact = presence is None or (torch.equal(buffer, want_buffer) and torch.equal(weight, want_weight))
    return close and exact and (copy is None or torch.equal(copy, weight.half()))
