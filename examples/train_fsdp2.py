"""The shortest complete script: Muon under FSDP2, on GPUs or on CPUs.

torchrun --nproc_per_node=2 examples/train_fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


class MLP(nn.Module):
    def __init__(self, d: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(blocks)
        )
        self.head = nn.Linear(d, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(model: nn.Module, optimizer: dmuon.Muon, device: str) -> None:
    torch.manual_seed(1 + dist.get_rank())  # different data on each
    for step in range(101):
        x = torch.randn(256, 128, device=device)
        loss = (model(x) - x[:, :8].sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(dmuon.get_ns_backend(optimizer))


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc_per_node=2 examples/train_fsdp2.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same model on every rank
    model = MLP().to(device)

    dmuon.dedicate_params(model, mesh, lambda name, p: name.startswith("blocks.") and p.ndim == 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.003, adamw_lr=1e-3)

    train(model, optimizer, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
