"""One gradient norm over dedicated, FSDP2's and plain parameters, and the clip by it.

A gradient lies whole on its owner, in shards over mesh dimensions, or repeated on every rank. Its norm is added up over
the ranks that it is divided over and averaged over those that repeat it, so that each element counts once and every
rank has the same number. The host reads none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon_fsdp.compat import local_tensor, norms_of, scale_all
from dmuon_fsdp.optim.average import Average
from dmuon_fsdp.optim.groups import entries_of
from dmuon_fsdp.runtime.binding import Registration, device_of
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor

_REST = ""  # the bucket of what no bucket names
_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm and this
_ALGORITHMS = ("muon", "adamw")

RankSet = tuple[int, ...]


@dataclass(frozen=True)
class Gradients:
    """What is clipped together.

    Attributes:
        registrations: the models.
        labelled: every parameter with the names that a bucket may call it by, the narrower one first.
        averages: what must be averaged before it can be measured.
    """

    registrations: Sequence[Registration]
    labelled: Sequence[tuple[nn.Parameter, tuple[str, ...]]]
    averages: Sequence[Average] = ()

    @classmethod
    def of_model(cls, registration: Registration, averages: Sequence[Average]) -> Gradients:
        """Of one model, whose buckets are the algorithms."""
        entries = entries_of([registration])
        labelled = [(entry.parameter, (entry.algorithm,)) for entry in entries]
        return cls([registration], labelled, averages)


@torch.no_grad()
def clip_(
    gradients: Gradients,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool = False,
    buckets: Mapping[str, float] | None = None,
    process_groups: Sequence[ProcessGroup] = (),
) -> Tensor:
    """See :func:`dmuon.clip_grad_norm_`."""
    limits = {**(buckets or {}), _REST: max_norm}
    _check(gradients, limits, norm_type)
    refuse_unreduced(gradients.registrations, "clip_grad_norm_")
    for average in gradients.averages:
        average.reduce()
    spread = _Spread(gradients)
    buckets_of_parts = [_parts(members, spread) for members in _by_bucket(gradients, limits).values()]
    device = device_of(gradients.registrations[0].dedications[0].mesh)
    powers = torch.stack([_power(parts, norm_type, device) for parts in buckets_of_parts])
    powers = _over_ranks(powers, norm_type, (*spread.groups.values(), *process_groups))
    total = _root(powers.max() if math.isinf(norm_type) else powers.sum(), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type:g} of all gradients is {total.item()}, and error_if_nonfinite=True: find "
            f"what makes them infinite or not-a-number, or pass False to go on"
        )
    for parts, power, limit in zip(buckets_of_parts, powers, limits.values(), strict=True):
        if not math.isinf(limit):  # inf / inf would make not-a-number of gradients that nobody limits
            _scale(parts, (limit / (_root(power, norm_type) + _TINY)).clamp(max=1.0))
    return total.float()


def refuse_unreduced(registrations: Iterable[Registration], call: str) -> None:
    """Raise RuntimeError, on all ranks alike, where gradients wait on their ranks for a backward that reduces."""
    for registration in registrations:
        waiting = [group.name for group in registration.state.groups if group.keeps_gradients]
        if waiting:
            raise RuntimeError(
                f"{call}() with gradients of {waiting[0]!r} that were accumulated under no_sync (or "
                f"set_requires_gradient_sync(False)) and not reduced: run the step's last backward outside of it"
            )


def check_limit(name: str, value: object) -> None:
    """Raise ValueError unless a norm can be clipped to ``value``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name} must be a number >= 0, or infinity to clip nothing; got {value!r}")


def _check(gradients: Gradients, limits: Mapping[str, float], norm_type: float) -> None:
    if not isinstance(norm_type, Real) or not float(norm_type) > 0:
        raise ValueError(f"norm_type must be a number > 0 or infinity, got {norm_type!r}")
    known = dict.fromkeys([*_ALGORITHMS, *(label for _, labels in gradients.labelled for label in labels)])
    for name, limit in limits.items():
        check_limit("max_norm" if name == _REST else f"buckets[{name!r}]", limit)
        if name != _REST and name not in known:
            raise ValueError(f"buckets has no {name!r} to clip; there are {', '.join(map(repr, known))}")


def _by_bucket(gradients: Gradients, limits: Mapping[str, float]) -> dict[str, list[nn.Parameter]]:
    """Every parameter in one bucket, the buckets in the order of ``limits``."""
    found: dict[str, list[nn.Parameter]] = {name: [] for name in limits}
    for parameter, labels in gradients.labelled:
        found[next((label for label in labels if label in limits), _REST)].append(parameter)
    return found


