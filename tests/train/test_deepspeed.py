"""DeepSpeed's JSON files: what becomes of each key, what wins, and what is refused by name."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import TypeAdapter
from rich.console import Console

from halfword.errors import UsageError
from halfword.train.config import PRESETS, TrainConfig
from halfword.train.deepspeed import translate
from halfword.train.deepspeed.keys import KEYS, QUIET_SECTIONS, SWITCHED_SECTIONS
from halfword.train.launch import settle
from halfword.train.loop import run
from halfword.train.reading import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
BF16 = {"bf16": {"enabled": True}}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
DEFAULTS = {  # of DeepSpeed, where a file says nothing
    **{"lr_schedule": "constant", "lr_warmup_steps": 0, "max_grad_norm": 0.0},
    **{"precision": "fp32-master", "on_nonfinite": "skip"},
}


@pytest.fixture
def write(tmp_path: Path):
    """Write a file, BF16 where it does not say otherwise."""

    def write(document: Any) -> Path:
        file = tmp_path / "ds.json"
        text = document if isinstance(document, str) else json.dumps(BF16 | document)
        file.write_text(text, encoding="utf-8")
        return file

    return write


def settled(file: Path, world_size: int = 1, **flags: Any) -> tuple[TrainConfig, str]:
    """Return the settings and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    config = settle(None, file, flags, world_size, console)
    return config, console.file.getvalue()


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999}
ADAMW |= {"eps": 1e-8, "weight_decay": 0.0}
LOG_WARMUP = {"lr_warmup_steps": 20, "lr_warmup_type": "log", "lr_start_ratio": 0.0}
MEANINGS = [
    ({}, {}),
    ({"steps_per_print": 7}, {"log_interval": 7}),
    ({"steps_per_print": 5e1}, {"log_interval": 50}),
    ({"gradient_clipping": 1}, {"max_grad_norm": 1.0}),
    ({"train_micro_batch_size_per_gpu": 2}, {"batch_size": 2}),
    ({"communication_data_type": "BF16"}, {"reduce_dtype": "bf16"}),
    ({"bf16": LOW}, {"precision": "bf16"}),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"precision": "bf16", "moments": "fp32"},
    ),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"on_nonfinite": "propagate"}),
    ({"bfloat16": {"enabled": True}, "bf16": None}, {}),
    (optimizer("AdamW"), ADAMW),
    (optimizer("Adam", lr=1e-4, betas=[0.8, 0.9]), ADAMW | {
        "learning_rate": 1e-4, "beta1": 0.8, "beta2": 0.9
    }),
    (optimizer("Adam", adam_w_mode=False), ADAMW | {"optimizer": "adam"}),
    (optimizer("AdamW", eps=1e-6, weight_decay=0.01), ADAMW | {"eps": 1e-6, "weight_decay": 0.01}),
    (optimizer("Lion"), {
        "optimizer": "lion", "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0
    }),
    (optimizer("SGD", lr=0.5, momentum=0.7, weight_decay=0.1), {
        "optimizer": "sgd", "learning_rate": 0.5, "beta1": 0.7, "weight_decay": 0.1
    }),
    (scheduler("WarmupLR", warmup_max_lr=0.1, warmup_min_lr=0.05, warmup_num_steps=20),
     LOG_WARMUP | {"learning_rate": 0.1, "lr_start_ratio": 0.5}),
    (optimizer("AdamW", lr=0.2) | scheduler("WarmupLR", warmup_num_steps=20, warmup_type="linear"),
     ADAMW | LOG_WARMUP | {"learning_rate": 0.2, "lr_warmup_type": "linear"}),
    (optimizer("AdamW", lr=0.2) | scheduler(
        "WarmupDecayLR", warmup_num_steps=20, total_num_steps=50
    ), ADAMW | LOG_WARMUP | {"lr_schedule": "linear", "num_steps": 50}),
    (scheduler("WarmupCosineLR", warmup_num_steps=20, warmup_min_ratio=0.2, total_num_steps=50),
     LOG_WARMUP | {
        "lr_schedule": "cosine", "num_steps": 50, "lr_start_ratio": 0.2, "lr_end_ratio": 1e-4
    }),
    (zero(stage=3), {"zero_stage": 3}),
    (zero(stage=3, mics_shard_size=1), {"zero_stage": 3, "shard_size": 1}),
    (zero(stage=2, offload_optimizer={"device": "none"}, offload_param=None), {"zero_stage": 2}),
]  # fmt: skip


