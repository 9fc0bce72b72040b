"""Settings: one table for Python, TOML and flags, and what each mistake in them says."""

from pathlib import Path
from typing import get_args

import pytest
import tomli_w

from halfword.errors import UsageError
from halfword.train.config import PRESETS, Precision, Schedule, TrainConfig, WarmupType
from halfword.train.reading import load_config
from halfword.train.schedule import SCHEDULES, WARMUPS
from halfword.train.training import OPTIMIZERS


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "num_layers = 3\nnum_heads = 2\nlearning_rate = 1\n")
    config = load_config(file, {"num_heads": 8})
    assert (config.num_layers, config.num_heads, config.num_steps) == (3, 8, 1000)
    assert config.learning_rate == 1.0  # a TOML integer where a number is asked for


def test_derived_defaults_follow_what_they_are_derived_from() -> None:
    config = TrainConfig(hidden_dim=96, num_heads=6, num_steps=50)
    assert (config.ffn_dim, config.num_kv_heads, config.lr_warmup_steps) == (256, 6, 5)
    config = TrainConfig(hidden_dim=96, num_heads=6, ffn_dim=7, num_kv_heads=2, lr_warmup_steps=0)
    assert (config.ffn_dim, config.num_kv_heads, config.lr_warmup_steps) == (7, 2, 0)
    assert TrainConfig().lr_warmup_steps == 100


def test_a_written_config_repeats_the_run_but_not_its_places(tmp_path: Path) -> None:
    first = TrainConfig(
        run=tmp_path / "run", overwrite=True, loss_log_file=tmp_path / "loss.csv",
        data=tmp_path / "a.txt", precision="bf16", moments="fp32", seed=7,
    )  # fmt: skip
    again = load_config(write(tmp_path, tomli_w.dumps(first.to_toml())), {})
    assert again.model_dump() == first.model_dump() | {
        "run": None, "overwrite": False, "loss_log_file": None,
    }  # fmt: skip


def test_another_precision_can_be_given_to_a_written_config(tmp_path: Path) -> None:
    """The preset's formats are not written out: they would win over the flag."""
    file = write(tmp_path, tomli_w.dumps(TrainConfig(precision="exact").to_toml()))
    assert load_config(file, {"precision": "bf16"}).formats == PRESETS["bf16"]


def test_formats_come_from_the_preset_unless_given() -> None:
    assert TrainConfig().formats == ("split", "fp32")
    assert TrainConfig(precision="bf16-sr", moments="fp32").formats == ("bf16-sr", "fp32")
    assert TrainConfig(master_weights="split24").formats == ("split24", "fp32")


def test_choices_are_the_tables_they_choose_from() -> None:
    assert get_args(Precision) == tuple(PRESETS)
    assert get_args(Schedule) == tuple(SCHEDULES)
    assert get_args(WarmupType) == tuple(WARMUPS)
    assert get_args(TrainConfig.model_fields["optimizer"].annotation) == tuple(OPTIMIZERS)


def test_every_setting_has_a_help_text() -> None:
    assert all(field.description for field in TrainConfig.model_fields.values())


BAD_TOML = {
    "hidden_dims = 64": "hidden_dims: unknown key; did you mean hidden_dim?",
    "frobnicate = 64": "frobnicate: unknown key",
    "[model]\nhidden_dim = 64": "model: unknown key",
    'num_layers = "4"': "num_layers '4': should be a valid integer",
    "num_layers = 4.0": "num_layers 4.0: should be a valid integer",
    "num_layers = true": "num_layers True: should be a valid integer",
    'learning_rate = "fast"': "learning_rate 'fast': should be a valid number",
    "learning_rate = nan": "learning_rate nan: should be a finite number",
    "tie_embeddings = 1": "tie_embeddings 1: should be a valid boolean",
    'precision = "fp8"': "precision 'fp8': should be 'fp32-master', 'exact'",
    "data = 3": "data 3: is not a valid path",
    "num_steps = 0": "num_steps 0: should be greater than or equal to 1",
    "beta2 = 1.0": "beta2 1.0: should be less than 1",
    "hidden_dim = 0": "hidden_dim 0: should be greater than or equal to 2",
}


@pytest.mark.parametrize("text", BAD_TOML)
def test_a_bad_value_in_a_file_is_named_with_the_file(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_config(file, {})
    assert str(caught.value).startswith(f"{file}: {BAD_TOML[text]}")


def test_a_bad_flag_is_named_as_a_flag_even_beside_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, "num_heads = 4\n")
    with pytest.raises(UsageError) as caught:
        load_config(file, {"num_heads": -1})
    assert str(caught.value) == "--num_heads -1: should be greater than or equal to 1"


BAD_COMBINATIONS = [
    ({"num_heads": 3, "hidden_dim": 64}, "--num_heads 3: does not divide --hidden_dim 64"),
    ({"num_heads": 4, "hidden_dim": 12}, "--num_heads 4: gives heads of odd width 3; "),
    (
        {"release_gradients": True, "max_grad_norm": 1.0},
        "--max_grad_norm 1.0: needs all gradients at once; with released ones use "
        "--max_parameter_grad_norm",
    ),
    (
        {"max_parameter_grad_norm": 1.0},
        "--max_parameter_grad_norm 1.0: clips released gradients; add --release_gradients, or use "
        "--max_grad_norm",
    ),
    (
        {"release_gradients": True, "on_nonfinite": "skip"},
        "--on_nonfinite skip: needs all gradients at once; with released ones use propagate",
    ),
    ({"num_heads": 4, "num_kv_heads": 3}, "--num_kv_heads 3: does not divide --num_heads 4"),
    ({"num_steps": 5, "lr_warmup_steps": 6}, "--lr_warmup_steps 6: more than --num_steps 5"),
    ({"data": "a.txt", "dataset": "wikitext"}, "--dataset wikitext: give it or --data, not both"),
    ({"shard_size": 2}, "--shard_size 2: stage 0 shards nothing; give --zero_stage 1, 2 or 3 too"),
    ({"overwrite": True}, "--overwrite True: name the folder to replace by --run"),
]


@pytest.mark.parametrize("flags, message", BAD_COMBINATIONS)
def test_settings_that_do_not_fit_together_are_refused(flags, message) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(None, flags)
    assert str(caught.value).startswith(message)
