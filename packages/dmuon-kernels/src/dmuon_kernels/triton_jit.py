"""Launches compiled by Triton at first use, or run by its interpreter. Importing this module imports triton."""

from __future__ import annotations

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from dmuon_kernels.tma_kernel import syrk_tma_kernel
from dmuon_kernels.triton_kernel import syrk_kernel
from dmuon_kernels.triton_launch import DESCRIPTORS, INTERPRETED, POINTERS, Argument, Block, Launch

KERNELS = {POINTERS: syrk_kernel, DESCRIPTORS: syrk_tma_kernel}

assert isinstance(syrk_kernel, triton.JITFunction) != INTERPRETED, "Triton and DMuon read TRITON_INTERPRET alike"


def run(launch: Launch) -> None:
    """Launch on the current device and stream, compiling what was not compiled before."""
    KERNELS[launch.kernel][(launch.programs,)](
        *map(_triton_argument, launch.arguments.values()),
        **launch.constants,
        num_warps=launch.warps,
        # Triton is about to change its default; said here, both versions round alike.
        enable_fp_fusion=True,
    )


def _triton_argument(argument: Argument) -> object:
    if isinstance(argument, Block):
        return TensorDescriptor(argument.tensor, list(argument.shape), list(argument.strides), list(argument.box))
    return argument
