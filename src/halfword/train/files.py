"""What a run writes beside its checkpoints: rows as it goes, and files that describe it."""

from pathlib import Path
from typing import Self

import tomli_w

from halfword.parallel import gather
from halfword.train import metrics, record, run_folder, trackers
from halfword.train.footprint import planned
from halfword.train.metrics import MetricsLog, Row
from halfword.train.trackers import Tracker
from halfword.train.training import Training


class Files:
    """The files of a run; only the first rank has any."""

    def __init__(self, folder: Path, training: Training) -> None:
        self._folder = folder
        self._training = training
        self._log: MetricsLog | None = None
        self._trackers: list[Tracker] = []
        self._num_tracked_evaluations = len(training.evaluations)

    def __enter__(self) -> Self:
        """Begin, or go on past the rows that a resumed run has; what is older is removed."""
        training, folder = self._training, self._folder
        if training.world.is_first:
            self._log = MetricsLog(folder, training.config.loss_log_file, training.rows)
            run_folder.clear(folder, past_step=len(training.rows))
            metrics.write_whole(folder / "config.toml", tomli_w.dumps(training.config.to_toml()))
            metrics.write_whole(folder / run_folder.TOKENIZER, training.tokenizer.to_json())
            config = training.config.model_dump(mode="json")
            past = training.rows, training.evaluations
            self._trackers = trackers.begin(config["log_to"], folder, config, *past)
        return self

    def __exit__(self, *exception: object) -> None:
        for tracker in self._trackers:
            tracker.close()
        if self._log is not None:
            self._log.__exit__()

    def row(self, row: Row) -> None:
        """Append a step."""
        if self._log is not None:
            self._log.write(row)
        for tracker in self._trackers:
            tracker.log(row.step, trackers.of_row(row))

    def evaluations(self) -> None:
        """Track the evaluations that came since the last call."""
        for evaluation in self._training.evaluations[self._num_tracked_evaluations :]:
            for tracker in self._trackers:
                tracker.log(evaluation["step"], trackers.of_evaluation(evaluation))
        self._num_tracked_evaluations = len(self._training.evaluations)

    def memory(self) -> None:
        """Write memory.json: what was held and at the peak, beside what was planned."""
        memory = self._training.memory
        if self._log is None or not memory:  # a resumed run may have had nothing left to do
            return
        at_step_entry = memory["at_step_entry"]
        table = {
            "num_parameters": at_step_entry.num_parameters,
            "at_step_entry": at_step_entry.components,
            "between_steps": memory["between_steps"].components,
            "bytes_per_parameter": at_step_entry.bytes_per_parameter,
            "peak": memory["peak"].components if "peak" in memory else None,
            "planned": {name: plan.components for name, plan in planned(self._training).items()},
            "peak_rss_bytes": record.peak_rss_bytes(),
        }
        metrics.write_json(self._folder / "memory.json", table)

    def summary(self, *, interrupted: bool) -> None:
        """Write memory.json, now with the peak of the whole run, and summary.json."""
        training = self._training
        config, model, optimizer = training.config, training.model, training.optimizer
        self.memory()
        digests = {  # for which all ranks give their parts
            "weights": record.digest(model, gather),
            "master_weights": record.digest(model, lambda p: gather(optimizer.master_weight(p))),
        }
        if self._log is None:
            return
        evaluations = training.evaluations
        eval_loss = evaluations[-1]["loss"] if evaluations else None
        results = record.results(training.rows, config.warmup_steps, eval_loss)
        summary = {
            "format": 1,
            "status": "interrupted" if interrupted else "finished",
            "settings": config.model_dump(mode="json") | config.formats._asdict(),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "world_size": training.world.size,
            "versions": record.versions(),
            "device": record.describe(training.device, config.threads),
            "corpus": training.corpus,
            "results": results | {"seconds": training.seconds()},
            "evaluations": evaluations,
            "digests": digests,
        }
        metrics.write_json(self._folder / "summary.json", summary)