@pytest.mark.parametrize("document, settings", MEANINGS)
def test_a_key_becomes_a_setting(write, document, settings) -> None:
    config, _ = settled(write(document))
    expected = TrainConfig(**{**DEFAULTS, **settings})
    assert config == expected


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_offloading_needs_several_ranks(write, stage, section) -> None:
    file = write(zero(stage=stage, **{section: {"device": "cpu", "pin_memory": True}}))
    assert settled(file, world_size=2)[0].cpu_offload
    with pytest.raises(UsageError, match=f'{section}.device "cpu": one process has nothing'):
        settled(file)


def test_the_two_files_of_the_example_differ_in_precision_alone() -> None:
    baseline, _ = settled(CONFIGS / "baseline.json", world_size=4)
    low, shown = settled(CONFIGS / "bf16_full.json", world_size=4)
    assert baseline.precision == "fp32-master"
    assert low == baseline.model_copy(update={"precision": "bf16"})
    assert low.formats == PRESETS["bf16"]
    assert (baseline.zero_stage, baseline.weight_decay, baseline.max_grad_norm) == (3, 0.01, 0)
    assert shown.count("overlap_comm") == shown.count("reduce_bucket_size") == 1


MICRO, STEPS, WHOLE = (
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "train_batch_size",
)


@pytest.mark.parametrize(
    "keys, flags, micro, steps",
    [
        ({WHOLE: 24}, {}, 6, 1),
        ({WHOLE: 24, MICRO: 2}, {}, 2, 3),
        ({WHOLE: 24, STEPS: 3}, {}, 2, 3),
        ({WHOLE: 24, MICRO: 2, STEPS: 3}, {}, 2, 3),
        ({MICRO: 2}, {}, 2, 1),
        ({STEPS: 2}, {}, 16, 2),
        ({WHOLE: 24, MICRO: "auto", STEPS: "auto"}, {"batch_size": 3}, 3, 2),
        ({WHOLE: 24, MICRO: 2, STEPS: 3}, {"batch_size": 1}, 1, 3),  # the command line wins
    ],
)
def test_the_batch_of_all_ranks_is_divided(write, keys, flags, micro, steps) -> None:
    config, _ = settled(write(keys), world_size=4, **flags)
    assert (config.batch_size, config.gradient_accumulation_steps) == (micro, steps)


