"""Other Muons under FSDP2 for bench_step.py, each as its documentation has it, with the settings that are fastest.

Every function takes a :class:`Division` of a sharded model and returns what to step. A package is imported when it is
asked for; what is missing, or does not take these parameters, raises, and the benchmark prints why. All have momentum
0.95 with Nesterov, five steps and no weight decay on matrices, and AdamW for the rest. They scale the update in their
own ways where they have no choice of ours: what is compared is time, not learning.

Not here, for nothing of theirs runs on FSDP2's parameters: see :data:`ABSENT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

LEARNING_RATE = 1e-4
ABSENT = {
    "dion": "not on PyPI",
    "gram-newton-schulz": "its Muon is for one GPU and takes no DTensors; its kernels are in bench_newton_schulz.py",
}


@dataclass(frozen=True)
class Division:
    """Who gets which parameter.

    Attributes:
        matrices: by name; [m, n], or [E, m, n] for a stack of experts.
        rest: AdamW's.
        mesh: what ``fully_shard`` got, its dimensions named; the last is the one that shards.
    """

    matrices: dict[str, nn.Parameter]
    rest: list[nn.Parameter]
    mesh: DeviceMesh

    @property
    def on_gpu(self) -> bool:
        return self.mesh.device_type == "cuda"

    def adamw(self) -> Optimizer:
        return torch.optim.AdamW(self.rest, lr=LEARNING_RATE, fused=True)


def torch_muon(division: Division) -> list[Optimizer]:
    """torch's own, on DTensors: every operation gathers what it needs."""
    muon = torch.optim.Muon(
        list(division.matrices.values()), lr=LEARNING_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, division.adamw()]


def torchtitan(division: Division) -> list[Optimizer]:
    """DistMuon: whole matrices on one rank each while they are computed, stacks by experts. A bucket a layer."""
    from torch.distributed.tensor import Shard
    from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned, build_dist_muon

    axis = (division.mesh.mesh_dim_names or ("shard",))[-1]
    stacks = [name for name, p in division.matrices.items() if p.ndim == 3]
    whole = [name for name in division.matrices if name not in stacks]
    layouts = {name: ComputeLayout(shardings_by_mesh_axis={axis: Owned()}) for name in whole}
    layouts |= {name: ComputeLayout(shardings_by_mesh_axis={axis: Shard(0)}) for name in stacks}
    # What needs no transport must not share a bucket with what does.
    buckets = [tuple(n for n in names if n.startswith(layer)) for names in (whole, stacks) for layer in _layers(names)]
    muon = build_dist_muon(
        [{"params": list(division.matrices.values()), "param_names": list(division.matrices)}],
        compute_sharding_by_fqn=layouts,
        bucket_configs=[BucketConfig(patterns=names) for names in buckets],
        lr=LEARNING_RATE,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, division.adamw()]


def _layers(names: list[str]) -> list[str]:
    """``layers.0.``, ``layers.1.`` and so on, in order."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) + "." for name in names))


def muonium(division: Division) -> list[Optimizer]:
    """Compiled and batched by shape; stacks of experts without communication."""
    from muonium import Muon

    groups = [
        {"params": list(division.matrices.values()), "wd": 0.0},
        {"params": division.rest, "algorithm": "adamw", "wd": 0.01, "betas": (0.9, 0.999), "fused": True},
    ]
    return [Muon(groups, lr=LEARNING_RATE)]


def dtensor_muon(division: Division) -> list[Optimizer]:
    """muonium's predecessor: batched by shape, on GPUs; one by one elsewhere."""
    from dtensor_muon import Muon, MuonForeach

    groups = [
        {"params": list(division.matrices.values()), "wd": 0.0, "flatten": False},
        {"params": division.rest, "algorithm": "adamw", "wd": 0.01, "betas": (0.9, 0.999)},
    ]
    return [(MuonForeach if division.on_gpu else Muon)(groups, lr=LEARNING_RATE)]


def muon_fsdp2(division: Division) -> list[Optimizer]:
    """Gathers a matrix to one rank, which scatters the factor; its own AdamW is a loop, torch's fused one is faster."""
    from muon_fsdp2 import Muon

    muon = Muon([{"params": list(division.matrices.values()), "use_muon": True, "lr": LEARNING_RATE}])
    return [muon, division.adamw()]


def emerging_optimizers(division: Division) -> list[Optimizer]:
    """Its Muon for one device, on DTensors as torch's own; its Triton kernel takes none. Python 3.12 or newer.

    Ask for version 0.3.0: the highest on PyPI, 999.9.9, is an empty stub that refuses to install.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon

    muon = Muon(
        list(division.matrices.values()), lr=LEARNING_RATE, weight_decay=0.0, nesterov=True, extra_scale_factor=0.2
    )
    return [muon, division.adamw()]


PEERS: dict[str, Callable[[Division], list[Optimizer]]] = {
    "torch-muon": torch_muon,
    "torchtitan": torchtitan,
    "muonium": muonium,
    "dtensor-muon": dtensor_muon,
    "muon-fsdp2": muon_fsdp2,
    "emerging-optimizers": emerging_optimizers,
}
