"""The ownership runtime under FSDP2: one owner per matrix.

Rooms: ``planning`` decides, ``runtime`` remembers, ``comm`` moves, ``optim`` orders; ``dmuon_core`` computes. Users
call what ``dmuon`` re-exports.
"""

from dmuon_fsdp.planning.assign import plan_owners
from dmuon_fsdp.planning.options import PlanningOptions

__version__ = "0.1.0"

__all__ = ["PlanningOptions", "plan_owners"]