def test_auto_leaves_a_setting_to_the_command_line_then_to_the_default(write) -> None:
    file = write(
        optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
        | scheduler("WarmupLR", warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto")
        | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
        | {"train_batch_size": "auto"}
        | zero(stage=2, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto")
    )
    config, shown = settled(file, learning_rate=0.5)
    expected = {
        **{"learning_rate": 0.5, "lr_schedule": "constant", "lr_warmup_type": "log"},
        **{"precision": "fp32-master", "on_nonfinite": "skip", "zero_stage": 2},
    }
    assert config == TrainConfig(**expected)
    assert shown.count('gradient_clipping "auto"') == 1


def test_the_command_line_wins_and_that_is_said_once(write) -> None:
    file = write(optimizer("AdamW", lr=0.1) | {"steps_per_print": 5})
    config, shown = settled(file, learning_rate=0.2, precision="exact", log_interval=5, beta1=0.8)
    assert (config.learning_rate, config.precision, config.beta1) == (0.2, "exact", 0.8)
    assert shown.splitlines()[-1] == (
        "The command line wins: --learning_rate 0.2 (not optimizer.params.lr), --beta1 0.8 (not "
        "optimizer.params.betas)."
    )
    assert "set aside, for the command line gives --precision exact" in shown


def test_another_precision_takes_the_place_of_both_formats(write) -> None:
    file = write({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})
    assert settled(file, precision="lean")[0].formats == PRESETS["lean"]
    assert settled(file, precision="lean", moments="bf16")[0].formats == ("split", "bf16")
    assert settled(file, moments="bf16")[0].formats == ("bf16", "bf16")


def test_another_optimizer_sets_the_files_params_aside(write) -> None:
    file = write(optimizer("AdamW", lr=0.1, betas=[0.5, 0.5]))
    config, shown = settled(file, optimizer="lion")
    assert config.model_dump() == TrainConfig(**DEFAULTS, optimizer="lion").model_dump()
    assert shown.count("set aside, for the command line gives --optimizer lion") == 2


def test_every_key_is_told_of_once(write) -> None:
    """Each with a value that its type allows; what the others become is tested above."""
    document: dict[str, Any] = {}
    for key, known in KEYS.items():
        if not known.nothing:
            continue
        value = known.only[0] if known.only else _example(known.kind)
        section = document
        *sections, name = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    for section in QUIET_SECTIONS:
        *outer, name = section.split(".")
        (document[outer[0]] if outer else document)[name] = {"some": {"deep": 1}}
    for section in SWITCHED_SECTIONS - {"zero_optimization.zenflow"}:
        document[section] = {"enabled": False}
    document["optimizer"]["type"], document["bf16"]["enabled"] = "AdamW", True
    document["scheduler"]["type"] = "WarmupLR"
    del document["data_types"]
    translation = translate(write(document), {})
    assert not translation.here.keys() & translation.idle.keys()
    assert translation.here.keys() | translation.idle.keys() >= translation.document.written.keys()
    assert len(translation.idle) > 80


def _example(kind: Any) -> Any:
    for value in (True, 1, 0.5, "bf16", ["a"]):
        try:
            TypeAdapter(kind, config={"strict": True}).validate_python(value)
        except ValueError:
            continue
        return value
    raise AssertionError(kind)


REFUSED = [
    ("[1]", "--deepspeed_config {file}: is not a JSON object, {{...}}"),
    ('{"bf16": {}, "bf16": {}}', "--deepspeed_config {file}: has the key bf16 twice in one"),
    ('{"bf16": ', "--deepspeed_config {file}: is not JSON: Expecting value: line 1 column 10"),
    ({"zero_optimisation": {}}, "{file}: zero_optimisation: unknown key; did you mean zero_opt"),
    (zero(stge=3), "{file}: zero_optimization.stge: unknown key; did you mean zero_optimization.s"),
    ({"stage": 3}, "{file}: stage: unknown key; did you mean zero_optimization.stage?"),
    ({"frobnicate": 3}, "{file}: frobnicate: unknown key"),
    ({"bf16": True}, "{file}: bf16 true: should be an object, {{...}}"),
    ({"bf16": {"enabled": "yes"}}, '{file}: bf16.enabled "yes": should be a valid boolean'),
    ({"steps_per_print": 1.5}, "{file}: steps_per_print 1.5: should be a valid integer"),
    ({"gradient_clipping": "1"}, '{file}: gradient_clipping "1": should be a valid number'),
    ('{"gradient_clipping": NaN}', "{file}: gradient_clipping NaN: should be a finite number"),
    (zero(stage=4), "{file}: zero_optimization.stage 4: should be less than or equal to 3"),
    (optimizer("AdamW", lr=True), "{file}: optimizer.params.lr true: should be a valid number"),
    (optimizer("AdamW", lr=0), "{file}: optimizer.params.lr 0: should be greater than 0"),
    (
        {**optimizer("AdamW", lr=0), **scheduler("WarmupLR", warmup_min_lr=0.1)},
        "{file}: optimizer.params.lr 0: should be greater than 0",
    ),
    (
        scheduler("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.01),
        "{file}: scheduler.params.warmup_min_lr 0.1: is more than the peak, 0.01",
    ),
    ("[" * 100_000, "--deepspeed_config {file}: has sections in sections without an end"),
    (
        f'{{"train_batch_size": {"9" * 5000}}}',
        "--deepspeed_config {file}: has a number of too many digits",
    ),
    (optimizer("AdamW", betas=[0.9]), "{file}: optimizer.params.betas [0.9]: "),
    (optimizer("AdamW", betas=[0.9, 1]), "{file}: optimizer.params.betas [0.9, 1]: should be less"),
    (optimizer("AdamW", amsgrad=True), "{file}: optimizer.params.amsgrad true: leave it out"),
    (optimizer("AdamW", max_grad_norm=1), "{file}: optimizer.params.max_grad_norm 1: use gradient"),
    (optimizer("Lion", eps=1e-8), "{file}: optimizer.params.eps 1e-08: Lion has none; leave it ou"),
    (optimizer("OneBitAdam"), '{file}: optimizer.type "OneBitAdam": halfword has AdamW, Adam, Lio'),
    ({"optimizer": {"params": {"lr": 1}}}, "{file}: optimizer.type (not given): name the optimize"),
    (scheduler("OneCycle"), '{file}: scheduler.type "OneCycle": halfword has WarmupLR, WarmupDeca'),
    (scheduler("WarmupLR", total_num_steps=9),
     "{file}: scheduler.params.total_num_steps 9: WarmupLR has none; leave it out"),
    (scheduler("WarmupLR", warmup_num_steps=2000),
     "{file}: scheduler.params.warmup_num_steps 2000: more than --num_steps 1000"),
    (scheduler("WarmupLR", warmup_type="cubic"),
     '{file}: scheduler.params.warmup_type "cubic": use log or linear'),
    ({"fp16": {"enabled": True}}, "{file}: fp16.enabled true: halfword trains BF16 weights; enabl"),
    ({"bf16": {"enabled": False}}, "{file}: bf16.enabled false: would be FP32, and halfword train"),
    ("{}", "{file}: bf16.enabled (not given): would be FP32, and halfword trains BF16 weights"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}},
     "{file}: bf16.bf16_optimizer_states true: needs bf16.bf16_master_weights_and_grads; --prec"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}},
     '{file}: torch_autocast.dtype "float16": use torch.bfloat16'),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, '{file}: data_types.grad_accum_dtype "bf16": m'),
    ({"communication_data_type": "fp16"}, '{file}: communication_data_type "fp16": gradients are'),
    (zero(stage=3, offload_param={"device": "nvme"}),
     '{file}: zero_optimization.offload_param.device "nvme": only the CPU can hold'),
    (zero(stage=1, offload_optimizer={"device": "cpu"}),
     '{file}: zero_optimization.offload_optimizer.device "cpu": needs --zero_stage 2 or 3, not 1'),
    (zero(zero_quantized_weights=True), "{file}: zero_optimization.zero_quantized_weights true: n"),
    (zero(zenflow={"topk_ratio": 0.1}), "{file}: zero_optimization.zenflow.topk_ratio 0.1: halfwo"),
    ({"amp": {"enabled": True}}, "{file}: amp.enabled true: halfword has no amp; leave it out"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}},
     "{file}: activation_checkpointing.cpu_checkpointing true: activations stay whole"),
    ({WHOLE: 8, MICRO: 2, STEPS: 2},
     "{file}: train_batch_size 8: 2 sequences x 2 micro-batches x 1 process are 4; leave out one"),
    ({WHOLE: 3, MICRO: 2}, "{file}: train_batch_size 3: cannot be divided into micro-batches of 2"),
]  # fmt: skip


