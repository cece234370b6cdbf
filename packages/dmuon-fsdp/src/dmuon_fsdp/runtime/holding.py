"""Which of its parameters' values a group's buckets have: a backward must compute with those of its forward."""

from __future__ import annotations

from collections.abc import Sequence

from dmuon_fsdp.runtime.parameter import DedicatedParam

Values = tuple[int, int, int]


class Holding:
    """What is known of the contents of one group's buckets.

    Attributes:
        values: which values they have, or had before they were freed; equal on all ranks.
        casts_again: copies of what ranks own are freed, and the gather for a backward casts them anew.
        differs: a module wrote to what it computes with, as embeddings with ``max_norm`` do, so that the parameters
            cast anew are something else. It is likely to again, and counts from then on.
    """

    def __init__(self, name: str, members: Sequence[DedicatedParam]) -> None:
        self.values: Values = (0, 0, 0)
        self.casts_again = False
        self.differs = False
        self._name = name
        self._members = members
        self._steps = 0
        self._versions: list[int] = []
        self._written_alone: str | None = None

    @property
    def newest(self) -> Values:
        """Of the parameters: changes whenever they are written, replaced or stepped on all ranks alike."""
        return (
            sum(member.owned.writes for member in self._members),
            sum(member.replacements for member in self._members),
            self._steps,
        )

    def note_step(self) -> None:
        """An optimizer has stepped members; on all ranks that have the group, also those that own nothing of it."""
        self._steps += 1

    def note_filled(self) -> None:
        """The buckets have what the parameters are."""
        self.values = self.newest
        self.casts_again = False
        self.note_own_writes()

    def note_own_writes(self) -> None:
        """What was written to the views until now was no module."""
        self._versions = self._view_versions()

    def note_modules_writes(self) -> None:
        """Before views leave the modules."""
        self.differs = self.differs or self._view_versions() != self._versions

    def note_cast_again(self, stale: Sequence[DedicatedParam]) -> None:
        """The copies are made of what the parameters are now. A prefetch may be in vain: nothing is refused yet.

        Args:
            stale: owned parameters that are others than were freed.
        """
        newest = self.newest
        self._written_alone = stale[0].fqn if stale and newest == self.values else None
        self.values = newest
        self.casts_again = False

    def check(self, before: Values, rank: int) -> None:
        """Raise RuntimeError unless the buckets have what they had ``before``: what a forward computed with.

        On all ranks alike, but for what was written on an owner alone.
        """
        if self.values != before:
            raise RuntimeError(
                f"parameters of {self._name!r} were written between a forward and its backward, which would compute "
                f"with others than the forward did: write, or step, before the forward or after the backward"
            )
        if self._written_alone is not None:
            raise RuntimeError(
                f"rank {rank}: {self._written_alone!r} was written on its owner alone (through .local) between a "
                f"forward and its backward, which would compute with other values than the forward did: write before "
                f"the forward or after the backward"
            )

    def _view_versions(self) -> list[int]:
        return [member.unsharded._version for member in self._members if member.unsharded is not None]
