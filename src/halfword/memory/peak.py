"""The most memory that was in use at one time, as whoever handed it out says.

On a CPU that is torch's profiler, which sees every allocation; on an accelerator, the statistics of
its caching allocator. Neither knows what was planned.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from halfword.shards import local

QUIET = "6"  # above all of Kineto's levels: it would write a line to stderr at each start


class Peak:
    """Watches a stretch of a program, as a context, for memory beyond what was there before.

    Attributes:
        components: bytes beyond that at the peak, by component: ``gradients``, those that were
            held when ``note_gradients`` was called, where the profiler tells them apart, and
            ``transient`` for the rest: activations, temporaries, communication.
    """

    def __init__(self, device: torch.device) -> None:
        self.components: dict[str, int] = {}
        self._device = device
        self._before = 0
        self._gradients: set[tuple[int, int]] = set()  # (address, bytes) of storages
        self._entry: Tensor | None = None
        self._profile: Any = None

    def note_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Say which tensors are gradients, while all of them are held."""
        storages = (local(gradient).untyped_storage() for gradient in gradients)
        self._gradients = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
        self._entry = torch.empty(1)  # its allocation says when this was

    def __enter__(self) -> Self:
        if self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
            # Not torch.profiler: that imports the compiler, which takes seconds.
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        else:
            torch.accelerator.synchronize(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._before = torch.accelerator.memory_allocated(self._device)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._profile is None:
            most = torch.accelerator.max_memory_allocated(self._device)
            self.components = {"transient": most - self._before}
            return
        self._profile.__exit__(*exception)
        if exception == (None, None, None):
            entry = None if self._entry is None else self._entry.data_ptr()
            self.components = highest(_events(self._profile), self._gradients, entry)
        self._profile = None  # it holds a record of every operation


@dataclass(frozen=True)
class Event:
    """An allocation, or where ``size`` is negative the end of one."""

    time_ns: int
    address: int
    size: int


def highest(
    events: Iterable[Event], gradients: set[tuple[int, int]], entry: int | None = None
) -> dict[str, int]:
    """Return the bytes alive when most were, of those that ``events`` began.

    Other threads, as gloo's, free memory without an event. So an address that is handed out again
    was free, and what is alive at the entry of the optimizer's step is the gradients.

    Args:
        events: in any order.
        gradients: address and bytes of storages; of each the last allocation counts as one.
        entry: address of what was last allocated there as the optimizer's step began.
    """
    ordered = sorted(events, key=lambda event: event.time_ns)
    last = {(event.address, event.size): number for number, event in enumerate(ordered)}
    of_gradients = {last[key] for key in gradients if key in last}
    starts = [number for number, event in enumerate(ordered) if event.address == entry]
    entered = max((n for n in starts if ordered[n].size > 0), default=None)
    alive: dict[int, tuple[int, int]] = {}  # by address: bytes, and bytes of a gradient
    total = gradient_total = most = gradients_then = 0
    for number, event in enumerate(ordered):
        if number == entered:
            alive = {address: sizes for address, sizes in alive.items() if sizes[1]}
            total = gradient_total
        size, as_gradient = alive.pop(event.address, (0, 0))
        total, gradient_total = total - size, gradient_total - as_gradient
        if event.size > 0:
            as_gradient = event.size if number in of_gradients else 0
            alive[event.address] = event.size, as_gradient
            total, gradient_total = total + event.size, gradient_total + as_gradient
        if total > most:
            most, gradients_then = total, gradient_total
    return {"gradients": gradients_then, "transient": most - gradients_then}


def _events(profile: Any) -> Iterable[Event]:
    waiting = list(reversed(profile.kineto_results.experimental_event_tree()))
    while waiting:
        node = waiting.pop()
        waiting += reversed(node.children)
        if node.tag == torch._C._profiler._EventType.Allocation:
            about = node.extra_fields
            if about.device.type == "cpu":
                yield Event(node.start_time_ns, about.ptr or 0, about.alloc_size)
