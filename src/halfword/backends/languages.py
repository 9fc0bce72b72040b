"""How C++ and Triton write what a traced rule does."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """How things are written; each is a template.

    Attributes:
        statement: gives a ``value`` of a ``type`` a ``name``.
        types: the type of an FP32 value, of a scalar, and of what a comparison gives.
        element: an input of the rule, by the name of its tile.
        scalar: one of the rule's scalars, by its place; the gradient's scale is at 0.
        number: a float64 literal.
        rounded: a scalar as FP32.
        divided: one FP32 value by another.
        negated: a value; zeros change their sign too.
        chosen: one of two values, by a condition.
        word: a name of ``halfword.ops`` for FP32 values.
        scalar_word: the same for scalars; "" where scalars come from Python.
    """

    statement: str
    types: tuple[str, str, str]
    element: str
    scalar: str
    number: str
    rounded: str
    divided: str
    negated: str
    chosen: str
    word: str
    scalar_word: str


CPP = Language(
    statement="const {type} {name} = {value};",
    types=("float", "double", "bool"),
    element="{}[k]",
    scalar="scalars[{}]",
    number="{}",
    rounded="float({})",
    divided="{} / {}",
    negated="-{}",
    chosen="{} ? {} : {}",
    word="{}",
    scalar_word="",
)
"""C++, one element at a time; the words are in cpp/ops.h."""

TRITON = Language(
    statement="{name} = {value}",
    types=("", "", ""),
    element="{}",
    scalar="tl.load(scalars + {})",
    number="tl.full((), {}, tl.float64)",
    rounded="{}.to(tl.float32)",
    divided="tl.div_rn({}, {})",  # `/` on FP32 is an approximation
    negated="{} * -1.0",  # `-` subtracts from +0
    chosen="tl.where({}, {}, {})",
    word="words.{}",
    scalar_word="words.scalar_{}",
)
"""Triton, a tile at a time; the words are in kernels/words.py."""
