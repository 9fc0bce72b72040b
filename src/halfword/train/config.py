"""The settings of a run: one flat table, which is the TOML file, the flags and their help."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from halfword.errors import UsageError

Precision = Literal["fp32-master", "exact", "exact-bf16", "bf16", "bf16-sr", "lean", "leanest"]
MasterWeights = Literal["split", "split24", "fp32", "bf16", "bf16-sr"]
Moments = Literal["fp32", "bf16", "bf16-sr", "int8"]
Rule = Literal["adamw", "adam", "lion", "sgd"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Tracker = Literal["tensorboard", "wandb"]
WarmupType = Literal["linear", "log"]


class Formats(NamedTuple):
    """How master weights and moments are kept, as the optimizers' arguments of these names."""

    master_weights: MasterWeights
    moments: Moments


PRESETS: dict[Precision, Formats] = {
    "fp32-master": Formats("fp32", "fp32"),
    "exact": Formats("split", "fp32"),
    "exact-bf16": Formats("split", "bf16-sr"),
    "bf16": Formats("bf16", "bf16"),
    "bf16-sr": Formats("bf16-sr", "bf16-sr"),
    "lean": Formats("split", "int8"),
    "leanest": Formats("split24", "int8"),
}

RELEASED: frozenset[Precision] = frozenset({"leanest"})
"""The presets that release gradients."""

LEARNING_RATES: dict[Rule, float] = {"adamw": 1e-3, "adam": 1e-3, "lion": 1e-4, "sgd": 0.1}

# Where one run writes. Not part of what config.toml repeats: a second run writes elsewhere.
PLACES = frozenset({"run", "overwrite", "resume", "loss_log_file"})

# What a run's memory depends on: the options of `halfword plan`.
PLANNED = (
    *("precision", "master_weights", "moments", "release_gradients", "optimizer", "beta1"),
    *("num_layers", "hidden_dim", "ffn_dim", "num_heads", "num_kv_heads", "vocab_size"),
    *("tie_embeddings", "seq_length", "batch_size", "gradient_accumulation_steps"),
    *("activation_checkpointing", "zero_stage", "shard_size", "reduce_dtype", "device"),
)

AnyPath = Annotated[Path, Strict(False)]  # a TOML file can only give a string


def _default_ffn_dim(settings: dict[str, Any]) -> int:
    hidden_dim: int = settings["hidden_dim"]
    return 32 * math.ceil(hidden_dim * 8 / 3 / 32)


def _default_max_grad_norm(settings: dict[str, Any]) -> float:
    return 0.0 if settings["release_gradients"] else 1.0


