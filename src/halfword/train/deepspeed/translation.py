"""A DeepSpeed file in halfword's terms, while it is read and after."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfword.errors import UsageError
from halfword.train.deepspeed.document import Document


@dataclass
class Translation:
    """A file in halfword's terms.

    Attributes:
        document: the file.
        flags: what the command line gives; it wins.
        settings: what the file gives, by halfword's names.
        sources: the key that gives each setting.
        here: what became of each key, also of those that are missed.
        idle: why each of the other keys changes nothing.
    """

    document: Document
    flags: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    here: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)

    @property
    def overruled(self) -> dict[str, str]:
        """The settings that the command line gives otherwise, and the key that gives each."""
        return {
            name: self.sources[name]
            for name, value in self.settings.items()
            if name in self.flags and self.flags[name] != value
        }

    def renamed(self, error: UsageError) -> UsageError:
        """Let an error name the key that gave the setting, where it was not a flag."""
        name = error.argument.removeprefix("--")
        if name not in self.settings or name in self.flags:
            return error
        key = self.sources[name]
        value = self.document.shown(key) if key in self.document.written else error.value
        return UsageError(f"{self.document.file}: {key}", value, error.fix)

    def value(self, key: str) -> Any:
        """Return the value of a key, None where it is missing or left open."""
        return self.document.values.get(key)

    def give(self, key: str, note: str = "", **settings: Any) -> None:
        """Make settings of a key."""
        self.settings |= settings
        self.sources |= dict.fromkeys(settings, key)
        options = " ".join(_option(name, value) for name, value in settings.items())
        self.say(key, f"{options}{note and f': {note}'}")

    def say(self, key: str, text: str) -> None:
        """Tell what became of a key."""
        self.here[key] = f"{self.here[key]}; {text}" if key in self.here else text


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
