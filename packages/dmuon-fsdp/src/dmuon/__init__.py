"""DMuon: Muon under FSDP2, one owner per matrix. Three lines: ``dedicate_params``, ``fully_shard``, ``Muon``."""

from dmuon_core import (
    KELLER,
    POLAR_EXPRESS,
    YOU,
    MatrixView,
    NewtonSchulz,
    direct_newton_schulz,
    get_backend_status,
    get_ns_backend,
    gram_newton_schulz,
    newton_schulz,
)
from dmuon_fsdp import __version__
from dmuon_fsdp.api import (
    clip_grad_norm_,
    dedicate_params,
    dedicated_params,
    ignored_params,
    init_weights,
    install_patch,
    no_sync,
    owned_params,
    publish,
    reset,
    uninstall_patch,
    wait_for_publish,
)
from dmuon_fsdp.checkpoint.folder import load_checkpoint, save_checkpoint
from dmuon_fsdp.checkpoint.model_dict import get_model_state_dict, set_model_state_dict
from dmuon_fsdp.checkpoint.optimizer_dict import get_optimizer_state_dict, set_optimizer_state_dict
from dmuon_fsdp.checkpoint.pretrained import load_pretrained
from dmuon_fsdp.optim.muon import Muon
from dmuon_fsdp.planning.options import PlanningOptions
from dmuon_fsdp.planning.plan import Owner, OwnershipPlan
from dmuon_fsdp.planning.policy import ParamPolicy
from dmuon_fsdp.runtime.parameter import DedicatedParam

__all__ = [
    "KELLER",
    "POLAR_EXPRESS",
    "YOU",
    "DedicatedParam",
    "MatrixView",
    "Muon",
    "NewtonSchulz",
    "Owner",
    "OwnershipPlan",
    "ParamPolicy",
    "PlanningOptions",
    "__version__",
    "clip_grad_norm_",
    "dedicate_params",
    "dedicated_params",
    "direct_newton_schulz",
    "get_backend_status",
    "get_model_state_dict",
    "get_ns_backend",
    "get_optimizer_state_dict",
    "gram_newton_schulz",
    "ignored_params",
    "init_weights",
    "install_patch",
    "load_checkpoint",
    "load_pretrained",
    "newton_schulz",
    "no_sync",
    "owned_params",
    "publish",
    "reset",
    "save_checkpoint",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "uninstall_patch",
    "wait_for_publish",
]
