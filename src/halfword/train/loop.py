"""One training run, from settings to result files: build, train, evaluate, save, finish."""

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import halfword
from halfword.checkpoint import Writer
from halfword.parallel import Parallel
from halfword.train import resume, run_folder
from halfword.train.config import TrainConfig
from halfword.train.data import Batch
from halfword.train.files import Files
from halfword.train.footprint import held, peak_watched
from halfword.train.metrics import Row
from halfword.train.model import IGNORED, loss_sum
from halfword.train.progress import Display
from halfword.train.training import Training, build
from halfword.train.world import World


class Stop:
    """Whether a signal asked the run to stop; the step that runs is finished first."""

    signal_number: int = 0

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self.signal_number > 0

    def agree(self, world: World) -> bool:
        """Make it one decision of all ranks, for a signal reaches them at different moments."""
        agreed = world.max(self.signal_number)
        if agreed:  # else a signal may have come meanwhile: it counts the next time
            self.signal_number = agreed
        return agreed > 0


class Stopped(Exception):  # noqa: N818
    """The run ended by a signal, its files complete; shells expect 128 + its number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


def run(config: TrainConfig, console: Console, world: World | None = None) -> Path:
    """Train as the settings say, and return the folder with the run's files.

    Of several ranks each calls this; the first one claims the folder, and writes.

    Raises:
        UsageError: a setting cannot be honoured; nothing was written.
        Stopped: SIGINT or SIGTERM; once training has begun, the run's files are complete.
        OSError, CheckpointError: a checkpoint could not be written; earlier ones are whole.
    """
    world = world or World()
    default = Path("runs") / config.precision
    replace = config.overwrite or config.resume is not None
    with contextlib.ExitStack() as stack:
        claim = run_folder.claim(config.run, default, overwrite=replace)
        folder = Path(world.publish("folder", lambda: str(stack.enter_context(claim))))
        training = build(config, world)
        if config.resume is not None and config.resume != resume.AUTO:
            resume.restore(training, Path(config.resume), folder)
        with _stop_on_signal() as stop:
            train(training, folder, console, stop)
        if stop.requested:
            raise Stopped(stop.signal_number)
    return folder


def train(training: Training, folder: Path, console: Console, stop: Stop) -> None:
    """Take all steps that are left, evaluating and saving where asked; write the run's files."""
    config, world = training.config, training.world
    with (
        Files(folder, training) as files,
        Display(console, config.num_steps, config.log_interval, len(training.rows)) as display,
    ):
        places = folder / run_folder.CHECKPOINTS
        writer = Writer(places, config.keep_checkpoints, config.keep_every, world.ranks)
        training.started = time.perf_counter()
        if training.release and config.gradient_accumulation_steps > 1:
            display.line("gradients are held until a step's last micro-batch, then released")
        _evaluate_if_due(training, display, stop)  # a signal may have come before it
        files.evaluations()
        while len(training.rows) < config.num_steps and not stop.agree(world):
            with peak_watched(training, len(training.rows)):
                row = train_step(training, len(training.rows))
            training.rows.append(row)
            files.row(row)
            display.step(row)
            if len(training.rows) == 1:
                files.memory()
            _evaluate_if_due(training, display, stop)
            files.evaluations()
            if _is_due(training, config.save_steps):
                writer.save(len(training.rows), *resume.contents(training))
        interrupted = stop.agree(world)
        if interrupted and training.rows:  # a step that is saved already is left as it is
            writer.save(len(training.rows), *resume.contents(training))
        writer.wait()
        files.summary(interrupted=interrupted)
        stopped = f"stopped after {len(training.rows)} steps; " if interrupted else ""
        display.line(f"{stopped}run written to {folder}")


