"""Every private name of torch that this package uses, and the only folder that may import one.

Each file says what is missing from the public surface. Whatever a file offers is a function or class of ours, so that
a change in torch is answered here.
"""

from dmuon_fsdp.compat.autograd import (
    adamw_if_,
    at_end_of_backward,
    copy_all,
    divide_all,
    get_parameter,
    in_backward,
    is_alone,
    norms_of,
    preserving_versions,
    profiled,
    put_parameter,
    run_post_accumulate_hooks,
    scale_all,
)
from dmuon_fsdp.compat.collectives import broadcast, coalescing, default_store, group_timeout, reduce
from dmuon_fsdp.compat.dtensor import (
    SeatedShard,
    build_dtensor,
    build_like,
    grid_mesh,
    local_tensor,
    plain_dtensor,
    shard_extent,
)
from dmuon_fsdp.compat.fsdp_state import (
    drop_unsharded_gradients,
    free_last_gather,
    gradient_sync_of,
    param_groups,
    reset_iteration,
    set_gradient_sync_of,
)
from dmuon_fsdp.compat.routing import AUTOGRAD_KEEPS_SUBCLASSES, RoutedDTensor
from dmuon_fsdp.compat.seam import (
    Cover,
    SeamHandler,
    fsdp_controls,
    install_seam,
    seam_complaint,
    uninstall_seam,
)
from dmuon_fsdp.compat.trees import tensors_with_grad, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AUTOGRAD_KEEPS_SUBCLASSES",
    "Cover",
    "RoutedDTensor",
    "SeamHandler",
    "SeatedShard",
    "adamw_if_",
    "at_end_of_backward",
    "broadcast",
    "build_dtensor",
    "build_like",
    "coalescing",
    "copy_all",
    "default_store",
    "divide_all",
    "drop_unsharded_gradients",
    "free_last_gather",
    "fsdp_controls",
    "get_parameter",
    "gradient_sync_of",
    "grid_mesh",
    "group_timeout",
    "in_backward",
    "install_seam",
    "is_alone",
    "local_tensor",
    "norms_of",
    "param_groups",
    "plain_dtensor",
    "preserving_versions",
    "profiled",
    "put_parameter",
    "reduce",
    "reset_iteration",
    "run_post_accumulate_hooks",
    "scale_all",
    "seam_complaint",
    "set_gradient_sync_of",
    "shard_extent",
    "tensors_with_grad",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "uninstall_seam",
]
