"""Write the measured figures of README and docs from benchmarks/results/, between their marks."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from differences import BASELINE, MEASURES, Pairing, Result, Spread, grouped, pairings
from results import RESULTS

ROOT = RESULTS.parent.parent


def main() -> int:
    """Rewrite every block whose result file is there, and name those whose is not."""
    for page, name, file, text in BLOCKS:
        path = RESULTS / file
        if not path.exists():
            print(f"{page}: {name} is left as it is, for there is no {path.relative_to(ROOT)}")
            continue
        _replace(ROOT / page, name, text(read(path)))
    return 0


def read(path: Path) -> Any:
    """Read a result file, or all those of a folder."""
    if path.is_dir():
        return [json.loads(file.read_text()) for file in sorted(path.glob("*.json"))]
    return json.loads(path.read_text())


def demo(result: dict[str, Any]) -> str:
    """The comparison of the presets."""
    lines = [
        "| precision | bytes a parameter | mean loss | final loss | evaluation loss | is |",
        "|---|---:|---:|---:|---:|---|",
    ]
    equal = {pair["second"] for pair in result["pairs"] if pair["equal"]}
    first = result["runs"][0]["label"]
    for run in result["runs"]:
        label, size = run["label"], run["bytes_per_parameter"]["total"]
        losses = " | ".join(f"{run[key]:.4f}" for key in ("mean_loss", "final_loss", "eval_loss"))
        verdict = f"equal to `{first}`, bit for bit" if label in equal else ""
        lines.append(f"| `{label}` | {size:.1f} | {losses} | {verdict} |")
    device, count = result["runs"][0]["device"], result["runs"][0]["num_parameters"]
    versions = result["runs"][0]["versions"]
    note = (
        f"{count:,} parameters, {result['steps']['count']} steps, {device['name']}, "
        f"{device['threads']} threads, torch {versions['torch']}; from `make demo`."
    )
    return "\n".join([*lines, "", note])


def train_loop(result: dict[str, Any]) -> str:
    """Throughput beside plain torch loops."""
    lines = ["| loop | tokens/s |", "|---|---:|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in result["tokens_per_s"].items()]
    ratio = f"halfword / torch with FP32 masters: {result['ratio']:.2f}."
    return "\n".join([*lines, "", f"{ratio} {_where(result)} `make bench`."])


def wikitext2(result: dict[str, Any]) -> str:
    """The run on WikiText-2."""
    settings, results, device = result["settings"], result["results"], result["device"]
    return (
        f"WikiText-2's validation text in bytes, {result['num_parameters']:,} parameters, "
        f"{results['steps']} steps of {settings['batch_size']} x {settings['seq_length']}, "
        f"`{settings['precision']}`: {results['eval_loss']:.3f} nats a byte over the whole test "
        f"text ({device['name']}, {device['threads']} threads, "
        f"torch {result['versions']['torch']})."
    )


def soak(result: dict[str, Any]) -> str:
    """Kills and damages."""
    kills, damages = result["kills"], result["damages"]
    equal = "equal bit for bit" if kills["equal"] else "NOT equal"
    taken = ", ".join(
        f"{damages.get(outcome, 0)} {outcome}"
        for outcome in ("refused", "loaded right", "loaded wrong")
    )
    return (
        f"Killed {kills['kills']} times at random moments, {kills['left a partial save']} of them "
        f"in the middle of a save, and resumed: {equal} to a run left alone. "
        f"{sum(damages.values())} damaged folders: {taken}. {_where(result)} `make soak`."
    )


def checkpoint_stall(result: dict[str, Any]) -> str:
    """How long a save holds training up."""
    return (
        f"A save of {result['bytes'] / 2**20:.0f} MiB holds training up for {result['ratio']:.2f} "
        f"times one copy of the same bytes. {_where(result)} `make bench`."
    )


def step_cpu(result: dict[str, Any]) -> str:
    """The optimizer step on the CPU, beside its peers."""
    lines = ["| measured | value | bar |", "|---|---:|---:|"]
    for row in result["results"]:
        value = f"{row['value']:.3g}" + (f" {row['unit']}" if row["unit"] else "")
        lines.append(f"| {row['name']} | {value} | {row.get('bar', '')} |")
    settings = result["settings"]
    note = (
        f"{int(settings['parameters']):,} parameters, BF16 gradients, medians of "
        f"{settings['rounds']} rounds, the best of three. {settings['compiler']}."
    )
    return "\n".join([*lines, "", f"{note} {_where(result)} `make bench`."])


def step_memory(result: dict[str, Any]) -> str:
    """Bytes of each preset, and the peak of a step beyond them."""
    lines = [
        "| preset | weight + master + moments + gradient | held, bytes a parameter | peak beyond |",
        "|---|---:|---:|---:|",
    ]
    for row in result["results"]:
        peak = row["peak"] / row["num_parameters"]
        lines.append(
            f"| `{row['preset']}` | {row['arithmetic']} | {row['held']:.3f} | {peak:.2f} |"
        )
    count = result["results"][0]["num_parameters"]
    where = f"{_where(result)} `benchmarks/step_memory.py`."
    return "\n".join([*lines, "", f"{count:,} parameters. {where}"])


def convergence(results: list[Result]) -> str:
    """The loss of each preset minus that of FP32 masters, with the same seed, by beta2."""
    groups = grouped(results, "beta2")
    lines = [_convergence_table(beta2, runs) for beta2, runs in groups.items()]
    return "\n\n".join([*lines, _study(results[0])])


def _convergence_table(beta2: str, results: list[Result]) -> str:
    found = pairings(results)
    most = max(len(pairing.runs) for pairing in found)
    lines = [
        f"| beta2 {beta2}, {most} seed{'s' * (most > 1)} | bytes a parameter | "
        f"{' | '.join(MEASURES.values())} | largest rise | stalled |",
        "|---|---:|" + "---:|" * (len(MEASURES) + 2),
    ]
    for pairing in found:
        is_baseline = pairing.preset == BASELINE
        cells = [
            _spread(pairing.baseline(measure), "") if is_baseline
            else "0, bit for bit" if pairing.equal
            else _spread(pairing.change(measure), "+")
            for measure in MEASURES
        ]  # fmt: skip
        count = len(pairing.runs)
        lines.append(
            f"| `{pairing.preset}`{f' ({count} of {most} seeds)' * (count < most)} | "
            f"{pairing.runs[0]['bytes_per_parameter']:.1f} | {' | '.join(cells)} | "
            f"{pairing.worst_rise():.3f} | {_share(pairing.stalled())} |"
        )
    return "\n".join(lines)


def finetuning(results: list[Result]) -> str:
    """What fine-tuning gains under each preset, and which share of updates is rounded away."""
    rates = {
        rate: {pairing.preset: pairing for pairing in pairings(runs)}
        for rate, runs in grouped(results, "learning_rate").items()
    }
    heads = [f"gain at {rate} | of `{BASELINE}`'s | stalled" for rate in rates]
    lines = [f"| preset | {' | '.join(heads)} |", "|---|" + "---:|" * (3 * len(rates))]
    for preset in next(iter(rates.values())):
        cells = [
            _gain(found[preset]) if preset in found else "- | - | -" for found in rates.values()
        ]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    before = f"Evaluation loss before: {results[0]['start']['eval_loss']:.4f}."
    return "\n".join([*lines, "", f"{before} {_study(results[0])}"])


def _study(run: Result) -> str:
    return (
        f"{run['num_parameters']:,} parameters, {run['steps']} steps of {run['tokens_per_step']} "
        f"tokens, {run['corpus']['name']}. {_where(run)} `make study`."
    )


def _gain(pairing: Pairing) -> str:
    share = _share(pairing.stalled())
    return f"{pairing.gain():.5f} | {pairing.gain_percent():.1f} % | {share}"


def _spread(spread: Spread, sign: str) -> str:
    deviation = "" if spread.deviation is None else f" \u00b1 {spread.deviation:.4f}"
    return f"{spread.mean:{sign}.4f}{deviation}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _where(result: dict[str, Any]) -> str:
    device = result["device"]
    return (
        f"{device['name']}, {device['threads']} threads, torch {result['versions']['torch']}, "
        f"commit {result['commit']}; from"
    )


def _replace(page: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    content, count = pattern.subn(lambda _: f"{begin}\n{text}\n{end}", page.read_text())
    if count != 1:
        raise SystemExit(f"{page}: must hold the marks of {name} once, holds them {count} times")
    page.write_text(content)


def zero_memory(result: dict[str, Any]) -> str:
    """Bytes a parameter of each preset and stage, on the first rank of the largest world."""
    size = max(row["world_size"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["world_size"] == size]
    lines = [
        "| precision | stage 0 | stage 1 | stages 2, 3 | 2, 3 by arithmetic |",
        "|---|---:|---:|---:|---:|",
    ]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = {row["zero_stage"]: row for row in rows if row["precision"] == precision}
        count = of[0]["num_parameters"]
        figures = [of[stage]["between_steps"] / count for stage in (0, 1, 3)]
        figures.append(of[3]["arithmetic"] / count)
        lines.append(f"| `{precision}` | " + " | ".join(f"{f:.3f}" for f in figures) + " |")
    equal = sum(row["between_steps"] == row["arithmetic"] for row in result["rows"])
    sizes = ", ".join(str(s) for s in sorted({row["world_size"] for row in result["rows"]}))
    note = (
        f"Bytes a parameter of the model that a rank of {size} holds between steps; "
        f"{rows[0]['num_parameters']:,} parameters. Over worlds of {sizes}, {equal} of "
        f"{len(result['rows'])} figures equal the arithmetic to the byte. {_where(result)} "
        "`make bench`."
    )
    return "\n".join([*lines, "", note])


def zero_throughput(result: dict[str, Any]) -> str:
    """Stage 3 on two ranks beside one process."""
    rates = result["tokens_per_s"]
    return (
        f"Stage 3 on 2 ranks of one thread: {rates['stage 3']:,.0f} tokens/s, "
        f"{result['ratio']:.2f} times one process of two threads with the same global batch "
        f"({rates['single']:,.0f}); {result['communication']:.0%} of a step is communication. "
        f"{_where(result)} `make bench`."
    )


def deepspeed_example(result: dict[str, Any]) -> str:
    """The comparison of DeepSpeed's example, run again."""
    lines = [
        "| | held, bytes a parameter | peak | step, s | final loss | mean loss | loss std |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, arm in result["arms"].items():
        sizes = [f"{arm[f'{at}_bytes_per_parameter']:.2f}" for at in ("held", "peak")]
        losses = [f"{arm[key]:.4f}" for key in ("final_loss", "mean_loss", "loss_std")]
        cells = [name, *sizes, f"{arm['step_s_median']:.3f}", *losses]
        lines.append(f"| {' | '.join(cells)} |")
    settings = result["settings"]
    note = (
        f"{result['num_parameters']:,} parameters, {settings['num_steps']} steps of "
        f"{settings['batch_size']} x {settings['seq_length']} bytes of the text that comes with "
        f"Python, one rank, DeepSpeed {result['deepspeed']}, {_where(result)} "
        "`benchmarks/deepspeed_example.py`."
    )
    return "\n".join([*lines, "", note])


def plan_runs(result: dict[str, Any]) -> str:
    """Planned against measured: how many agree to the byte, and how far peaks are off."""
    lines = [
        "| processes | ZeRO stage | equal to the byte | largest error of the peak | of which |",
        "|---:|---:|---:|---:|---|",
    ]
    groups: dict[tuple[int, int], list[Any]] = {}
    for run in result["runs"]:
        groups.setdefault((run["world_size"], run["zero_stage"]), []).append(run)
    for (size, stage), runs in groups.items():
        worst = max(runs, key=lambda run: abs(run["peak_error"]))
        equal = sum(run["equal"] for run in runs)
        lines.append(
            f"| {size} | {stage if size > 1 else '-'} | {equal} of {len(runs)} presets | "
            f"{100 * worst['peak_error']:+.2f} % | `{worst['precision']}` |"
        )
    return "\n".join([*lines, "", f"{_where(result)} `benchmarks/plan.py`."])


def plan_example(result: dict[str, Any]) -> str:
    """The model of DeepSpeed's example under every preset, in GiB."""
    example = result["example"]
    columns = {
        "weights, states": (
            *("weights", "master", "exp_avg", "exp_avg_sq", "scales", "step_counters"),
        ),
        "gradients": ("gradients",),
        "gathered": ("gathered_weights", "gathered_gradients"),
        "communication": ("communication",),
        "activations": ("activations", "inputs", "buffers"),
        "temporaries": ("temporaries",),
        "peak": ("total",),
    }
    lines = [
        f"| precision | at entry | between | {' | '.join(columns)} |",
        "|---|" + "---:|" * (2 + len(columns)),
    ]
    for name, moments in example["presets"].items():
        sizes = [moments["at_step_entry"]["total"], moments["between_steps"]["total"]]
        sizes += [sum(moments["peak"].get(key, 0) for key in keys) for keys in columns.values()]
        lines.append(f"| `{name}` | " + " | ".join(f"{s / 2**30:.2f}" for s in sizes) + " |")
    count = example["num_parameters"]
    note = (
        f"GiB of a rank of {example['world_size']}, from the third number on at the peak; "
        f"{count:,} parameters, {100 * (count / 6_858_007_633 - 1):+.4f} % to theirs. Traced in "
        f"{example['seconds']:.0f} s. {_where(result)} `benchmarks/plan.py`."
    )
    return "\n".join([*lines, "", note])


BLOCKS: list[tuple[str, str, str, Callable[[Any], str]]] = [
    ("README.md", "demo", "demo/comparison.json", demo),
    ("docs/training.md", "train_loop", "train_loop.json", train_loop),
    ("docs/training.md", "wikitext2", "wikitext2/summary.json", wikitext2),
    ("docs/cpu-backend.md", "step", "step-cpu.json", step_cpu),
    ("docs/checkpoints.md", "soak", "soak.json", soak),
    ("docs/checkpoints.md", "checkpoint_stall", "checkpoint_stall.json", checkpoint_stall),
    ("docs/precision.md", "step_memory", "step-memory.json", step_memory),
    ("docs/distributed.md", "zero_memory", "zero_memory.json", zero_memory),
    ("docs/distributed.md", "zero_throughput", "zero_throughput.json", zero_throughput),
    (
        *("docs/deepspeed.md", "deepspeed_example"),
        *("deepspeed_example/result.json", deepspeed_example),
    ),
    ("docs/memory.md", "plan_runs", "plan.json", plan_runs),
    ("docs/memory.md", "plan_example", "plan.json", plan_example),
    ("docs/precision.md", "convergence", "convergence", convergence),
    ("docs/precision.md", "finetuning", "finetuning", finetuning),
]

if __name__ == "__main__":
    sys.exit(main())
