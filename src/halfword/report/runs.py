"""A run as the comparison sees it: a run folder, or a plain CSV file of losses."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from halfword.errors import UsageError
from halfword.report.history import PLAIN_HEADER, RUN_HEADER, History, read_history

# Of runs that do not say how many first steps to leave out of timing.
DEFAULT_WARMUP_STEPS = 5


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


R = TypeVar("R", bound=_Record)


Components = dict[str, dict[str, int]]  # component: plane: bytes


class Memory(_Record):
    """`memory.json`, as far as a comparison needs it; of the first rank."""

    num_parameters: int = Field(gt=0)
    at_step_entry: Components
    between_steps: Components | None = None
    peak: Components | None = None  # of runs that measured it
    planned: dict[str, Components] = Field(default_factory=dict)  # by moment

    def moments(self) -> dict[str, dict[str, int]]:
        """Bytes by component at each moment that is known, measured and then planned."""
        found = {"at step entry": self.at_step_entry, "between steps": self.between_steps}
        planned = {moment: self.planned.get(moment.replace(" ", "_")) for moment in found}
        tables: dict[str, Components | None] = {}
        for moment, table in found.items():
            tables |= {moment: table, f"{moment}, planned": planned[moment]}
        tables["at the peak"] = self.peak
        return {
            moment: {name: sum(sizes.values()) for name, sizes in table.items()}
            for moment, table in tables.items()
            if table is not None
        }

    def bytes_per_parameter(self) -> dict[str, float]:
        """The components at the entry of `step()`, and their total."""
        planes = self.at_step_entry.items()
        component_bytes = {component: sum(sizes.values()) for component, sizes in planes}
        component_bytes["total"] = sum(component_bytes.values())
        return {name: size / self.num_parameters for name, size in component_bytes.items()}


class Settings(_Record):
    """The settings of a run; only those with a part in the comparison are named here."""

    model_config = ConfigDict(frozen=True, extra="allow")

    warmup_steps: int = DEFAULT_WARMUP_STEPS


class Evaluation(_Record):
    """A loss on held-out text."""

    step: int
    loss: float


class Summary(_Record):
    """`summary.json`, as far as a comparison needs it."""

    format: Literal[1]
    status: Literal["finished", "interrupted"]
    settings: Settings
    versions: dict[str, str]
    device: dict[str, Any]
    corpus: dict[str, Any]
    evaluations: list[Evaluation]
    digests: dict[str, str | None]  # of "weights" and of "master_weights"


@dataclass(frozen=True, eq=False)
class Run:
    """What one run left behind; `None` is what it did not record."""

    label: str
    path: Path
    is_folder: bool
    history: History
    summary: Summary | None
    memory: Memory | None

    @property
    def status(self) -> str:
        """One of finished, interrupted, unfinished (no summary yet), losses only."""
        if not self.is_folder:
            return "losses only"
        return self.summary.status if self.summary else "unfinished"

    @property
    def evaluation(self) -> Evaluation | None:
        """The last one."""
        return self.summary.evaluations[-1] if self.summary and self.summary.evaluations else None

    @property
    def has_nonfinite(self) -> bool:
        """A training or evaluation loss is NaN or Inf."""
        return len(self.history.nonfinite_loss_steps()) > 0 or bool(self.nonfinite_evaluations)

    @property
    def nonfinite_evaluations(self) -> list[Evaluation]:
        """Those whose loss is NaN or Inf."""
        evaluations = self.summary.evaluations if self.summary else []
        return [each for each in evaluations if not math.isfinite(each.loss)]

    def digest(self, of: str) -> str | None:
        """The digest of `weights` or of `master_weights` as the run left them."""
        return self.summary.digests.get(of) if self.summary else None


def load_runs(paths: Sequence[Path], *, at_least: int = 2) -> tuple[Run, ...]:
    """Read all runs, each with a label that tells it from the others."""
    if len(paths) < at_least:
        given = " ".join(map(str, paths)) or "(none)"
        raise UsageError("RUN", given, "a comparison needs two runs or more; name another")
    return tuple(_load(path, label) for path, label in zip(paths, labels(paths), strict=True))


def labels(paths: Sequence[Path]) -> list[str]:
    """The shortest end of each path that no other path shares; the same path twice is numbered.

    >>> labels([Path("a/exact"), Path("b/exact"), Path("b/bf16"), Path("b/bf16")])
    ['a/exact', 'b/exact', 'bf16', 'bf16 (2)']
    """
    places = [_place(path) for path in paths]
    seen: Counter[tuple[str, ...]] = Counter()
    names = []
    for place in places:
        seen[place] += 1
        others = [other for other in places if other != place]
        number = f" ({seen[place]})" if seen[place] > 1 else ""
        names.append(_as_text(_shortest_end(place, others)) + number)
    return names


def _as_text(name: str) -> str:
    """Show the bytes of a file's name that are no UTF-8, which no file or terminal would take."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _load(path: Path, label: str) -> Run:
    if not path.exists():
        raise UsageError("RUN", path, "does not exist; give a run folder or a step,loss CSV file")
    if not path.is_dir():
        history = read_history(path, [PLAIN_HEADER, RUN_HEADER])
        return Run(label, path, False, history, summary=None, memory=None)
    if not (path / "metrics.csv").is_file():
        fix = "is not a run: it holds no metrics.csv; give a folder that halfword train wrote"
        raise UsageError("RUN", path, fix)
    history = read_history(path / "metrics.csv", [RUN_HEADER])
    summary = _read_record(path / "summary.json", Summary)
    memory = _read_record(path / "memory.json", Memory)
    return Run(label, path, True, history, summary, memory)


def _read_record(path: Path, kind: type[R]) -> R | None:
    if not path.exists():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError("RUN", path, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        fix = f"is damaged ({problem}); restore it, or remove it to compare without it"
        raise UsageError("RUN", path, fix) from None


def _place(path: Path) -> tuple[str, ...]:
    absolute = Path(os.path.abspath(path))
    return absolute.with_suffix("").parts if absolute.is_file() else absolute.parts


def _shortest_end(place: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    for length in range(1, len(place)):
        end = place[-length:]
        if all(other[-length:] != end for other in others):
            return "/".join(end)
    return "/".join(place)
