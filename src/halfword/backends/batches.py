"""Works as the words of calls to the native library, kept from one step to the next.

A step of many small parameters costs what Python and cold memory cost. So what stays the same of a
parameter is written down once, and a step looks at all parameters in a few passes that touch only
their tensors.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword.backends.pieces import GRADIENTS
from halfword.backends.work import Work

Places = tuple[int, ...]
"""Of a rule and of the formats of weight and slots, in the tables of the library."""


class Batches:
    """A list of works, as calls, and those that no call takes.

    Attributes:
        batches: what is called.
        left: places of other works in the list.
    """

    def __init__(self, works: Sequence[Work], places_of: Callable[[Work], Places | None]) -> None:
        self._kept = [work.kept for work in works]
        self.left: list[int] = []
        alike: dict[tuple[Places, torch.dtype], list[int]] = defaultdict(list)
        for number, work in enumerate(works):
            places = places_of(work)
            if places is None:
                self.left.append(number)
            else:
                alike[places, work.gradient.dtype].append(number)
        self.batches = [Batch(key[0], numbers, works) for key, numbers in alike.items()]

    def fit(self, works: Sequence[Work]) -> bool:
        """Whether these are the same works again, of another step."""
        return (
            not self.left  # what was wrong with those may be right now
            and len(works) == len(self._kept)
            and all(map(is_, map(attrgetter("kept"), works), self._kept))
            and all(batch.fits(works) for batch in self.batches)
        )


class Batch:
    """Works of one rule, of the same formats and gradient dtype: a call of the library.

    Attributes:
        table: the places of rule and formats, the gradient's last.
        planes: all tensors that the call writes.
        num_works: how many works it takes.
    """

    def __init__(self, places: Places, numbers: list[int], works: Sequence[Work]) -> None:
        chosen = [works[number] for number in numbers]
        self._dtype = chosen[0].gradient.dtype
        self._numbers = numbers
        self._counts = [work.gradient.numel() for work in chosen]
        self.table = array("q", (*places, GRADIENTS.index(self._dtype)))
        stored = [(work.weight, *work.slots) for work in chosen]
        self._parameters = [weight.planes[0] for weight, *_ in stored]
        planes = [[plane for one in own for plane in one.planes] for own in stored]
        self.planes = list(chain.from_iterable(planes))
        self._addresses = array("Q", map(Tensor.data_ptr, self.planes))
        # In the order that works.h states; zeros are filled in at each step.
        rows = [
            (
                count,
                work.start,
                0,
                0,
                *(one.stream for one in own),
                *map(Tensor.data_ptr, written),
                0,
            )
            for count, work, own, written in zip(self._counts, chosen, stored, planes, strict=True)
        ]
        self.num_works = len(rows)
        self._num_words = len(rows[0])
        self._words = array("Q", chain.from_iterable(rows))

    def fits(self, works: Sequence[Work]) -> bool:
        """Whether the tensors are as they were, and the gradients what the call takes."""
        gradients = [work.gradient for work in self._chosen(works)]
        return (
            set(map(type, gradients)) <= {Tensor, Parameter}
            and set(map(attrgetter("dtype"), gradients)) == {self._dtype}
            and list(map(Tensor.numel, gradients)) == self._counts
            and all(map(Tensor.is_contiguous, gradients))
            and all(map(attrgetter("is_cpu"), gradients))
            # ``.data`` changes a tensor under its name.
            and array("Q", map(Tensor.data_ptr, self.planes)) == self._addresses
            and all(map(Tensor.is_contiguous, self._parameters))
        )

    def words(self, works: Sequence[Work]) -> tuple["array[int]", list[Any]]:
        """Return the call's words for this step, and what they point into."""
        chosen = self._chosen(works)
        scale, scalars = None, None
        addresses, alive = array("Q"), []
        for work in chosen:
            # By identity: works of a group share them, and 0.0 and -0.0 differ.
            if work.scalars is not scalars or work.gradient_scale is not scale:
                scale, scalars = work.gradient_scale, work.scalars
                alive.append(array("d", (scale, *scalars)))
                address = alive[-1].buffer_info()[0]
            addresses.append(address)
        words, stride = self._words, self._num_words
        words[2::stride] = addresses
        words[3::stride] = array("Q", map(attrgetter("step"), chosen))
        gradients = list(map(attrgetter("gradient"), chosen))
        words[stride - 1 :: stride] = array("Q", map(Tensor.data_ptr, gradients))
        return words, [alive, gradients]

    def _chosen(self, works: Sequence[Work]) -> Sequence[Work]:
        if len(works) == len(self._numbers):
            return works
        return [works[number] for number in self._numbers]


def is_plain(tensor: Tensor, count: int) -> bool:
    """Whether ``count`` elements stand one after the other at the tensor's address."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.numel() == count
        and tensor.is_contiguous()
        and tensor.is_cpu
    )
