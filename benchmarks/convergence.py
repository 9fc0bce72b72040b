"""What each precision costs in loss: every preset, the same seeds, the same text.

    python benchmarks/convergence.py                    # 35 minutes on two cores
    python benchmarks/convergence.py --data wikitext-2/ --seeds 0 --beta2 0.999 --output FOLDER
    python benchmarks/convergence.py --device cuda --hidden_dim 768 ... --output FOLDER

Every option of `halfword train` that the study does not set itself is one here. Writes
benchmarks/results/convergence/, a run at a time; stopped by Ctrl-C or worse, the same command goes
on. Fails where a bar is missed.
"""

import argparse
import sys

import tables
from differences import Verdict, grouped, verdicts
from results import RESULTS
from study import Study, parse, report

# 0.9 million parameters. All dimensions are multiples of 128: int8 moments take whole blocks only.
# No clipping, which would hide a spike; 256 tokens a step, for the time it takes. The learning rate
# trains smoothly: at 1e-3 runs that differ by a rounding part by 1.5 % at their first spike.
SETTINGS = {
    "num_layers": "4",
    "hidden_dim": "128",
    "ffn_dim": "384",
    "num_heads": "4",
    "seq_length": "64",
    "batch_size": "4",
    "num_steps": "1500",
    "learning_rate": "3e-4",
    "max_grad_norm": "0",
    "save_steps": "500",
    "keep_checkpoints": "1",
    "log_interval": "500",
}


def main() -> int:
    """Run what is left of the study, print its tables, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument(
        "--beta2",
        nargs="+",
        default=["0.999", "0.95"],
        help="the first with all seeds, others with one",
    )
    arguments, options = parse(parser, RESULTS / "convergence", SETTINGS, {"seed", "beta2"})
    arms = [
        {"beta2": beta2, "seed": seed, "precision": preset}
        for number, beta2 in enumerate(arguments.beta2)
        for seed in (arguments.seeds if number == 0 else arguments.seeds[:1])
        for preset in arguments.presets
    ]
    results = Study(arms, options, arguments.output, arguments.runs).run()
    print(tables.convergence(results))
    return report(
        Verdict(f"beta2 {beta2}, {text}", kept)
        for beta2, runs in grouped(results, "beta2").items()
        for text, kept in verdicts(runs)
    )


if __name__ == "__main__":
    sys.exit(main())
