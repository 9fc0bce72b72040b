"""The ranks that save or read a checkpoint together."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


class Ranks:
    """One process alone, or those of a group that takes tensors on the CPU.

    Attributes:
        group: the group; None for one process.
        rank: this process's number in it.
        size: their number.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.size = 1 if group is None else distributed.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what is done once."""
        return self.rank == 0

    def each(self, make: Callable[[], T]) -> list[T]:
        """Return what every rank made, in their order; where one failed, all raise its error."""
        if self.group is None:
            return [make()]
        made: Any = None
        failed: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failed = error
        outcomes: list[Any] = [None] * self.size
        distributed.all_gather_object(outcomes, (made, failed), group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [value for value, _ in outcomes]

    def first(self, make: Callable[[], T]) -> T:
        """Return what the first rank made, to all; where it failed, all raise its error."""
        made: T | None = self.each(lambda: make() if self.is_first else None)[0]
        return made  # type: ignore[return-value]
