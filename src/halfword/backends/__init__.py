"""Backends run decode, rule and encode over a list of works; all give the same bits."""

from collections.abc import Callable, Sequence

from halfword.backends import native, reference
from halfword.backends.work import Work

BACKENDS: dict[str, Callable[[Sequence[Work]], None]] = {
    "reference": reference.step,
    "native": native.step,
}


def choose(name: str) -> Callable[[Sequence[Work]], None]:
    """Return the step function of the backend called ``name``, or of the best one for ``auto``.

    Raises:
        ValueError: the backend was asked for by name and does not work on this machine.
    """
    if name == "native" and (reason := native.unavailable()):
        raise ValueError(f"backend='native': {reason}; or use backend='auto'")
    return BACKENDS["native" if name == "auto" else name]


__all__ = ["BACKENDS", "Work", "choose"]
