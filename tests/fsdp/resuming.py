"""Runs that stop and go on elsewhere: the same global batch on any mesh, and the single process that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_core import Muon as ReferenceMuon
from fsdp.models import Toy, is_projection, tokens

PARTS = 24  # of the global batch: every world size here divides it
IN_FP32 = dmuon.NewtonSchulz(dtype=torch.float32)


def global_loss(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    """The loss of this rank's share of the step's global batch; the mean over the ranks is the global loss."""
    share = PARTS // world_size
    batch = torch.cat([tokens(part, step) for part in range(rank * share, (rank + 1) * share)])
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Run:
    """A wrapped model with its optimizer on a mesh of ``sizes``: (S,) or (R, S)."""

    def __init__(
        self,
        *sizes: int,
        seed: int = 0,
        make: Callable[[], nn.Module] = Toy,
        predicate: Callable[[str, nn.Parameter], bool] = is_projection,
        planning: dmuon.PlanningOptions | None = None,
        dedicate: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        model = make()
        mesh, shards, replicas = mesh_of(sizes or (dist.get_world_size(),))
        dmuon.dedicate_params(model, shards, predicate, replicate_mesh=replicas, planning=planning, **(dedicate or {}))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        self.model = model
        self.optimizer = dmuon.Muon(model, **{"ns_backend": IN_FP32, **options})

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            global_loss(self.model, step, dist.get_rank(), dist.get_world_size()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Any]:
        return {
            name: whole(value).clone() if isinstance(value, Tensor) else value
            for name, value in self.model.state_dict().items()
        }

    def state(self) -> dict[str, Tensor]:
        """Whole, by ``<name>.<key>``."""
        return {
            f"{name}.{key}": whole(value).clone()
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def everything(self) -> dict[str, Any]:
        return {**self.weights(), **self.state()}

    def owners(self) -> dict[str, tuple[int, int]]:
        return {m.fqn: (m.owner.replicate, m.owner.shard) for m in dmuon.dedicated_params(self.model)}


def mesh_of(sizes: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """(what ``fully_shard`` gets, its shard dimension, its replicate dimension)."""
    if len(sizes) == 1:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard",))
        return mesh, mesh, None
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    return mesh, mesh["shard"], mesh["replicate"]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bitwise."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def reference(
    make: Callable[[], nn.Module] = Toy, predicate: Callable[[str, nn.Parameter], bool] = is_projection
) -> tuple[nn.Module, ReferenceMuon]:
    """The unwrapped model of seed 0 and ``dmuon_core.Muon`` with what ``dmuon.Muon`` has by default."""
    torch.manual_seed(0)
    model = make()
    return model, reference_optimizer(model, predicate)


def reference_optimizer(
    model: nn.Module, predicate: Callable[[str, nn.Parameter], bool] = is_projection
) -> ReferenceMuon:
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        split[bool(predicate(name, parameter))].append(parameter)
    muon = {"params": split[True], "lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"params": split[False], "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.01}
    return ReferenceMuon([muon, adamw], ns_backend=IN_FP32)


def train_reference(model: nn.Module, optimizer: ReferenceMuon, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        global_loss(model, step).backward()
        optimizer.step()


def uninterrupted(steps: int, **kind: Any) -> nn.Module:
    """The single process after that many steps."""
    model, optimizer = reference(**kind)
    train_reference(model, optimizer, range(steps))
    return copy.deepcopy(model)
