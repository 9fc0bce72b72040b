"""One training run, from settings to result files: build, train, evaluate, save, finish."""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import tomli_w
import torch
from rich.console import Console
from torch import Tensor

from halfword.checkpoint import Writer
from halfword.train import metrics, record, resume, run_folder
from halfword.train.config import TrainConfig
from halfword.train.metrics import MetricsLog, Row
from halfword.train.model import IGNORED, loss_sum
from halfword.train.progress import Display
from halfword.train.training import Training, build


class Stop:
    """Whether a signal asked the run to stop; the step that runs is finished first."""

    signal_number: int | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self.signal_number is not None


class Stopped(Exception):  # noqa: N818
    """The run ended by a signal, its files complete; shells expect 128 + its number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


def run(config: TrainConfig, console: Console) -> Path:
    """Train as the settings say, and return the folder with the run's files.

    Raises:
        UsageError: a setting cannot be honoured; nothing was written.
        Stopped: SIGINT or SIGTERM; once training has begun, the run's files are complete.
        OSError, CheckpointError: a checkpoint could not be written; earlier ones are whole.
    """
    default = Path("runs") / config.precision
    replace = config.overwrite or config.resume is not None
    with run_folder.claim(config.run, default, overwrite=replace) as folder:
        training = build(config)
        if config.resume is not None and config.resume != resume.AUTO:
            resume.restore(training, Path(config.resume), folder)
        with _stop_on_signal() as stop:
            train(training, folder, console, stop)
        if stop.signal_number is not None:
            raise Stopped(stop.signal_number)
    return folder


def train(training: Training, folder: Path, console: Console, stop: Stop) -> None:
    """Take all steps that are left, evaluating and saving where asked; write the run's files."""
    config = training.config
    with (
        MetricsLog(folder, config.loss_log_file, training.rows) as log,
        Display(console, config.num_steps, config.log_interval, len(training.rows)) as display,
    ):
        run_folder.clear(folder, past_step=len(training.rows))
        metrics.write_whole(folder / "config.toml", tomli_w.dumps(config.to_toml()))
        metrics.write_whole(folder / run_folder.TOKENIZER, training.tokenizer.to_json())
        writer = Writer(folder / run_folder.CHECKPOINTS, config.keep_checkpoints, config.keep_every)
        training.started = time.perf_counter()
        if training.release and config.gradient_accumulation_steps > 1:
            display.line("gradients are held until a step's last micro-batch, then released")
        _evaluate_if_due(training, display, stop)  # a signal may have come before it
        while len(training.rows) < config.num_steps and not stop.requested:
            row = train_step(training, len(training.rows))
            training.rows.append(row)
            log.write(row)
            display.step(row)
            if len(training.rows) == 1:
                write_memory(training, folder)
            _evaluate_if_due(training, display, stop)
            if _is_due(training, config.save_steps):
                writer.save(len(training.rows), *resume.contents(training))
        if stop.requested and training.rows:  # a step that is saved already is left as it is
            writer.save(len(training.rows), *resume.contents(training))
        writer.wait()
        finish(training, folder, interrupted=stop.requested)
        stopped = f"stopped after {len(training.rows)} steps; " if stop.requested else ""
        display.line(f"{stopped}run written to {folder}")


def train_step(training: Training, step: int) -> Row:
    """Fetch, forward and backward over micro-batches, clip, update, schedule."""
    config, optimizer = training.config, training.optimizer
    started = time.perf_counter()
    num_parts = config.gradient_accumulation_steps
    batches = [
        training.sequences.micro_batch(step * num_parts + part, config.batch_size)
        for part in range(num_parts)
    ]
    num_tokens = sum(int((targets != IGNORED).sum()) for _, targets in batches)
    count = config.stall_steps > 0 and step % config.stall_steps == 0
    with optimizer.diagnostics() if count else contextlib.nullcontext() as diagnostics:
        losses = _backward(training, batches, num_tokens)
        _synchronize(training.device)
        optimizer_started = time.perf_counter()
        grad_norm = _clip(training)
        if "at_step_entry" not in training.memory:
            training.memory["at_step_entry"] = optimizer.memory()
        if num_tokens:
            optimizer.step()
    _synchronize(training.device)
    finished = time.perf_counter()
    optimizer.zero_grad()
    if "between_steps" not in training.memory:
        training.memory["between_steps"] = optimizer.memory()
    mean_loss = sum(loss.item() for loss in losses)
    row = Row(
        step=step,
        loss=mean_loss,
        lr=float(training.scheduler.get_last_lr()[0]),
        grad_norm=grad_norm,
        tokens=num_tokens,
        step_s=finished - started,
        optimizer_s=finished - optimizer_started,
        nonfinite=int(not (math.isfinite(mean_loss) and math.isfinite(grad_norm))),
        stalled=diagnostics.stalled_share if diagnostics else math.nan,
    )
    training.scheduler.step()
    return row


