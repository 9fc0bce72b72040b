"""The keys of DeepSpeed's JSON files: what each must hold, and what it means here.

A key becomes a setting, or changes nothing here, or can be honoured for some values only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_whole), Strict()]  # DeepSpeed's files have 5e7 for numbers
Count = Annotated[Size, Field(ge=1)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class Key:
    """What a key may hold.

    Attributes:
        kind: the type of its value, for pydantic.
        nothing: why it changes nothing here; empty where `translation` makes a setting of it.
        only: the values that can be honoured, in lower case; empty for all.
        fix: what to do where another value is given.
    """

    kind: Any
    nothing: str = ""
    only: tuple[Any, ...] = ()
    fix: str = ""


def _nothing(section: str, names: str, kind: Any, why: str) -> dict[str, Key]:
    return {f"{section}{name}": Key(kind, why) for name in names.split()}


def _only(section: str, names: str, value: Any, fix: str) -> dict[str, Key]:
    kind = type(value) if isinstance(value, bool | str) else float
    why = "as it is here"
    return {f"{section}{name}": Key(kind, why, (value,), fix) for name in names.split()}


def _section(name: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{name}.{key}": meaning for key, meaning in keys.items()}


_BUCKETS = "torch's DDP and FSDP2 choose buckets, prefetch and overlap"
_SUMS = "gradients are summed in FP32 and divided by the tokens of all ranks"
_METRICS = "metrics.csv and memory.json have the measured times, losses and bytes"
_FP16 = "counts for FP16 alone"
_NVME = "counts for offloading to NVMe alone"
_SAVED = "checkpoints are complete; halfword export writes the model"
_BF16 = ("bf16", "bfloat16", "torch.bfloat16")

_BATCH = {
    "train_batch_size": Key(Count),
    "train_micro_batch_size_per_gpu": Key(Count),
    "gradient_accumulation_steps": Key(Count),
}

_OPTIMIZER = {
    "type": Key(str),
    **dict.fromkeys(
        ["params.lr", "params.eps", "params.weight_decay", "params.momentum"], Key(float)
    ),
    "params.betas": Key(Pair),
    "params.adam_w_mode": Key(bool),
    **_nothing("params.", "torch_adam fused foreach", bool, "chooses an implementation"),
    **_only("params.", "bias_correction", True, "halfword corrects the bias of Adam's moments"),
    **_only("params.", "fp32_optimizer_states", True, "use bf16.bf16_optimizer_states"),
    **_only(
        "params.", "amsgrad maximize nesterov capturable differentiable", False, "leave it out"
    ),
    **_only("params.", "dampening", 0, "leave it out"),
    **_only("params.", "max_grad_norm", 0, "use gradient_clipping"),
    "legacy_fusion": Key(bool, "chooses an implementation"),
}

_SCHEDULER = {
    "type": Key(str),
    "params.warmup_num_steps": Key(Annotated[Size, Field(ge=0)]),
    "params.total_num_steps": Key(Count),
    "params.warmup_type": Key(str, only=("log", "linear"), fix="use log or linear"),
    **dict.fromkeys(
        ["params.warmup_min_lr", "params.warmup_max_lr"], Key(Annotated[float, Field(ge=0)])
    ),
    **dict.fromkeys(
        ["params.warmup_min_ratio", "params.cos_min_ratio"],
        Key(Annotated[float, Field(ge=0, le=1)]),
    ),
    **_only("params.", "last_batch_iteration", -1, "go on from a checkpoint by --resume"),
}

_PRECISION = {
    "bf16.enabled": Key(bool),
    "bf16.bf16_master_weights_and_grads": Key(bool),
    "bf16.bf16_optimizer_states": Key(bool),
    "bf16.check_grad_overflow": Key(bool),
    "bf16.immediate_grad_update": Key(bool, "moves work about, not results"),
    "fp16.enabled": Key(bool),
    **_nothing("fp16.", "auto_cast consecutive_hysteresis", bool, _FP16),
    **_nothing("fp16.", "loss_scale loss_scale_window min_loss_scale hysteresis", float, _FP16),
    **_nothing("fp16.", "initial_scale_power", float, _FP16),
    **_only("fp16.", "fp16_master_weights_and_grads", False, "halfword trains BF16 weights"),
    "torch_autocast.enabled": Key(bool, "the model computes in BF16 in every preset"),
    "torch_autocast.dtype": Key(str, "the model computes in BF16", _BF16, "use torch.bfloat16"),
    "torch_autocast.lower_precision_safe_modules": Key(
        list[str], "matrix products are in BF16; norms, softmax and the loss in FP32"
    ),
    "data_types.grad_accum_dtype": Key(
        str, "micro-batches are summed in FP32", ("fp32",), "micro-batches are summed in FP32 here"
    ),
    "data_types.param_dtype": Key(str, "weights are BF16", _BF16, "weights are BF16 here"),
    "data_types.buffer_dtype": Key(str, "the model's tables are FP32"),
}  # fmt: skip

_OFFLOAD_WHERE = Key(
    str, only=("none", "cpu"), fix="only the CPU can hold what is offloaded; use cpu or none"
)
_OFFLOAD = {
    "device": _OFFLOAD_WHERE,
    "pin_memory": Key(bool, "torch pins what it needs"),
    **_nothing("", "buffer_count buffer_size max_in_cpu", Size, _NVME),
    **_nothing("", "pipeline_read pipeline_write fast_init", bool, _NVME),
    "nvme_path": Key(str, _NVME),
}

_ZERO = {
    "stage": Key(Annotated[Size, Field(ge=0, le=3)]),
    "mics_shard_size": Key(Size),
    "cpu_offload": Key(bool),
    **_section("offload_param", _OFFLOAD),
    **_section("offload_optimizer", _OFFLOAD),
    **_only("offload_optimizer.", "ratio", 1, "all or nothing is offloaded; leave it out"),
    **_only("offload_optimizer.", "super_offload", False, "leave it out"),
    "offload_optimizer.cpuadam_cores_perc": Key(float, "--threads says how many cores work"),
    **_nothing(
        "",
        "overlap_comm contiguous_gradients reduce_scatter allgather_partitions "
        "use_multi_rank_bucket_allreduce round_robin_gradients memory_efficient_linear "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential parameter_alignment "
        "legacy_stage1 mics_hierarchical_params_gather",
        bool,
        _BUCKETS,
    ),
    **_nothing(
        "",
        "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold",
        Size,
        _BUCKETS,
    ),
    **_nothing(
        "",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint",
        bool,
        _SAVED,
    ),
    **_nothing("", "ignore_unused_parameters compute_grad_norm", bool, "as it is here"),
    **_nothing("", "override_module_apply log_trace_cache_warnings", bool, "no such thing here"),
    "enable_sanity_checks": Key(bool, "settings and checkpoints are always checked"),
    **_only(
        "",
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
        False,
        "nothing is quantized on its way between ranks; set it to false",
    ),
    **_only("", "zero_hpz_partition_size", 1, "set it to 1; --shard_size shards within groups"),
}

_ACTIVATIONS = {
    **_only(
        "",
        "partition_activations cpu_checkpointing",
        False,
        "activations stay whole, on their device; set it to false",
    ),
    **_nothing(
        "",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile use_reentrant",
        bool,
        "--activation_checkpointing recomputes each layer by torch",
    ),
    "number_checkpoints": Key(Size, "--activation_checkpointing recomputes each layer"),
}

_REST = {
    "gradient_clipping": Key(Annotated[float, Field(ge=0)]),
    "steps_per_print": Key(Count),
    "communication_data_type": Key(
        str, only=("fp32", "bf16"), fix="gradients are summed in fp32 or bf16"
    ),
    **_nothing("", "wall_clock_breakdown memory_breakdown dump_state", bool, _METRICS),
    **_nothing("", "prescale_gradients", bool, _SUMS),
    **_nothing("", "gradient_predivide_factor", float, _SUMS),
    **_only("", "gradient_allreduce_op", "mean", "a step's loss is a mean over all tokens"),
    **_only("", "sparse_gradients", False, "gradients are dense; set it to false"),
    **_nothing("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", bool,
               "each optimizer is tested in every stage"),
    **_nothing("", "disable_allgather disable_python_gc managed_gradient_accumulation", bool,
               "no such thing here"),
    "seq_parallel_communication_data_type": Key(str, "sequences are not split over ranks"),
    "dataloader_drop_last": Key(bool, "sequences are packed, and their order never ends"),
    "vocabulary_size": Key(Size, "--vocab_size is the model's"),
    "log_level": Key(str, "no such thing here"),
}  # fmt: skip

KEYS: dict[str, Key] = {
    **_BATCH,
    **_section("optimizer", _OPTIMIZER),
    **_section("scheduler", _SCHEDULER),
    **_PRECISION,
    **_section("zero_optimization", _ZERO),
    **_section("activation_checkpointing", _ACTIVATIONS),
    **_REST,
}
"""By their path, with dots between sections."""

QUIET_SECTIONS: dict[str, str] = {
    **dict.fromkeys(["flops_profiler", "comms_logger", "csv_monitor", "monitor_config"], _METRICS),
    **dict.fromkeys(["tensorboard", "wandb", "comet"], _METRICS),
    "aio": _NVME,
    "checkpoint": _SAVED,
    "zero_optimization.leaf_module": _BUCKETS,
}
"""Sections whose keys all change nothing here, whatever they are."""

SWITCHED_SECTIONS: frozenset[str] = frozenset(
    "amp autotuning compile compression_training curriculum_learning data_efficiency elasticity "
    "eigenvalue hybrid_engine nebula pipeline progressive_layer_drop sequence_parallel "
    "sparse_attention tensor_parallel weight_quantization zero_optimization.zenflow".split()
)
"""Sections of what halfword does not have: refused, unless they say `"enabled": false`."""


def parts(paths: Iterable[str]) -> set[str]:
    """Give the sections that paths lie in.

    >>> sorted(parts(["a.b.c", "d"]))
    ['a', 'a.b']
    """
    return {path[:at] for path in paths for at, letter in enumerate(path) if letter == "."}


SECTIONS: frozenset[str] = frozenset(
    parts(KEYS)
    | parts([*QUIET_SECTIONS, *SWITCHED_SECTIONS])
    | {*QUIET_SECTIONS}
    | SWITCHED_SECTIONS
)
