"""Printed kernels made callable, and whether Triton works here. Triton is imported when asked."""

import functools
import hashlib
import importlib
import linecache
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfword.backends.triton_clock import Shape, print_clock
from halfword.backends.triton_source import function_of, module_of, print_step
from halfword.backends.work import Clock
from halfword.formats import Format
from halfword.rules import Rule

TILE, NUM_WARPS = 1024, 4
"""Elements of a program and its warps: 8 elements a thread, so that 2-byte planes move 16 bytes."""

CLOCK_BLOCK = 32
"""Works whose clocks a program advances."""


@functools.cache
def unavailable() -> str | None:
    """Return why Triton cannot be used here, or None where a first kernel has run."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; a build of torch for GPUs brings it"
    if interprets():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "torch finds no GPU"
    try:
        from halfword.backends.kernels.probe import probe

        result = torch.zeros(1, dtype=torch.int32, device=accelerator)
        probe[(1,)](result)
        assert result.item() == 1
    except Exception as error:  # whichever of its tools fails, each in a way of its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"Triton {triton.__version__} does not work on {accelerator}: {reason}"
    return None


def interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of one combination, see ``print_step``."""

    full: Any
    rest: Any

    @staticmethod
    def launch(kernel: Any, rows: Tensor, scalars: Tensor, owners: Tensor) -> None:
        """Run a program for each tile; ``owners`` says whose it is."""
        kernel[(owners.numel(),)](
            *(rows, scalars, owners),
            TILE=TILE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # each operation rounds once
        )


@dataclass(frozen=True, eq=False)
class ClockKernel:
    """The kernel of a clock, see ``print_clock``."""

    advance: Any
    inputs: list[tuple[str, int | None]]
    num_scalars: int

    def words(self, clock: Clock) -> list[int]:
        """Return a work's row, as triton_clock.py names its places, without the counter."""
        finite = 0 if clock.finite is None else clock.finite.data_ptr()
        values = (clock.settings[name] for name, _ in self.inputs)
        places = (place for _, place in self.inputs)
        inputs = (v if p is None else v[p] for v, p in zip(values, places, strict=True))
        return [finite, *map(_word, (clock.scale, *inputs))]

    def launch(self, rows: Tensor, scalars: Tensor, num_works: int) -> None:
        """Write the scalars of every work."""
        grid = (-(-num_works // CLOCK_BLOCK),)
        self.advance[grid](
            *(rows, scalars, num_works),
            BLOCK=CLOCK_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )


@functools.cache
def kernels(
    rule: Rule, formats: tuple[Format, ...], gradient: torch.dtype, guarded: bool
) -> Kernels:
    """Return the kernels of a combination; they are compiled when first launched.

    Raises:
        TypeError: there are none; the message says why.
    """
    for format in formats:
        try:
            module = importlib.import_module(f"halfword.backends.kernels.{module_of(format)}")
            getattr(module, function_of(format, "encode"))
        except (ImportError, AttributeError):
            raise TypeError(f"format {format.name!r} has no Triton piece") from None
    with _named(rule):
        return Kernels(**defined(print_step(rule, formats, gradient, guarded)))


@functools.cache
def clock_kernel(rule: Rule, shape: Shape, scale: Any, guarded: bool) -> ClockKernel:
    """Return the kernel of a rule's clock, see ``print_clock``.

    Raises:
        TypeError: there is none; the message says why.
    """
    with _named(rule):
        printed = print_clock(rule, shape, scale, guarded)
    return ClockKernel(
        inputs=printed.inputs, num_scalars=printed.num_scalars, **defined(printed.source)
    )


def defined(source: str) -> dict[str, Any]:
    """Run a printed module and return its kernels by name.

    Triton reads a kernel's text where Python's tracebacks do, so it is left there.
    """
    file = f"<halfword {hashlib.blake2b(source.encode(), digest_size=8).hexdigest()}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": file}
    exec(compile(source, file, "exec"), names)
    return {name: value for name, value in names.items() if hasattr(value, "run")}


@contextmanager
def _named(rule: Rule) -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        raise TypeError(f"rule {rule.name!r} cannot be printed as Triton ({error})") from error


def _word(value: float | Tensor) -> int:
    """Return the address of a float64 tensor, or the bits of a number."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    (word,) = struct.unpack("Q", struct.pack("d", value))
    return int(word)
