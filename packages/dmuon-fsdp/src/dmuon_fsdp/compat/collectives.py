"""What torch.distributed knows and does not tell.

- `_coalescing_manager`: one NCCL group call for several collectives has no public spelling.
- a group's timeout can be given when it is made, but not read.
- the store behind `init_process_group`, where ranks can wait for each other by name.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def coalescing(group: ProcessGroup, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Collectives launched inside go out as one call; the current stream is ordered after it on leaving."""
    return torch.distributed._coalescing_manager(  # type: ignore[attr-defined, no-any-return]
        group=group, device=device, async_ops=False
    )


def default_store() -> Any:
    """The store that all ranks of the default process group share."""
    return dist.distributed_c10d._get_default_store()


def group_timeout(group: ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout that collectives of ``group`` have on this kind of device; None where the backend does not say."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)
