"""The C++ of the native backend: rules printed from Python, formats from their headers.

A rule is a function over a tile and a format two, to decode and to encode one. They meet at run
time, tile by tile, so the library has as many pieces as there are rules and formats, and each
combination of them works as soon as it is compiled.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfword.backends.tracing import print_rule
from halfword.formats import FORMATS, Format
from halfword.rules import RULES

HEADERS = Path(__file__).parent / "cpp"


@dataclass(frozen=True)
class Pieces:
    """What one library is compiled from.

    Attributes:
        source: the translation unit; it includes headers from ``HEADERS``.
        rules: the place of each rule in the library's table, by name.
        formats: the place of each format, by name.
        missing: why a rule or a format is not among them, by name.
    """

    source: str
    rules: Mapping[str, int]
    formats: Mapping[str, int]
    missing: Mapping[str, str]


def pieces() -> Pieces:
    """Print every rule, and list every format whose module has a header of its name."""
    printed: dict[str, str] = {}
    missing: dict[str, str] = {}
    for rule in RULES.values():
        try:
            printed[rule.name] = print_rule(rule)
        except TypeError as error:
            missing[rule.name] = f"rule {rule.name!r} cannot be printed as C++ ({error})"
    formats = [format for format in FORMATS.values() if (HEADERS / _header(format)).exists()]
    for name in FORMATS.keys() - {format.name for format in formats}:
        missing[name] = f"format {name!r} has no C++ header"
    return Pieces(
        source=_source(printed, formats),
        rules={name: place for place, name in enumerate(printed)},
        formats={format.name: place for place, format in enumerate(formats)},
        missing=missing,
    )


def _source(printed: Mapping[str, str], formats: list[Format]) -> str:
    headers = sorted({_header(format) for format in formats} | {"ops.h", "works.h"})
    rules = [f"{{update_{name}, {len(RULES[name].slots)}}}" for name in printed]
    lines = [
        "namespace halfword {",
        f"constexpr int MAX_SLOTS = {max(len(RULES[name].slots) for name in printed)};",
        f"constexpr int MAX_PLANES = {max(len(format.planes) for format in formats)};",
        "}",
        *(f'#include "{header}"' for header in headers),
        "namespace halfword {",
        *printed.values(),
        f"const Rule RULES[] = {{{', '.join(rules)}}};",
        f"const Format FORMATS[] = {{{', '.join(map(_entry, formats))}}};",
        "}",
        '#include "entry.h"',
    ]
    return "\n".join(lines) + "\n"


def _entry(format: Format) -> str:
    name = re.sub(r"\W", "_", format.name)
    planes = (f"Plane{{{plane.dtype.itemsize}, {plane.block}}}" for plane in format.planes)
    return f"format<{name}>({', '.join(planes)})"


def _header(format: Format) -> str:
    """Return the name of the header beside a format's module: ``split.h`` for split.py."""
    return format.encode.__module__.rpartition(".")[2] + ".h"
