"""Whole runs of a tiny model: exactness, weighting, evaluation, and the files that are left."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from halfword.train import loop
from halfword.train.config import TrainConfig
from halfword.train.model import IGNORED, build_model, loss_sum
from halfword.train.reading import load_config
from halfword.train.training import build_optimizer


def run(config: TrainConfig, folder: Path) -> Path:
    return loop.run(config.model_copy(update={"run": folder}), Console(quiet=True))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def assert_equal_bit_for_bit(first: Path, second: Path, columns: tuple[str, ...]) -> None:
    for one, other in zip(rows(first), rows(second), strict=True):
        assert [one[name] for name in columns] == [other[name] for name in columns]
    assert summary(first)["digests"] == summary(second)["digests"]
    assert summary(first)["evaluations"] == summary(second)["evaluations"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 4, "batch_size": 2, "seq_length": 8},
        {"max_grad_norm": 0.05, "tie_embeddings": True, "lr_schedule": "wsd"},
    ],
    ids=["plain", "accumulation", "clipping"],
)
def test_exact_equals_fp32_masters_bit_for_bit(tiny, tmp_path: Path, settings) -> None:
    """Losses, weights and FP32 masters, over 300 steps."""
    settings = {"num_steps": 300, "num_layers": 1, "learning_rate": 3e-3, **settings}
    folders = [
        run(tiny(precision=precision, **settings), tmp_path / precision)
        for precision in ("fp32-master", "exact")
    ]
    assert_equal_bit_for_bit(*folders, ("loss", "lr", "grad_norm", "tokens"))
    losses = [float(row["loss"]) for row in rows(folders[0])]
    assert losses[-1] < losses[0] - 1  # it learns: equality is not that of runs that stand still
    if settings.get("max_grad_norm"):
        assert min(float(row["grad_norm"]) for row in rows(folders[0])) > 0.05


def test_a_precision_without_masters_differs(tiny, tmp_path: Path) -> None:
    folders = [
        run(tiny(precision=precision, num_steps=30), tmp_path / precision)
        for precision in ("exact", "bf16")
    ]
    assert summary(folders[0])["digests"] != summary(folders[1])["digests"]


def test_a_run_is_repeated_by_its_config(tiny, tmp_path: Path) -> None:
    settings = {"precision": "bf16-sr", "lr_schedule": "wsd", "seed": 3, "eval_steps": 2}
    first = run(tiny(**settings), tmp_path / "first")
    second = run(load_config(first / "config.toml", {}), tmp_path / "second")
    assert_equal_bit_for_bit(first, second, ("loss", "lr", "grad_norm", "tokens"))
    assert (first / "config.toml").read_text() == (second / "config.toml").read_text()


class Padded:
    """Sequences of 3 and 30 tokens, padded to 30 with targets that do not count."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randint(256, (len(lengths), 30), generator=generator)
        self.targets = torch.randint(256, (len(lengths), 30), generator=generator)
        for row, length in enumerate(lengths):
            self.targets[row, length:] = IGNORED

    def micro_batch(self, number: int, batch_size: int) -> tuple[Tensor, Tensor]:
        some = slice(number * batch_size, (number + 1) * batch_size)
        return self.inputs[some], self.targets[some]


