"""How owners are chosen, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanningOptions:
    """How owners are chosen.

    Attributes:
        balance: what is spread evenly, predicted Newton-Schulz ``"time"`` or ``"numel"``.
        max_bytes_per_rank: most bytes of dedicated parameters that one rank may own; None for no bound.
        pack_below: matrices of one hook boundary with fewer elements than this go to one owner together, as long as
            they stay below it together.
    """

    balance: Literal["time", "numel"] = "time"
    max_bytes_per_rank: int | None = None
    pack_below: int = 0

    def __post_init__(self) -> None:
        if self.balance not in ("time", "numel"):
            raise ValueError(f"PlanningOptions.balance must be 'time' or 'numel', got {self.balance!r}")
        if self.max_bytes_per_rank is not None and self.max_bytes_per_rank < 1:
            raise ValueError(f"PlanningOptions.max_bytes_per_rank must be positive, got {self.max_bytes_per_rank}")
        if self.pack_below < 0:
            raise ValueError(f"PlanningOptions.pack_below must be >= 0, got {self.pack_below}")
