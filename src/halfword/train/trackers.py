"""Where --log_to sends each step's scalars beside metrics.csv: TensorBoard, Weights & Biases."""

import contextlib
import importlib.util
import math
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from halfword.errors import UsageError
from halfword.train.metrics import Row
from halfword.train.run_folder import TENSORBOARD, WANDB

Scalars = Mapping[str, float]  # by name, as train/loss


class Tracker(Protocol):
    """Takes the scalars of one step after another."""

    def log(self, step: int, scalars: Scalars) -> None:
        """Add scalars; those of one step may come in parts."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in the run's folder, written anew from the rows that a resumed run has."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], past: Mapping[int, Scalars]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / TENSORBOARD
        shutil.rmtree(place, ignore_errors=True)  # it may hold steps that are given up
        self._writer = SummaryWriter(place, flush_secs=10)
        for step, scalars in past.items():
            self.log(step, scalars)

    def log(self, step: int, scalars: Scalars) -> None:
        """Add scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, which a resumed run goes on with: its id is kept in the run's folder.

    W&B only appends. It has the steps before the checkpoint already, and maybe some past it, which
    a resumed run computes again to the same bits: neither is sent twice.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], past: Mapping[int, Scalars]
    ) -> None:
        import wandb

        id_file = folder / WANDB / "id"
        known = id_file.is_file() and bool(past)
        if not known:
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(uuid.uuid4().hex)
        with _errors_of_wandb():
            self._run = wandb.init(
                id=id_file.read_text(), name=folder.name, dir=folder, config=dict(config),
                project="halfword", resume="allow",
            )  # fmt: skip
        self._first_step = max(self._run.starting_step, len(past) if known else 0)
        for step, scalars in past.items():
            self.log(step, scalars)

    def log(self, step: int, scalars: Scalars) -> None:
        """Add scalars of a step, unless W&B has them."""
        if step >= self._first_step:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], Mapping[int, Scalars]], Tracker]] = {
    TENSORBOARD: TensorBoard,
    WANDB: WeightsAndBiases,
}


def check(names: Iterable[str]) -> None:
    """Raise UsageError for a tracker that cannot be had, before anything is written."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            fix = f"needs a package that is not there; pip install 'halfword[{name}]'"
            raise UsageError("--log_to", name, fix)
        if name == WANDB:
            import wandb

            with _errors_of_wandb():
                wandb.login()  # asks for a key on a terminal, and needs none if W&B is offline


def begin(
    names: Iterable[str],
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[Row],
    evaluations: Sequence[Mapping[str, Any]],
) -> list[Tracker]:
    """Start trackers in a run's folder; a resumed run has rows and evaluations already."""
    past = {row.step: of_row(row) for row in rows}
    for evaluation in evaluations:
        past[evaluation["step"]] |= of_evaluation(evaluation)
    return [TRACKERS[name](folder, config, past) for name in dict.fromkeys(names)]


def of_row(row: Row) -> dict[str, float]:
    """The scalars of a step."""
    scalars = {
        "train/loss": row.loss,
        "train/lr": row.lr,
        "train/grad_norm": row.grad_norm,
        "train/tokens_per_s": row.tokens / row.step_s,
    }
    return scalars if math.isnan(row.stalled) else scalars | {"train/stalled": row.stalled}


def of_evaluation(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of an evaluation."""
    return {"eval/loss": evaluation["loss"]}


@contextlib.contextmanager
def _errors_of_wandb() -> Iterator[None]:
    import wandb

    try:
        yield
    except wandb.Error as error:
        fix = f"cannot begin: {str(error).splitlines()[0]}"
        raise UsageError("--log_to", WANDB, fix) from None
