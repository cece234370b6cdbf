"""The conformance suite of the kernel contract (``dmuon_core.syrk.contract``), for any backend and test framework.

    for case in syrk_cases():
        run_syrk_case(my_syrk, case, "cuda", rejects=my_rejects)
    for error_case in syrk_error_cases():
        run_syrk_error_case(my_syrk, error_case, "cuda")

A failure is an AssertionError that names the case. Inputs are seeded by the case's name and lie in buffers filled with
NaN, so an element read from beside them shows in the result; outputs lie between canaries.

Legend: M rows, K columns; ``*`` the batch dimensions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from dmuon_core.syrk.builtin import mirror_lower, torch_syrk
from dmuon_core.syrk.contract import Scalar, SyrkFn, accept_all

Shape = tuple[int, ...]
Rejects = Callable[[Tensor, Tensor | None, Tensor | None], str | None]
ScalarKind = float | Literal["0-d", "per item"]

_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALVES, torch.float32)
_FENCE = 64
"""Elements in front of and behind every buffer: a multiple of 16 bytes, so they leave the alignment alone."""

_CANARY = -123.0
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SyrkCase:
    """One call.

    Attributes:
        m: rows of A.
        k: columns of A.
        dtype: of all operands.
        batch: the leading dimensions.
        layout: how A, B, C and out lie in memory, a key of ``LAYOUTS``.
        b: A itself, another tensor, or one matrix for the whole batch (stride 0).
        c: none; symmetric with NaN above the diagonal; or all NaN, which beta = 0 must not read.
        out: allocated by the kernel, given, or C itself.
        alpha: a float, or the kind of device tensor.
        beta: likewise.
    """

    m: int
    k: int
    dtype: torch.dtype = torch.float16
    batch: Shape = ()
    layout: str = "contiguous"
    b: Literal["a", "given", "expanded"] = "a"
    c: Literal["none", "lower", "nan"] = "none"
    out: Literal["fresh", "given", "c"] = "fresh"
    alpha: ScalarKind = 1.0
    beta: ScalarKind = 0.0

    @property
    def name(self) -> str:
        """Sizes, dtype, and every field that is not the default: "3x65x127 bfloat16 layout=transposed"."""
        sizes = "x".join(str(size) for size in (*self.batch, self.m, self.k))
        rest = [f for f in fields(self)[4:] if getattr(self, f.name) != f.default]
        return " ".join([sizes, str(self.dtype)[6:], *(f"{f.name}={getattr(self, f.name)}" for f in rest)])


@dataclass(frozen=True)
class Layout:
    """A way to lie in memory: the shape of the buffer for a shape, and the view of the buffer that has it."""

    buffer: Callable[[Shape], Shape]
    view: Callable[[Tensor], Tensor]


LAYOUTS = {
    "contiguous": Layout(lambda s: s, lambda x: x),
    "transposed": Layout(lambda s: (*s[:-2], s[-1], s[-2]), lambda x: x.mT),
    "offset": Layout(lambda s: (*s[:-1], s[-1] + 1), lambda x: x[..., 1:]),
    "offset transposed": Layout(lambda s: (*s[:-2], s[-1], s[-2] + 1), lambda x: x[..., 1:].mT),
    "padded rows": Layout(lambda s: (*s[:-1], s[-1] + 8), lambda x: x[..., :-8]),
    "every second row": Layout(lambda s: (*s[:-2], 2 * s[-2], s[-1]), lambda x: x[..., ::2, :]),
    "every second column": Layout(lambda s: (*s[:-1], 2 * s[-1]), lambda x: x[..., ::2]),
    "padded batch": Layout(lambda s: (*s[:-3], s[-3] + 1, *s[-2:]), lambda x: x[..., :-1, :, :]),
}
"""The layouts of a case, by name; "expanded" besides: one matrix with batch stride 0, C and out contiguous."""


@dataclass(frozen=True)
class Fenced:
    """A view into a buffer whose other elements must stay as they are."""

    base: Tensor  # [elements], the whole buffer
    view: Tensor

    @classmethod
    def of(cls, values: Tensor, layout: Layout, fill: float, device: torch.device) -> Fenced:
        shape = layout.buffer(tuple(values.shape))
        size = torch.Size(shape).numel()
        base = torch.full((size + 2 * _FENCE,), fill, dtype=values.dtype, device=device)
        view = layout.view(base[_FENCE : _FENCE + size].view(shape))
        view.copy_(values)
        return cls(base, view)

    def window(self, buffer: Tensor) -> Tensor:
        """The elements of another buffer of this size that ``view`` covers in its own."""
        return buffer.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


@dataclass(frozen=True)
class Operands:
    """The arguments of one call."""

    a: Fenced
    b: Fenced | None
    c: Fenced | None
    out: Fenced | None
    alpha: Scalar
    beta: Scalar

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.a.view, _view(self.b), _view(self.c)

    def call(self, fn: SyrkFn) -> Tensor:
        return fn(*self.tensors(), alpha=self.alpha, beta=self.beta, out=_view(self.out))


def _view(x: Fenced | None) -> Tensor | None:
    return None if x is None else x.view


def build_operands(case: SyrkCase, device: torch.device | str) -> Operands:
    """The case's operands on ``device``, the same values each time."""
    where = torch.device(device)
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    a, b = _factors(case, generator)
    square = _layout(case)
    c = None if case.c == "none" else Fenced.of(_addend(case, generator), square, float("nan"), where)
    empty = torch.full((*case.batch, case.m, case.m), _CANARY, dtype=case.dtype)
    outs = {"fresh": None, "given": Fenced.of(empty, square, _CANARY, where), "c": c}
    return Operands(
        a=_place(a, case, where, expanded=case.layout == "expanded"),
        b=None if b is None else _place(b, case, where, expanded=case.b == "expanded"),
        c=c,
        out=outs[case.out],
        alpha=_scalar(case.alpha, case.batch, generator, where),
        beta=_scalar(case.beta, case.batch, generator, where),
    )


