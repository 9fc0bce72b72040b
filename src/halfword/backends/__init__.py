"""Backends run decode, rule and encode over a list of works; all give the same bits."""

from collections.abc import Callable, Sequence

from halfword.backends import reference
from halfword.backends.work import Work

BACKENDS: dict[str, Callable[[Sequence[Work]], None]] = {"reference": reference.step}


def choose(name: str) -> Callable[[Sequence[Work]], None]:
    """Return the step function of the backend called ``name``, or of the best one for ``auto``."""
    return BACKENDS["reference" if name == "auto" else name]


__all__ = ["BACKENDS", "Work", "choose"]