@pytest.mark.parametrize("document, message", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(write, document, message) -> None:
    file = write(document)
    with pytest.raises(UsageError) as caught:
        settled(file)
    assert str(caught.value).startswith(message.format(file=file))


def test_a_flag_that_is_wrong_is_named_as_a_flag(write) -> None:
    with pytest.raises(UsageError, match="^--beta1 2.0: should be less than 1$"):
        settled(write(optimizer("AdamW")), beta1=2.0)


def test_config_toml_repeats_the_run_without_the_file(write, tiny, tmp_path) -> None:
    flags = tiny(seed=5).model_dump(exclude_unset=True)
    config, _ = settled(write({"bf16": LOW} | optimizer("AdamW", lr=0.01)), **flags)
    first = run(config, Console(quiet=True))
    again = load_config(first / "config.toml", {})
    assert tomli_w.dumps(again.to_toml()) == (first / "config.toml").read_text()
    second = run(again.model_copy(update={"run": tmp_path / "again"}), Console(quiet=True))
    digests = [json.loads((x / "summary.json").read_text())["digests"] for x in (first, second)]
    assert digests[0] == digests[1]


def test_a_file_cannot_change_a_run_that_is_resumed(write, tiny, tmp_path) -> None:
    flags = tiny(run=tmp_path / "run", num_steps=2).model_dump(exclude_unset=True)
    low = write({"bf16": LOW} | optimizer("AdamW", lr=0.01))
    run(settled(low, **flags)[0], Console(quiet=True))
    flags |= {"resume": "auto", "num_steps": 3}
    run(settled(low, **flags)[0], Console(quiet=True))  # the same settings
    file = write(optimizer("AdamW", lr=0.01))  # precision may change, but not by a file
    message = r"bf16.enabled true: .*step-00000003 has bf16; give --precision bf16, which wins"
    with pytest.raises(UsageError, match=message):
        settled(file, **flags)
    assert settled(file, **flags, precision="bf16")[0].precision == "bf16"
    with pytest.raises(UsageError, match=r"optimizer.params.lr 0.5: .* has 0.01; give --learning_"):
        settled(write({"bf16": LOW} | optimizer("AdamW", lr=0.5)), **flags)
