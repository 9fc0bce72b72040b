"""How a run shows itself: a live bar on a terminal, plain lines elsewhere."""

import time
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfword.train.metrics import Row


class Display:
    """Shows each step's loss, tokens per second and the time left."""

    def __init__(self, console: Console, num_steps: int, log_interval: int, done: int = 0) -> None:
        self._console = console
        self._num_steps = num_steps
        self._done_before = done
        self._log_interval = log_interval
        self._started = time.perf_counter()
        self._shown_at = self._started
        self._tokens_since_shown = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=done)

    def step(self, row: Row) -> None:
        """Show a step; a line every `log_interval` steps and for the last."""
        self._tokens_since_shown += row.tokens
        done = row.step + 1
        if self._bar:
            self._bar.update(self._task, completed=done)
        if done % self._log_interval and done != self._num_steps:
            return
        now = time.perf_counter()
        rate = self._tokens_since_shown / (now - self._shown_at)
        self._shown_at, self._tokens_since_shown = now, 0
        figures = f"loss {row.loss:.4f}  {rate:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, description=figures)
        else:
            pace = (now - self._started) / (done - self._done_before)
            left = pace * (self._num_steps - done)
            eta = timedelta(seconds=round(left))
            self.line(f"step {done}/{self._num_steps}  {figures}  lr {row.lr:.2e}  {eta} left")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
