"""Several ranks, for tests: a function, or the command line as torchrun runs it."""

import functools
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch import distributed

import processes
from halfword.cli import main

TIMEOUT_S = 60
_STORES: list[distributed.Store] = []  # as torchrun, which outlives its ranks, has one

launch = functools.partial(processes.launch, timeout_s=TIMEOUT_S)


def start_command(size: int, folder: Path, words: list[str]) -> list[BaseProcess]:
    """Start `halfword WORDS` on several ranks, as torchrun does; stderr goes to folder/RANK.err."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _STORES.append(store)
    ranks = [(rank, size, store.port, folder, words) for rank in range(size)]
    return processes.start(_command, ranks)


def _command(rank: int, size: int, port: int, folder: Path, words: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with open(folder / f"{rank}.err", "wb") as errors, open(os.devnull, "wb") as nothing:
        os.dup2(errors.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    sys.exit(main(words))
