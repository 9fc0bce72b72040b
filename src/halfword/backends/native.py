"""The native backend: C++ on the CPU, compiled on this machine when first used.

A work that it cannot take (a tensor that is not plain and contiguous, a format without C++, another
device) goes to the reference, which gives the same bits; a reason that a user may want to know is
logged once.
"""

import ctypes
import functools
import logging
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword.backends import reference
from halfword.backends.compiling import CompileError, load
from halfword.backends.pieces import GRADIENTS, HEADERS, Pieces, pieces
from halfword.backends.work import Work
from halfword.formats import FORMATS
from halfword.rules import RULES
from halfword.stored import Stored

logger = logging.getLogger(__name__)


def step(works: Sequence[Work]) -> None:
    """Take every work through decode, rule and encode, those that share formats in one call."""
    native = library()
    if isinstance(native, CompileError):
        _say_once(str(native))
        reference.step(works)
        return
    left: list[Work] = []
    calls: dict[tuple[int, ...], Call] = defaultdict(Call)
    for work in works:
        row = native.row(work)
        if row is None:
            left.append(work)
        else:
            calls[*row.places, GRADIENTS.index(work.gradient.dtype)].add(row, work)
    for places, call in calls.items():
        native.step(places, call)
    reference.step(left)


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
    """The compiled pieces, and the one function that puts them together."""

    def __init__(self, pieces: Pieces, compiled: ctypes.CDLL) -> None:
        self._rules = {id(RULES[name]): place for name, place in pieces.rules.items()}
        self._formats = {id(FORMATS[name]): place for name, place in pieces.formats.items()}
        self._missing = pieces.missing
        self._step = compiled.halfword_step
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._step.argtypes = (pointer, pointer, integer, integer, pointer, pointer)
        self._step.restype = None
        self._openmp = _openmp()

    def row(self, work: Work) -> "Row | None":
        """Return what the work needs that does not change, or None if the reference must run."""
        row: Row | None = work.kept.get("native")
        if row is None or not row.is_current():
            row = work.kept["native"] = self._look_at(work)
        gradient = work.gradient
        if (
            row.places
            and gradient.dtype in GRADIENTS
            and _is_plain(gradient, gradient.dtype, row.count)
        ):
            return row
        if row.places:
            _say_once("a gradient is not contiguous, or of a class or dtype of its own")
        return None

    def step(self, places: tuple[int, ...], call: "Call") -> None:
        """Update works of the same rule, formats and gradient dtype."""
        table, words = array("q", places), array("Q", call.words)
        self._step(
            *(_address(table), _address(words), call.num_works),
            *(torch.get_num_threads(), *self._openmp),
        )
        torch.autograd.graph.increment_version(call.written)

    def _look_at(self, work: Work) -> "Row":
        stored = (work.weight, *work.slots)
        planes = [plane for one in stored for plane in one.planes]
        row = Row((), work.gradient.numel(), planes, [plane.data_ptr() for plane in planes])
        if not work.gradient.is_cpu:
            return row
        names = (work.rule.name, *(one.format.name for one in stored))
        try:
            places = (
                self._rules[id(work.rule)],
                *(self._formats[id(one.format)] for one in stored),
            )
        except KeyError:
            reasons = [self._missing[name] for name in names if name in self._missing]
            _say_once(reasons[0] if reasons else f"one of {', '.join(names)} is not listed")
            return row
        if all(
            _is_plain(tensor, plane.dtype, row.count // plane.block)
            for one in stored
            for plane, tensor in zip(one.format.planes, one.planes, strict=True)
        ):
            return replace(row, places=places)
        _say_once("a parameter is not contiguous, or of a class of its own")
        return row


@dataclass(slots=True)
class Row:
    """What stays the same of a parameter from step to step.

    Attributes:
        places: of the rule and of each format in their tables; empty if the reference must run.
        count: its elements.
        planes: all tensors that a step writes.
        addresses: where they were when they were looked at.
    """

    places: tuple[int, ...]
    count: int
    planes: list[Tensor]
    addresses: list[int]

    def is_current(self) -> bool:
        """Whether the tensors are as they were: ``.data`` changes one under its name."""
        return (
            self.addresses == [plane.data_ptr() for plane in self.planes]
            and self.planes[0].is_contiguous()
        )


class Call:
    """Works of the same places, as words in the order that works.h states."""

    def __init__(self) -> None:
        self.num_works = 0
        self.words: list[int] = []
        self.written: list[Tensor] = []
        self._scalars: dict[bytes, array[float]] = {}  # by their bits: 0.0 and -0.0 differ

    def add(self, row: Row, work: Work, start: int = 0) -> None:
        """Add a work; ``start`` is the index of its first element."""
        values = array("d", (work.gradient_scale, *work.scalars))
        values = self._scalars.setdefault(values.tobytes(), values)
        self.num_works += 1
        self.words += (row.count, start, _address(values))
        self.words += map(_key_word, (work.weight, *work.slots))
        self.words += row.addresses
        self.words.append(work.gradient.data_ptr())
        self.written += row.planes


def _is_plain(tensor: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether ``count`` elements of ``dtype`` stand one after the other at the tensor's address."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.dtype is dtype
        and tensor.numel() == count
        and tensor.is_contiguous()
        and tensor.is_cpu
    )


def _address(values: "array[Any]") -> int:
    return values.buffer_info()[0]


def _key_word(stored: Stored) -> int:
    low, high = stored.noise_key or (0, 0)
    return high << 32 | low


def _openmp() -> tuple[int | None, int | None]:
    """Return the entries of the OpenMP runtime that torch runs on: one set of threads for both."""
    process = ctypes.CDLL(None)
    try:
        entries = process.GOMP_parallel, process.omp_get_thread_num
    except AttributeError:
        return None, None
    parallel, thread_number = (ctypes.cast(entry, ctypes.c_void_p).value for entry in entries)
    return parallel, thread_number


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("halfword runs its slower reference backend: %s", reason)
