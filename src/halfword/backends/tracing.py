"""A rule as C++, printed by running its Python function on values that write down what is done.

A value of the tile is a ``float`` and every operation on it one statement, in the order of the
Python function, so that each rounds once. A scalar is a ``double``, as in Python, and becomes a
``float`` where it meets a value of the tile, which is what torch does with it.
"""

import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from halfword import ops
from halfword.rules import Rule

MAX_SCALARS = 16

Kind = Literal["tile", "mask", "scalar", "flag"]  # a mask is a bool per element, a flag one bool


def print_rule(rule: Rule) -> str:
    """Return a C++ function that updates one tile; it leaves slots without subnormal numbers.

    Raises:
        TypeError: the rule does what cannot be printed.
    """
    for num_scalars in range(MAX_SCALARS + 1):
        try:
            return _Trace().function(rule, num_scalars)
        except ValueError:  # it does not unpack this number of scalars
            continue
    raise TypeError(f"rule {rule.name!r} does not unpack its scalars, or more than {MAX_SCALARS}")


class _Trace:
    """Statements written down while a rule runs."""

    def __init__(self) -> None:
        self.before_loop: list[str] = []
        self.in_loop: list[str] = []
        self._rounded: dict[str, str] = {}
        self._numbers: dict[str, Iterator[int]] = defaultdict(count)

    def function(self, rule: Rule, num_scalars: int) -> str:
        names = [slot.name for slot in rule.slots]
        for index, name in enumerate(names):
            self.before_loop.append(f"float* __restrict {name} = slots[{index}];")
        scale, *scalars = (
            self.new("scalar", f"scalars[{index}]") for index in range(num_scalars + 1)
        )
        g = self.operate("*", self.new("tile", "g[k]"), scale)
        x, *slots = (self.new("tile", f"{name}[k]") for name in ("x", *names))
        new_x, new_slots = self.remade(rule.update)(x, g, tuple(slots), tuple(scalars))
        self.in_loop.append(f"x[k] = {self.as_tile(new_x)};")
        for name, value in zip(names, new_slots, strict=True):
            self.in_loop.append(f"{name}[k] = flush_subnormals({self.as_tile(value)});")
        return "\n".join(
            [
                f"void update_{rule.name}(float* __restrict x, const float* __restrict g,",
                "        float* const* slots, const double* scalars) {",
                *(f"    {line}" for line in self.before_loop),
                "    for (int k = 0; k < TILE; ++k) {",
                *(f"        {line}" for line in self.in_loop),
                "    }",
                "}",
            ]
        )

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
        lines = self.in_loop if kind in ("tile", "mask") else self.before_loop
        type_name = {"tile": "float", "scalar": "double"}.get(kind, "bool")
        return _Value(self, kind, self._named(lines, type_name, kind, expression))

    def operate(self, symbol: str, left: Any, right: Any) -> "_Value":
        """Write down one operation of Python on two values, or on a value and a number."""
        is_comparison = symbol in ("<", "<=", ">", ">=")
        if "tile" in (_kind(left), _kind(right)):
            if symbol == "/" and _kind(left) != "tile":
                raise TypeError("a scalar divided by a tile rounds twice in torch; turn it around")
            expression = f"{self.as_tile(left)} {symbol} {self.as_tile(right)}"
            return self.new("mask" if is_comparison else "tile", expression)
        expression = f"{_as_scalar(left)} {symbol} {_as_scalar(right)}"
        return self.new("flag" if is_comparison else "scalar", expression)

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """Write down ``ops.where``."""
        if isinstance(condition, bool):
            return yes if condition else no
        if _kind(condition) == "flag" and "tile" not in (_kind(yes), _kind(no)):
            return self.new("scalar", f"{condition.name} ? {_as_scalar(yes)} : {_as_scalar(no)}")
        if _kind(condition) not in ("mask", "flag"):
            raise TypeError("where() takes a comparison")
        return self.new("tile", f"{condition.name} ? {self.as_tile(yes)} : {self.as_tile(no)}")

    def as_tile(self, value: Any) -> str:
        """Return the name of a value as ``float``, a scalar rounded to it before the loop."""
        if _kind(value) == "tile":
            return str(value.name)
        scalar = _as_scalar(value)
        if scalar not in self._rounded:
            rounded = self._named(self.before_loop, "float", "rounded", f"float({scalar})")
            self._rounded[scalar] = rounded
        return self._rounded[scalar]

    def _named(self, lines: list[str], type_name: str, prefix: str, expression: str) -> str:
        name = f"{prefix}{next(self._numbers[prefix])}"
        lines.append(f"const {type_name} {name} = {expression};")
        return name

    def _word(self, name: str) -> Callable[..., "_Value"]:
        return lambda *values: self.new("tile", f"{name}({', '.join(map(self.as_tile, values))})")


def _operator(symbol: str) -> Any:
    return lambda left, right: left.trace.operate(symbol, left, right)


def _reflected(symbol: str) -> Any:
    return lambda right, left: right.trace.operate(symbol, left, right)


@dataclass(frozen=True, eq=False)
class _Value:
    """Something that a rule computes with, by the name that it has in C++."""

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
        return self.trace.new(self.kind, f"-{self.name}")

    def __bool__(self) -> bool:
        raise TypeError("a rule chooses with where(), not with if")


def _kind(value: Any) -> Kind | None:
    return value.kind if isinstance(value, _Value) else None


def _as_scalar(value: Any) -> str:
    if _kind(value) == "scalar":
        return str(value.name)
    if isinstance(value, int | float) and math.isfinite(value):
        return repr(float(value))
    raise TypeError(f"{value!r} is not a number that a rule can compute with")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
