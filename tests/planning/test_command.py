"""`halfword plan`: the figures that people check first, its JSON, and mistakes in one line."""

import json

import pytest

from halfword.cli import main
from halfword.planning import command
from halfword.planning.request import read_request
from halfword.train.config import PRESETS

GIB = 2**30
LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 500000.0},
}
PARAMETERS = 2 * 300 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def _plan(capsys, words):
    assert main(["plan", "--json", *words.split()]) == 0
    return json.loads(capsys.readouterr().out)


def test_exact_masters_save_two_bytes_a_parameter(capsys):
    def saved(words):
        presets = _plan(capsys, f"--params 30e9 {words}")["presets"]
        master = {name: preset["per_rank"]["master_bytes"] for name, preset in presets.items()}
        return master["fp32-master"] - master["exact"]

    assert saved("") == 60_000_000_000
    assert saved("--world_size 4 --zero_stage 3") == 15_000_000_000
    assert saved("--world-size 4 --zero-stage 1") == 15_000_000_000


def test_deepspeeds_example_by_arithmetic(capsys):
    """25.74 and 16.17 GiB are published; 0.2 of each does not depend on the mode."""
    found = _plan(capsys, "--params 6858007633 --world_size 4 --zero_stage 3")
    assert found["num_parameters"] == 6_858_007_633
    master = found["presets"]["fp32-master"]["per_rank"]["total_bytes"]
    assert round(master / GIB, 2) == 25.55
    assert round(master * 10 / 16 / GIB, 2) == 15.97
    assert found["presets"]["fp32-master"]["peak"] is None, "no shapes, no activations"


def test_components_add_up(capsys):
    for preset in _plan(capsys, "--params 1e6")["presets"].values():
        for moment in ("per_rank", "between_steps"):
            total = preset[moment].pop("total_bytes")
            assert sum(preset[moment].values()) == total


def test_a_config_json_is_the_model(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for path in (file, tmp_path):
        found = _plan(capsys, f"--model {path} --no-trace")
        assert found["num_parameters"] == PARAMETERS
        assert found["shapes_known"]
    lean = found["presets"]["lean"]["per_rank"]
    assert lean["exp_avg_bytes"] == PARAMETERS + 3 * 5 * 64, "norms stay FP32"


def test_lion_has_one_moment(capsys):
    rank = _plan(capsys, "--params 1e6 --optimizer lion")["presets"]["exact"]["per_rank"]
    assert rank["exp_avg_bytes"] == 4_000_000
    assert "exp_avg_sq_bytes" not in rank


def test_sgd_has_a_momentum_buffer_if_any(capsys):
    def rank(words):
        found = _plan(capsys, f"--params 1e6 --optimizer sgd {words}")
        return found["presets"]["bf16"]["per_rank"]

    assert rank("")["momentum_buffer_bytes"] == 2_000_000
    assert "momentum_buffer_bytes" not in rank("--beta1 0")


def test_formats_without_a_preset_get_a_row(capsys):
    found = _plan(capsys, "--params 64e6 --master_weights split24 --moments bf16")
    assert found["chosen"] == "split24+bf16"
    assert list(found["presets"]) == [*PRESETS, "split24+bf16"]
    rank = found["presets"]["split24+bf16"]["per_rank"]
    assert rank["total_bytes"] == (2 + 1 + 4 + 2) * 64_000_000


def test_what_fits_is_said(capsys):
    words = "--params 1e9 --world_size 2 --zero_stage 3 --device_memory 6.5"
    found = _plan(capsys, words)["presets"]
    fits = {name: preset["fits"] for name, preset in found.items()}
    assert fits["exact-bf16"] and not fits["exact"]
    assert main(["plan", *words.split()]) == 0
    assert "fits" in capsys.readouterr().out


def test_the_table_shows_presets_side_by_side(capsys):
    assert main("plan --params 30e9".split()) == 0
    shown = capsys.readouterr().out
    assert "Assumed: all parameters are in matrices that int8 can quantize" in shown
    assert "447.03" in shown and "391.16" in shown
    assert all(len(line) <= 80 for line in shown.splitlines()[3:])


BAD = {
    "--params 1.5": "--params 1.5: must be a whole number, as 6858007633 or 30e9",
    "--params many": "--params many: must be a whole number, as 6858007633 or 30e9",
    "--params 1e30": "--params 1e30: must be at most 1e+15",
    "--params 1e999999999": "--params 1e999999999: must be at most 1e+15",
    "--model empty.json": "--model empty.json: num_hidden_layers is 0, must be at least 1",
    "--model deep.json": "--model deep.json: is not JSON",
    "--params 1e9 --hidden_dim 64": "--hidden_dim 64: is a model's shape; give it or --params 1e9, "
    "not both",
    "--params 1e9 --model x": "--model x: give it or --params, not both",
    "--model missing": "--model missing: cannot be read: No such file or directory",
    "--model llama.json --num_layers 3": "--num_layers 3: llama.json has 2; leave the option out",
    "--model gpt2.json": "--model gpt2.json: model_type is 'gpt2', must be llama or mistral; "
    "or give --params",
    "--world_size 0": "--world_size 0: must be at least 1",
    "--world_size 4 --zero_stage 3 --shard_size 3": "--shard_size 3: does not divide 4 processes",
    "--device_memory 80TB": "--device_memory 80TB: must be a size in GiB, as 80, or as 80GB",
    "--hidden_dim 1000000000000": "--hidden_dim 1000000000000: should be less than or equal to "
    "65536",
    "--batch_size 1000000000": "--batch_size 1000000000: should be less than or equal to 65536",
    "--zero_stage 4": "--zero_stage 4: should be less than or equal to 3",
}


@pytest.mark.parametrize("words", BAD)
def test_a_mistake_is_told_in_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "empty.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 0}))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "gpt2.json").write_text(json.dumps({**LLAMA, "model_type": "gpt2"}))
    assert main(["plan", *words.split()]) == 2
    assert capsys.readouterr().err == f"halfword plan: {BAD[words]}\n"


def test_a_step_is_traced_once_for_held_and_once_for_released_gradients(monkeypatch, capsys):
    traced = []
    original = command.trace_step

    def trace_step(*arguments, released):
        traced.append(released)
        return original(*arguments, released=released)

    monkeypatch.setattr(command, "trace_step", trace_step)
    tiny = {"num_layers": 1, "hidden_dim": 64, "seq_length": 16, "batch_size": 1, "device": "cpu"}
    command.plan(read_request(None, None, None, 1, None, tiny), trace=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert traced == [False, True]
    for preset in found["presets"].values():
        peak = preset["peak"]
        assert peak["weights_bytes"] == preset["per_rank"]["weights_bytes"]
        assert peak["total_bytes"] > preset["between_steps"]["total_bytes"]
    assert "allocator rounding and fragmentation" in found["not_seen_by_the_trace"]
