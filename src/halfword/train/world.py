"""The processes of one run: how they meet, agree, and end together.

torchrun starts them and gives each a number. They meet at a store first, where rank 0 hands out the
settings once they are known to be good, and whoever fails says so; then in a process group.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from halfword.checkpoint import CheckpointError, Ranks
from halfword.errors import UsageError

FAILURE, USAGE_ERROR, INTERRUPTED = 1, 2, 130
TIMEOUT_S = 600
POLL_S = 0.5
LOOK_S = 0.05
BEATS = "beats"


class World:
    """All processes of a run, seen from one; by default it is alone.

    Attributes:
        rank: this process's number, from 0.
        size: how many there are.
        local_rank: its number on its machine.
        mesh: of all ranks, once they are connected: ("shard",) or ("replicate", "shard").
        ranks: a group of its own for checkpoints, which are saved while training goes on.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.mesh: DeviceMesh | None = None
        self.ranks = Ranks()
        self._store = store

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S) -> "World":
        """Return the world that torchrun started this process in, or a world of one.

        Raises:
            UsageError: there should be others, and nothing says where.
            ConnectionError: they do not answer.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1 or distributed.is_torchelastic_launched():
            _end_with_launcher()
        if size == 1:
            return cls()
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UsageError("WORLD_SIZE", size, f"{name} is not set; start by torchrun")
        rank, local_rank = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
        timeout = timedelta(seconds=timeout_s)
        try:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        except distributed.DistError:
            problem = f"rank {rank} of {size} has not met the others within {timeout_s:g} s"
            raise ConnectionError(problem) from None
        store.set_timeout(timeout)
        return cls(rank, size, local_rank, store)

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def publish(self, key: str, make: Callable[[], str]) -> str:
        """Return on every rank what the first one makes, before they are connected."""
        if self._store is None:
            return make()
        with self.first_goes_first(f"{key} made"):
            if self.is_first:
                self._store.set(key, make())
        published: bytes = self._store.get(key)
        return published.decode()

    @contextlib.contextmanager
    def first_goes_first(self, key: str) -> Iterator[None]:
        """Let the first rank through, then the others, who find caches filled.

        It may take longer than a timeout as long as it shows that it is alive.
        """
        if self._store is None:
            yield
        elif self.is_first:
            with _beating(self._store):
                yield
            self._store.set(key, "done")
        else:
            _wait_while_beating(self._store, key)
            yield

    def connect(self, device: torch.device, shard_size: int | None, timeout_s: float) -> None:
        """Make the process group, the mesh and the group for checkpoints."""
        if self._store is None:
            return
        timeout = timedelta(seconds=timeout_s)
        backend, on_device = "gloo", None
        if device.type != "cpu":
            fast = distributed.get_default_backend_for_device(device.type)
            backend, on_device = f"cpu:gloo,{device.type}:{fast}", device
        distributed.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=on_device,
        )
        sizes = mesh_sizes(self.size, shard_size)
        names, shape = tuple(sizes), tuple(sizes.values())
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for group in self.mesh.get_all_groups():  # a mesh makes its own with torch's half an hour
            distributed.distributed_c10d._set_pg_timeout(timeout, group)
        self.ranks = Ranks(distributed.new_group(backend="gloo", timeout=timeout))

    def sum(self, value: float) -> float:
        """Return the sum over all ranks, in float64."""
        return self._reduce(value, distributed.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        return int(self._reduce(value, distributed.ReduceOp.MAX))

    def leave(self) -> None:
        """Part after a run that has ended well."""
        if self.mesh is not None:
            distributed.destroy_process_group()

    def end(self, error: BaseException) -> NoReturn:
        """End this process at once for an error; one line, by the first rank that met one.

        The others wait in operations that will not finish, so nothing is waited for here.
        """
        if self._is_first_to_tell():
            print(f"halfword train: {self._line(error)}", file=sys.stderr, flush=True)
        codes = {UsageError: USAGE_ERROR, KeyboardInterrupt: INTERRUPTED}
        sys.stdout.flush()
        os._exit(codes.get(type(error), FAILURE))

    def _line(self, error: BaseException) -> str:
        if isinstance(error, UsageError | CheckpointError | OSError):
            return str(error)
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        if is_loss_of_contact(error):
            return f"rank {self.rank} of {self.size} lost contact with another: the run has ended"
        traceback.print_exception(error)
        return f"rank {self.rank} of {self.size}: {type(error).__name__}: {error}"

    def _is_first_to_tell(self) -> bool:
        if self._store is None:
            return True
        try:
            return bool(self._store.add("told", 1) == 1)
        except RuntimeError:  # the store has gone, and rank 0 with it where torchrun has no store
            return self.rank == 1

    def _reduce(self, value: float, operation: distributed.ReduceOp.RedOpType) -> float:
        if self.mesh is None:
            return value
        reduced = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(reduced, operation)
        return reduced.item()


def mesh_sizes(world_size: int, shard_size: int | None) -> dict[str, int]:
    """Return the dimensions of the mesh of all ranks: copies, if there are several, and shards."""
    shards = shard_size or world_size
    copies = {"replicate": world_size // shards} if world_size > shards else {}
    return copies | {"shard": shards}


def is_loss_of_contact(error: BaseException) -> bool:
    """Whether an operation among ranks failed because another rank is gone or does not answer."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


@contextlib.contextmanager
def _beating(store: Store) -> Iterator[None]:
    """Count on at the store while this rank makes what the others wait for."""
    made = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone; the main thread will say so
            while not made.wait(POLL_S):
                store.add(BEATS, 1)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        made.set()


def _wait_while_beating(store: Store, key: str) -> None:
    """Wait for a key of the first rank; DistStoreError where that was silent for a timeout."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # which torch's stubs lack
    beats, heard = 0, time.monotonic()
    while not store.check([key]):  # store.wait would write a warning for each look
        if (counted := store.add(BEATS, 0)) != beats:
            beats, heard = counted, time.monotonic()
        elif time.monotonic() - heard > timeout.total_seconds():
            raise distributed.DistStoreError(f"no {key} and no sign of life of the first rank")
        time.sleep(LOOK_S)


def _end_with_launcher() -> None:
    """End this process when its parent has ended: a killed torchrun leaves its ranks running."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_S)
        os._exit(FAILURE)

    threading.Thread(target=watch, daemon=True).start()
