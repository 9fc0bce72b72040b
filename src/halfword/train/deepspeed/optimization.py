"""The sections `optimizer` and `scheduler`; what is missing there is DeepSpeed's default."""

from typing import Any

from halfword.train.config import LEARNING_RATES
from halfword.train.deepspeed.keys import KEYS
from halfword.train.deepspeed.translation import Translation

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd"}
# What DeepSpeed takes where a parameter is missing (ops/adam/fused_adam.py, ops/lion/fused_lion.py,
# torch.optim.SGD), by its optimizers' names in lower case.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
DEFAULTS["adamw"] = DEFAULTS["adam"]
# The parameters of each schedule (runtime/lr_schedules.py); None: the optimizer's, or the run's.
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "WarmupLR": ("constant", {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP}),
    "WarmupDecayLR": (
        "linear",
        {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, **_WARMUP, "total_num_steps": None},
    ),
    "WarmupCosineLR": (
        "cosine",
        {"warmup_min_ratio": 0.0, **_WARMUP, "cos_min_ratio": 1e-4, "total_num_steps": None},
    ),
}


def optimizer(it: Translation) -> None:
    """Read `optimizer`."""
    kind, params = _type_and_params(it, "optimizer")
    if kind is None:
        it.say("optimizer", "the command line's, or halfword's default")
        return
    if kind.lower() not in OPTIMIZERS:
        it.document.refuse("optimizer.type", "halfword has AdamW, Adam, Lion and SGD")
    rule = OPTIMIZERS[kind.lower()]
    decoupled = it.value("optimizer.params.adam_w_mode") is not False
    if kind.lower() == "adam" and not decoupled:
        rule = "adam"
    it.give("optimizer.type", optimizer=rule)
    if "optimizer.params.adam_w_mode" in it.document.written:
        it.say("optimizer.params.adam_w_mode", f"--optimizer {rule}")
    if it.flags.get("optimizer", rule) != rule:
        for key in params:
            it.say(
                key, f"set aside, for the command line gives --optimizer {it.flags['optimizer']}"
            )
        return
    _rule_settings(it, kind.lower())


def _rule_settings(it: Translation, kind: str) -> None:
    defaults = DEFAULTS[kind]
    for name in ("betas", "eps", "momentum"):
        key = f"optimizer.params.{name}"
        if name not in defaults and key in it.document.written:
            it.document.refuse(key, f"{it.value('optimizer.type')} has none; leave it out")
    for name, default in defaults.items():
        key = f"optimizer.params.{name}"
        if it.document.is_left_open(key):
            continue
        note = "" if key in it.document.values else "DeepSpeed's default"
        value = it.document.values.get(key, default)
        if name == "betas":
            it.give(key, note, beta1=float(value[0]), beta2=float(value[1]))
        elif name == "weight_decay":
            it.give(key, note or "of matrices; norms do not decay", weight_decay=float(value))
        else:
            setting = {"lr": "learning_rate", "eps": "eps", "momentum": "beta1"}[name]
            it.give(key, note, **{setting: float(value)})


def schedule(it: Translation) -> None:
    """Read `scheduler`, after `optimizer`, whose learning rate it may replace."""
    kind, params = _type_and_params(it, "scheduler")
    if kind is None:
        if not it.document.is_left_open("scheduler.type"):
            it.give("scheduler", lr_schedule="constant", lr_warmup_steps=0)
        return
    if kind not in SCHEDULES:
        it.document.refuse("scheduler.type", f"halfword has {', '.join(SCHEDULES)}")
    name, defaults = SCHEDULES[kind]
    it.give("scheduler.type", lr_schedule=name)
    for key in params:
        if key.rpartition(".")[2] not in defaults and not KEYS[key].nothing:
            it.document.refuse(key, f"{kind} has none; leave it out")
    for name, default in defaults.items():
        key = f"scheduler.params.{name}"
        value = it.document.values.get(key, default)
        if not it.document.is_left_open(key) and value is not None:
            note = "" if key in it.document.values else "DeepSpeed's default"
            _schedule_setting(it, key, name, value, note)


def _schedule_setting(it: Translation, key: str, name: str, value: Any, note: str) -> None:
    if name == "warmup_max_lr":
        if earlier := it.sources.get("learning_rate"):
            it.say(earlier, f"set aside for {key}")
        it.give(key, note, learning_rate=float(value))
    elif name == "warmup_min_lr":
        peak = _peak(it)
        if value > peak > 0:
            it.document.refuse(key, f"is more than the peak, {peak:g}")
        # A peak that is not above 0 is told of as the learning rate.
        ratio = value / peak if value and peak > 0 else 0.0
        it.give(key, note or f"of the peak, {peak:g}", lr_start_ratio=ratio)
    elif name == "total_num_steps":
        it.give(key, num_steps=value)
    else:
        setting = {
            "warmup_num_steps": "lr_warmup_steps",
            "warmup_type": "lr_warmup_type",
            "warmup_min_ratio": "lr_start_ratio",
            "cos_min_ratio": "lr_end_ratio",
        }[name]
        it.give(key, note, **{setting: value.lower() if name == "warmup_type" else value})


def _peak(it: Translation) -> float:
    """Return the learning rate after the warm-up, which the smallest one is a part of."""
    highest = it.value("scheduler.params.warmup_max_lr")
    settings = {**it.settings, **({"learning_rate": highest} if highest else {}), **it.flags}
    rate: float = settings.get("learning_rate", LEARNING_RATES[settings.get("optimizer", "adamw")])
    return rate


def _type_and_params(it: Translation, section: str) -> tuple[str | None, list[str]]:
    """Return what a section names, and the keys of its parameters, which need a name."""
    kind = it.value(f"{section}.type")
    params = [key for key in it.document.written if key.startswith(f"{section}.params.")]
    if params and kind is None:
        it.document.refuse(f"{section}.type", f"name the {section} that has the params")
    return kind, params
