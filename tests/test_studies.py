"""The studies at a tiny size: stopped and continued, and their figures against ones by hand."""

import doctest
import json
import math
import os
import random
import signal
import sys

import numpy as np
import pytest

import convergence
import differences
import finetuning
import plots
import study
import tables
from differences import figures, pairings, tuning_verdicts, verdicts
from halfword import cli
from halfword.train import loop

STEPS = 12
TINY = (
    "--num_layers 1 --hidden_dim 16 --ffn_dim 32 --num_heads 2 --seq_length 8 --batch_size 2 "
    f"--num_steps {STEPS} --save_steps 5 --threads 1 --device cpu"
).split()


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that gives a study's command and counts the steps that it takes."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices("the cat sat on a mat".split(), k=400)))
    plain_step = loop.train_step
    monkeypatch.chdir(tmp_path)

    def command(script, *words, stop_at=None):
        taken = 0

        def step(training, number):
            nonlocal taken
            taken += 1
            if taken == stop_at:
                os.kill(os.getpid(), signal.SIGINT)
            return plain_step(training, number)

        monkeypatch.setattr(loop, "train_step", step)
        given = [*TINY, "--data", str(text), "--output", "results/tiny", *words]
        monkeypatch.setattr(sys, "argv", ["script", *given])
        try:
            code = script.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, taken

    return command


def test_a_stopped_study_goes_on_where_it_was(command, tmp_path, capsys):
    small = (convergence, "--presets", "exact", "--seeds", "0", "--beta2", "0.999")
    results = tmp_path / "results" / "tiny"
    assert command(*small, stop_at=STEPS + 8) == (cli.INTERRUPTED, STEPS + 8)
    assert "the same command goes on from here" in capsys.readouterr().err
    assert {file.stem for file in results.iterdir()} == {"beta2-0.999-seed-0-fp32-master"}

    # The run that was stopped, from its 9th step on. Its bits are those of one that was not, for
    # `exact` is held to be `fp32-master`.
    assert command(*small) == (0, STEPS - 8)
    assert (
        "exact: equal to fp32-master, bit for bit, in all 1 runs: kept" in capsys.readouterr().out
    )
    assert command(*small) == (0, 0)
    assert not list(tmp_path.glob("runs/tiny/*/checkpoints"))
    assert sum(file.stat().st_size for file in results.iterdir()) < 10_000
    assert str(tmp_path) not in "".join(file.read_text() for file in results.iterdir())


def test_results_of_other_settings_are_not_mixed(command, tmp_path):
    small = (convergence, "--presets", "fp32-master", "--seeds", "0", "--beta2", "0.999")
    assert command(*small)[0] == 0
    code, taken = command(*small, "--learning_rate", "0.5")
    assert "seed-0-fp32-master.json: has options" in code
    assert "remove it, or name another --output" in code
    assert taken == 0
    assert command(*small, "--log_interval", "1") == (0, 0)  # decides no number


def test_finetuning_starts_from_a_model_and_goes_on_after_a_stop(command, tmp_path, capsys):
    data = ["--data", str(tmp_path / "text.txt")]
    assert cli.main(["train", "--run", "base", *TINY, *data]) == 0
    assert cli.main(["export", "base", "-o", "model", "--dtype", "fp32"]) == 0
    small = (finetuning, "--init", "model", "--presets", "fp32-master", "exact", "bf16")
    small += ("--learning_rates", "1e-6", "1e-5")
    assert command(*small, stop_at=STEPS + 3) == (cli.INTERRUPTED, STEPS + 3)
    assert command(*small) == (0, 5 * STEPS - 3)
    out = capsys.readouterr().out
    assert "learning rate 1e-6, exact: equal to fp32-master, bit for bit" in out
    assert "learning rate 1e-5, exact: 100.0 % of the gain (bar 10 %): kept" in out
    results = [json.loads(file.read_text()) for file in tmp_path.glob("results/tiny/*.json")]
    assert len(results) == 6
    last = json.loads((tmp_path / "base" / "summary.json").read_text())["results"]["eval_loss"]
    assert {result["start"]["eval_loss"] for result in results} == {last}


