"""The native backend: C++ on the CPU, compiled on this machine when first used.

A work that it cannot take (a tensor that is not plain and contiguous, a format without C++, another
device) goes to the reference, which gives the same bits; a reason that a user may want to know is
logged once.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword.backends import reference
from halfword.backends.batches import GRADIENTS, Batch, Batches, obstacle, planes_of
from halfword.backends.compiling import CompileError, load
from halfword.backends.exchange import WORDS, Exchange
from halfword.backends.pieces import HEADERS, Pieces, pieces
from halfword.backends.reference import say_once
from halfword.backends.work import Work
from halfword.formats import FORMATS
from halfword.rules import RULES

Places = tuple[int, ...]
"""Of a rule and of the formats of weight and slots, in the tables of the library."""


def step(works: Sequence[Work]) -> None:
    """Take every work through decode, rule and encode, those that share formats in one call."""
    native = library()
    if isinstance(native, CompileError):
        say_once(str(native))
        reference.step(works)
        return
    if not works:
        return
    batches: Batches[Call] | None = works[0].kept.get("native")
    if batches is None or not batches.fit(works):
        batches = works[0].kept["native"] = Batches(works, native.places, native.call)
    for batch in batches.batches:
        native.step(batch, works)
    reference.step([works[number] for number in batches.left])


def unavailable() -> str | None:
    """Return why this machine has no native backend, or None where it has; compiles if need be."""
    native = library()
    return str(native) if isinstance(native, CompileError) else None


@functools.cache
def library() -> "Library | CompileError":
    """Return the compiled pieces, from the cache or compiled now, or why there are none."""
    printed = pieces()
    try:
        return Library(printed, load(printed.source, HEADERS))
    except CompileError as error:
        return error


class Library:
    """The compiled pieces, and the one function that puts them together.

    Attributes:
        exchange: sees what tensors are.
    """

    def __init__(self, pieces: Pieces, compiled: ctypes.CDLL) -> None:
        self._rules = {id(RULES[name]): place for name, place in pieces.rules.items()}
        self._formats = {id(FORMATS[name]): place for name, place in pieces.formats.items()}
        self._missing = pieces.missing
        self._step = compiled.halfword_step
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._step.argtypes = (pointer, pointer, integer, integer, pointer, pointer)
        self._step.restype = None
        self._openmp = _openmp()
        self.exchange = Exchange(compiled)

    def call(self, places: Places, numbers: list[int], works: Sequence[Work]) -> "Call":
        """Make a call of some of the works."""
        return Call(self.exchange, places, numbers, works)

    def step(self, call: "Call", works: Sequence[Work]) -> None:
        """Update the works of a call."""
        chosen = call.chosen(works)
        _alive = call.fill_step(chosen)
        # Before the step, which leaves no tensor in the caches.
        torch.autograd.graph.increment_version(call.planes)
        self._step(
            *(call.table.buffer_info()[0], call.rows.buffer_info()[0], len(chosen)),
            *(torch.get_num_threads(), *self._openmp),
        )

    def places(self, work: Work) -> Places | None:
        """Return the places of a work's rule and formats; None where the reference must run."""
        if not work.gradient.is_cpu:
            return None
        if reason := obstacle(work):
            return say_once(reason)
        stored = (work.weight, *work.slots)
        try:
            return self._rules[id(work.rule)], *(self._formats[id(one.format)] for one in stored)
        except KeyError:
            names = [work.rule.name, *(one.format.name for one in stored)]
            reasons = [self._missing[name] for name in names if name in self._missing]
            return say_once(reasons[0] if reasons else f"one of {', '.join(names)} is not listed")


class Call(Batch):
    """A batch as words of a call, in the order that works.h states.

    Attributes:
        table: the places of rule and formats, the gradient's last.
    """

    def __init__(
        self, exchange: Exchange, places: Places, numbers: list[int], works: Sequence[Work]
    ) -> None:
        chosen = [works[number] for number in numbers]
        # Zeros are filled in at each step.
        rows = [
            (
                *(work.gradient.numel(), work.start, 0, 0),
                *(one.stream for one in (work.weight, *work.slots)),
                *map(Tensor.data_ptr, planes_of(work)),
                0,
            )
            for work in chosen
        ]
        super().__init__(numbers, works, rows)
        self.table = array("q", (*places, GRADIENTS.index(chosen[0].gradient.dtype)))
        self._exchange = exchange
        self._planes = exchange.see(self.planes)
        self._gradients = exchange.see([work.gradient for work in chosen])

    def fits(self, works: Sequence[Work]) -> bool:
        """Whether the tensors are as they were, and the gradients what the call takes."""
        gradients = list(map(attrgetter("gradient"), self.chosen(works)))
        before, self._gradients = self._gradients, self._exchange.see(gradients)
        return (
            set(map(type, gradients)) <= {Tensor, Parameter}
            and self._gradients[1::WORDS] == before[1::WORDS]
            and self._gradients[2::WORDS] == before[2::WORDS]
            and self._exchange.see(self.planes) == self._planes
        )

    def fill_step(self, chosen: Sequence[Work]) -> list[Any]:
        """Write the words of this step, and return what they point into."""
        scale, scalars = None, None
        addresses, alive = array("Q"), []
        for work in chosen:
            # By identity: works of a group share them, and 0.0 and -0.0 differ.
            if work.scalars is not scalars or work.gradient_scale is not scale:
                scale, scalars = work.gradient_scale, work.scalars
                alive.append(array("d", (scale, *scalars)))
                address = alive[-1].buffer_info()[0]
            addresses.append(address)
        self.fill(2, addresses)
        self.fill(3, array("Q", map(attrgetter("step"), chosen)))
        self.fill(-1, self._gradients[::WORDS])
        return [alive, list(map(attrgetter("gradient"), chosen))]


def _openmp() -> tuple[int | None, int | None]:
    """Return the entries of the OpenMP runtime that torch runs on: one set of threads for both."""
    process = ctypes.CDLL(None)
    try:
        entries = process.GOMP_parallel, process.omp_get_thread_num
    except AttributeError:
        return None, None
    parallel, thread_number = (ctypes.cast(entry, ctypes.c_void_p).value for entry in entries)
    return parallel, thread_number
