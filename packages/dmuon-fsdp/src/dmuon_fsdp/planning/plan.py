"""The plan: which rank owns which parameter, in which group, in which order. Names only; it holds no tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dmuon_core.views import MatrixView
from dmuon_fsdp.planning.assign import Item, assign, loads
from dmuon_fsdp.planning.options import PlanningOptions
from dmuon_fsdp.planning.policy import Treatment


@dataclass(frozen=True, order=True)
class Owner:
    """Where a parameter lives: its coordinate in the shard mesh and in the replicate mesh."""

    shard: int
    replicate: int = 0


@dataclass(frozen=True)
class ParamSpec:
    """A parameter chosen by the predicate.

    Attributes:
        fqn: canonical name; of a shared parameter the first.
        aliases: every other canonical name it has.
        shape: global shape.
        dtype: as it was at ``dedicate_params``.
        boundary: canonical name of its hook boundary.
        treatment: its route, view and dtypes.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boundary: str
    treatment: Treatment = field(default_factory=Treatment)

    @property
    def view(self) -> MatrixView:
        """How it is read as matrices."""
        return self.treatment.view or MatrixView.matrix()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def item(self) -> Item:
        return Item(self.fqn, self.shape, self.nbytes, self.boundary, self.view, self.treatment.route == "muon")


@dataclass(frozen=True)
class Assignment:
    """A finished plan: specs in the order of the model, and the owner of each, on ``replicas`` rows of ``shards``."""

    specs: tuple[ParamSpec, ...]
    owners: Mapping[str, Owner]
    shards: int
    replicas: int
    options: PlanningOptions

    @classmethod
    def of(
        cls, specs: tuple[ParamSpec, ...], shards: int, options: PlanningOptions, *, replicas: int = 1
    ) -> Assignment:
        ranked = assign([spec.item for spec in specs], shards * replicas, options)
        owners = {name: Owner(rank % shards, rank // shards) for name, rank in ranked.items()}
        return cls(specs, owners, shards, replicas, options)

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    def groups(self) -> dict[str, list[ParamSpec]]:
        """Specs by boundary, both in the order of the model."""
        groups: dict[str, list[ParamSpec]] = {}
        for spec in self.specs:
            groups.setdefault(spec.boundary, []).append(spec)
        return groups

    def lines(self) -> list[str]:
        """Equal on ranks that agree: what is dedicated, then who owns it, which follows from all of that."""
        chosen = [
            f"{spec.fqn} {list(spec.shape)} {spec.dtype} boundary={spec.boundary!r} {spec.treatment}"
            for spec in self.specs
        ]
        owned = [f"{spec.fqn} owner={self.name_of(self.owners[spec.fqn])}" for spec in self.specs]
        mesh = f"{self.replicas} replicas of {self.shards} ranks"
        return [*chosen, f"{len(self.specs)} dedicated parameters in all on {mesh}", *owned]

    def name_of(self, owner: Owner) -> str:
        return f"{owner.shard}" if self.replicas == 1 else f"{owner.shard} of replica {owner.replicate}"

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def loads(self) -> list[float]:
        """What each rank has to do, in seconds or elements."""
        by_rank = {name: owner.replicate * self.shards + owner.shard for name, owner in self.owners.items()}
        return loads([spec.item for spec in self.specs], by_rank, self.ranks, self.options)

    @property
    def imbalance(self) -> float:
        """The most loaded rank over the mean; 1 where there is nothing to do."""
        work = self.loads()
        return max(work) * len(work) / sum(work) if any(work) else 1.0


class OwnershipPlan(Mapping[str, Owner]):
    """What ``dedicate_params`` returns: owner by canonical name. Planned when it is first looked at; put to work at the
    first ``fully_shard`` or ``Muon``, or by :meth:`bind`."""

    def __init__(self, assignment: Callable[[], Assignment], bind: Callable[[], None]) -> None:
        self._assignment = assignment
        self._bind = bind

    def bind(self) -> OwnershipPlan:
        """Put the plan to work now, on all ranks alike: compare it over ranks, give every parameter to its owner."""
        self._bind()
        return self

    def __getitem__(self, fqn: str) -> Owner:
        return self._assignment().owners[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._assignment().owners)

    def __len__(self) -> int:
        return len(self._assignment().owners)

    def describe(self) -> str:
        """Groups, owners and the balance over ranks, as text."""
        plan = self._assignment()
        rows = [f"{len(plan.specs)} dedicated parameters in {len(plan.groups())} groups on {plan.ranks} ranks"]
        for boundary, specs in plan.groups().items():
            rows.append(f"  {boundary or '(root)'}")
            rows.extend(
                f"    {spec.fqn} {list(spec.shape)} → rank {plan.name_of(plan.owners[spec.fqn])}" for spec in specs
            )
        rows.append(f"most loaded rank over the mean: {plan.imbalance:.3f}")
        return "\n".join(rows)

    def __repr__(self) -> str:
        return f"OwnershipPlan({dict(self)})"