def test_figures_of_a_curve():
    losses = np.concatenate([np.full(20, 9.0), np.full(100, 2.0), np.full(100, 1.0)])
    losses[150:160] = 1.5  # a spike: ten steps, 0.5 above the lowest mean before
    assert figures(losses, warmup_steps=20) == {
        "final_loss": (90 * 1.0 + 10 * 1.5) / 100,
        "mean_loss": (20 * 9.0 + 100 * 2.0 + 90 * 1.0 + 10 * 1.5) / 220,
        "largest_rise": 0.5,
    }
    losses[30] = math.nan
    assert math.isnan(figures(losses, warmup_steps=20)["largest_rise"])
    assert math.isnan(figures(losses, warmup_steps=20)["mean_loss"])
    assert figures(losses[:20], warmup_steps=20)["largest_rise"] == 0


def _result(precision, seed, loss, *, stalled=None, beta2="0.999", digest="a", **more):
    """Make a run's result, all its losses the same."""
    names = ("final_loss", "mean_loss", "eval_loss")
    return {
        "arm": {"beta2": beta2, "seed": str(seed), "precision": precision},
        **dict.fromkeys(names, loss),
        "bytes_per_parameter": {"fp32-master": 16.0, "exact": 14.0}.get(precision, 10.0),
        "largest_rise": 0.125 * (seed + 1),
        "stalled": stalled,
        "digests": {"losses": digest},
        "num_parameters": 1000,
        "steps": 12,
        "tokens_per_step": 16,
        "corpus": {"name": "text.txt"},
        "device": {"name": "a CPU", "threads": 2},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        **more,
    }


BASE = [_result("fp32-master", seed, loss) for seed, loss in enumerate([1.9, 2.0, 2.1])]
LEAN = [_result("exact-bf16", s, loss, digest="b") for s, loss in enumerate([1.901, 2.005, 2.109])]
EXACT = [_result("exact", seed, loss, stalled=0.0) for seed, loss in enumerate([1.9, 2.0, 2.1])]


def test_differences_are_to_the_run_with_the_same_seed():
    unpaired = _result("exact-bf16", 7, 99.0)
    base, exact, lean = pairings([*LEAN, unpaired, *EXACT, *BASE])
    assert [it.preset for it in (base, exact, lean)] == ["fp32-master", "exact", "exact-bf16"]
    # 0.001, 0.005 and 0.009; 0.005 is 0.25 % of 2.
    assert lean.change("mean_loss") == pytest.approx((0.005, 0.004))
    assert lean.change_percent("mean_loss") == pytest.approx(0.25)
    assert lean.baseline("eval_loss") == pytest.approx((2.0, 0.1))
    assert lean.worst_rise() == 0.375
    assert (exact.equal, lean.equal) == (True, False)
    assert (exact.stalled(), lean.stalled()) == (0.0, None)


def test_bars():
    assert [kept for _, kept in verdicts([*BASE, *EXACT, *LEAN])] == [True] * 5
    off = [_result("exact-bf16", seed, loss) for seed, loss in enumerate([1.91, 2.01, 2.11])]
    text, kept = verdicts([*BASE, *off])[0]
    assert (text, kept) == ("exact-bf16: mean loss +0.500 % (bar 0.3 %)", False)
    assert verdicts([*BASE, *off])[1].kept  # 0.01 is inside the seeds' 0.1
    close = [_result("fp32-master", seed, loss) for seed, loss in enumerate([2.0, 2.001, 2.0])]
    shifted = [_result("exact-bf16", seed, 2.004) for seed in range(3)]
    assert [kept for _, kept in verdicts([*close, *shifted])] == [True, False] * 2
    lost = [_result("exact-bf16", seed, "nan") for seed in range(3)]  # as JSON holds it
    assert not any(kept for _, kept in verdicts([*BASE, *lost]))
    other_bits = [_result("exact", 0, 1.9, digest="b")]
    assert [kept for _, kept in verdicts([*BASE, *other_bits])] == [False]
    assert verdicts([*BASE[:1], *LEAN[:1]]) == []  # one seed is not an average


