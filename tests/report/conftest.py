import copy
import json
from pathlib import Path

import pytest

from halfword.report.comparison import build
from halfword.report.runs import load_runs

HEADER = "step,loss,lr,grad_norm,tokens,step_s,optimizer_s,nonfinite,stalled"
PARAMETERS = 1000
SUMMARY = {
    "format": 1,
    "status": "finished",
    "settings": {"precision": "exact", "warmup_steps": 2, "seed": 0, "learning_rate": 1e-3},
    "num_parameters": PARAMETERS,
    "versions": {"halfword": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
    "device": {"kind": "cpu", "name": "A", "flags": ["avx2"], "threads": 2, "bf16_matmul": False},
    "corpus": {"name": "c", "sha256": "ab" * 32, "train_tokens": 900, "eval_tokens": 100},
    "results": {},
    "evaluations": [{"step": 5, "loss": 1.75}],
    "digests": {"weights": "w0", "master_weights": "m0"},
}


@pytest.fixture
def write_run(tmp_path):
    """Write a run folder; `summary` is merged into the default, two levels deep."""

    def write(name, losses, *, sizes=(2, 2, 8, 2), summary=None, step_s=None, nonfinite=()):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        step_s = step_s or [0.5] * len(losses)
        rows = [
            f"{step},{loss!r},0.001,1.0,64,{step_s[step]!r},0.25,{int(step in nonfinite)},nan"
            for step, loss in enumerate(losses)
        ]
        (folder / "metrics.csv").write_text("\n".join([HEADER, *rows, ""]))
        names = ["weights", "master_weights", "moments", "gradients"]
        bytes_of = {n: {"plane": s * PARAMETERS} for n, s in zip(names, sizes, strict=True)}
        memory = {"num_parameters": PARAMETERS, "at_step_entry": bytes_of | {"scalars": {"t": 4}}}
        (folder / "memory.json").write_text(json.dumps(memory))
        if summary is not False:
            (folder / "summary.json").write_text(json.dumps(_merged(summary or {})))
        return folder

    return write


@pytest.fixture
def write_csv(tmp_path):
    def write(name, losses):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step,loss\n" + "".join(f"{s},{x}\n" for s, x in enumerate(losses)))
        return path

    return write


@pytest.fixture
def compared():
    """Load and join, without output; one run alone too."""
    return lambda *paths: build(load_runs([Path(path) for path in paths], at_least=1))


def _merged(changes):
    summary = copy.deepcopy(SUMMARY)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(summary.get(name), dict)
        summary[name] = summary[name] | value if both else value
    return summary