def train_step(training: Training, step: int) -> Row:
    """Fetch, forward and backward over micro-batches, clip, update, schedule."""
    config, optimizer, world = training.config, training.optimizer, training.world
    started = time.perf_counter()
    # Of each micro-batch of all ranks, this rank takes its own part.
    own = range(world.rank, world.size * config.gradient_accumulation_steps, world.size)
    batches = [
        training.sequences.micro_batch(training.micro_batches + part, config.batch_size)
        for part in own
    ]
    num_tokens = int(world.sum(sum(int((targets != IGNORED).sum()) for _, targets in batches)))
    count = config.stall_steps > 0 and step % config.stall_steps == 0
    with optimizer.diagnostics() if count else contextlib.nullcontext() as diagnostics:
        losses = backward(training.model, training.release, training.device, batches, num_tokens)
        _synchronize(training.device)
        optimizer_started = time.perf_counter()
        grad_norm = _clip(training)
        if "at_step_entry" not in training.memory:
            training.memory["at_step_entry"] = held(training)
        if num_tokens:
            optimizer.step()
    _synchronize(training.device)
    finished = time.perf_counter()
    optimizer.zero_grad()
    if "between_steps" not in training.memory:
        training.memory["between_steps"] = held(training)
    training.micro_batches += world.size * config.gradient_accumulation_steps
    mean_loss = world.sum(sum(loss.item() for loss in losses))
    row = Row(
        step=step,
        loss=mean_loss,
        lr=float(training.scheduler.get_last_lr()[0]),
        grad_norm=grad_norm,
        tokens=num_tokens,
        step_s=finished - started,
        optimizer_s=finished - optimizer_started,
        nonfinite=int(not (math.isfinite(mean_loss) and math.isfinite(grad_norm))),
        stalled=_stalled_share(diagnostics, world) if diagnostics else math.nan,
    )
    if not (num_tokens and optimizer.step_was_skipped):
        training.scheduler.step()
    return row


def backward(
    model: Parallel,
    release: halfword.Release | None,
    device: torch.device,
    batches: list[Batch],
    num_tokens: int,
) -> list[Tensor]:
    """Return the share in the step's loss of each micro-batch; released gradients step in here."""
    losses = []
    for number, (inputs, targets) in enumerate(batches, start=1):
        logits = model(inputs.to(device))
        # By the tokens of all micro-batches: a mean of means would weigh short ones more.
        loss = loss_sum(logits, targets.to(device)) / max(1, num_tokens)
        losses.append(loss.detach())
        last = number == len(batches)
        hold = release is not None and not (last and num_tokens)
        with release.hold() if release and hold else contextlib.nullcontext():
            model.backward(loss)
    return losses


def _clip(training: Training) -> float:
    """Clip what is not clipped yet, and return the norm of all gradients before."""
    if training.release:
        return training.release.total_norm().item()
    return training.optimizer.clip_grad_norm(training.config.max_grad_norm or math.inf).item()


@torch.no_grad()
def evaluate(training: Training, step: int, display: Display, stop: Stop) -> None:
    """Record the loss over all held-out tokens, unless interrupted.

    Ranks take turns at the batches; all run the model equally often, as its engine may require.
    """
    total, num_tokens, world = 0.0, 0, training.world
    training.model.eval()
    batches = iter(training.eval_windows)
    while turn := list(itertools.islice(batches, world.size)):
        if stop.agree(world):
            break
        inputs, targets = turn[world.rank % len(turn)]
        logits = training.model(inputs.to(training.device))
        if world.rank < len(turn):
            total += loss_sum(logits, targets.to(training.device)).item()
            num_tokens += targets.numel()
    else:
        loss = world.sum(total) / world.sum(num_tokens)
        training.evaluations.append({"step": step, "loss": loss})
        display.line(f"step {step + 1}/{training.config.num_steps}  evaluation loss {loss:.4f}")
    training.model.train()


def _evaluate_if_due(training: Training, display: Display, stop: Stop) -> None:
    """Evaluate after the steps done so far, unless that was done or a signal came."""
    done = {evaluation["step"] for evaluation in training.evaluations}
    step = len(training.rows) - 1
    if step >= 0 and step not in done and _is_due(training, training.config.eval_steps):
        if not stop.agree(training.world):
            evaluate(training, step, display, stop)


def _stalled_share(diagnostics: halfword.Diagnostics, world: World) -> float:
    """Return the share over the parts of all ranks."""
    counts = [count for (state, _), count in diagnostics.counts.items() if state == "weight"]
    stalled, elements = (
        world.sum(sum(numbers))
        for numbers in ([c.stalled for c in counts], [c.elements for c in counts])
    )
    return stalled / max(1.0, elements)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _is_due(training: Training, interval: int) -> bool:
    """Whether something that happens at an interval of steps, and after the last, is due."""
    done = len(training.rows)
    return done == training.config.num_steps or (interval > 0 and done % interval == 0)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a request; the same again ends the process at once.

    Not another one: torchrun sends SIGTERM to ranks that a terminal has sent SIGINT already.
    """
    stop = Stop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(signal_number: int, frame: object) -> None:
        stop.signal_number = stop.signal_number or signal_number
        signal.signal(signal_number, previous[signal.Signals(signal_number)])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
