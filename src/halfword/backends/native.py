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
from typing import Any

import torch
from torch import Tensor

from halfword.backends import reference
from halfword.backends.compiling import CompileError, load
from halfword.backends.pieces import GRADIENTS, HEADERS, Pieces, pieces
from halfword.backends.work import Work
from halfword.formats import FORMATS
from halfword.rules import RULES
from halfword.stored import Stored

logger = logging.getLogger(__name__)

LEFT: tuple[int, ...] = ()
"""The parts of a work that is left to the reference."""


def step(works: Sequence[Work]) -> None:
    """Take every work through decode, rule and encode, those that share formats in one call."""
    native = library()
    if isinstance(native, CompileError):
        _say_once(str(native))
        reference.step(works)
        return
    groups: dict[tuple[int, ...], list[Work]] = defaultdict(list)
    for work in works:
        groups[native.parts(work)].append(work)
    reference.step(groups.pop(LEFT, []))
    for parts, group in groups.items():
        native.step(parts, group)


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

    def parts(self, work: Work) -> tuple[int, ...]:
        """Return the places of rule, formats and gradient in their tables, or ``LEFT``."""
        gradient, stored = work.gradient, (work.weight, *work.slots)
        if not gradient.is_cpu:
            return LEFT
        count = gradient.numel()
        if (
            gradient.dtype not in GRADIENTS
            or not _is_plain(gradient, gradient.dtype, count)
            or not all(
                _is_plain(tensor, plane.dtype, count // plane.block)
                for one in stored
                for plane, tensor in zip(one.format.planes, one.planes, strict=True)
            )
        ):
            return _leave("a tensor is not contiguous, or of a class or dtype of its own")
        try:
            return (
                self._rules[id(work.rule)],
                *(self._formats[id(one.format)] for one in stored),
                GRADIENTS.index(gradient.dtype),
            )
        except KeyError:
            names = (work.rule.name, *(one.format.name for one in stored))
            reasons = [self._missing[name] for name in names if name in self._missing]
            return _leave(reasons[0] if reasons else f"{' or '.join(names)} is not listed")

    def step(self, parts: tuple[int, ...], works: Sequence[Work], start: int = 0) -> None:
        """Update works of the same parts; ``start`` is the index of their first elements."""
        scalars: dict[bytes, array[float]] = {}  # by their bits: 0.0 and -0.0 differ
        words, written = array("Q"), list[Tensor]()
        for work in works:
            values = array("d", (work.gradient_scale, *work.scalars))
            values = scalars.setdefault(values.tobytes(), values)
            stored = (work.weight, *work.slots)
            planes = [plane for one in stored for plane in one.planes]
            words.extend((work.gradient.numel(), start, _address(values)))
            words.extend(map(_key_word, stored))
            words.extend(tensor.data_ptr() for tensor in (*planes, work.gradient))
            written += planes
        places = array("q", parts)
        self._step(
            *(_address(places), _address(words), len(works)),
            *(torch.get_num_threads(), *self._openmp),
        )
        torch.autograd.graph.increment_version(written)


def _is_plain(tensor: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether ``count`` elements of ``dtype`` stand one after the other at the tensor's address."""
    return (
        type(tensor) is Tensor
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


def _leave(reason: str) -> tuple[int, ...]:
    _say_once(reason)
    return LEFT


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("halfword runs its slower reference backend: %s", reason)