class _Spread:
    """Which ranks divide a gradient among them and which repeat it, with a process group for each set of ranks.

    Known from the parameters, not from the gradients there are: the collectives are the same on all ranks.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.groups: dict[RankSet, ProcessGroup] = {}
        self._dims: dict[DeviceMesh, list[RankSet]] = {}
        for registration in gradients.registrations:
            for group in registration.ranks.groups:
                self._note(group)
        self._dividing = {parameter: self._find(parameter) for parameter, _ in gradients.labelled}
        self._repeats = {
            dividing: math.prod(len(ranks) for ranks in self.groups if ranks not in dividing)
            for dividing in set(self._dividing.values())
        }

    def repeats(self, parameter: nn.Parameter) -> int:
        """How often its gradient is counted where every group adds up what its ranks have."""
        return self._repeats[self._dividing[parameter]]

    def _note(self, group: ProcessGroup) -> RankSet:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.groups.setdefault(ranks, group)
        return ranks

    def _find(self, parameter: nn.Parameter) -> frozenset[RankSet]:
        if not isinstance(parameter, DTensor):
            return frozenset()
        mesh, placements = parameter.device_mesh, _layout_of(parameter)
        if mesh not in self._dims:
            self._dims[mesh] = [self._note(mesh.get_group(dim)) for dim in range(mesh.ndim)]
        dims = zip(self._dims[mesh], placements, strict=True)
        return frozenset(ranks for ranks, placement in dims if not isinstance(placement, Replicate))


def _layout_of(tensor: DTensor) -> Sequence[Placement]:
    """Its placements; of a dedicated one those that operators see, which are not made at each call."""
    return tensor.home.operator_placements if isinstance(tensor, OwnedTensor) else tensor.placements


@dataclass(frozen=True)
class _Part:
    """What this rank holds of a gradient, and how many ranks hold the same."""

    local: Tensor
    repeats: int


def _parts(parameters: Sequence[nn.Parameter], spread: _Spread) -> list[_Part]:
    found = ((_local_gradient(parameter), parameter) for parameter in parameters)
    return [_Part(local, spread.repeats(parameter)) for local, parameter in found if local is not None]


def _power(parts: Sequence[_Part], norm_type: float, device: torch.device) -> Tensor:
    """This rank's share of ‖g‖ᵖ, or of max |g|: 0-dim, in float64, which holds squares of fp32 norms."""
    batches: dict[tuple[torch.device, bool, int], list[Tensor]] = {}
    for part in parts:
        key = part.local.device, part.local.dtype == torch.float64, part.repeats
        batches.setdefault(key, []).append(part.local)
    shares = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, wide, repeats), tensors in batches.items():
        norms = torch.stack(norms_of(tensors, norm_type, torch.float64 if wide else torch.float32))
        norms = norms.to(device=device, dtype=torch.float64)
        shares.append(norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum() / repeats)
    together = torch.stack(shares)
    return together.max() if math.isinf(norm_type) else together.sum()


def _over_ranks(powers: Tensor, norm_type: float, groups: Sequence[ProcessGroup]) -> Tensor:
    """The sum over all ranks of every group in turn, or the maximum; not-a-number wherever one rank has that."""
    if not math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(powers, ReduceOp.SUM, group=group)
        return powers
    # A backend's maximum of a number and not-a-number may be the number.
    lost = powers.isnan()
    largest = torch.stack([powers.masked_fill(lost, 0.0), lost.to(powers.dtype)])
    for group in groups:
        dist.all_reduce(largest, ReduceOp.MAX, group=group)
    return largest[0].masked_fill(largest[1] > 0, math.nan)


def _root(power: Tensor, norm_type: float) -> Tensor:
    return power if math.isinf(norm_type) else power.pow(1 / norm_type)


def _scale(parts: Sequence[_Part], factor: Tensor) -> None:
    batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        batches.setdefault((part.local.device, part.local.dtype), []).append(part.local)
    for (device, dtype), tensors in batches.items():
        scale_all(tensors, factor.to(device=device, dtype=torch.promote_types(dtype, torch.float32)))


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank holds of a gradient; None for nothing."""
    grad = parameter.grad
    if grad is None:
        return None
    if isinstance(grad, DTensor):
        if not isinstance(grad, OwnedTensor) and any(isinstance(p, Partial) for p in grad.placements):
            raise ValueError(f"a gradient of shape {tuple(grad.shape)} is {grad.placements}: reduce it before clipping")
        grad = local_tensor(grad)
    return grad if grad.numel() else None
