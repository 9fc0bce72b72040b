"""The command: answer the question, trace the step where shapes are known, print."""

import contextlib
import json
from functools import partial

from rich.console import Console
from rich.text import Text

from halfword.memory.trace import Traced
from halfword.planning.answer import answer, chosen, num_parameters, to_table
from halfword.planning.request import Request
from halfword.planning.step import UNSEEN, trace_step
from halfword.planning.tables import size, table

ASSUMPTION = (
    "Assumed: all parameters are in matrices that int8 can quantize; give a model's shape, by "
    "options or --model, for what it is, for activations, and for the peak."
)


def plan(request: Request, trace: bool, as_json: bool) -> None:
    """Print what each preset holds on the first rank, as tables or as JSON."""
    known = request.vocab_size
    traced = partial(_trace, request, known) if trace and known is not None else None
    rows = answer(request, traced)
    if as_json:
        print(json.dumps(to_table(request, rows, UNSEEN), indent=2))
        return
    console = Console()
    console.print(Text(_heading(request)), soft_wrap=True)
    if known is None:
        console.print(Text(ASSUMPTION), soft_wrap=True)
    console.print()
    console.print(table(request, rows, chosen(request, rows)).to_rich())
    if traced is not None:
        console.print(Text(f"Not seen by the trace: {'; '.join(UNSEEN)}."), soft_wrap=True)


def _heading(request: Request) -> str:
    config, ranks = request.config, request.world_size
    parts = [f"{num_parameters(request):,} parameters"]
    parts.append(f"{ranks} ranks, ZeRO {config.zero_stage}" if ranks > 1 else "1 rank")
    if request.vocab_size is not None:
        parts.append(f"{config.batch_size} x {config.seq_length} tokens a micro-batch")
    if request.device_memory is not None:
        parts.append(f"{size(request.device_memory)} a device")
    return ", ".join(parts) + "."


def _trace(request: Request, vocab_size: int, released: bool) -> Traced:
    about = f"tracing a step{' with released gradients' * released} (--no-trace: arithmetic only)"
    errors = Console(stderr=True)
    with errors.status(about) if errors.is_terminal else contextlib.nullcontext():
        return trace_step(request.config, vocab_size, request.world_size, released=released)
