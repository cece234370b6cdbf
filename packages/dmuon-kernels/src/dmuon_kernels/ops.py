"""``syrk``: the symmetric product by the best kernel there is, as two torch operators.

``torch.compile`` sees ``dmuon::syrk`` and ``dmuon::syrk_out`` as opaque calls with known shapes. The operators are made
with ``Library.define``, which costs a few microseconds a call; the ``custom_op`` decorator costs five times that.
"""

# mypy: allow-untyped-calls
# torch.library.Library has no annotations.

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dmuon_core.report import BackendStatus, get_backend_status
from dmuon_core.syrk.contract import Scalar, check_operands, check_scalars
from dmuon_core.syrk.ladder import KernelChoice

_ARGUMENTS = (
    "Tensor a, Tensor? b=None, Tensor? c=None, *, float alpha=1.0, float beta=0.0, "
    'Tensor? alpha_tensor=None, Tensor? beta_tensor=None, str kernel="auto", int? sms=None'
)
_LIBRARY = torch.library.Library("dmuon", "FRAGMENT")
_LIBRARY.define(f"syrk({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(f"syrk_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    kernel: str = "auto",
    sms: int | None = None,
) -> Tensor:
    """Return ``alpha * a @ b.mT + beta * c``, a batch of symmetric matrices, at half the work of a full product.

    Accumulates in fp32 and rounds once. The result equals its transpose bitwise. Not differentiable.

    Args:
        a: [*, M, K].
        b: [*, M, K]; None for ``a`` itself. With another ``b`` the caller promises that ``a @ b.mT`` is symmetric.
        c: [*, M, M], symmetric; only its lower triangle is read.
        alpha: a float, or an fp32 tensor on a's device: 0-d, or one value per batch item.
        beta: likewise; needs ``c`` unless it is 0.
        out: [*, M, M] to write into: memory of its own, or ``c`` itself.
        kernel: "auto", or the name of a backend (see :func:`status`). A named backend never falls back.
        sms: a hint to kernels that can run on fewer multiprocessors; others ignore it.

    Raises:
        ValueError: shapes, dtypes or overlaps outside the contract (``dmuon_core.syrk.contract``).
        KernelUnavailableError: the named kernel cannot run here, with the reason of every backend.
    """
    alpha_float, alpha_tensor = _split(alpha)
    beta_float, beta_tensor = _split(beta)
    if out is None:
        product: Tensor = torch.ops.dmuon.syrk(
            a, b, c, alpha=alpha_float, beta=beta_float,
            alpha_tensor=alpha_tensor, beta_tensor=beta_tensor, kernel=kernel, sms=sms,
        )  # fmt: skip
        return product
    torch.ops.dmuon.syrk_out(
        a, b, c, alpha=alpha_float, beta=beta_float,
        alpha_tensor=alpha_tensor, beta_tensor=beta_tensor, kernel=kernel, sms=sms, out=out,
    )  # fmt: skip
    return out


def _split(scalar: Scalar) -> tuple[float, Tensor | None]:
    """A schema knows no "float or tensor": the float, which a tensor replaces where there is one."""
    return (1.0, scalar) if isinstance(scalar, Tensor) else (float(scalar), None)


def status(device: torch.device | str | None = None) -> dict[str, BackendStatus]:
    """Every backend and what it lacks, best first, on ``device`` (None: the current CUDA device, else the CPU)."""
    return get_backend_status(device)


@functools.cache
def choice_of(kernel: str) -> KernelChoice:
    """The choice behind a name, one per process; it counts what ran."""
    return KernelChoice.of(kernel)


def _syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
    kernel: str = "auto",
    sms: int | None = None,
) -> Tensor:
    alpha_ = alpha if alpha_tensor is None else alpha_tensor
    beta_ = beta if beta_tensor is None else beta_tensor
    # Backends may lay out a fresh result as they like; the operator promises a contiguous one.
    return choice_of(kernel)(a, b, c, alpha=alpha_, beta=beta_, sms=sms).contiguous()


def _syrk_out(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
    kernel: str = "auto",
    sms: int | None = None,
    out: Tensor,
) -> None:
    alpha_ = alpha if alpha_tensor is None else alpha_tensor
    beta_ = beta if beta_tensor is None else beta_tensor
    choice_of(kernel)(a, b, c, alpha=alpha_, beta=beta_, out=out, sms=sms)


def _check(a: Tensor, b: Tensor | None, c: Tensor | None, alpha: Scalar, beta: Scalar) -> None:
    check_operands(a, b, c, beta, None)
    check_scalars(a, alpha, beta)


def _syrk_fake(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
    kernel: str = "auto",
    sms: int | None = None,
) -> Tensor:
    _check(a, b, c, alpha if alpha_tensor is None else alpha_tensor, beta if beta_tensor is None else beta_tensor)
    return a.new_empty((*a.shape[:-1], a.shape[-2]))


def _syrk_out_fake(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
    kernel: str = "auto",
    sms: int | None = None,
    out: Tensor,
) -> None:
    # A fake tensor has no address, so the overlap of ``out`` is checked at run time only.
    _check(a, b, c, alpha if alpha_tensor is None else alpha_tensor, beta if beta_tensor is None else beta_tensor)


_LIBRARY.impl("syrk", _syrk, "CompositeExplicitAutograd")
_LIBRARY.impl("syrk_out", _syrk_out, "CompositeExplicitAutograd")
torch.library.register_fake("dmuon::syrk", _syrk_fake, lib=_LIBRARY)
torch.library.register_fake("dmuon::syrk_out", _syrk_out_fake, lib=_LIBRARY)
