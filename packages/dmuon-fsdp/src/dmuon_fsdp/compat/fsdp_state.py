"""FSDP2's own state.

- `set_requires_gradient_sync` sets but nothing reads: restoring what was there needs the parameter groups.
- whether a module is a root, which `reset_iter_state` must not be called on before a forward, nothing tells.
- FSDP2 keeps the output of an all-gather until the next one in forward; where owners have every parameter of the
  layers, the root's is the last, and stays until its forward is over.
- `reset_iter_state` leaves gradients on the unsharded parameters, which the next backward would add to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule


def param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that ``fully_shard`` made for this module itself."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def free_last_gather(module: FSDPModule) -> None:
    """Where ``module`` has nothing for FSDP2 to gather, let go of what the module before it has copied out by now."""
    if param_groups(module):
        return
    shared = module._get_fsdp_state()._comm_ctx
    if shared.all_gather_state is not None:
        for stream in (shared.all_gather_copy_in_stream, shared.all_gather_stream):
            stream.wait_event(shared.all_gather_state.event)
        shared.all_gather_state = None


def gradient_sync_of(module: FSDPModule) -> list[tuple[bool, bool]]:
    """(reduce, all-reduce) of the module's own parameter groups."""
    return [(group.reduce_grads, group.all_reduce_grads) for group in param_groups(module)]


def set_gradient_sync_of(module: FSDPModule, values: Sequence[tuple[bool, bool]]) -> None:
    for group, (reduce, all_reduce) in zip(param_groups(module), values, strict=True):
        group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


def reset_iteration(module: FSDPModule) -> None:
    """FSDP2's own reset, and where a torch before 2.13 has none, the same on its state."""
    state: Any = module._get_fsdp_state()
    if not state._is_root:  # only a root has anything to reset, and none is one before its forward
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._comm_ctx.all_gather_state = None
    state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in [each._fsdp_param_group] if each._fsdp_param_group else []:
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()


def drop_unsharded_gradients(module: FSDPModule) -> None:
    """Forget what autograd left on FSDP2's unsharded parameters and what it accumulated there."""
    for group in param_groups(module):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
