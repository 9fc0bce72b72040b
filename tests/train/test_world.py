"""Runs of several processes: they are told apart, fail together, and resume to the last bit."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed import DistStoreError, TCPStore

from halfword.checkpoint import checkpoints, read_manifest
from halfword.train import config as settings
from halfword.train import world
from halfword.train.config import TrainConfig
from halfword.train.export import export, inspect
from halfword.train.loop import Stop
from halfword.train.world import World
from ranks import start_command

TINY = (
    "train --num_layers 1 --hidden_dim 16 --num_heads 2 --seq_length 8 --batch_size 2 --threads 1 "
    "--device cpu --save_steps 5 --keep_checkpoints 3 --log_interval 100000 --zero_stage 3"
).split()
STEPS = 100
TIMEOUT_S = 8
PATIENCE_S = 300  # how long a busy machine may take

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


@pytest.fixture
def words(tmp_path: Path, text_file: Path) -> Callable[..., list[str]]:
    """Return the words of a command that trains in a folder of this name."""

    def words(name: str, *more: str, steps: int = STEPS) -> list[str]:
        places = ["--run_dir", str(tmp_path / name), "--data", str(text_file)]
        return [*TINY, *places, "--num_steps", str(steps), "--timeout", str(TIMEOUT_S), *more]

    return words


def ended(processes: list[Any], within_s: float) -> list[int | None]:
    """Return the exit codes of processes, waited for together; none stays behind."""
    deadline = time.monotonic() + within_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def complaints(folder: Path) -> list[str]:
    """Return our own lines on all ranks' stderr."""
    lines = [line for file in folder.glob("*.err") for line in file.read_text().splitlines()]
    return [line for line in lines if line.startswith("halfword")]


def wait_for_rows(run: Path, count: int, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (run / "metrics.csv").exists() and len(rows(run)) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {count} rows in {run}")


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as lines:
        table = list(csv.DictReader(lines))
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in table]


def result(run: Path) -> tuple[Any, ...]:
    step, newest = next(iter(checkpoints(run / "checkpoints")))
    return step, rows(run), read_manifest(newest).fingerprint


