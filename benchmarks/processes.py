"""Running a function on several ranks of this machine: processes of one thread each, over gloo.

They are forked from a server that has imported torch already, which takes 1 s instead of 10.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 1800.0
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "halfword.train.loop"]


def write_text(folder: str) -> str:
    """Write text to train on, the same everywhere, and return its path."""
    path = Path(folder) / "text.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8") * 20, encoding="utf-8")
    return str(path)


def launch(
    size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Return what ``function(rank, size, *arguments)`` returns on each rank of a process group.

    Args:
        size: how many ranks.
        function: takes its rank and their number first.
        arguments: the rest of what it takes.
        timeout_s: of the group's operations; an answer is waited for eight times as long.

    Raises:
        RuntimeError: a rank failed or did not answer; the message holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(size)]
        shared = store, timeout_s, function, arguments
        processes = start(_run, [(rank, size, pipes[rank][1], *shared) for rank in range(size)])
        try:
            answers = [_receive(here, 8 * timeout_s) for here, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise RuntimeError(f"rank {rank} of {size}:\n{error}")
    return [result for result, _ in answers]


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[BaseProcess]:
    """Start a process for each tuple of arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [context.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return processes


def _receive(pipe: Connection, patience_s: float) -> tuple[Any, str | None]:
    return pipe.recv() if pipe.poll(patience_s) else (None, "no answer")


def _run(
    rank: int,
    size: int,
    pipe: Connection,
    store: str,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send((function(rank, size, *arguments), None))
        distributed.barrier()  # nobody leaves while others may still ask
    except BaseException:
        pipe.send((None, traceback.format_exc()))
