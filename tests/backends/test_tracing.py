"""Rules printed as C++: what the text says, and what it computes."""

import ctypes
from array import array

import pytest
import torch

from bits import SPECIAL, same_bits
from halfword.backends import native
from halfword.backends.compiling import load
from halfword.backends.pieces import HEADERS
from halfword.backends.tracing import print_rule
from halfword.ops import sign, sqrt, where
from halfword.rules import RULES, Rule, Slot


def rule(update, *slots):
    return Rule("traced", tuple(Slot(name, True) for name in slots), lambda group, step: (), update)


def test_operations_are_printed_in_the_order_of_the_rule():
    assert print_rule(RULES["lion"]) == (
        "void update_lion(float* __restrict x, const float* __restrict g,\n"
        "        float* const* slots, const double* scalars) {\n"
        "    float* __restrict exp_avg = slots[0];\n"
        "    const double scalar0 = scalars[0];\n"
        "    const double scalar1 = scalars[1];\n"
        "    const double scalar2 = scalars[2];\n"
        "    const double scalar3 = scalars[3];\n"
        "    const double scalar4 = scalars[4];\n"
        "    const float rounded0 = float(scalar0);\n"
        "    const float rounded1 = float(scalar2);\n"
        "    const float rounded2 = float(scalar1);\n"
        "    const float rounded3 = float(scalar4);\n"
        "    const float rounded4 = float(scalar3);\n"
        "    for (int k = 0; k < TILE; ++k) {\n"
        "        const float tile0 = g[k];\n"
        "        const float tile1 = tile0 * rounded0;\n"
        "        const float tile2 = x[k];\n"
        "        const float tile3 = exp_avg[k];\n"
        "        const float tile4 = tile1 - tile3;\n"
        "        const float tile5 = rounded1 * tile4;\n"
        "        const float tile6 = tile3 + tile5;\n"
        "        const float tile7 = sign(tile6);\n"
        "        const float tile8 = rounded2 * tile7;\n"
        "        const float tile9 = rounded3 * tile2;\n"
        "        const float tile10 = tile8 + tile9;\n"
        "        const float tile11 = tile2 - tile10;\n"
        "        const float tile12 = tile1 - tile3;\n"
        "        const float tile13 = rounded4 * tile12;\n"
        "        const float tile14 = tile3 + tile13;\n"
        "        x[k] = tile11;\n"
        "        exp_avg[k] = flush_subnormals(tile14);\n"
        "    }\n"
        "}"
    )


def _helper(x, scale):
    return scale * sqrt(x)


def _every_word(x, g, slots, scalars):
    a, b, c = scalars
    (m,) = slots
    third = (a + b) / 3 - 0.1 * b  # in float64 until it meets a tile
    m = where(g > third, _helper(g, third), -m)
    x = where(a > b, x - m, where(m <= x, sign(x), 0.5))
    return x / c + where(a < 1.0, b, third) - (1 - x), (m,)


def test_a_traced_rule_computes_what_the_python_function_does():
    traced = rule(_every_word, "m")
    source = '#include "ops.h"\n#include "tile.h"\nnamespace halfword {\n'
    source += print_rule(traced).replace(
        "void", 'extern "C" [[gnu::visibility("default")]] void', 1
    )
    library = load(source + "\n}\n", HEADERS)
    g = SPECIAL.repeat(20)[:256].clone()
    for a, b in ((0.3, 0.7), (2.0, 1.0)):
        x, m = g.flip(0).clone(), g.roll(7).clone()
        expected_x, (expected_m,) = traced.update(x, g, (m,), (a, b, 1.1))
        slots = array("Q", [m.data_ptr()])
        scalars = array("d", [1.0, a, b, 1.1])
        library.update_traced(
            *(ctypes.c_void_p(address) for address in (x.data_ptr(), g.data_ptr())),
            *(ctypes.c_void_p(values.buffer_info()[0]) for values in (slots, scalars)),
        )
        assert same_bits(x, expected_x)
        flushed = torch.where(expected_m.abs() < 2.0**-126, 0.0, expected_m)
        assert same_bits(m, flushed)


def _with_if(x, g, slots, scalars):
    (a,) = scalars
    return (x if a > 0.0 else g), slots


def _divides_a_scalar(x, g, slots, scalars):
    return 1.0 / x, slots


def _compares_in_arithmetic(x, g, slots, scalars):
    return x * (x > g), slots


def _infinite(x, g, slots, scalars):
    return x * float("inf"), slots


def _chooses_by_number(x, g, slots, scalars):
    return where(x, g, x), slots


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (_with_if, "a rule chooses with where(), not with if"),
        (_divides_a_scalar, "a scalar divided by a tile rounds twice in torch; turn it around"),
        (_compares_in_arithmetic, "is not a number that a rule can compute with"),
        (_infinite, "inf is not a number that a rule can compute with"),
        (_chooses_by_number, "where() takes a comparison"),
    ],
)
def test_what_cannot_be_printed_is_refused(update, message):
    with pytest.raises(TypeError, match=message.replace("(", r"\(").replace(")", r"\)")):
        print_rule(rule(update))


def test_a_rule_must_unpack_its_scalars():
    def update(x, g, slots, scalars):
        raise ValueError

    with pytest.raises(TypeError, match="'traced' does not unpack its scalars, or more than 16"):
        print_rule(rule(update))


def test_every_rule_has_its_place():
    library = native.library()
    assert not library._missing