@pytest.fixture
def torchrun() -> Iterator[Callable[[list[str]], subprocess.Popen[bytes]]]:
    """Return what starts a command by torchrun on two ranks, which takes long; none stays."""
    started = []

    def start(words: list[str]) -> subprocess.Popen[bytes]:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        process = subprocess.Popen(
            [*run, "-m", "halfword", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def are_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@linux
def test_kill_9_of_the_launcher_and_of_a_rank_end_all_and_resume_to_the_last_bit(
    words, torchrun, tmp_path
):
    assert ended(start_command(2, tmp_path, words("whole")), PATIENCE_S) == [0, 0]
    run = tmp_path / "run"
    launcher = torchrun(words("run"))
    wait_for_rows(run, 12)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    launcher.kill()
    assert are_gone(ranks, TIMEOUT_S)
    processes = start_command(2, tmp_path, words("run", "--resume", "auto"))
    wait_for_rows(run, len(rows(run)) + 12)
    processes[1].kill()
    assert ended(processes, TIMEOUT_S) == [1, -signal.SIGKILL]
    assert len(rows(run)) < STEPS
    assert ended(start_command(2, tmp_path, words("run", "--resume", "auto")), PATIENCE_S) == [0, 0]
    assert result(run) == result(tmp_path / "whole")


def test_kill_9_in_stage_1_with_8_bits_and_noise_resumes_to_the_last_bit(words, tmp_path):
    def start(name: str, *more: str) -> list[Any]:
        shape = ["--zero_stage", "1", "--precision", "lean", "--hidden_dim", "64"]
        return start_command(2, tmp_path, words(name, *shape, *more, steps=40))

    assert ended(start("whole"), 90) == [0, 0]
    processes = start("run")
    wait_for_rows(tmp_path / "run", 12)
    processes[1].kill()
    assert ended(processes, TIMEOUT_S) == [1, -signal.SIGKILL]
    assert len(rows(tmp_path / "run")) < 40
    assert ended(start("run", "--resume", "auto"), 90) == [0, 0]
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_a_rank_that_is_killed_is_told_of_once(words, tmp_path):
    processes = start_command(3, tmp_path, words("run", steps=10**6))
    wait_for_rows(tmp_path / "run", 3)
    processes[1].kill()
    first, _, third = ended(processes, TIMEOUT_S)
    assert (first, third) == (1, 1)
    (line,) = complaints(tmp_path)
    assert line.endswith("of 3 lost contact with another: the run has ended")


@linux
def test_a_rank_that_hangs_is_given_up_after_the_timeout(words, tmp_path):
    processes = start_command(2, tmp_path, words("run", steps=10**6))
    wait_for_rows(tmp_path / "run", 3)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        assert ended(processes[:1], PATIENCE_S) == [1]
    finally:
        processes[1].kill()
    assert len(complaints(tmp_path)) == 1


def test_a_signal_to_one_rank_stops_all_after_the_same_step(words, tmp_path):
    processes = start_command(2, tmp_path, words("run", steps=10**6))
    wait_for_rows(tmp_path / "run", 3)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert ended(processes, 60) == [143, 143]
    assert complaints(tmp_path) == []
    step, newest = next(iter(checkpoints(tmp_path / "run" / "checkpoints")))
    assert step == len(rows(tmp_path / "run"))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--num_heads", "3"], "--num_heads 3: does not divide --hidden_dim 16"),
        (["--shard_size", "3"], "--shard_size 3: does not divide 2 processes"),
        (["--vocab_size", "9"], "--vocab_size 9: too few for the tokenizer, which has 256"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line_by_one_rank(words, tmp_path, more, line):
    processes = start_command(2, tmp_path, words("run", *more))
    codes = ended(processes, PATIENCE_S)
    assert codes[0] == 2 and None not in codes
    assert complaints(tmp_path) == [f"halfword train: {line}"]
    assert not (tmp_path / "run").exists()


def test_a_wrong_timeout_is_told_as_other_settings_are(words, tmp_path):
    """The other rank waits for the default one; torchrun would end it."""
    processes = start_command(2, tmp_path, words("run", "--timeout", "0"))
    assert ended(processes[:1], PATIENCE_S) == [2]
    assert ended(processes[1:], 0) == [None]
    line = "halfword train: --timeout 0: should be greater than or equal to 1"
    assert complaints(tmp_path) == [line]


def test_other_ranks_go_on_from_where_all_were(words, tmp_path, capsys):
    """2 ranks, then 1, then 3: no sequence twice, none left out, and the files are one run's."""
    from halfword.cli import main

    run = tmp_path / "run"
    assert ended(start_command(2, tmp_path, words("run", steps=10)), 60) == [0, 0]
    for process_count, steps in [(1, 20), (3, 30)]:
        more = words("run", "--resume", "auto", steps=steps)
        if process_count == 1:
            assert main(more) == 0
            assert "resumed with world_size 1 instead of 2" in capsys.readouterr().err
        else:
            assert ended(start_command(process_count, tmp_path, more), 60) == [0] * 3
    table = rows(run)
    assert [int(row["step"]) for row in table] == list(range(30))
    assert [int(row["tokens"]) for row in table] == [32] * 10 + [16] * 10 + [48] * 10
    newest = next(path for _, path in checkpoints(run / "checkpoints"))
    assert '"micro_batches": 60' in (newest / "state.json").read_text()
    export(run, tmp_path / "model", "fp32", Console(quiet=True))
    inspect(run, Console(quiet=True))


def test_a_signal_that_comes_while_ranks_agree_is_not_lost():
    stop = Stop()

    class Interrupted(World):
        def max(self, value: int) -> int:
            stop.signal_number = signal.SIGTERM
            return value

    assert not stop.agree(Interrupted())
    assert stop.agree(World())


def test_threads_are_shared_among_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(settings.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert TrainConfig().threads == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    assert TrainConfig().threads == 1


def test_a_process_alone_needs_no_other(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.join()
    assert (world.rank, world.size, world.sum(2.5), world.max(3)) == (0, 1, 2.5, 3)
    assert world.publish("key", lambda: "value") == "value"


def test_what_the_first_rank_makes_may_take_longer_than_the_timeout():
    """A silent one is given up."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))
    first, second = World(0, 2, store=server), World(1, 2, store=client)

    def slow() -> str:
        time.sleep(2)
        return "text"

    with ThreadPoolExecutor() as pool:
        made = pool.submit(first.publish, "key", slow)
        assert second.publish("key", str) == made.result() == "text"
    with pytest.raises(DistStoreError):
        second.publish("another", str)


def test_a_process_that_torchrun_started_alone_ends_with_it_too(monkeypatch):
    ends = []
    monkeypatch.setattr(world, "_end_with_launcher", lambda: ends.append(True))
    monkeypatch.setenv("WORLD_SIZE", "1")
    World.join()
    assert not ends
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    World.join()
    assert ends


def test_others_that_cannot_be_met_are_told_of_in_one_line(monkeypatch, capsys):
    from halfword.cli import main

    monkeypatch.setattr(world, "_end_with_launcher", lambda: None)
    numbers = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, number in numbers.items():
        monkeypatch.setenv(name, number)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train"]) == 2
    line = "halfword train: WORLD_SIZE 2: RANK is not set; start by torchrun"
    assert capsys.readouterr().err.splitlines() == [line]
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--timeout", "1"]) == 1
    line = "halfword train: rank 1 of 2 has not met the others within 1 s"
    assert capsys.readouterr().err.splitlines() == [line]