def _default_lr_warmup_steps(settings: dict[str, Any]) -> int:
    return min(100, int(settings["num_steps"]) // 10)


def _own_cores() -> int:
    """Return this process's share of the cores: torchrun says how many processes it started."""
    affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class TrainConfig(BaseModel):
    """All settings of one training run, checked; a field's description is its flag's help."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    run: AnyPath | None = Field(
        None, description="folder for the run's files [default: runs/PRECISION, numbered if taken]"
    )
    overwrite: bool = Field(False, description="replace the run that --run holds")
    resume: str | None = Field(
        None,
        min_length=1,
        description="go on from a checkpoint: auto (the newest of --run; none: start), a run's "
        "folder, or one checkpoint",
    )
    init: AnyPath | None = Field(
        None, description="a model in Hugging Face layout to start from; it gives the shape"
    )
    loss_log_file: AnyPath | None = Field(
        None, description="a CSV file that also gets step,loss rows"
    )

    log_to: list[Tracker] = Field(
        default_factory=list,
        description="where each step's loss, lr, gradient norm and speed also go; may be repeated",
    )

    precision: Precision = Field(
        "exact", description="preset: how master weights and moments are kept"
    )
    master_weights: MasterWeights | None = Field(
        None, description="format of the master weights, instead of the preset's"
    )
    moments: Moments | None = Field(
        None, description="format of the optimizer's moments, instead of the preset's"
    )
    release_gradients: bool = Field(
        default_factory=lambda settings: settings["precision"] in RELEASED,
        description="update each parameter as its gradient arrives, and free the gradient "
        "[default: with leanest]",
    )

    data: AnyPath | None = Field(
        None,
        description="text to train on: a .txt, .jsonl or .parquet file, or a folder of them "
        "[default: text that comes with Python]",
    )
    dataset: str | None = Field(
        None, description="a Hugging Face data set to train on, NAME or NAME/CONFIG"
    )
    eval_data: AnyPath | None = Field(
        None,
        description="held-out text, as --data [default: the data set's validation split, else the "
        "last 5 % of the text]",
    )
    tokenizer: str = Field(
        "bytes",
        min_length=1,
        description="bytes, bpe:N (trained on the text, N tokens), or a Hugging Face "
        "tokenizer.json or the folder it is in",
    )

    num_layers: int = Field(4, ge=1, le=2**12, description="layers of the model")
    hidden_dim: int = Field(256, ge=2, le=2**16, description="width of the model")
    ffn_dim: int = Field(
        default_factory=_default_ffn_dim,
        ge=1,
        le=2**18,
        description="width inside the feed-forward network [default: 8/3 of --hidden_dim, rounded "
        "up to a multiple of 32]",
    )
    num_heads: int = Field(4, ge=1, description="attention heads of a layer")
    num_kv_heads: int = Field(
        default_factory=lambda settings: settings["num_heads"],
        ge=1,
        description="key and value heads of a layer [default: --num_heads]",
    )
    vocab_size: int | None = Field(
        None, ge=1, le=2**24, description="rows of the embedding [default: the tokenizer's]"
    )
    seq_length: int = Field(256, ge=1, le=2**20, description="tokens in a sequence")
    tie_embeddings: bool = Field(False, description="use the embedding as the output matrix too")
    activation_checkpointing: bool = Field(
        False, description="recompute a layer's activations in the backward pass: less memory"
    )

    batch_size: int = Field(16, ge=1, le=2**16, description="sequences in a micro-batch")
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="micro-batches in a step; from 2 on, gradients are summed in FP32"
    )
    num_steps: int = Field(1000, ge=1, description="optimizer steps")
    optimizer: Rule = Field("adamw", description="update rule")
    learning_rate: float = Field(
        default_factory=lambda settings: LEARNING_RATES[settings["optimizer"]],
        gt=0,
        description="peak learning rate [default: 1e-3; lion 1e-4, sgd 0.1]",
    )
    lr_schedule: Schedule = Field("cosine", description="what follows the warm-up")
    lr_warmup_steps: int = Field(
        default_factory=_default_lr_warmup_steps,
        ge=0,
        description="steps over which the learning rate rises [default: a tenth of --num_steps, "
        "at most 100]",
    )
    lr_warmup_type: WarmupType = Field("linear", description="how the learning rate rises")
    lr_start_ratio: float = Field(
        0.0, ge=0, le=1, description="the warm-up rises from this part of the peak learning rate"
    )
    lr_end_ratio: float = Field(
        0.0, ge=0, le=1, description="the schedule falls to this part of the peak learning rate"
    )
    weight_decay: float = Field(0.1, ge=0, description="weight decay, on matrices only")
    beta1: float = Field(
        0.9, ge=0, lt=1, description="decay rate of the first moment; sgd's momentum"
    )
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    max_grad_norm: float = Field(
        default_factory=_default_max_grad_norm,
        ge=0,
        description="largest norm of all gradients together; 0: no clipping [default: 1; 0 with "
        "released gradients]",
    )
    max_parameter_grad_norm: float = Field(
        0.0, ge=0, description="largest norm of each parameter's released gradient; 0: no clipping"
    )

    on_nonfinite: Literal["propagate", "skip"] = Field(
        "propagate", description="what a step does whose gradients hold an Inf or a NaN"
    )

    eval_steps: int = Field(
        0, ge=0, description="steps between evaluations; there is always one after the last step"
    )
    save_steps: int = Field(
        500,
        ge=0,
        description="steps between checkpoints; there is always one after the last step",
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(
        0, ge=0, description="also keep checkpoints at multiples of so many steps; 0: none"
    )
    stall_steps: int = Field(
        100, ge=0, description="steps between counts of stalled updates; 0: none"
    )
    log_interval: int = Field(10, ge=1, description="steps between printed lines")
    warmup_steps: int = Field(5, ge=0, description="first steps, left out of the timing")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: int = Field(
        default_factory=_own_cores,
        ge=1,
        le=1024,
        description="CPU threads of a process [default: all cores, shared among processes]",
    )
    zero_stage: int = Field(
        0,
        ge=0,
        le=3,
        description="under torchrun, what is sharded: 1 optimizer states, 2 gradients too, 3 "
        "weights too",
    )
    shard_size: int | None = Field(
        None, ge=1, description="processes that share one copy of what is sharded [default: all]"
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="in which gradients are summed over processes"
    )
    cpu_offload: bool = Field(
        False, description="stages 2 and 3: keep weights and states on the CPU, and step there"
    )
    timeout: int = Field(
        600, ge=1, description="seconds after which a process that does not answer is given up"
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="of initial weights, data order and stochastic rounding"
    )

    @property
    def formats(self) -> Formats:
        """The preset's formats, or what was given instead."""
        preset = PRESETS[self.precision]
        return Formats(self.master_weights or preset.master_weights, self.moments or preset.moments)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hidden_dim % self.num_heads:
            fix = f"does not divide --hidden_dim {self.hidden_dim}"
            raise UsageError("--num_heads", self.num_heads, fix)
        head_dim = self.hidden_dim // self.num_heads
        if head_dim % 2:
            fix = f"gives heads of odd width {head_dim}; rotary positions need an even one"
            raise UsageError("--num_heads", self.num_heads, fix)
        if self.num_heads % self.num_kv_heads:
            fix = f"does not divide --num_heads {self.num_heads}"
            raise UsageError("--num_kv_heads", self.num_kv_heads, fix)
        if self.lr_warmup_steps > self.num_steps:
            fix = f"more than --num_steps {self.num_steps}"
            raise UsageError("--lr_warmup_steps", self.lr_warmup_steps, fix)
        if self.release_gradients and self.max_grad_norm:
            fix = "needs all gradients at once; with released ones use --max_parameter_grad_norm"
            raise UsageError("--max_grad_norm", self.max_grad_norm, fix)
        if self.max_parameter_grad_norm and not self.release_gradients:
            fix = "clips released gradients; add --release_gradients, or use --max_grad_norm"
            raise UsageError("--max_parameter_grad_norm", self.max_parameter_grad_norm, fix)
        if self.release_gradients and self.on_nonfinite != "propagate":
            fix = "needs all gradients at once; with released ones use propagate"
            raise UsageError("--on_nonfinite", self.on_nonfinite, fix)
        if self.overwrite and self.run is None:
            raise UsageError("--overwrite", self.overwrite, "name the folder to replace by --run")
        if self.shard_size and not self.zero_stage:
            fix = "stage 0 shards nothing; give --zero_stage 1, 2 or 3 too"
            raise UsageError("--shard_size", self.shard_size, fix)
        if self.cpu_offload and self.zero_stage < 2:
            fix = f"needs --zero_stage 2 or 3, not {self.zero_stage}"
            raise UsageError("--cpu_offload", self.cpu_offload, fix)
        if self.data and self.dataset:
            raise UsageError("--dataset", self.dataset, "give it or --data, not both")
        return self

    def to_toml(self) -> dict[str, Any]:
        """Give the settings that another run needs to repeat this one, as TOML can hold them."""
        return self.model_dump(mode="json", exclude_none=True, exclude=set(PLACES))