def _tuned(precision, loss, rate="1e-6", stalled=None, digest="a"):
    arm = {"learning_rate": rate, "precision": precision}
    return _result(precision, 0, loss, stalled=stalled, digest=digest) | {
        "arm": arm,
        "start": {"model": "c", "eval_loss": 2.0},
    }


def test_gain_of_finetuning():
    results = [_tuned("fp32-master", 1.5), _tuned("exact-bf16", 1.54), _tuned("bf16", 2.0)]
    assert [it.gain_percent() for it in pairings(results)] == pytest.approx([100, 92, 0])
    assert [kept for _, kept in tuning_verdicts(results)] == [True]
    results[1] = _tuned("exact-bf16", 1.44)
    assert [kept for _, kept in tuning_verdicts(results)] == [False]


def test_tables():
    small = _result("fp32-master", 0, 2.5, beta2="0.95")
    assert tables.convergence([small, *LEAN[:2], *EXACT, *BASE]).split("\n") == [
        "| beta2 0.999, 3 seeds | bytes a parameter | last 100 steps | mean loss | evaluation loss "
        "| largest rise | stalled |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `fp32-master` | 16.0 | 2.0000 ± 0.1000 | 2.0000 ± 0.1000 | 2.0000 ± 0.1000 "
        "| 0.375 | - |",
        "| `exact` | 14.0 | 0, bit for bit | 0, bit for bit | 0, bit for bit | 0.375 | 0.0 % |",
        "| `exact-bf16` (2 of 3 seeds) | 10.0 | +0.0030 ± 0.0028 | +0.0030 ± 0.0028 "
        "| +0.0030 ± 0.0028 | 0.250 | - |",
        "",
        "| beta2 0.95, 1 seed | bytes a parameter | last 100 steps | mean loss | evaluation loss "
        "| largest rise | stalled |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `fp32-master` | 16.0 | 2.5000 | 2.5000 | 2.5000 | 0.125 | - |",
        "",
        "1,000 parameters, 12 steps of 16 tokens, text.txt. a CPU, 2 threads, torch 2.13, "
        "commit abc; from `make study`.",
    ]
    tuned = [_tuned("fp32-master", 1.5, "1e-5"), _tuned("bf16", 1.75, "1e-5", stalled=0.5)]
    tuned += [_tuned("fp32-master", 1.75), _tuned("bf16", 2.0, stalled=0.875)]
    assert tables.finetuning(tuned).split("\n")[:4] == [
        "| preset | gain at 1e-6 | of `fp32-master`'s | stalled "
        "| gain at 1e-5 | of `fp32-master`'s | stalled |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `fp32-master` | 0.25000 | 100.0 % | - | 0.50000 | 100.0 % | - |",
        "| `bf16` | 0.00000 | 0.0 % | 87.5 % | 0.25000 | 50.0 % | 50.0 % |",
    ]


def test_the_plot_has_a_point_for_each_preset(tmp_path):
    figure = plots.draw(pairings([*BASE, *EXACT, *LEAN]), "AdamW")
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels[1:] == ["exact-bf16 (10.0)", "exact (14.0)", "fp32-master (16.0)"]
    figure.savefig(tmp_path / "precision.png")
    assert (tmp_path / "precision.png").stat().st_size < 100_000


@pytest.mark.parametrize("module", [differences, study], ids=lambda module: module.__name__)
def test_examples(module):
    assert doctest.testmod(module).failed == 0
