"""A run's checkpoint as a model-only one, and what a checkpoint holds."""

from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import halfword
from halfword.checkpoint import CheckpointError, component_of, read, restore
from halfword.errors import UsageError
from halfword.train import pretrained, resume, run_folder
from halfword.train.config import TrainConfig
from halfword.train.model import Llama, build_model
from halfword.train.training import build_optimizer

FORMATS = ("bf16", "fp32")
MIB = 1 << 20


def export(source: Path, output: Path, dtype: str, console: Console) -> None:
    """Write the weights of a checkpoint in Hugging Face layout.

    Args:
        source: a run's folder, or one checkpoint.
        output: a new folder.
        dtype: `bf16`, the weights as they are, or `fp32`, the master weights.
        console: told where it went.

    Raises:
        UsageError: no checkpoint that verifies, an unknown dtype, or a folder in use.
    """
    if dtype not in FORMATS:
        raise UsageError("--dtype", dtype, "use " + " or ".join(FORMATS))
    checkpoint = _locate(source)
    config, model, optimizer = _load(checkpoint)
    weights: dict[str, Tensor] = dict(model.state_dict())
    if dtype == "fp32":
        weights = halfword.fp32_state_dict(model, optimizer)
    if config.tie_embeddings:
        del weights["lm_head.weight"]
    tokenizer = checkpoint.parent.parent / run_folder.TOKENIZER
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    pretrained.write(output, config, weights, text)
    without = "" if text else ", without a tokenizer, for the checkpoint is not in its run's folder"
    console.print(f"{checkpoint} written to {output} as {dtype}{without}", soft_wrap=True)


def inspect(source: Path, console: Console) -> None:
    """Print what a checkpoint holds, after verifying all of it.

    Raises:
        UsageError: no checkpoint that verifies.
    """
    checkpoint = _locate(source)
    try:
        manifest, tensors, state = read(checkpoint)
    except CheckpointError as error:
        raise UsageError("DIR", checkpoint, error.problem) from None
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for name, tensor in tensors.items():
        sizes[component_of(name)] += tensor.nbytes
    count = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model."))
    table = Table("component", "plane", "MiB", "bytes a parameter", title=str(checkpoint))
    for (component, plane), size in [*sorted(sizes.items()), (("total", ""), sum(sizes.values()))]:
        table.add_row(component, plane, f"{size / MIB:.3f}", f"{size / count:.3f}")
    console.print(table)
    formats = state["precision"]
    lines = (
        f"step {manifest.step}, precision {state['settings']['precision']} "
        f"(master weights {formats['master_weights']}, moments {formats['moments']})",
        f"{count:,} parameters, optimizer {state['settings']['optimizer']}",
        "every file verifies",
    )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _locate(source: Path) -> Path:
    checkpoint = resume.locate(str(source), source, "DIR")
    assert checkpoint is not None
    return checkpoint


def _load(checkpoint: Path) -> tuple[TrainConfig, Llama, halfword.Optimizer]:
    try:
        _, tensors, state = read(checkpoint)
        config = TrainConfig(**state["settings"])
        model = build_model(config, config.vocab_size or 0, torch.device("cpu"))
        optimizer = build_optimizer(config, model)
        restore(model, optimizer, tensors, state["contents"])
    except CheckpointError as error:
        raise UsageError("DIR", checkpoint, error.problem) from None
    return config, model, optimizer
