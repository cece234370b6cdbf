"""The small model of the tests, how it is wrapped, and the single process that it is compared with.

Shapes: B sequences, T tokens, D = 64 the width, V = 97 words, a prime so that FSDP2's shards are uneven.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon_core import Muon as ReferenceMuon
from dmuon_fsdp.api import registration_of
from dmuon_fsdp.planning.names import canonical
from dmuon_fsdp.runtime.binding import Registration

VOCABULARY, WIDTH, FEED_FORWARD = 97, 64, 176
GRADIENT_TOLERANCE = 1e-5  # fp32: the order of a reduction
WEIGHT_TOLERANCE = 5e-3  # five steps in which Newton-Schulz amplifies that order

Loss = Callable[[nn.Module, int], Tensor]


class Block(nn.Module):
    """One head of attention and a gated feed-forward, seven projections and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))
        h_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))

    def attend(self, h_BTD: Tensor) -> Tensor:
        q, k, v = self.q(h_BTD), self.k(h_BTD), self.v(h_BTD)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Toy(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor, **options: Any) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, **options)
        return self.lm_head(self.norm(x_BTD))


def tokens(rank: int, step: int = 0, length: int = 6) -> Tensor:
    """[2, length], another batch on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def next_token_loss(model: nn.Module, rank: int, step: int = 0, **options: Any) -> Tensor:
    batch = tokens(rank, step)
    logits = model(batch[:, :-1], **options)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def is_projection(name: str, parameter: nn.Parameter) -> bool:
    return "blocks." in name and parameter.ndim == 2


def device_type() -> str:
    """Where this process group's tensors are: beside NCCL on GPUs."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def world_mesh(replicas: int = 1) -> DeviceMesh:
    """All ranks in a row, or for HSDP as (replicas, shards)."""
    world_size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type(), (world_size,))
    return init_device_mesh(device_type(), (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def wrap(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    replicas: int = 1,
    predicate: Callable[[str, nn.Parameter], bool] = is_projection,
    checkpoint: str = "none",
    outside: bool = False,
    dedicate: dict[str, Any] | None = None,
    **shard: Any,
) -> nn.Module:
    """Dedicate, then shard every block, then the model.

    Args:
        replicas: more than one for HSDP.
        checkpoint: "none", "reentrant" or "non-reentrant", around every block.
        outside: the checkpoint goes around what ``fully_shard`` was given, rather than the other way round.
        dedicate, shard: further options of ``dedicate_params`` and ``fully_shard``.
    """
    mesh = mesh or world_mesh(replicas)
    if mesh.ndim == 1:
        dmuon.dedicate_params(model, mesh, predicate, **(dedicate or {}))
    else:
        replicate, row = mesh["replicate"], mesh["shard"]
        dmuon.dedicate_params(model, row, predicate, replicate_mesh=replicate, **(dedicate or {}))
    if not outside:
        checkpoint_blocks(model, checkpoint)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **shard)
    if outside:
        checkpoint_blocks(model, checkpoint)
    return fully_shard(model, mesh=mesh, **shard)


def checkpoint_blocks(model: nn.Module, kind: str) -> None:
    if kind != "none":
        implementation = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, implementation)


