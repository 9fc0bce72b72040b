"""All parts of a run in memory, made from its settings."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import halfword
from halfword.errors import UsageError
from halfword.parallel import Parallel, parallelize
from halfword.train import pretrained
from halfword.train.config import TrainConfig
from halfword.train.data import EvalWindows, PackedSequences
from halfword.train.metrics import Row
from halfword.train.model import Llama, build_model
from halfword.train.schedule import multiplier
from halfword.train.text import load_corpus
from halfword.train.tokenizer import Tokenizer, load_tokenizer
from halfword.train.world import World

OPTIMIZERS: dict[str, Callable[..., halfword.Optimizer]] = {
    "adamw": halfword.AdamW,
    "adam": halfword.Adam,
    "lion": halfword.Lion,
    "sgd": halfword.SGD,
}


@dataclass
class Training:
    """A run in memory."""

    config: TrainConfig  # with what was left to default filled in
    world: World
    device: torch.device
    corpus: dict[str, Any]
    sequences: PackedSequences
    eval_windows: EvalWindows
    model: Parallel
    optimizer: halfword.Optimizer
    scheduler: LambdaLR
    tokenizer: Tokenizer
    release: halfword.Release | None
    micro_batches: int = 0  # that all ranks together have taken, each of one rank's batch size
    rows: list[Row] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, halfword.Memory] = field(default_factory=dict)
    earlier_seconds: float = 0.0  # of the processes that a resumed run had before
    started: float = 0.0

    def seconds(self) -> float:
        """Time spent in training so far, over all processes of the run."""
        return self.earlier_seconds + time.perf_counter() - self.started


def build(config: TrainConfig, world: World | None = None) -> Training:
    """Make all parts of a run; what cannot be honoured is refused before ranks are connected."""
    world = world or World()
    check_world(config, world.size)
    device = _device(config.device, world)
    _make_deterministic(config, device)
    with world.first_goes_first("text"):
        corpus = load_corpus(config)
        tokenizer = load_tokenizer(config.tokenizer, corpus.train)
    vocab_size = config.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        fix = f"too few for the tokenizer, which has {tokenizer.vocab_size}"
        raise UsageError("--vocab_size", vocab_size, fix)
    own_device = str(device) if world.size == 1 else device.type  # each rank has its own
    config = config.model_copy(update={"vocab_size": vocab_size, "device": own_device})
    tokens, eval_tokens = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    sequences = PackedSequences(tokens, config.seq_length, config.seed)
    eval_windows = EvalWindows(eval_tokens, config.seq_length, config.batch_size)
    world.connect(device, config.shard_size, config.timeout)
    model = spread(config, build_model(config, vocab_size, device), world)
    optimizer = build_optimizer(config, model)
    model.attach(optimizer)
    if config.gradient_accumulation_steps > 1:
        model.accumulate_in_fp32(optimizer)
    if config.init is not None and config.resume is None:
        _start_from(config.init, config, model, optimizer)
    about = {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "train_tokens": len(tokens),
        "eval_tokens": len(eval_tokens),
    }
    release = None
    if config.release_gradients:
        release = optimizer.release_gradients(config.max_parameter_grad_norm or math.inf)
    scheduler = LambdaLR(optimizer, _lr_factor(config))
    return Training(
        *(config, world, device, about, sequences, eval_windows),
        *(model, optimizer, scheduler, tokenizer, release),
    )


def _lr_factor(config: TrainConfig) -> Callable[[int], float]:
    return multiplier(
        *(config.lr_schedule, config.num_steps, config.lr_warmup_steps),
        *(config.lr_warmup_type, config.lr_start_ratio, config.lr_end_ratio),
    )


def check_world(config: TrainConfig, size: int) -> None:
    """Raise UsageError for settings that do not fit the number of ranks."""
    if config.shard_size and size % config.shard_size:
        raise UsageError("--shard_size", config.shard_size, f"does not divide {size} processes")
    if config.cpu_offload and size == 1:
        fix = "one process has nothing to shard; start several by torchrun"
        raise UsageError("--cpu_offload", config.cpu_offload, fix)


def spread(config: TrainConfig, model: Llama, world: World) -> Parallel:
    """Run the model on all ranks; alone, every stage is the same."""
    if world.mesh is None:
        return Parallel(model)
    return parallelize(
        model,
        config.zero_stage,
        world.mesh,
        units=model.model.layers,
        reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32,
        average_gradients=False,  # each loss is divided by the tokens of all ranks
        cpu_offload=config.cpu_offload,
    )


def _start_from(
    folder: Path, config: TrainConfig, model: Parallel, optimizer: halfword.Optimizer
) -> None:
    """Write the weights of a model-only checkpoint, masters from FP32 files exactly."""
    weights = pretrained.read_weights(folder, config)
    try:
        halfword.load_fp32_state_dict(model, optimizer, weights)
    except ValueError as error:
        raise UsageError("--init", folder, str(error)) from None
    model.share_weights()


def build_optimizer(config: TrainConfig, model: nn.Module) -> halfword.Optimizer:
    """Make the optimizer that the settings name; it decays matrices only."""
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
        **_rule_settings(config),
        weight_decay=config.weight_decay,
        master_weights=config.formats.master_weights,
        moments=config.formats.moments,
        seed=config.seed,
        on_nonfinite=config.on_nonfinite,
    )
    return optimizer


def _rule_settings(config: TrainConfig) -> dict[str, Any]:
    """Return what only some of the optimizers take."""
    if config.optimizer == "sgd":
        return {"momentum": config.beta1}
    betas = {"betas": (config.beta1, config.beta2)}
    return betas if config.optimizer == "lion" else betas | {"eps": config.eps}


def is_available(name: str) -> bool:
    """Whether --device can name this device here."""
    try:
        _device(name)
    except UsageError:
        return False
    return True


def _device(name: str, world: World | None = None) -> torch.device:
    """Return the device of a name, of each rank its own."""
    device = _named_device(name)
    if world is None or world.size == 1 or device.type == "cpu":
        return device
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(device.type, world.local_rank)


def _named_device(name: str) -> torch.device:
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
    torch.manual_seed(config.seed)  # nothing here draws from it, but its state is saved
    # It would cost time, and nothing here reads memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is refused
