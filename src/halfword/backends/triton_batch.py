"""Works of one launch, their tables on the device, and what a step writes into those."""

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword.backends.batches import Batch, planes_of
from halfword.backends.triton_kernels import TILE, ClockKernel, Kernels
from halfword.backends.triton_source import SCALARS, VECTOR_BYTES
from halfword.backends.triton_tables import Tables, is_capturing
from halfword.backends.work import Work


class Combination(NamedTuple):
    """What works of one launch have in common beside the gradients' dtype.

    Attributes:
        kernels: those of their rule, formats and gradient dtype.
        clock: computes their scalars; None where they bring them.
        device: where they are.
    """

    kernels: Kernels
    clock: ClockKernel | None
    device: torch.device


class Launch(Batch):
    """A batch as rows of words in the order that triton_source.py states."""

    def __init__(self, shared: Combination, numbers: list[int], works: Sequence[Work]) -> None:
        chosen = [works[number] for number in numbers]
        self._shared = shared
        self._aligned = _aligned([work.gradient for work in chosen])
        rows, self._full, self._rest = _layout(chosen, self._aligned)
        self._tables = Tables()
        super().__init__(numbers, works, rows)
        self._dtype = chosen[0].gradient.dtype
        self._counts = [work.gradient.numel() for work in chosen]
        self._addresses = array("Q", map(Tensor.data_ptr, self.planes))
        self._sizes = list(map(attrgetter("nbytes"), self.planes))

    def fits(self, works: Sequence[Work]) -> bool:
        """Whether the tensors are as they were, and the gradients what the launch takes."""
        gradients = [work.gradient for work in self.chosen(works)]
        return (
            set(map(type, gradients)) <= {Tensor, Parameter}
            and set(map(attrgetter("dtype"), gradients)) == {self._dtype}
            and set(map(attrgetter("device"), gradients)) == {self._shared.device}
            and list(map(Tensor.numel, gradients)) == self._counts
            and all(map(Tensor.is_contiguous, gradients))
            and _aligned(gradients) == self._aligned
            and array("Q", map(Tensor.data_ptr, self.planes)) == self._addresses
            and list(map(attrgetter("nbytes"), self.planes)) == self._sizes
            and all(map(Tensor.is_contiguous, self.planes))
        )

    def run(self, works: Sequence[Work]) -> None:
        """Update the works."""
        chosen, tables = self.chosen(works), self._tables
        kernels, clock, device = self._shared
        gradients = map(attrgetter("gradient"), chosen)
        self.fill(-1, array("Q", map(Tensor.data_ptr, gradients)))
        with _on(device):
            scalars = self._computed(chosen, clock) if clock else self._sent(chosen)
            rows = tables.rows.on(device, self.rows)
            for kernel, table, num_tiles in (
                (kernels.full, tables.full, self._full),
                (kernels.rest, tables.rest, self._rest),
            ):
                if any(num_tiles):
                    owners = table.on(device, num_tiles, _owners)
                    kernels.launch(kernel, rows, scalars, owners)
        torch.autograd.graph.increment_version(self.planes)

    def _sent(self, chosen: Sequence[Work]) -> Tensor:
        """Send scalars to the device; each work's place in their table goes into its row."""
        if is_capturing(self._shared.device):
            raise RuntimeError("a graph can capture a step with capturable=True only")
        numbers, places = array("d"), array("Q")
        last, place = None, -1
        for work in chosen:
            # By identity: works of a group share them, and 0.0 and -0.0 differ.
            if last is None or not (
                work.scalars is last.scalars
                and work.gradient_scale is last.gradient_scale
                and work.step == last.step
            ):
                numbers.extend((work.gradient_scale, *work.scalars, work.step))
                last, place = work, place + 1
            places.append(place)
        self.fill(SCALARS, places)
        return self._tables.scalars.on(self._shared.device, numbers)

    def _computed(self, chosen: Sequence[Work], clock: ClockKernel) -> Tensor:
        """Let the clocks of the works compute their scalars."""
        words, device = array("Q"), self._shared.device
        known: dict[tuple[int, int, int], list[int]] = {}
        for read in map(attrgetter("clock"), chosen):
            key = id(read.settings), id(read.scale), id(read.finite)
            if key not in known:
                known[key] = clock.words(read)
            words.append(read.step.data_ptr())
            words.extend(known[key])
        self.fill(SCALARS, array("Q", range(len(chosen))))
        scalars = self._tables.room(len(chosen) * clock.num_scalars, device)
        clock.launch(self._tables.clocks.on(device, words), scalars, len(chosen))
        return scalars


def _layout(
    works: Sequence[Work], aligned: Sequence[bool]
) -> tuple[list[tuple[int, ...]], "array[int]", "array[int]"]:
    """Lay out the tiles of works.

    Args:
        works: of one launch.
        aligned: whether a vector may start where a work's gradient does.

    Returns:
        Rows, zero where steps fill them; for each work its tiles of ``full``, and of ``rest``.
    """
    rows, full, rest = [], array("q"), array("q")
    num_full = num_rest = 0
    for work, of_gradient in zip(works, aligned, strict=True):
        planes, count = planes_of(work), work.gradient.numel()
        vectors = of_gradient and all(_aligned(planes)) and work.start % TILE == 0
        tiles = count // TILE if vectors else 0
        # Of ``rest``, tile 0 would be as many programs earlier as ``full`` has tiles.
        first_rest = (num_rest - tiles) % 2**64
        streams = (one.stream for one in (work.weight, *work.slots))
        rows.append(
            (
                *(count, work.start, 0, num_full, first_rest),
                *(*streams, *map(Tensor.data_ptr, planes), 0),
            )
        )
        full.append(tiles)
        rest.append(-(-count // TILE) - tiles)
        num_full += full[-1]
        num_rest += rest[-1]
    return rows, full, rest


def _aligned(tensors: Sequence[Tensor]) -> list[bool]:
    return [address % VECTOR_BYTES == 0 for address in map(Tensor.data_ptr, tensors)]


def _owners(num_tiles: Tensor) -> Tensor:
    """Return the place of the work that each program has a tile of."""
    return torch.arange(len(num_tiles), dtype=torch.int32).repeat_interleave(num_tiles)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
