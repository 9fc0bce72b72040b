"""From the keys of a DeepSpeed file to settings of a run; no setting is left to be guessed.

What a missing key means is a setting too: no scheduler is a constant learning rate, no
`gradient_clipping` none, a missing beta DeepSpeed's default. `"auto"` leaves a setting to
the command line, then to halfword's default, as Hugging Face leaves it to its own arguments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfword.train.deepspeed.document import read
from halfword.train.deepspeed.keys import KEYS, QUIET_SECTIONS
from halfword.train.deepspeed.optimization import optimizer, schedule
from halfword.train.deepspeed.translation import Translation

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
WHOLE = "train_batch_size"
MASTERS, STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"


def translate(file: Path, flags: Mapping[str, Any], world_size: int = 1) -> Translation:
    """Read a file as settings.

    Args:
        file: DeepSpeed's JSON.
        flags: what the command line gives. It wins; what it gives completes the file.
        world_size: how many processes run.

    Raises:
        UsageError: the file, or a key in it, cannot be honoured.
    """
    translation = Translation(read(file), flags)
    _batch(translation, world_size)
    for part in (optimizer, schedule, _precision, _zero, _rest):
        part(translation)
    for key in translation.document.written:
        if key not in translation.here:
            translation.idle[key] = _why_idle(translation, key)
    return translation


def _batch(it: Translation, world_size: int) -> None:
    micro, steps, whole = it.value(MICRO), it.value(STEPS), it.value(WHOLE)
    if micro is not None:
        it.give(MICRO, batch_size=micro)
    if steps is not None:
        it.give(STEPS, gradient_accumulation_steps=steps)
    if whole is None:
        return
    if it.overruled:
        it.say(WHOLE, "set aside, for the command line gives another batch")
        return
    micro = it.flags.get("batch_size", micro)
    steps = it.flags.get("gradient_accumulation_steps", steps)
    ranks = f"{world_size} process{'es' if world_size > 1 else ''}"
    if micro is None:
        steps = 1 if steps is None else steps
        micro = _divided(it, whole, steps * world_size, f"{steps} micro-batches on {ranks}")
        it.give(WHOLE, batch_size=micro)
    if steps is None:
        steps = _divided(it, whole, micro * world_size, f"micro-batches of {micro} on {ranks}")
        it.give(WHOLE, gradient_accumulation_steps=steps)
    product = micro * steps * world_size
    if product != whole:
        fix = f"{micro} sequences x {steps} micro-batches x {ranks} are {product}"
        it.document.refuse(WHOLE, f"{fix}; leave out one of the three, or give {product}")
    it.say(WHOLE, f"{micro} sequences x {steps} micro-batches x {ranks}")


def _divided(it: Translation, whole: int, by: int, what: str) -> int:
    if whole % by:
        it.document.refuse(WHOLE, f"cannot be divided into {what}; give a multiple of {by}")
    return whole // by


def _precision(it: Translation) -> None:
    document = it.document
    masters, states = it.value(MASTERS), it.value(STATES)
    if "precision" in it.flags:
        said = f"set aside, for the command line gives --precision {it.flags['precision']}"
        for key in {"bf16.enabled", "fp16.enabled", MASTERS, STATES} & document.written.keys():
            it.say(key, said)
    elif it.value("fp16.enabled"):
        document.refuse("fp16.enabled", "halfword trains BF16 weights; enable bf16 instead")
    elif not it.value("bf16.enabled") and not document.is_left_open("bf16.enabled"):
        fix = "would be FP32, and halfword trains BF16 weights; set it to true, or give --precision"
        document.refuse("bf16.enabled", fix)
    elif states and not masters:
        fix = f"needs {MASTERS}; --precision exact-bf16 has BF16 moments and exact masters"
        document.refuse(STATES, fix)
    elif not masters:
        note = "FP32 masters and moments; exact gives the same bits in 2 bytes a parameter less"
        it.give("bf16.enabled", note, precision="fp32-master")
    else:
        it.say("bf16.enabled", "BF16 weights, as always")
        it.give(MASTERS, "no masters beside the BF16 weights", precision="bf16")
        if states:
            it.say(STATES, "the moments of --precision bf16")
        else:
            it.give(STATES, moments="fp32")
    if it.value("bf16.check_grad_overflow") is False:
        it.give("bf16.check_grad_overflow", on_nonfinite="propagate")
    elif not document.is_left_open("bf16.check_grad_overflow"):
        it.give("bf16.check_grad_overflow", on_nonfinite="skip")


def _zero(it: Translation) -> None:
    if (stage := it.value("zero_optimization.stage")) is not None:
        it.give("zero_optimization.stage", zero_stage=stage)
    for key in ("offload_param.device", "offload_optimizer.device", "cpu_offload"):
        path = f"zero_optimization.{key}"
        where = it.value(path)
        if where in (True, "cpu"):
            it.give(path, "weights, gradients and states together", cpu_offload=True)
        elif where is not None:
            it.say(path, "nothing is offloaded")
    size = it.value("zero_optimization.mics_shard_size")
    if size is not None and size > 0:
        it.give("zero_optimization.mics_shard_size", shard_size=size)


def _rest(it: Translation) -> None:
    clipping = "gradient_clipping"
    if not it.document.is_left_open(clipping):
        # runtime/constants.py of 0.19 has 1.0 as default, which few who leave the key out expect.
        note = "" if clipping in it.document.values else "DeepSpeed 0.19 itself clips to 1"
        it.give(clipping, note, max_grad_norm=float(it.value(clipping) or 0.0))
    if (interval := it.value("steps_per_print")) is not None:
        it.give("steps_per_print", log_interval=interval)
    if (dtype := it.value("communication_data_type")) is not None:
        it.give("communication_data_type", reduce_dtype=dtype.lower())


def _why_idle(it: Translation, key: str) -> str:
    """Say why a key that no setting came from changes nothing."""
    if it.document.written[key] is None:
        return "null is as if it were not there"
    if it.document.is_left_open(key) and not (key in KEYS and KEYS[key].nothing):
        return "auto: the command line's value, or halfword's default"
    if key in KEYS:
        return KEYS[key].nothing or "as it is here"
    section = next((name for name in QUIET_SECTIONS if key.startswith(f"{name}.")), None)
    return QUIET_SECTIONS[section] if section else "switched off"
