"""A rule in another language, printed by running its Python function on values that write down.

A value of the tile is FP32 and every operation on it one statement, in the order of the Python
function, so that each rounds once. A scalar is float64, as in Python, and is rounded to FP32 where
it meets a value of the tile, which is what torch does with it.
"""

import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from halfword import ops
from halfword.backends.languages import CPP, Language
from halfword.rules import Rule

MAX_SCALARS = 16

Kind = Literal["tile", "mask", "scalar", "flag"]  # a mask is a bool per element, a flag one bool


@dataclass(frozen=True)
class Traced:
    """A rule's update, written down.

    Attributes:
        before: statements on scalars.
        inside: statements on values of the tile, after those.
        x: the name of the new weight.
        slots: the names of the new slots.
        num_scalars: how many scalars it takes, the gradient's scale among them.
    """

    before: list[str]
    inside: list[str]
    x: str
    slots: list[str]
    num_scalars: int


@dataclass(frozen=True)
class TracedScalars:
    """A rule's scalars, written down.

    Attributes:
        statements: on float64 values.
        scalars: the names of the scalars.
        inputs: the settings that they are computed from, each with its place in a pair or None.
    """

    statements: list[str]
    scalars: list[str]
    inputs: list[tuple[str, int | None]]


def print_rule(rule: Rule) -> str:
    """Return a C++ function that updates one tile; it leaves slots without subnormal numbers.

    Raises:
        TypeError: the rule does what cannot be printed.
    """
    traced = trace(rule, CPP)
    names = [slot.name for slot in rule.slots]
    pointers = [f"float* __restrict {name} = slots[{i}];" for i, name in enumerate(names)]
    results = [f"x[k] = {traced.x};"]
    for name, value in zip(names, traced.slots, strict=True):
        results.append(f"{name}[k] = flush_subnormals({value});")
    return "\n".join(
        [
            f"void update_{rule.name}(float* __restrict x, const float* __restrict g,",
            "        float* const* slots, const double* scalars) {",
            *(f"    {line}" for line in pointers + traced.before),
            "    for (int k = 0; k < TILE; ++k) {",
            *(f"        {line}" for line in traced.inside + results),
            "    }",
            "}",
        ]
    )


def trace(rule: Rule, language: Language) -> Traced:
    """Run a rule's update on values that write down what is done to them.

    Raises:
        TypeError: the rule does what cannot be printed.
    """
    for num_scalars in range(MAX_SCALARS + 1):
        try:
            return _Trace(language).update(rule, num_scalars)
        except ValueError:  # it does not unpack this number of scalars
            continue
    raise TypeError(f"rule {rule.name!r} does not unpack its scalars, or more than {MAX_SCALARS}")


def trace_scalars(rule: Rule, settings: Mapping[str, Any], language: Language) -> TracedScalars:
    """Run a rule's scalars on values that write down what is done to them.

    Args:
        rule: the rule.
        settings: of a parameter group; flags are taken as they are, numbers become inputs, called
            ``input0`` and so on. The step is an input called ``step``.
        language: has a ``scalar_word``.

    Raises:
        TypeError: the scalars are computed by what cannot be printed.
    """
    tracer = _Trace(language)
    inputs = _Inputs(tracer, settings)
    scalars = tracer.remade(rule.scalars)(inputs, tracer.new("scalar", "step"))
    names = [tracer.as_scalar(value) for value in scalars]
    return TracedScalars(tracer.before, names, list(inputs.places))


