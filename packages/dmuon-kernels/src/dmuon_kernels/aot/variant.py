"""The name of a compiled kernel: everything about a launch that is fixed when the kernel is compiled, nothing else.

Triton's own compiler specialises on more, such as integers that are multiples of 16. Here integers have one type by
name, and of pointers only those are known to be aligned that the host has checked, so that a few kernels serve all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dmuon_kernels.triton_launch import DESCRIPTORS, POINTERS, Argument, Block, Launch

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
_OPERANDS = ("a", "b", "c", "d")
_STRIDES = ("sb", "sm", "sk", "sn")
_LONG = {
    POINTERS: {f"{operand}_{stride}" for operand in _OPERANDS for stride in _STRIDES},
    # A row stride in i64 takes so many registers at the store that the largest tiles spill.
    DESCRIPTORS: {"d_sb"},
}
"""Integers of type i64; all others are i32."""
_SIZES = {POINTERS: ("M", "K", "tiles"), DESCRIPTORS: ("M", "K", "units", "d_sm")}
"""Integers of type i32 that grow with the operands."""
_DIVISORS = {
    POINTERS: dict.fromkeys(_OPERANDS, 16),
    DESCRIPTORS: {"d": 16, "partials": 16, "arrivals": 16, "d_sb": 8, "d_sm": 8},
}
"""What pointers and strides are multiples of, where operands are aligned."""
_BEYOND_I32 = 2**31
_ON_DEVICE = {"alpha": "ALPHA_ON_DEVICE", "beta": "BETA_ON_DEVICE"}
_K_MAJOR, _M_MAJOR = ("a_sk", "b_sk"), ("a_sm", "b_sm")


@dataclass(frozen=True)
class Variant:
    """A kernel's name among those compiled for one architecture.

    Attributes:
        kernel: the function.
        dtype: of the operands, as Triton writes it.
        warps: per program.
        constants: its ``constexpr`` arguments, by name.
        folded: the strides that are 1 and no arguments of the compiled kernel.
    """

    kernel: str
    dtype: str
    warps: int
    constants: frozenset[tuple[str, int]]
    folded: frozenset[str]

    @property
    def label(self) -> str:
        constants = " ".join(f"{name}={int(value)}" for name, value in sorted(self.constants))
        return f"{self.kernel} {self.dtype} warps={self.warps} {constants} 1={','.join(sorted(self.folded))}"


def canonical(launch: Launch) -> Launch:
    """The same work in the form that ships: B described on its own, alpha and beta both floats or both tensors."""
    alone = launch.kernel == DESCRIPTORS and launch.arguments["b_desc"] is None
    of_two_kinds = launch.constants["HAS_C"] and len({launch.constants[flag] for flag in _ON_DEVICE.values()}) == 2
    if not alone and not of_two_kinds:
        return launch
    arguments, constants = dict(launch.arguments), dict(launch.constants)
    if alone:
        arguments["b_desc"] = arguments["a_desc"]
    if of_two_kinds:
        for name, like in (("alpha", arguments["beta"]), ("beta", arguments["alpha"])):
            if isinstance(like, Tensor):
                arguments[name] = like.new_full((), _float(arguments[name]))
                constants[_ON_DEVICE[name]] = True
    return replace(launch, arguments=arguments, constants=constants)


def _float(argument: Argument) -> float:
    assert isinstance(argument, float), "one scalar is a float where the other is a tensor"
    return argument


def variant_of(launch: Launch) -> Variant | None:
    """The variant that runs a launch in its canonical form; None where none can, because of its strides or sizes."""
    folded = _folded(launch) if launch.kernel == POINTERS else frozenset[str]()
    if folded is None or not all(_fits_i32(launch.arguments[name]) for name in _SIZES[launch.kernel]):
        return None
    d = launch.arguments["d"]
    assert isinstance(d, Tensor), "every kernel has a result"
    return Variant(launch.kernel, _TYPES[d.dtype], launch.warps, frozenset(launch.constants.items()), folded)


def _fits_i32(number: Argument) -> bool:
    assert isinstance(number, int), "sizes and strides are integers"
    return number < _BEYOND_I32


def _folded(launch: Launch) -> frozenset[str] | None:
    """The strides that are constants where operands are row-major, or A and B column-major."""
    values = launch.arguments
    if values["M"] != 1 and (values["c_sn"] != 1 or values["d_sn"] != 1):
        return None
    for names, size in ((_K_MAJOR, values["K"]), (_M_MAJOR, values["M"])):
        # The stride of a dimension of size 0 or 1 is multiplied by 0 at most.
        if size in (0, 1) or all(values[name] == 1 for name in names):
            return frozenset({*names, "c_sn", "d_sn"})
    return None


def signature_of(launch: Launch, variant: Variant) -> dict[str, str]:
    """The compiled kernel's parameters in order: name to Triton type."""
    present = {n: x for n, x in launch.arguments.items() if x is not None and n not in variant.folded}
    return {name: _type_of(name, argument, variant) for name, argument in present.items()}


def _type_of(name: str, argument: Argument, variant: Variant) -> str:
    if isinstance(argument, Block):
        return f"tensordesc<{variant.dtype}{list(argument.box)}>"
    if isinstance(argument, Tensor):
        return f"*{_TYPES[argument.dtype]}"
    if isinstance(argument, float):
        return "fp32"
    return "i64" if name in _LONG[variant.kernel] else "i32"


def divisors_of(variant: Variant, names: Iterable[str]) -> dict[str, int]:
    """What the parameters among ``names`` are multiples of, which the compiler may rely on."""
    if variant.kernel == POINTERS and not dict(variant.constants)["ALIGNED"]:
        return {}
    return {name: _DIVISORS[variant.kernel][name] for name in names if name in _DIVISORS[variant.kernel]}
