"""Host time of forward and backward: DMuon beside FSDP2 alone on the same model, in one process.

    python tools/bench_host.py [--device cuda] [--ranks 2] [--layers 12] [--rounds 60]

torch's fake process group answers every collective at once, so one process stands for a rank of a mesh of any size, and
what is left is what the host does: Python, launches, allocations. Few tokens, so that a GPU does not hold it up. Rounds
alternate between the variants, named by what has owners; a line has their medians in milliseconds of processor time and
the ratio to FSDP2 alone, which is the result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon
from dmuon_fsdp.runtime import binding

WARM_UP = 10
DEDICATED = ("nothing", "matrices", "layers")


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d, 2 * d, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = self.norm1(x_TD)
        x_TD = x_TD + self.o(self.q(h_TD) * self.k(h_TD) + self.v(h_TD))
        h_TD = self.norm2(x_TD)
        return x_TD + self.down(self.gate(h_TD) * self.up(h_TD))


def build(device: str, layers: int, d: int, *, dedicated: str, reshard: bool) -> nn.Module:
    """``dedicated``: "nothing", "matrices", or "layers", whose norms then have owners too."""
    model = nn.Sequential(*(Block(d) for _ in range(layers))).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if dedicated == "matrices":
        dmuon.dedicate_params(model, mesh, lambda name, parameter: parameter.ndim == 2)
    elif dedicated == "layers":
        norms = dmuon.ParamPolicy("*norm*", route="adamw")
        dmuon.dedicate_params(model, mesh, lambda name, parameter: True, param_policy=[norms])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def host_seconds(model: nn.Module, x_TD: Tensor, settle: Callable[[], None]) -> float:
    model.zero_grad()
    settle()
    begin = time.process_time()  # of all threads, backward's too; what else runs on the machine does not count
    model(x_TD).sum().backward()
    took = time.process_time() - begin
    settle()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    binding.meet = binding.agree_on = lambda *_, **__: None  # there is nobody to meet
    torch.set_num_threads(1)
    settle = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    # On a GPU large enough for gradients to go out as autograd leaves them, on a CPU small enough not to matter.
    d = 1024 if options.device == "cuda" else 32
    x_TD = torch.randn(64 if options.device == "cuda" else 8, d, device=options.device)
    print(f"torch {torch.__version__}, {options.device}, {options.layers} layers, rank 0 of {options.ranks}")
    for name, reshard in (("Z3", True), ("Z2", False)):
        models = [build(options.device, options.layers, d, dedicated=each, reshard=reshard) for each in DEDICATED]
        rounds = [[host_seconds(model, x_TD, settle) for model in models] for _ in range(WARM_UP + options.rounds)]
        times = [1e3 * statistics.median(column[WARM_UP:]) for column in zip(*rounds, strict=True)]
        cells = [f"{each} {ms:.2f} ({ms / times[0]:.3f})" for each, ms in zip(DEDICATED, times, strict=True)]
        print(f"{name}  {'  '.join(cells)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