class _Trace:
    """Statements written down while a rule runs."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.before: list[str] = []
        self.inside: list[str] = []
        self._rounded: dict[str, str] = {}
        self._numbers: dict[str, Iterator[int]] = defaultdict(count)

    def update(self, rule: Rule, num_scalars: int) -> Traced:
        scale, *scalars = (
            self.new("scalar", self.language.scalar.format(index))
            for index in range(num_scalars + 1)
        )
        g = self.operate("*", self._input("g"), scale)
        x, *slots = map(self._input, ("x", *(slot.name for slot in rule.slots)))
        new_x, new_slots = self.remade(rule.update)(x, g, tuple(slots), tuple(scalars))
        names = [self.as_tile(value) for value in (new_x, *new_slots)]
        return Traced(self.before, self.inside, names[0], names[1:], num_scalars + 1)

    def remade(self, function: types.FunctionType | Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that writes down the words of ``halfword.ops`` that it calls."""
        if not isinstance(function, types.FunctionType):
            return function
        if function.__module__ == ops.__name__:
            return self.where if function is ops.where else self._word(function.__name__)
        names = {"__builtins__": function.__globals__["__builtins__"]}
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                names[name] = self.remade(function.__globals__[name])
        return types.FunctionType(
            function.__code__,
            names,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )

    def new(self, kind: Kind, expression: str) -> "_Value":
        """Write down a statement that gives ``expression`` a name."""
        lines = self.inside if kind in ("tile", "mask") else self.before
        of_tile, of_scalar, of_comparison = self.language.types
        type_name = {"tile": of_tile, "scalar": of_scalar}.get(kind, of_comparison)
        return _Value(self, kind, self._named(lines, type_name, kind, expression))

    def operate(self, symbol: str, left: Any, right: Any) -> "_Value":
        """Write down one operation of Python on two values, or on a value and a number."""
        is_comparison = symbol in ("<", "<=", ">", ">=")
        if "tile" in (_kind(left), _kind(right)):
            if symbol == "/" and _kind(left) != "tile":
                raise TypeError("a scalar divided by a tile rounds twice in torch; turn it around")
            template = self.language.divided if symbol == "/" else f"{{}} {symbol} {{}}"
            expression = template.format(self.as_tile(left), self.as_tile(right))
            return self.new("mask" if is_comparison else "tile", expression)
        expression = f"{self.as_scalar(left)} {symbol} {self.as_scalar(right)}"
        return self.new("flag" if is_comparison else "scalar", expression)

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """Write down ``ops.where``."""
        if isinstance(condition, bool):
            return yes if condition else no
        kind: Kind = "tile"
        if _kind(condition) == "flag" and "tile" not in (_kind(yes), _kind(no)):
            kind = "scalar"
        elif _kind(condition) not in ("mask", "flag"):
            raise TypeError("where() takes a comparison")
        written = map(self.as_tile if kind == "tile" else self.as_scalar, (yes, no))
        return self.new(kind, self.language.chosen.format(condition.name, *written))

    def as_tile(self, value: Any) -> str:
        """Return the name of a value in FP32; a scalar is rounded to it once."""
        if _kind(value) == "tile":
            return str(value.name)
        scalar = self.as_scalar(value)
        if scalar not in self._rounded:
            expression = self.language.rounded.format(scalar)
            of_tile = self.language.types[0]
            self._rounded[scalar] = self._named(self.before, of_tile, "rounded", expression)
        return self._rounded[scalar]

    def as_scalar(self, value: Any) -> str:
        """Return the name of a scalar, or how a number is written."""
        if _kind(value) == "scalar":
            return str(value.name)
        if isinstance(value, int | float) and math.isfinite(value):
            return self.language.number.format(repr(float(value)))
        raise TypeError(f"{value!r} is not a number that a rule can compute with")

    def _input(self, name: str) -> "_Value":
        return self.new("tile", self.language.element.format(name))

    def _named(self, lines: list[str], type_name: str, prefix: str, expression: str) -> str:
        name = f"{prefix}{next(self._numbers[prefix])}"
        lines.append(self.language.statement.format(type=type_name, name=name, value=expression))
        return name

    def _word(self, name: str) -> Callable[..., "_Value"]:
        def write(*values: Any) -> _Value:
            if any(_kind(value) == "tile" for value in values):
                written, of_values = self.language.word, map(self.as_tile, values)
                return self.new("tile", f"{written.format(name)}({', '.join(of_values)})")
            if not self.language.scalar_word:
                raise TypeError(f"{name}() of scalars belongs to the rule's scalars")
            written, of_values = self.language.scalar_word, map(self.as_scalar, values)
            return self.new("scalar", f"{written.format(name)}({', '.join(of_values)})")

        return write


def _operator(symbol: str) -> Any:
    return lambda left, right: left.trace.operate(symbol, left, right)


def _reflected(symbol: str) -> Any:
    return lambda right, left: right.trace.operate(symbol, left, right)


@dataclass(frozen=True, eq=False)
class _Value:
    """Something that a rule computes with, by the name it was given."""

    trace: _Trace
    kind: Kind
    name: str

    __add__, __radd__ = _operator("+"), _reflected("+")
    __sub__, __rsub__ = _operator("-"), _reflected("-")
    __mul__, __rmul__ = _operator("*"), _reflected("*")
    __truediv__, __rtruediv__ = _operator("/"), _reflected("/")
    __lt__, __le__ = _operator("<"), _operator("<=")
    __gt__, __ge__ = _operator(">"), _operator(">=")

    def __neg__(self) -> "_Value":
        if self.kind not in ("tile", "scalar"):
            raise TypeError("a comparison has no sign")
        return self.trace.new(self.kind, self.trace.language.negated.format(self.name))

    def __bool__(self) -> bool:
        raise TypeError("a rule chooses with where(), not with if")


class _Inputs(Mapping[str, Any]):
    """Settings whose numbers are inputs of a trace, numbered as they are first asked for."""

    def __init__(self, tracer: _Trace, settings: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._settings = settings
        self.places: dict[tuple[str, int | None], _Value] = {}

    def __getitem__(self, name: str) -> Any:
        value = self._settings[name]
        if isinstance(value, bool | str) or value is None:
            return value
        if isinstance(value, tuple | list):
            return tuple(self._input((name, place)) for place in range(len(value)))
        return self._input((name, None))

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def _input(self, place: tuple[str, int | None]) -> _Value:
        if place not in self.places:
            self.places[place] = self._tracer.new("scalar", f"input{len(self.places)}")
        return self.places[place]


def _kind(value: Any) -> Kind | None:
    return value.kind if isinstance(value, _Value) else None


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
