"""Running a function on several ranks of this machine, over gloo."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def write_text(folder: str) -> str:
    """Write text to train on, the same everywhere, and return its path."""
    path = Path(folder) / "text.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8") * 20, encoding="utf-8")
    return str(path)


def launch(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``function(rank, size, *arguments)`` returns on each rank.

    Raises:
        RuntimeError: a rank failed; the message holds its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "halfword.train.loop"])
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=_run, args=(rank, size, store, there, function, arguments), daemon=True
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        answers = [here.recv() for here, _ in pipes]
        for process in processes:
            process.join()
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise RuntimeError(f"rank {rank} of {size}:\n{error}")
    return [result for result, _ in answers]


def _run(
    rank: int,
    size: int,
    store: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        store_of_all = distributed.FileStore(store, size)
        distributed.init_process_group("gloo", store=store_of_all, rank=rank, world_size=size)
        pipe.send((function(rank, size, *arguments), None))
        distributed.barrier()  # nobody leaves while others may still ask
    except BaseException:
        pipe.send((None, traceback.format_exc()))
