"""The error of all checkpoints."""

from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A folder that cannot be used as a checkpoint, told in one line that names it.

    Attributes:
        problem: the line without the folder.
    """

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.folder = folder
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, (self.folder, self.problem)  # ranks tell each other
