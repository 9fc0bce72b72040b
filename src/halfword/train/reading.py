"""Reading the settings of a run; precedence: defaults, then the TOML file, then flags."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halfword.errors import UsageError
from halfword.train.config import TrainConfig


def read_settings(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the TOML file and the flags, unchecked: what was given rather than left to default."""
    return {**(_read_toml(file) if file else {}), **flags}


def load_config(
    file: Path | None, flags: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Merge defaults, TOML file and flags; whatever is wrong is told in one line.

    Args:
        file: the TOML file.
        flags: what the command line gives.
        defaults: settings that stand in for the usual defaults.
    """
    try:
        return TrainConfig(**{**(defaults or {}), **read_settings(file, flags)})
    except ValidationError as error:
        raise _usage_error(error, file, flags) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("--config", file, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError("--config", file, "is not a text file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError("--config", file, f"is not TOML: {error}") from None


def _usage_error(
    errors: ValidationError, file: Path | None, flags: Mapping[str, Any]
) -> UsageError:
    first = errors.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UsageError):
        return cause
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, TrainConfig.model_fields, n=1)
        return UsageError(f"{file}:", key, "unknown key" + _did_you_mean(near))
    fix = first["msg"].removeprefix("Input ")
    if key in flags:
        return UsageError(f"--{key}", first["input"], fix)
    return UsageError(f"{file}: {key}", repr(first["input"]), fix)


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""
