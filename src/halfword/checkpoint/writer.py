"""A series of checkpoints: saved in the background, thinned out, found again by content."""

import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfword.checkpoint.errors import CheckpointError
from halfword.checkpoint.folder import verify, write
from halfword.checkpoint.ranks import Ranks
from halfword.shards import local

_NAME = re.compile(r"step-(\d{8,})")


class Writer:
    """Saves checkpoints of one run into one folder; of several ranks each has a Writer.

    A save copies the tensors into buffers that are kept between saves, and returns; a thread writes
    them while training goes on. The next save waits for it.

    Attributes:
        folder: where the checkpoints go, as ``step-00000060``.
    """

    def __init__(
        self, folder: Path, keep: int = 2, keep_every: int = 0, ranks: Ranks | None = None
    ) -> None:
        """Take a folder over: leftovers of saves that died are removed.

        Args:
            folder: made when the first checkpoint is saved; must belong to this run alone.
            keep: how many of the newest checkpoints are kept, at least 1.
            keep_every: also keep every checkpoint whose step is a multiple of it; 0 for none.
            ranks: those that save together, over a group that nothing else uses.
        """
        self.folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._ranks = ranks or Ranks()
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        for leftover in folder.glob(".step-*.partial") if self._ranks.is_first else ():
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Save a checkpoint in the background; a step that is saved already is left as it is.

        Raises:
            OSError, CheckpointError: an earlier save failed.
        """
        self.wait()
        target = self.folder / f"step-{step:08d}"
        if target.exists():
            return
        self._stage(tensors)
        self._thread = threading.Thread(target=self._write, args=(target, step, state))
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save that is going on.

        Raises:
            OSError, CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self._buffers[name] = torch.empty_like(
                    tensor, device="cpu", memory_format=torch.contiguous_format
                )
            local(self._buffers[name]).copy_(local(tensor))
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]

    def _write(self, target: Path, step: int, state: Mapping[str, Any]) -> None:
        try:
            write(target, step, self._buffers, state, self._ranks)
            if self._ranks.is_first:
                self._thin_out()
        except BaseException as error:  # told to whoever saves or waits next
            self._error = error

    def _thin_out(self) -> None:
        for number, folder in list(checkpoints(self.folder))[self._keep :]:
            if not self._keep_every or number % self._keep_every:
                shutil.rmtree(folder)


def checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield step and path of the checkpoints in a folder, newest first; none is opened."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*")]
    steps = [(int(match[1]), path) for match, path in found if match]
    yield from sorted(steps, reverse=True)


def latest(folder: Path) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest checkpoint in a folder that verifies, and why newer ones do not."""
    problems = []
    for _, path in checkpoints(folder):
        try:
            verify(path)
        except CheckpointError as problem:
            problems.append(problem)
        else:
            return path, problems
    return None, problems
