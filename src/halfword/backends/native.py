"""The native backend: C++ on the CPU, compiled on this machine when first used.

A work that it cannot take (a tensor that is not plain and contiguous, a format without C++, another
device) goes to the reference, which gives the same bits; a reason that a user may want to know is
logged once.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch

from halfword.backends import reference
from halfword.backends.batches import Batch, Batches, Places, is_plain
from halfword.backends.compiling import CompileError, load
from halfword.backends.pieces import GRADIENTS, HEADERS, Pieces, pieces
from halfword.backends.work import Work
from halfword.formats import FORMATS
from halfword.rules import RULES

logger = logging.getLogger(__name__)


def step(works: Sequence[Work]) -> None:
    """Take every work through decode, rule and encode, those that share formats in one call."""
    native = library()
    if isinstance(native, CompileError):
        _say_once(str(native))
        reference.step(works)
        return
    if not works:
        return
    batches: Batches | None = works[0].kept.get("native")
    if batches is None or not batches.fit(works):
        batches = works[0].kept["native"] = Batches(works, native.places)
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

    def step(self, batch: Batch, works: Sequence[Work]) -> None:
        """Update the works of a batch."""
        words, _alive = batch.words(works)
        self._step(
            *(batch.table.buffer_info()[0], words.buffer_info()[0], batch.num_works),
            *(torch.get_num_threads(), *self._openmp),
        )
        torch.autograd.graph.increment_version(batch.planes)

    def places(self, work: Work) -> Places | None:
        """Return the places of a work's rule and formats; None where the reference must run."""
        stored, gradient = (work.weight, *work.slots), work.gradient
        if not gradient.is_cpu:
            return None
        if gradient.dtype not in GRADIENTS or not is_plain(gradient, gradient.numel()):
            return _say_once("a gradient is not contiguous, or of a class or dtype of its own")
        if not all(
            is_plain(tensor, gradient.numel() // plane.block) and tensor.dtype is plane.dtype
            for one in stored
            for plane, tensor in zip(one.format.planes, one.planes, strict=True)
        ):
            return _say_once("a parameter is not contiguous, or of a class of its own")
        try:
            return self._rules[id(work.rule)], *(self._formats[id(one.format)] for one in stored)
        except KeyError:
            names = [work.rule.name, *(one.format.name for one in stored)]
            reasons = [self._missing[name] for name in names if name in self._missing]
            return _say_once(reasons[0] if reasons else f"one of {', '.join(names)} is not listed")


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
