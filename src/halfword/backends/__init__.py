"""Backends run decode, rule and encode over a list of works; all give the same bits."""

from collections.abc import Callable, Sequence

from halfword.backends import native, reference, triton
from halfword.backends.work import Clock, Work

BACKENDS: dict[str, Callable[[Sequence[Work]], None]] = {
    "reference": reference.step,
    "native": native.step,
    "triton": triton.step,
}

_UNAVAILABLE: dict[str, Callable[[], str | None]] = {
    "native": native.unavailable,
    "triton": triton.unavailable,
}


def choose(name: str) -> Callable[[Sequence[Work]], None]:
    """Return the step function of the backend called ``name``, or of the best one for ``auto``.

    Raises:
        ValueError: the backend was asked for by name and does not work on this machine.
    """
    if name == "auto":
        return _by_device
    if name in _UNAVAILABLE and (reason := _UNAVAILABLE[name]()):
        raise ValueError(f"backend={name!r}: {reason}; or use backend='auto'")
    return BACKENDS[name]


def _by_device(works: Sequence[Work]) -> None:
    """Run works on the CPU in C++, all others in Triton."""
    on_cpu = [work for work in works if work.gradient.is_cpu]
    if on_cpu:
        native.step(on_cpu)
    if len(on_cpu) < len(works):
        triton.step([work for work in works if not work.gradient.is_cpu])


__all__ = ["BACKENDS", "Clock", "Work", "choose"]
