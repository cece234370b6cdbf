"""Process groups of our own, so that our collectives never queue behind, or deadlock with, the user's."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuon_fsdp.compat import group_timeout


def make_group(mesh: DeviceMesh, policy: str) -> ProcessGroup:
    """The group for collectives over the 1-D ``mesh``: one of our own (``"isolated"``) or the mesh's (``"shared"``).

    Nobody outside the mesh takes part in making it; it has the timeout of the mesh's own group.
    """
    parent = mesh.get_group()
    if policy == "shared":
        return parent
    group = dist.new_group(
        dist.get_process_group_ranks(parent),
        timeout=group_timeout(parent, mesh.device_type),
        backend=dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc="dmuon",
    )
    assert isinstance(group, ProcessGroup), "this rank is in the mesh"
    return group