class Twins:
    """A wrapped model beside the same model in a single process that computes on all ranks' batches.

    ``loss(model, rank)`` is what one rank minimises; the single process minimises the mean of it over the ranks.
    """

    def __init__(
        self, make: Callable[[], nn.Module] = Toy, *, wrapping: Callable[..., nn.Module] = wrap, **options: Any
    ) -> None:
        torch.manual_seed(0)
        model = make()
        self.reference = copy.deepcopy(model)
        self.model = wrapping(model, **options)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def optimizers(self, *, weight_decay: float = 0.0, lr: float = 0.02) -> None:
        in_fp32 = dmuon.NewtonSchulz(dtype=torch.float32)
        self.optimizer = dmuon.Muon(self.model, lr=lr, weight_decay=weight_decay, ns_backend=in_fp32)
        groups = self.reference_groups(self.reference, lr, weight_decay)
        self.reference_optimizer = ReferenceMuon(groups, ns_backend=in_fp32)

    def reference_groups(self, reference: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """The single process's groups: by view what Muon steps, the rest together."""
        views = {m.fqn: str(m.view) for m in dmuon.dedicated_params(self.model) if m.route == "muon"}
        by_view: dict[str | None, list[nn.Parameter]] = {}
        for name, parameter in reference.named_parameters():
            by_view.setdefault(views.get(name), []).append(parameter)
        adamw = {"params": by_view.pop(None, []), "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.01}
        muon = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        groups = [{"params": parameters, "view": view, **muon} for view, parameters in by_view.items()]
        return [*groups, adamw] if adamw["params"] else groups

    def backward(self, loss: Loss = next_token_loss) -> None:
        loss(self.model, self.rank).backward()
        self.reference_backward(loss)

    def reference_backward(self, loss: Loss = next_token_loss) -> None:
        for rank in range(self.world_size):
            (loss(self.reference, rank) / self.world_size).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.reference_optimizer.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference_optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, steps: int, loss: Callable[..., Tensor] = next_token_loss) -> None:
        for step in range(steps):
            self.zero_grad()
            self.backward(lambda model, rank, step=step: loss(model, rank, step))
            self.step()

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        theirs = dict(self.reference.named_parameters())
        for name, parameter in self.model.named_parameters():
            yield canonical(name), parameter, theirs[canonical(name)]

    def check_gradients(self, tolerance: float = GRADIENT_TOLERANCE) -> None:
        """Every gradient as the single process has it; one that it does not have may be zero."""
        for name, parameter, reference in self.pairs():
            assert (parameter.grad is None) <= (reference.grad is None), f"{name} has no gradient"
            if parameter.grad is not None:
                expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
                close(f"gradient of {name}", parameter.grad.full_tensor(), expected, tolerance)

    def check_weights(self, tolerance: float = WEIGHT_TOLERANCE) -> None:
        for name, parameter, reference in self.pairs():
            close(name, parameter.full_tensor(), reference, tolerance)

    @property
    def registration(self) -> Registration:
        return registration_of(self.model)

    def traffic(self) -> tuple[int, int]:
        """Coalesced broadcasts and reductions so far."""
        traffics = self.registration.state.traffics
        return sum(t.broadcasts for t in traffics), sum(t.reduces for t in traffics)

    def foreign_bytes(self) -> int:
        """Storage that this rank has for values of parameters that others own."""
        foreign = [member for member in self.registration.params.values() if not member.is_owner]
        held = [tensor for m in foreign for tensor in (m.owned, m.owned.grad) if tensor is not None]
        place = self.registration.ranks.shard_rank  # whose buckets this rank keeps, other replicas' too
        views = [m.unsharded for m in foreign if m.unsharded is not None and m.owner.shard != place]
        plain = [*(tensor.local for tensor in held), *views, *(v.grad for v in views if v.grad is not None)]
        return sum(tensor.untyped_storage().nbytes() for tensor in plain)

    def check_at_rest(self) -> None:
        for member in self.registration.params.values():
            assert member.shown() is member.param, f"{member.fqn} is not back in its module"
        assert self.foreign_bytes() == 0


def groups_of(model: nn.Module) -> dict[str, Any]:
    """The groups of a model's dedicated parameters by name."""
    return {group.name: group for group in registration_of(model).state.groups}


def close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative Frobenius error within ``tolerance``."""
    error = (got - expected).norm().item()
    size = expected.norm().item()
    assert error <= tolerance * size, f"{what}: off by {error:.2e} of {size:.2e}"


def on_all_cells(cells: Any, run: Callable[..., None]) -> None:
    """``run(**cell)`` for every cell, the cell named where one fails."""
    for cell in cells:
        try:
            run(**cell)
        except Exception as error:
            raise AssertionError(f"{cell}: {error}") from error
