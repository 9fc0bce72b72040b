"""The Triton of a step: a rule printed from Python, between the pieces of its formats.

A module is printed for each combination of rule, formats and gradient dtype. It has the step twice:
``full`` for tiles that are whole and aligned, without a mask, so that every access is a vector, and
``rest`` for all others. What is printed is straight-line code. The formats' functions, named after
their formats, the words and the noise are in ``kernels/``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from halfword.backends.languages import TRITON
from halfword.backends.tracing import trace
from halfword.formats import Format, Plane
from halfword.rules import Rule

COUNT, FIRST, SCALARS, FULL, REST, STREAMS = range(6)
"""Places of the words in a work's row: its elements, the index of the first one, its place in the
table of scalars, the number that the program of its first tile has in either kernel; the noise
streams of the weight and each slot; after those the addresses of all planes and of the gradient."""

_GRADIENTS = {
    torch.float32: "plain.decode_fp32",
    torch.bfloat16: "plain.decode_bf16",
    torch.float16: "half.decode_fp16",
}

VECTOR_BYTES = 16

_STORED = {torch.float32: "tl.float32", torch.uint8: "tl.uint8"}  # others as signed patterns


def print_step(
    rule: Rule, formats: Sequence[Format], gradient: torch.dtype, guarded: bool = False
) -> str:
    """Return a module with the kernels ``full`` and ``rest``.

    Args:
        rule: the update.
        formats: of the weight, then of each slot.
        gradient: the gradients' dtype.
        guarded: whether they write nothing at step 0.

    Raises:
        TypeError: the rule does what cannot be printed.
    """
    modules = {module_of(format) for format in formats} | {_GRADIENTS[gradient].partition(".")[0]}
    parts = ", ".join(sorted(modules | {"noise", "words"}))
    names = ", ".join(format.name for format in formats)
    lines = [
        f'"""{rule.name} on {names} with {gradient} gradients, printed by halfword."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        f"from halfword.backends.kernels import {parts}",
    ]
    for name in ("full", "rest"):
        step = _Step(name == "full", guarded, rule, formats, gradient)
        lines += ["", "", "@triton.jit"]
        lines += [f"def {name}(rows, all_scalars, owners, TILE: tl.constexpr):"]
        lines += [f"    {line}" for line in step.lines()]
    return "\n".join(lines) + "\n"


def num_words(formats: Sequence[Format]) -> int:
    """Return how many words the row of a work has."""
    return STREAMS + len(formats) + sum(len(format.planes) for format in formats) + 1


def module_of(format: Format) -> str:
    """Return the name of the module beside a format's: ``split`` for formats/split.py."""
    return format.encode.__module__.rpartition(".")[2]


def function_of(format: Format, what: str) -> str:
    """Return the name of the function that decodes or encodes: ``encode_bf16_sr``."""
    name = re.sub(r"\W", "_", format.name)
    return f"{what}_{name}"


@dataclass(frozen=True)
class _Pointers:
    """Where a plane's entries of one tile are: a block of pointers called ``name``."""

    name: str
    word: int
    plane: Plane
    full: bool

    def made(self) -> Iterator[str]:
        dtype, block = self.plane.dtype, self.plane.block
        stored = _STORED.get(dtype, f"tl.int{8 * dtype.itemsize}")
        each = "each" if block == 1 else f"tl.arange(0, TILE // {block})"
        start = "start" if block == 1 else f"start // {block}"
        base = f"tl.load(row + {self.word}).to(tl.pointer_type({stored}))"
        pointers = f"{base} + {start} + {each}"
        yield f"{self.name} = " + (
            f"tl.multiple_of({pointers}, {VECTOR_BYTES})" if self.full else pointers
        )

    def loaded(self) -> str:
        return f"tl.load({self.name}{'' if self.full else f', mask={self._mask()}, other=0'})"

    def stored(self, value: str) -> str:
        return f"tl.store({self.name}, {value}{'' if self.full else f', mask={self._mask()}'})"

    def _mask(self) -> str:
        if self.plane.block == 1:
            return "each < left"
        return f"tl.arange(0, TILE // {self.plane.block}) * {self.plane.block} < left"


class _Step:
    """The body of one kernel."""

    def __init__(
        self,
        full: bool,
        guarded: bool,
        rule: Rule,
        formats: Sequence[Format],
        gradient: torch.dtype,
    ) -> None:
        self.full = full
        self.guarded = guarded
        self.rule = rule
        self.names = ["x", *(slot.name for slot in rule.slots)]
        self.formats = formats
        self.gradient = gradient
        word = STREAMS + len(formats)
        self.pointers: list[list[_Pointers]] = []
        for name, format in zip(self.names, formats, strict=True):
            planes = enumerate(format.planes)
            self.pointers.append(
                [_Pointers(f"{name}_at{i}", word + i, plane, full) for i, plane in planes]
            )
            word += len(format.planes)
        self.gradient_pointers = _Pointers("g_at", word, Plane("", gradient), full)

    def lines(self) -> Iterator[str]:
        traced = trace(self.rule, TRITON)
        yield "program = tl.program_id(0)"
        yield f"row = rows + tl.load(owners + program).to(tl.int64) * {num_words(self.formats)}"
        yield f"start = (program - tl.load(row + {FULL if self.full else REST})) * TILE"
        # The step stands behind the scalars.
        yield f"scalars = all_scalars + tl.load(row + {SCALARS}) * {traced.num_scalars + 1}"
        yield f"step = tl.load(scalars + {traced.num_scalars})"
        if self.guarded:
            yield "if step == 0.0:"
            yield "    return"
        yield "each = tl.arange(0, TILE)"
        if not self.full:
            yield f"left = tl.load(row + {COUNT}) - start"
        yield from self._decoded()
        yield from traced.before
        yield from traced.inside
        if any(format.stochastic for format in self.formats):
            yield f"first = tl.load(row + {FIRST}) + start"
        yield from self._encoded([traced.x, *traced.slots])

    def _decoded(self) -> Iterator[str]:
        for name, format, pointers in zip(self.names, self.formats, self.pointers, strict=True):
            for one in pointers:
                yield from one.made()
            planes = ", ".join(one.loaded() for one in pointers)
            yield f"{name} = {_path(format, 'decode')}({planes})"
        yield from self.gradient_pointers.made()
        yield f"g = {_GRADIENTS[self.gradient]}({self.gradient_pointers.loaded()})"

    def _encoded(self, values: Sequence[str]) -> Iterator[str]:
        parts = zip(self.names, self.formats, self.pointers, values, strict=True)
        for place, (name, format, pointers, value) in enumerate(parts):
            arguments = [value if place == 0 else f"words.flush_subnormals({value})"]
            if format.stochastic:
                yield f"{name}_key = noise.key(tl.load(row + {STREAMS + place}), step)"
                of_tile = "tile_bits({}, first, TILE)" if self.full else "bits({}, first + each)"
                yield f"{name}_noise = noise.{of_tile.format(f'{name}_key')}"
                arguments.append(f"{name}_noise")
            planes = [f"{name}_new{i}" for i in range(len(pointers))]
            yield f"{', '.join(planes)} = {_path(format, 'encode')}({', '.join(arguments)})"
            for one, plane in zip(pointers, planes, strict=True):
                yield one.stored(plane)


def _path(format: Format, what: str) -> str:
    return f"{module_of(format)}.{function_of(format, what)}"