def _factors(case: SyrkCase, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """A and B with a symmetric product: B is A with signs and powers of two on its columns, or on its matrices."""
    shared = case.layout == "expanded" or case.b == "expanded"
    shape = (*((1,) * len(case.batch) if shared else case.batch), case.m, case.k)
    a = torch.randn(shape, generator=generator).to(case.dtype)
    if case.b == "a":
        return a, None
    powers = torch.tensor([-2.0, -0.5, 0.5, 1.0, 2.0], dtype=case.dtype)
    if case.b == "expanded":
        each = powers[torch.randint(5, (*case.batch, 1, 1), generator=generator)]
        return a * each, a
    return a, a * powers[torch.randint(5, (case.k,), generator=generator)]


def _addend(case: SyrkCase, generator: torch.Generator) -> Tensor:
    shape = (*case.batch, case.m, case.m)
    if case.c == "nan":
        return torch.full(shape, float("nan"), dtype=case.dtype)
    lower = torch.randn(shape, generator=generator).to(case.dtype)
    above = torch.ones(case.m, case.m, dtype=torch.bool).triu(1)
    return lower.masked_fill(above, float("nan"))


def _layout(case: SyrkCase) -> Layout:
    return LAYOUTS["contiguous" if case.layout == "expanded" else case.layout]


def _place(values: Tensor, case: SyrkCase, device: torch.device, *, expanded: bool) -> Fenced:
    if not expanded:
        return Fenced.of(values, _layout(case), float("nan"), device)
    one = Fenced.of(values[(0,) * len(case.batch)], LAYOUTS["contiguous"], float("nan"), device)
    return Fenced(one.base, one.view.expand(*case.batch, *one.view.shape))


def _scalar(kind: ScalarKind, batch: Shape, generator: torch.Generator, device: torch.device) -> Scalar:
    if isinstance(kind, float):
        return kind
    values = 0.5 + torch.rand(batch if kind == "per item" else (), generator=generator)
    return values.to(device)


def run_syrk_case(
    fn: SyrkFn, case: SyrkCase, device: torch.device | str = "cpu", *, rejects: Rejects = accept_all
) -> str | None:
    """Run ``case`` twice on ``device`` and check values, symmetry, memory and repeatability.

    Returns:
        None after a pass, or the reason for which the backend's ``rejects`` leaves the operands to another.

    Raises:
        AssertionError: the contract does not hold; the text begins with the case's name.
    """
    operands = build_operands(case, device)
    refusal = rejects(*operands.tensors())
    if refusal is not None:
        return refusal
    d = _call_between_fences(fn, case, operands)
    _check_values(case, d)
    assert _same_bits(d, d.mT), f"{case.name}: the result is not exactly symmetric"
    again = build_operands(case, device).call(fn)
    assert _same_bits(d, again), f"{case.name}: a second call gives other bits"
    return None


def _call_between_fences(fn: SyrkFn, case: SyrkCase, operands: Operands) -> Tensor:
    """The result, after checking that it is where it should be and that nothing else was written."""
    fenced = [x for x in (operands.a, operands.b, operands.c, operands.out) if x is not None]
    before = [x.base.clone() for x in fenced]
    d = operands.call(fn)
    for x, old in zip(fenced, before, strict=True):
        if operands.out is not None and x.base is operands.out.base:
            x.window(old).copy_(x.view)
        assert _same_bits(x.base, old), f"{case.name}: memory beside the output was written"
    assert d.shape == (*case.batch, case.m, case.m), f"{case.name}: the result has shape {list(d.shape)}"
    assert d.dtype == case.dtype, f"{case.name}: the result has dtype {d.dtype}"
    if operands.out is not None:
        assert d.data_ptr() == operands.out.view.data_ptr(), f"{case.name}: the result is not in out"
    return d.clone()


def _check_values(case: SyrkCase, d: Tensor) -> None:
    """Two rules: the largest error against that of torch, and each entry's error against rounding analysis.

    The second sees what the first cannot, errors in the entries off the diagonal, which are smaller than those on it.
    """
    if not d.numel():
        return
    operands = build_operands(case, "cpu")
    want, terms, magnitude = _exact(case, operands)
    error = (d.cpu().double() - want).abs()
    torch_error = (operands.call(torch_syrk).double() - want).abs().max().item()
    epsilon = torch.finfo(case.dtype).eps
    # One unit in the last place of the largest entry on top: torch may be exact by luck, as for K = 1.
    allowed = 2 * torch_error + epsilon * terms.max().item()
    assert error.max().item() <= allowed, f"{case.name}: error {error.max().item():.3g}, allowed is {allowed:.3g}"
    # Twice the bound of any order of fp32 sums (tensor cores truncate), and a rounding each of product and result.
    subnormal = torch.finfo(case.dtype).smallest_normal * epsilon
    bound = epsilon * terms + 2 * (case.k + 4) * 2.0**-24 * magnitude + subnormal
    wrong = int((~(error <= bound)).sum())
    assert wrong == 0, f"{case.name}: {wrong} of {error.numel()} entries are outside the bound of fp32 accumulation"


def _exact(case: SyrkCase, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64: the result, |alpha A Bᵀ| + |beta C|, and the same with |A| |B|ᵀ for the product."""
    a, b, c = (None if x is None else x.double() for x in operands.tensors())
    assert a is not None
    b = a if b is None else b
    alpha, beta = (_broadcastable(scalar) for scalar in (operands.alpha, operands.beta))
    product = alpha * (a @ b.mT)
    addend = torch.zeros_like(product) if case.c != "lower" else beta * mirror_lower(c if c is not None else product)
    magnitude = alpha.abs() * (a.abs() @ b.abs().mT) + addend.abs()
    return product + addend, product.abs() + addend.abs(), magnitude


def _broadcastable(scalar: Scalar) -> Tensor:
    x = torch.as_tensor(scalar, dtype=torch.float64)
    return x[..., None, None] if x.ndim else x


def _same_bits(x: Tensor, y: Tensor) -> bool:
    as_bits = _BITS[x.element_size()]
    return torch.equal(x.contiguous().view(as_bits), y.contiguous().view(as_bits))


def syrk_cases() -> list[SyrkCase]:
    """Every case, each with a name of its own."""
    plain = [*_size_cases(), *_layout_cases(), *_batch_cases()]
    return [*plain, *_scalar_cases(), *_second_factor_cases(), *_empty_cases()]


_SIZES: dict[int, Shape] = {
    1: (1, 7),
    3: (9,),
    4: (63,),
    7: (1, 64),
    8: (127,),
    9: (3, 176, 1000),
    63: (4, 65),
    64: (64, 176),
    65: (127,),
    127: (8,),
    176: (9, 63),
}
"""The K of each M: wide and tall, on both sides of the usual tiles, and off every alignment."""


def _size_cases() -> list[SyrkCase]:
    return [SyrkCase(m, k, dtype) for dtype in _DTYPES for m, ks in _SIZES.items() for k in ks]


def _layout_cases() -> list[SyrkCase]:
    names = [name for name in LAYOUTS if name not in ("contiguous", "padded batch")]
    plain = [SyrkCase(65, 127, dtype, layout=name) for dtype in _HALVES for name in names]
    full = [
        SyrkCase(64, 40, dtype, (2,), name, c="lower", out="given", beta=-0.5) for dtype in _HALVES for name in names
    ]
    return plain + full


def _batch_cases() -> list[SyrkCase]:
    plain = [SyrkCase(40, 72, dtype, batch) for dtype in _HALVES for batch in ((1,), (3,), (2, 3), (1, 1, 2))]
    layouts = [
        SyrkCase(33, 40, torch.float16, batch, layout, c="lower", out="given", beta=2.0)
        for batch in ((3,), (2, 2))
        for layout in ("expanded", "padded batch")
    ]
    return plain + layouts


def _scalar_cases() -> list[SyrkCase]:
    kinds: list[tuple[ScalarKind, ScalarKind]] = [(2.0, 0.5), (-0.75, 1.0), (0.0, 1.0), (1.0, "0-d"), ("0-d", 2.0)]
    kinds += [("0-d", "0-d"), ("per item", "per item"), ("per item", 0.5), (1.0, "per item")]
    added = [
        SyrkCase(40, 24, dtype, (2,), c="lower", out=out, alpha=alpha, beta=beta)
        for dtype in _HALVES
        for out in ("fresh", "c")
        for alpha, beta in kinds
    ]
    unread = [SyrkCase(40, 24, dtype, (2,), c="nan", out=out) for dtype in _HALVES for out in ("fresh", "c")]
    scaled = [SyrkCase(40, 40, dtype, (2, 2), alpha=alpha) for dtype in _HALVES for alpha in (3.0, "0-d", "per item")]
    wide = [SyrkCase(65, 40, torch.float32, (3,), c="lower", alpha="per item", beta="0-d")]
    single = [SyrkCase(33, 40, torch.float16, (), c="lower", out="c", alpha="per item", beta="per item")]
    return added + unread + scaled + wide + single


def _second_factor_cases() -> list[SyrkCase]:
    layouts = ("contiguous", "transposed")
    given = [SyrkCase(65, 72, dtype, (2,), layout, "given") for dtype in _HALVES for layout in layouts]
    added = [SyrkCase(65, 72, dtype, (2,), b="given", c="lower", out="c", beta=1.5) for dtype in _HALVES]
    shared = [SyrkCase(40, 40, dtype, (3,), b="expanded", c="lower", out="given", beta=1.0) for dtype in _HALVES]
    return given + added + shared


def _empty_cases() -> list[SyrkCase]:
    """No columns, no rows, no batch."""
    return [
        *[SyrkCase(33, 0, dtype, batch) for dtype in _DTYPES for batch in ((), (2,))],
        *[SyrkCase(33, 0, dtype, (2,), c="lower", out="c", beta=0.5) for dtype in _DTYPES],
        *[SyrkCase(0, 8), SyrkCase(0, 8, batch=(2,), c="lower", beta=1.0), SyrkCase(0, 0)],
        *[SyrkCase(8, 8, batch=(0,)), SyrkCase(8, 8, batch=(2, 0), c="lower", out="given", beta=1.0)],
    ]


@dataclass(frozen=True)
class SyrkErrorCase:
    """A call that the contract forbids; ``call(fn, device)`` must raise ValueError."""

    name: str
    call: Callable[[SyrkFn, torch.device], object]


def run_syrk_error_case(fn: SyrkFn, case: SyrkErrorCase, device: torch.device | str = "cpu") -> None:
    """Check that the call raises ValueError.

    Raises:
        AssertionError: it does not.
    """
    try:
        case.call(fn, torch.device(device))
    except ValueError:
        return
    raise AssertionError(f"{case.name}: no ValueError")


def syrk_error_cases() -> list[SyrkErrorCase]:
    """Shapes and dtypes that do not match, and every overlap but ``out=c``."""
    return [*_mismatches(), *_overlaps()]


def _zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _mismatches() -> list[SyrkErrorCase]:
    single = torch.float32
    return [
        SyrkErrorCase("a is a vector", lambda f, d: f(_zeros(d, 8))),
        SyrkErrorCase("b of another shape", lambda f, d: f(_zeros(d, 8, 16), _zeros(d, 8, 8))),
        SyrkErrorCase("b of another dtype", lambda f, d: f(_zeros(d, 8, 8), _zeros(d, 8, 8, dtype=single))),
        SyrkErrorCase("c of another shape", lambda f, d: f(_zeros(d, 8, 16), None, _zeros(d, 8, 16), beta=1.0)),
        SyrkErrorCase("c without the batch", lambda f, d: f(_zeros(d, 2, 8, 16), None, _zeros(d, 8, 8), beta=1.0)),
        SyrkErrorCase(
            "c of another dtype", lambda f, d: f(_zeros(d, 8, 8), None, _zeros(d, 8, 8, dtype=single), beta=1.0)
        ),
        SyrkErrorCase("a of integers", lambda f, d: f(_zeros(d, 8, 8, dtype=torch.int32))),
        SyrkErrorCase("alpha in half precision", lambda f, d: f(_zeros(d, 8, 8), alpha=_zeros(d))),
        SyrkErrorCase("alpha per row", lambda f, d: f(_zeros(d, 8, 8), alpha=_zeros(d, 8, dtype=single))),
        SyrkErrorCase("alpha for fewer", lambda f, d: f(_zeros(d, 2, 8, 8), alpha=_zeros(d, 1, dtype=single))),
        SyrkErrorCase(
            "beta of the shape of c",
            lambda f, d: f(_zeros(d, 8, 8), None, _zeros(d, 8, 8), beta=_zeros(d, 8, 8, dtype=single)),
        ),
        SyrkErrorCase("beta without c", lambda f, d: f(_zeros(d, 8, 8), beta=1.0)),
        SyrkErrorCase("out of another shape", lambda f, d: f(_zeros(d, 8, 16), out=_zeros(d, 8, 16))),
        SyrkErrorCase("out of another dtype", lambda f, d: f(_zeros(d, 8, 8), out=_zeros(d, 8, 8, dtype=single))),
    ]


def _overlaps() -> list[SyrkErrorCase]:
    return [
        SyrkErrorCase("out is a", _out_is_a),
        SyrkErrorCase("out is b", _out_is_b),
        SyrkErrorCase("out is c and a", _out_is_c_and_a),
        SyrkErrorCase("out is c transposed", _out_is_c_transposed),
        SyrkErrorCase("out is c shifted by a row", _out_is_c_shifted),
        SyrkErrorCase("out has stride 0", lambda f, d: f(_zeros(d, 3, 8, 8), out=_zeros(d, 8, 8).expand(3, 8, 8))),
    ]


def _out_is_a(fn: SyrkFn, device: torch.device) -> None:
    a = _zeros(device, 8, 8)
    fn(a, out=a)


def _out_is_b(fn: SyrkFn, device: torch.device) -> None:
    b = _zeros(device, 8, 8)
    fn(_zeros(device, 8, 8), b, out=b)


def _out_is_c_and_a(fn: SyrkFn, device: torch.device) -> None:
    a = _zeros(device, 8, 8)
    fn(a, None, a, beta=1.0, out=a)


def _out_is_c_transposed(fn: SyrkFn, device: torch.device) -> None:
    c = _zeros(device, 8, 8)
    fn(_zeros(device, 8, 8), None, c, beta=1.0, out=c.mT)


def _out_is_c_shifted(fn: SyrkFn, device: torch.device) -> None:
    buffer = _zeros(device, 9, 8)
    fn(_zeros(device, 8, 8), None, buffer[:8], beta=1.0, out=buffer[1:])