@pytest.fixture
def fp32_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16, gradients of another batch size would be rounded at other places."""
    monkeypatch.setattr(
        "halfword.train.training.build_model", lambda *about: build_model(*about).float()
    )


@pytest.mark.usefixtures("fp32_model")
def test_loss_and_update_do_not_depend_on_how_a_step_is_cut(tiny) -> None:
    """Every token weighs the same, however its micro-batch is filled (transformers#24725)."""
    found = []
    for batch_size, parts in [(2, 1), (1, 2)]:
        cut = {"batch_size": batch_size, "gradient_accumulation_steps": parts}
        # With a large eps the first update is in proportion to the gradient.
        training = loop.build(tiny(seq_length=30, eps=1.0, learning_rate=1.0, **cut))
        training.sequences = Padded((3, 30))
        with torch.no_grad():
            logits = training.model(training.sequences.inputs)
            expected = loss_sum(logits, training.sequences.targets).item() / 33
        row = loop.train_step(training, 0)
        assert (row.tokens, row.nonfinite) == (33, 0)
        assert row.loss == pytest.approx(expected, rel=1e-6)
        weights = torch.nn.utils.parameters_to_vector(training.model.parameters())
        found.append((row.grad_norm, weights.detach()))
    (norm, weights), (other_norm, other_weights) = found
    assert norm == pytest.approx(other_norm, rel=1e-6)
    torch.testing.assert_close(weights, other_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_without_a_token_changes_nothing(tiny) -> None:
    training = loop.build(tiny(seq_length=30, batch_size=2))
    training.sequences = Padded((0, 0))
    before = [weight.clone() for weight in training.model.parameters()]
    row = loop.train_step(training, 0)
    assert (row.loss, row.grad_norm, row.tokens, row.nonfinite) == (0.0, 0.0, 0, 0)
    assert all(map(torch.equal, before, training.model.parameters()))


def test_a_skipped_step_writes_nothing_and_holds_the_schedule(tiny) -> None:
    config = tiny(on_nonfinite="skip", lr_schedule="linear", num_steps=4, lr_warmup_steps=0)
    training = loop.build(config)
    before = [weight.clone() for weight in training.model.parameters()]
    next(iter(training.model.parameters())).register_hook(lambda gradient: gradient * math.inf)
    found = [loop.train_step(training, number) for number in range(2)]
    assert [row.nonfinite for row in found] == [1, 1]
    assert [row.lr for row in found] == [config.learning_rate] * 2
    assert all(map(torch.equal, before, training.model.parameters()))


def test_metrics_show_the_learning_rate_that_each_step_used(tiny, tmp_path: Path) -> None:
    config = tiny(lr_schedule="linear", num_steps=4, lr_warmup_steps=2, learning_rate=0.01)
    folder = run(config, tmp_path / "run")
    assert [float(row["lr"]) for row in rows(folder)] == pytest.approx([0.005, 0.01, 0.01, 0.005])


def test_evaluation_is_over_every_held_out_token(tiny, tmp_path: Path) -> None:
    """A mean over tokens, not over windows: the last window is shorter."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a mouse ran off with the cat and the mat of the cat")
    config = tiny(eval_data=held_out, eval_steps=2, num_steps=5)
    training = loop.build(config)
    with torch.no_grad():
        total = 0.0
        text = torch.tensor(list(held_out.read_bytes()))
        for start in range(0, len(text) - 1, config.seq_length):
            window = text[start : start + config.seq_length + 1]
            total += loss_sum(training.model(window[None, :-1]), window[None, 1:]).item()
    display = loop.Display(Console(quiet=True), 5, 1)
    loop.evaluate(training, 0, display, loop.Stop())
    assert training.evaluations[0]["loss"] == pytest.approx(total / (len(text) - 1), rel=1e-5)
    folder = run(config, tmp_path / "run")
    assert [each["step"] for each in summary(folder)["evaluations"]] == [1, 3, 4]


def test_a_diverged_run_says_so(tiny, tmp_path: Path) -> None:
    folder = run(tiny(learning_rate=1e38, lr_warmup_steps=0), tmp_path / "run")
    last = rows(folder)[-1]
    assert (last["loss"], last["nonfinite"]) == ("nan", "1")
    assert rows(folder)[0]["nonfinite"] == "0"
    assert summary(folder)["results"]["final_loss"] == "nan"


@pytest.mark.parametrize(
    "precision, bytes_per_parameter",
    [("fp32-master", 16), ("exact", 14), ("exact-bf16", 10), ("bf16", 8), ("bf16-sr", 8)],
)
def test_memory_is_what_the_preset_promises(tiny, tmp_path, precision, bytes_per_parameter) -> None:
    folder = run(tiny(precision=precision, num_steps=1), tmp_path / "run")
    memory = json.loads((folder / "memory.json").read_text())
    # Above it are the step counts, 4 bytes a tensor; the norms' few weights are as the rest.
    assert memory["bytes_per_parameter"] == pytest.approx(bytes_per_parameter, abs=0.01)
    assert sum(memory["at_step_entry"]["gradients"].values()) == 2 * memory["num_parameters"]
    assert sum(memory["between_steps"].get("gradients", {}).values()) == 0
    assert memory["peak_rss_bytes"] > memory["num_parameters"] * bytes_per_parameter


@pytest.mark.parametrize(
    ("precision", "gradients", "most"), [("lean", 2, 8.2), ("leanest", 0, 5.2)]
)
def test_the_lean_presets_take_their_bytes_on_the_default_model(precision, gradients, most) -> None:
    """Norms stay FP32, and scales come on top."""
    config = TrainConfig(precision=precision)
    assert config.release_gradients == (gradients == 0)
    model = build_model(config, 256, torch.device("cpu"))
    memory = build_optimizer(config, model).memory()
    assert most - 0.1 < memory.bytes_per_parameter + gradients <= most
    assert set(memory.components["moments"]) > {"exp_avg_code", "exp_avg_sq_code"}


def test_accumulated_gradients_are_fp32(tiny, tmp_path: Path) -> None:
    folder = run(tiny(gradient_accumulation_steps=2, num_steps=1), tmp_path / "run")
    memory = json.loads((folder / "memory.json").read_text())
    assert sum(memory["at_step_entry"]["gradients"].values()) == 4 * memory["num_parameters"]


def test_the_summary_names_all_that_decides_the_bits(tiny, tmp_path: Path) -> None:
    config = tiny(num_steps=8, warmup_steps=3)
    record = summary(run(config, tmp_path / "run"))
    assert (record["format"], record["status"]) == (1, "finished")
    assert record["settings"]["master_weights"] == "split"
    assert record["settings"]["vocab_size"] == 256
    assert record["device"]["kind"] == "cpu" and record["device"]["threads"] == 1
    assert record["device"]["bf16_matmul"] in ("native", "fp32 upcast")
    assert record["corpus"]["train_tokens"] > 9 * record["corpus"]["eval_tokens"]
    results = record["results"]
    losses = [float(row["loss"]) for row in rows(tmp_path / "run")]
    assert (results["steps"], results["tokens"]) == (8, 8 * 4 * 16)
    assert results["final_loss"] == losses[-1]
    assert results["mean_loss"] == pytest.approx(math.fsum(losses) / 8)
    timed = sorted(float(row["step_s"]) for row in rows(tmp_path / "run")[3:])
    assert results["step_s_median"] == timed[2]


@pytest.mark.parametrize("parts", [1, 2])
def test_released_gradients_change_no_bits_and_are_not_held(tiny, tmp_path: Path, parts) -> None:
    settings = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.0}
    folders = [
        run(tiny(release_gradients=release, **settings), tmp_path / str(release))
        for release in (False, True)
    ]
    assert_equal_bit_for_bit(*folders, columns=("step", "loss", "lr", "stalled"))
    norms = [[float(row["grad_norm"]) for row in rows(folder)] for folder in folders]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    held = [json.loads((folder / "memory.json").read_text()) for folder in folders]
    assert "gradients" in held[0]["at_step_entry"] and "gradients" not in held[1]["at_step_entry"]


def test_each_released_gradient_is_clipped(tiny, tmp_path: Path) -> None:
    settings = {"release_gradients": True, "optimizer": "sgd", "weight_decay": 0.0}
    before = run(tiny(num_steps=1, learning_rate=1e-30, **settings), tmp_path / "before")
    clipped = tiny(num_steps=1, max_parameter_grad_norm=1e-30, **settings)
    after = run(clipped, tmp_path / "after")
    digests = [summary(folder)["digests"]["weights"] for folder in (before, after)]
    assert digests[0] == digests[1], "clipped to nothing, as if the learning rate were none"


def test_stalled_updates_are_counted_at_an_interval(tiny, tmp_path: Path) -> None:
    settings = {"num_steps": 5, "stall_steps": 2, "learning_rate": 1e-6}
    for precision, low, high in (("bf16", 0.5, 1.0), ("exact", 0.0, 0.0)):
        folder = run(tiny(precision=precision, **settings), tmp_path / precision)
        shares = [float(row["stalled"]) for row in rows(folder)]
        assert [math.isnan(share) for share in shares] == [False, True, False, True, False]
        assert all(low <= share <= high for share in shares[::2])


def test_a_larger_vocabulary_than_the_tokenizer_s_is_allowed(tiny, tmp_path: Path) -> None:
    folder = run(tiny(vocab_size=300, num_steps=1), tmp_path / "run")
    assert summary(folder)["settings"]["vocab_size"] == 300


def test_plain_lines_are_printed_where_there_is_no_terminal(tiny, tmp_path, capsys) -> None:
    config = tiny(num_steps=4, log_interval=2, run=tmp_path / "run")
    loop.run(config, Console(width=40))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/4", "step 4/4", "step 4/4", f"run written to {tmp_path / 'run'}",
    ]  # fmt: skip
    assert "tokens/s" in lines[0] and "evaluation loss" in lines[2]
