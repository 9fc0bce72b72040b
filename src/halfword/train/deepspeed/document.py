"""Reading and checking one of DeepSpeed's JSON files."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ConfigDict, TypeAdapter, ValidationError

from halfword.errors import UsageError
from halfword.train.deepspeed.keys import KEYS, QUIET_SECTIONS, SECTIONS, SWITCHED_SECTIONS

AUTO = "auto"  # Hugging Face's word for what its own arguments say
ALIASES = {"bfloat16": "bf16"}  # as DeepSpeed has them
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Document:
    """The keys of a file, by their path.

    Attributes:
        file: where they stand.
        written: each key's value as it stands there.
        values: checked, without those that are `"auto"` or `null`.
    """

    file: Path
    written: dict[str, Any]
    values: dict[str, Any]

    def refuse(self, key: str, fix: str) -> NoReturn:
        """Say that a key cannot be honoured."""
        raise UsageError(f"{self.file}: {key}", self.shown(key), fix)

    def shown(self, key: str) -> str:
        """A key's value, as JSON."""
        return json.dumps(self.written[key]) if key in self.written else "(not given)"

    def is_left_open(self, key: str) -> bool:
        """Whether a key says that its value is to be taken from elsewhere."""
        return bool(self.written.get(key) == AUTO)


def read(file: Path) -> Document:
    """Read a file and check each key by itself.

    Raises:
        UsageError: it cannot be read, or a key is unknown, of another type, or has a value that
            halfword cannot honour.
    """
    document = Document(file, {}, {})
    for key, value in _leaves(document, _load(file), ""):
        document.written[key] = value
        if value is not None and value != AUTO:
            document.values[key] = _checked(document, key, value)
    for section in SWITCHED_SECTIONS:
        _check_switched_off(document, section)
    return document


def _load(file: Path) -> dict[str, Any]:
    def refuse(problem: str) -> NoReturn:
        raise UsageError("--deepspeed_config", file, problem)

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                refuse(f"has the key {name} twice in one section")
        return {ALIASES.get(name, name): value for name, value in pairs}

    try:
        text = file.read_text(encoding="utf-8")
        loaded = json.loads(text, object_pairs_hook=without_duplicates)
    except OSError as error:
        refuse(f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        refuse("is not a text file in UTF-8")
    except json.JSONDecodeError as error:
        refuse(f"is not JSON: {error}")
    except RecursionError:
        refuse("has sections in sections without an end")
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        refuse("has a number of too many digits")
    if not isinstance(loaded, dict):
        refuse("is not a JSON object, {...}")
    return loaded


def _leaves(document: Document, section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = prefix + name
        if _is_free(key):
            yield key, value
        elif key in SECTIONS:
            if value is None:
                yield key, value
            elif not isinstance(value, dict):
                raise UsageError(
                    f"{document.file}: {key}", json.dumps(value), "should be an object, {...}"
                )
            else:
                yield from _leaves(document, value, f"{key}.")
        elif key in KEYS:
            yield key, value
        else:
            raise UsageError(f"{document.file}:", key, "unknown key" + _did_you_mean(key))


def _is_free(key: str) -> bool:
    """Whether a key lies in a section whose keys are not known one by one."""
    return any(key.startswith(f"{name}.") for name in (*QUIET_SECTIONS, *SWITCHED_SECTIONS))


def _checked(document: Document, key: str, value: Any) -> Any:
    if key not in KEYS:
        return value
    known = KEYS[key]
    try:
        checked = TypeAdapter(known.kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        document.refuse(key, error.errors()[0]["msg"].removeprefix("Input "))
    if known.only and _lower(checked) not in known.only:
        document.refuse(key, known.fix)
    return checked


def _check_switched_off(document: Document, section: str) -> None:
    keys = [key for key in document.values if key.startswith(f"{section}.")]
    if keys and document.values.get(f"{section}.enabled") is not False:
        document.refuse(keys[0], f"halfword has no {section.rpartition('.')[2]}; leave it out")


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _did_you_mean(key: str) -> str:
    """Name the known key that is spelled most alike, or the one of this name elsewhere."""
    name = key.rpartition(".")[2]
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == name]
    near = elsewhere or difflib.get_close_matches(key, [*KEYS, *SECTIONS], n=1)
    return f"; did you mean {near[0]}?" if near else ""
