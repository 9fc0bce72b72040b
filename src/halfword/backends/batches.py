"""Works of one call of a backend, kept from one step to the next.

A step of many small parameters costs what Python and cold memory cost. So what stays the same of a
parameter is written down once, and a step looks at all parameters in a few passes that touch only
their tensors.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword.backends.work import Work

BatchT = TypeVar("BatchT", bound="Batch")
Key = TypeVar("Key", bound=Hashable)

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that a gradient may have, in the order of ``GRADIENTS`` in entry.h."""


class Batches(Generic[BatchT]):
    """A list of works, as calls, and those that no call takes.

    Attributes:
        batches: what is called.
        left: places of other works in the list.
    """

    def __init__(
        self,
        works: Sequence[Work],
        key_of: Callable[[Work], Key | None],
        make: Callable[[Key, list[int], Sequence[Work]], BatchT],
    ) -> None:
        """Put works together.

        Args:
            works: the list.
            key_of: gives what the works of a call have in common beside the gradients' dtype; None
                for one that no call takes.
            make: makes a call of a key and of the places of its works.
        """
        self._kept = [work.kept for work in works]
        self.left: list[int] = []
        alike: dict[tuple[Key, torch.dtype], list[int]] = defaultdict(list)
        for number, work in enumerate(works):
            key = key_of(work)
            if key is None:
                self.left.append(number)
            else:
                alike[key, work.gradient.dtype].append(number)
        self.batches = [make(key, numbers, works) for (key, _), numbers in alike.items()]

    def fit(self, works: Sequence[Work]) -> bool:
        """Whether these are the same works again, of another step."""
        return (
            not self.left  # what was wrong with those may be right now
            and len(works) == len(self._kept)
            and all(map(is_, map(attrgetter("kept"), works), self._kept))
            and all(batch.fits(works) for batch in self.batches)
        )


class Batch:
    """Works of one rule, of the same formats and gradient dtype: a call of a backend.

    Attributes:
        planes: all tensors that the call writes.
        rows: 64-bit words of each work in turn, in an order that the backend states; those of a
            step are filled in as it comes.
    """

    def __init__(
        self, numbers: list[int], works: Sequence[Work], rows: Sequence[Sequence[int]]
    ) -> None:
        self._numbers = numbers
        self.planes = list(chain.from_iterable(planes_of(works[number]) for number in numbers))
        self.rows = array("Q", chain.from_iterable(rows))
        self._num_words = len(rows[0])

    def fits(self, works: Sequence[Work]) -> bool:
        """Whether the tensors are as they were, and the gradients what the call takes.

        What is behind a tensor may change under its name: by ``.data``, or in place.
        """
        raise NotImplementedError

    def fill(self, word: int, values: "array[int]") -> None:
        """Write a word of each row, counted from the end where it is negative."""
        self.rows[word % self._num_words :: self._num_words] = values

    def chosen(self, works: Sequence[Work]) -> Sequence[Work]:
        """Return the works of this call among those of a step."""
        if len(works) == len(self._numbers):
            return works
        return [works[number] for number in self._numbers]


def planes_of(work: Work) -> list[Tensor]:
    """Return the tensors that a work writes, the weight's first."""
    return [plane for one in (work.weight, *work.slots) for plane in one.planes]


def obstacle(work: Work) -> str | None:
    """Return why a work's tensors cannot be read and written through their addresses, or None."""
    gradient = work.gradient
    count, device = gradient.numel(), gradient.device
    if gradient.dtype not in GRADIENTS or not _is_plain(gradient, count, device):
        return "a gradient is not contiguous, or of a class or dtype of its own"
    stored = (work.weight, *work.slots)
    expected = [plane for one in stored for plane in one.format.planes]
    if not all(
        _is_plain(tensor, count // plane.block, device) and tensor.dtype is plane.dtype
        for plane, tensor in zip(expected, planes_of(work), strict=True)
    ):
        return "a parameter is not contiguous, or of a class of its own"
    if work.weight.place.outer and any(one.format.stochastic for one in stored):
        return "a shard with stochastic rounding is not one run of its parameter"
    return None


def _is_plain(tensor: Tensor, count: int, device: torch.device) -> bool:
    """Whether ``count`` elements stand one after the other at the tensor's address."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.numel() == count
        and (tensor.data_ptr() != 0 or count == 0)  # its storage may have been freed in place
        and tensor.is_contiguous()
        and tensor.device == device
    )
