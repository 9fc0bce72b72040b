"""Running a function on several ranks: processes of one thread each, over gloo.

They are forked from a server that has imported torch already, which takes 1 s instead of 10.
"""

import multiprocessing
import os
import sys
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

from halfword.cli import main

TIMEOUT_S = 60
_STORES: list[distributed.Store] = []  # as torchrun, which outlives its ranks, has one
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "parallel_cases"]


def launch(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``function(rank, size, *arguments)`` returns on each rank of a process group.

    Raises:
        AssertionError: a rank failed or did not answer; the message holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(size)]
        processes = start(
            _answer,
            [(rank, size, store, pipes[rank][1], function, arguments) for rank in range(size)],
        )
        try:
            answers = [_receive(here) for here, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank, (_, error) in enumerate(answers):
        assert error is None, f"rank {rank} of {size}:\n{error}"
    return [result for result, _ in answers]


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[BaseProcess]:
    """Start a process for each tuple of arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [context.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return processes


def start_command(size: int, folder: Path, words: list[str]) -> list[BaseProcess]:
    """Start `halfword WORDS` on several ranks, as torchrun does; stderr goes to folder/RANK.err."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _STORES.append(store)
    return start(_command, [(rank, size, store.port, folder, words) for rank in range(size)])


def _receive(pipe: Connection) -> tuple[Any, str | None]:
    return pipe.recv() if pipe.poll(8 * TIMEOUT_S) else (None, "no answer")


def _answer(
    rank: int,
    size: int,
    store: str,
    pipe: Connection,
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
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        pipe.send((function(rank, size, *arguments), None))
        distributed.barrier()  # nobody leaves while others may still ask
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def _command(rank: int, size: int, port: int, folder: Path, words: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with open(folder / f"{rank}.err", "wb") as errors, open(os.devnull, "wb") as nothing:
        os.dup2(errors.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    sys.exit(main(words))
