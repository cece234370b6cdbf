"""The private names of torch that dmuon-kernels uses, all of them."""

from __future__ import annotations

import torch


def current_stream_handle(device: int) -> int:
    """The driver's handle of the current stream of a CUDA device, as TorchInductor's launchers ask for it.

    ``torch.cuda.current_stream(device).cuda_stream`` is the same number, at ten times the time.
    """
    return int(torch._C._cuda_getCurrentRawStream(device))
