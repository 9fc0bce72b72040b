"""The Triton of a clock: what a step that may be captured in a graph computes before it updates.

For each work it counts the step, computes the rule's scalars from the group's settings in float64,
as Python does on the host, and leaves them in the table that the update reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfword.backends.languages import TRITON
from halfword.backends.tracing import trace_scalars
from halfword.rules import Rule

COUNTER, FINITE, SCALE, INPUTS = range(4)
"""Places of the words in a work's row: the addresses of the step's counter and of the number that
is 0 where nothing is to be written; the gradient's scale and then each input, as the bits of a
float64 or as the address of one."""

NUMBER, ADDRESS = 0.0, object()
"""What stands for a setting that is a number, or a tensor."""

Shape = tuple[tuple[str, Any], ...]


def shape_of(settings: Mapping[str, Any]) -> Shape:
    """Return what a clock is printed for: flags as they are, other settings as what they are."""
    return tuple((name, _kind(value)) for name, value in settings.items())


@dataclass(frozen=True)
class PrintedClock:
    """A printed clock.

    Attributes:
        source: a module with the kernel ``advance``.
        inputs: the settings that its rows hold, each with its place in a pair or None.
        num_scalars: how many numbers it leaves for each work, the step last.
    """

    source: str
    inputs: list[tuple[str, int | None]]
    num_scalars: int


def print_clock(rule: Rule, shape: Shape, scale: Any, guarded: bool) -> PrintedClock:
    """Print the clock of a rule.

    Args:
        rule: the rule.
        shape: of the settings of a group.
        scale: ``NUMBER`` or ``ADDRESS``.
        guarded: whether steps may be told to write nothing.

    Raises:
        TypeError: the scalars are computed by what cannot be printed.
    """
    settings = dict(shape)
    traced = trace_scalars(rule, settings, TRITON)
    kinds = [
        settings[name] if place is None else settings[name][place] for name, place in traced.inputs
    ]
    finite = _at(_word(FINITE), "tl.int32")
    values = [_number(SCALE, scale), *traced.scalars]
    body = [
        "work = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "inside = work < num_works",
        f"row = rows + work.to(tl.int64) * {INPUTS + len(kinds)}",
        "writes = inside" + (f" & ({finite} != 0)" if guarded else ""),
        f"counter = {_word(COUNTER)}.to(tl.pointer_type(tl.float32))",
        "counted = tl.load(counter, mask=inside) + 1.0",
        "tl.store(counter, counted, mask=writes)",
        "step = counted.to(tl.float64)",
        *(f"input{i} = {_number(INPUTS + i, kind)}" for i, kind in enumerate(kinds)),
        *traced.statements,
        f"scalars = all_scalars + work.to(tl.int64) * {len(values) + 1}",
        # Each is rounded to FP32 once.
        *(
            f"tl.store(scalars + {i}, {value}.to(tl.float32).to(tl.float64), mask=inside)"
            for i, value in enumerate(values)
        ),
        f"tl.store(scalars + {len(values)}, tl.where(writes, step, 0.0), mask=inside)",
    ]
    lines = [
        f'"""The clock of {rule.name}, printed by halfword."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from halfword.backends.kernels import words",
        "",
        "",
        '@triton.jit(do_not_specialize=["num_works"])',
        "def advance(rows, all_scalars, num_works, BLOCK: tl.constexpr):",
        *(f"    {line}" for line in body),
    ]
    return PrintedClock("\n".join(lines) + "\n", traced.inputs, len(values) + 1)


def _kind(value: Any) -> Any:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    return ADDRESS if isinstance(value, Tensor) else NUMBER


def _word(place: int) -> str:
    return f"tl.load(row + {place}, mask=inside)"


def _at(word: str, type_name: str) -> str:
    return f"tl.load({word}.to(tl.pointer_type({type_name})), mask=inside)"


def _number(place: int, kind: Any) -> str:
    if kind is ADDRESS:
        return _at(_word(place), "tl.float64")
    return f"{_word(place)}.to(tl.float64, bitcast=True)"
