"""Muon under HSDP: replicas of a sharded model, on GPUs or on CPUs.

torchrun --nproc_per_node=4 examples/train_hsdp.py
torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT examples/train_hsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_fsdp2 import MLP, train

import dmuon

REPLICAS = 2


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc_per_node=4 examples/train_hsdp.py")
    world = int(os.environ["WORLD_SIZE"])
    if world % REPLICAS:
        raise SystemExit(f"{world} ranks do not make {REPLICAS} replicas of equal size: start a multiple of {REPLICAS}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # Ranks of one row shard a replica between them: let a row be a node, where the network is fastest.
    hsdp = init_device_mesh(device, (REPLICAS, world // REPLICAS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same model on every rank
    model = MLP().to(device)

    dmuon.dedicate_params(
        model,
        hsdp["shard"],
        lambda name, p: name.startswith("blocks.") and p.ndim == 2,
        replicate_mesh=hsdp["replicate"],
    )
    for block in model.blocks:
        fully_shard(block, mesh=hsdp)
    fully_shard(model, mesh=hsdp)
    optimizer = dmuon.Muon(model, lr=0.003, adamw_lr=1e-3)

    train(model, optimizer, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
