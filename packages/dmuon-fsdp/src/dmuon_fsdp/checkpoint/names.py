"""What a model asks for against what a checkpoint has: compared by name and shape before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Shapes = Mapping[str, tuple[int, ...] | None]


class CheckpointKeyError(KeyError):
    """Names that are missing or too many; its text is printed as it stands."""

    def __str__(self) -> str:
        return str(self.args[0])


def check_names(source: str, wanted: Iterable[str], found: Iterable[str], *, strict: bool = True) -> None:
    """Raise unless both are the same names.

    Args:
        source: what was found there, for the message.
        strict: False lets anything pass.

    Raises:
        KeyError: all names that are missing, and all that nobody asks for.
    """
    wanted, found = list(wanted), list(found)
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if not strict or not (missing or extra):
        return
    parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
    parts += [f"has {', '.join(map(repr, extra))}, which nothing here asks for"] if extra else []
    raise CheckpointKeyError(f"{source} {' and '.join(parts)}; strict=False loads what both have")


def check_shapes(source: str, wanted: Shapes, found: Shapes) -> None:
    """Raise ValueError naming every entry of both whose shape differs; None stands for something that is no tensor."""
    both = [name for name in wanted if name in found]
    wrong = [
        f"{name!r} {_plain(found[name])} for {_plain(wanted[name])}" for name in both if _differ(name, wanted, found)
    ]
    if wrong:
        raise ValueError(f"{source} has other shapes than the model: {', '.join(wrong)}")


def _differ(name: str, wanted: Shapes, found: Shapes) -> bool:
    return _plain(wanted[name]) != _plain(found[name])


def _plain(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(tuple(shape))