def _backward(
    training: Training, batches: list[tuple[Tensor, Tensor]], num_tokens: int
) -> list[Tensor]:
    """Return the share in the step's loss of each micro-batch; released gradients step in here."""
    losses = []
    for number, (inputs, targets) in enumerate(batches, start=1):
        logits = training.model(inputs.to(training.device))
        # By the tokens of all micro-batches: a mean of means would weigh short ones more.
        loss = loss_sum(logits, targets.to(training.device)) / max(1, num_tokens)
        losses.append(loss.detach())
        release, last = training.release, number == len(batches)
        held = release.hold() if release and not (last and num_tokens) else contextlib.nullcontext()
        with held:
            loss.backward()  # type: ignore[no-untyped-call]
    return losses


def _clip(training: Training) -> float:
    """Clip what is not clipped yet, and return the norm of all gradients before."""
    if training.release:
        return training.release.total_norm().item()
    return training.optimizer.clip_grad_norm(training.config.max_grad_norm or math.inf).item()


@torch.no_grad()
def evaluate(training: Training, step: int, display: Display, stop: Stop) -> None:
    """Record the loss over all held-out tokens, unless interrupted."""
    total, num_tokens = 0.0, 0
    training.model.eval()
    for inputs, targets in training.eval_windows:
        if stop.requested:
            break
        logits = training.model(inputs.to(training.device))
        total += loss_sum(logits, targets.to(training.device)).item()
        num_tokens += targets.numel()
    else:
        loss = total / num_tokens
        training.evaluations.append({"step": step, "loss": loss})
        display.line(f"step {step + 1}/{training.config.num_steps}  evaluation loss {loss:.4f}")
    training.model.train()


def write_memory(training: Training, folder: Path) -> None:
    """Write memory.json: what was held at the entry of a step and between steps."""
    at_step_entry, between_steps = (
        training.memory[moment] for moment in ("at_step_entry", "between_steps")
    )
    table = {
        "num_parameters": at_step_entry.num_parameters,
        "at_step_entry": at_step_entry.components,
        "between_steps": between_steps.components,
        "bytes_per_parameter": at_step_entry.bytes_per_parameter,
        "peak_rss_bytes": record.peak_rss_bytes(),
    }
    metrics.write_json(folder / "memory.json", table)


def finish(training: Training, folder: Path, *, interrupted: bool) -> None:
    """Write memory.json, now with the peak of the whole run, and summary.json."""
    config, model, optimizer = training.config, training.model, training.optimizer
    if training.memory:  # a resumed run may have had nothing left to do
        write_memory(training, folder)
    eval_loss = training.evaluations[-1]["loss"] if training.evaluations else None
    results = record.results(training.rows, config.warmup_steps, eval_loss)
    summary = {
        "format": 1,
        "status": "interrupted" if interrupted else "finished",
        "settings": config.model_dump(mode="json") | config.formats._asdict(),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": record.versions(),
        "device": record.describe(training.device, config.threads),
        "corpus": training.corpus,
        "results": results | {"seconds": training.seconds()},
        "evaluations": training.evaluations,
        "digests": {
            "weights": record.digest(model, lambda parameter: parameter),
            "master_weights": record.digest(model, optimizer.master_weight),
        },
    }
    metrics.write_json(folder / "summary.json", summary)


def _evaluate_if_due(training: Training, display: Display, stop: Stop) -> None:
    """Evaluate after the steps done so far, unless that was done or a signal came."""
    done = {evaluation["step"] for evaluation in training.evaluations}
    step = len(training.rows) - 1
    if step >= 0 and step not in done and _is_due(training, training.config.eval_steps):
        if not stop.requested:
            evaluate(training, step, display, stop)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _is_due(training: Training, interval: int) -> bool:
    """Whether something that happens at an interval of steps, and after the last, is due."""
    done = len(training.rows)
    return done == training.config.num_steps or (interval > 0 and done % interval == 0)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a request; a second one ends the process at once."""
    stop = Stop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(signal_number: int, frame: object) -> None:
        stop.signal_number = signal_number
        restore()

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
