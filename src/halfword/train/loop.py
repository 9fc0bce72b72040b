"""One training run, from settings to result files: build, train, evaluate, finish."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import halfword
from halfword.errors import UsageError
from halfword.train import metrics, record, run_folder
from halfword.train.config import TrainConfig
from halfword.train.data import EvalWindows, PackedSequences
from halfword.train.metrics import MetricsLog, Row
from halfword.train.model import IGNORED, Llama, build_model, loss_sum
from halfword.train.progress import Display
from halfword.train.schedule import multiplier
from halfword.train.text import load_corpus
from halfword.train.tokenizer import load_tokenizer

OPTIMIZERS = {"adamw": halfword.AdamW}


@dataclass
class Training:
    """A run in memory."""

    config: TrainConfig  # with what was left to default filled in
    device: torch.device
    corpus: dict[str, Any]
    sequences: PackedSequences
    eval_windows: EvalWindows
    model: Llama
    optimizer: halfword.Optimizer
    scheduler: LambdaLR
    rows: list[Row] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)


class Stop:
    """Whether Ctrl-C was pressed; the step that runs is finished first."""

    requested = False


def run(config: TrainConfig, console: Console) -> Path:
    """Train as the settings say, and return the folder with the run's files.

    Raises:
        UsageError: a setting cannot be honoured; nothing was written.
        KeyboardInterrupt: Ctrl-C; once training has begun, the run's files are complete.
    """
    default = Path("runs") / config.precision
    with run_folder.claim(config.run, default, overwrite=config.overwrite) as folder:
        training = build(config)
        with _stop_on_interrupt() as stop:
            train(training, folder, console, stop)
        if stop.requested:
            raise KeyboardInterrupt
    return folder


def build(config: TrainConfig) -> Training:
    """Make all parts of a run; what cannot be honoured is refused here."""
    device = _device(config.device)
    _make_deterministic(config, device)
    corpus = load_corpus(config)
    tokenizer = load_tokenizer(config.tokenizer, corpus.train)
    vocab_size = config.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        fix = f"too few for the tokenizer, which has {tokenizer.vocab_size}"
        raise UsageError("--vocab_size", vocab_size, fix)
    config = config.model_copy(update={"vocab_size": vocab_size, "device": str(device)})
    tokens, eval_tokens = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    sequences = PackedSequences(tokens, config.seq_length, config.seed)
    eval_windows = EvalWindows(eval_tokens, config.seq_length, config.batch_size)
    model = build_model(config, vocab_size, device)
    optimizer = _build_optimizer(config, model)
    about = {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "train_tokens": len(tokens),
        "eval_tokens": len(eval_tokens),
    }
    factor = multiplier(config.lr_schedule, config.num_steps, config.lr_warmup_steps)
    return Training(
        config, device, about, sequences, eval_windows, model, optimizer,
        scheduler=LambdaLR(optimizer, factor),
    )  # fmt: skip


def train(training: Training, folder: Path, console: Console, stop: Stop) -> None:
    """Take all steps, evaluating where asked, and write the run's files."""
    config = training.config
    started = time.perf_counter()
    with (
        MetricsLog(folder, config.loss_log_file) as log,
        Display(console, config.num_steps, config.log_interval) as display,
    ):
        run_folder.clear(folder)
        metrics.write_whole(folder / "config.toml", tomli_w.dumps(config.to_toml()))
        for step in range(config.num_steps):
            row = train_step(training, step)
            training.rows.append(row)
            log.write(row)
            display.step(row)
            last = step + 1 == config.num_steps
            if not stop.requested and (last or _is_due(step + 1, config.eval_steps)):
                evaluate(training, step, display, stop)
            if stop.requested:
                break
        finish(training, folder, time.perf_counter() - started, interrupted=stop.requested)
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
    losses = []
    for inputs, targets in batches:
        logits = training.model(inputs.to(training.device))
        # By the tokens of all micro-batches: a mean of means would weigh short ones more.
        loss = loss_sum(logits, targets.to(training.device)) / max(1, num_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    _synchronize(training.device)
    optimizer_started = time.perf_counter()
    grad_norm = optimizer.clip_grad_norm(config.max_grad_norm or math.inf).item()
    if not training.rows:
        training.memory["at_step_entry"] = optimizer.memory()
    if num_tokens:
        optimizer.step()
    _synchronize(training.device)
    finished = time.perf_counter()
    optimizer.zero_grad()
    if not training.rows:
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
    )
    training.scheduler.step()
    return row


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


def finish(training: Training, folder: Path, seconds: float, *, interrupted: bool) -> None:
    """Write memory.json and summary.json."""
    config, model, optimizer = training.config, training.model, training.optimizer
    at_step_entry: halfword.Memory = training.memory["at_step_entry"]
    memory = {
        "num_parameters": at_step_entry.num_parameters,
        "at_step_entry": at_step_entry.components,
        "between_steps": training.memory["between_steps"].components,
        "bytes_per_parameter": at_step_entry.bytes_per_parameter,
        "peak_rss_bytes": record.peak_rss_bytes(),
    }
    metrics.write_json(folder / "memory.json", memory)
    eval_loss = training.evaluations[-1]["loss"] if training.evaluations else None
    summary = {
        "format": 1,
        "status": "interrupted" if interrupted else "finished",
        "settings": config.model_dump(mode="json") | config.formats._asdict(),
        "num_parameters": at_step_entry.num_parameters,
        "versions": record.versions(),
        "device": record.describe(training.device, config.threads),
        "corpus": training.corpus,
        "results": record.results(training.rows, config.warmup_steps, eval_loss)
        | {"seconds": seconds},
        "evaluations": training.evaluations,
        "digests": {
            "weights": record.digest(model, lambda parameter: parameter),
            "master_weights": record.digest(model, optimizer.master_weight),
        },
    }
    metrics.write_json(folder / "summary.json", summary)


def _build_optimizer(config: TrainConfig, model: Llama) -> halfword.Optimizer:
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, parameter) for name, parameter in named if parameter.dim() > 1]},
        {  # norms: decay would only pull their weights away from one
            "params": [(name, parameter) for name, parameter in named if parameter.dim() == 1],
            "weight_decay": 0.0,
        },
    ]
    optimizer = OPTIMIZERS[config.optimizer](
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        master_weights=config.formats.master_weights,
        moments=config.formats.moments,
        seed=config.seed,
    )
    if config.gradient_accumulation_steps > 1:
        optimizer.accumulate_in_fp32()
    return optimizer


def _device(name: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError("--device", name, "no such device; use auto, cpu or cuda") from None
    if device.type != "cpu" and (
        accelerator is None
        or device.type != accelerator.type
        or (device.index or 0) >= torch.accelerator.device_count()
    ):
        kinds = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        raise UsageError("--device", name, f"not available on this machine; use {kinds}")
    return device


def _make_deterministic(config: TrainConfig, device: torch.device) -> None:
    torch.set_num_threads(config.threads)  # sums are split by thread: their number decides bits
    torch.use_deterministic_algorithms(True)
    # It would cost time, and nothing here reads memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is refused


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _is_due(steps_done: int, interval: int) -> bool:
    return interval > 0 and steps_done % interval == 0


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request; a second one interrupts at once."""
    stop = Stop()

    def request(signal_number: int, frame: object) -> None:
        stop.requested = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
