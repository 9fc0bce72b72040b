"""Stalled updates: where an FP32 value would have changed, and what is stored did not."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from halfword.backends import Work, reference
from halfword.formats import FORMATS


@dataclass
class Count:
    """Elements of one state in one format over all that was watched.

    Attributes:
        elements: how many went through a step.
        stalled: how many would have changed in FP32 and did not as stored.
    """

    elements: int = 0
    stalled: int = 0

    @property
    def share(self) -> float:
        """Stalled elements by all."""
        return self.stalled / max(1, self.elements)


class Diagnostics:
    """A handle of ``Optimizer.diagnostics``: counts what each step does until it is closed.

    A step is computed a second time for it, tile by tile and without writing, by the reference.

    Attributes:
        counts: by state (``weight``, ``exp_avg``, ...) and the name of its format.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)
        self._on_close = on_close

    @property
    def stalled(self) -> dict[str, float]:
        """Share of stalled elements by weight format; 0 for those that hold every FP32 value."""
        return {
            format: count.share
            for (state, format), count in self.counts.items()
            if state == "weight"
        }

    @property
    def stalled_share(self) -> float:
        """Share of stalled elements over all weights; NaN where no step was taken."""
        counts = [count for (state, _), count in self.counts.items() if state == "weight"]
        elements = sum(count.elements for count in counts)
        return sum(count.stalled for count in counts) / elements if elements else math.nan

    @torch.no_grad()
    def watch(self, works: Sequence[Work]) -> None:
        """Count over works that are about to be done.

        Raises:
            ValueError: the numbers of a work are on the device alone.
        """
        for work in works:
            if work.clock is not None:
                raise ValueError("diagnostics: cannot follow a step of capturable=True")
            names = ("weight", *(slot.name for slot in work.rule.slots))
            stored = (work.weight, *work.slots)
            for update in reference.updates(work):
                values = zip(names, stored, update.before, update.after, strict=True)
                for name, one, before, after in values:
                    count = self.counts[name, one.format.name]
                    count.elements += before.numel()
                    if not one.format.holds(FORMATS["fp32"]):
                        kept = one.format.decode(one.encoded(after, update.start, work.step))
                        count.stalled += int(((after != before) & (kept == before)).sum())

    def close(self) -> None:
        """Stop counting. Closing twice is harmless."""
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
