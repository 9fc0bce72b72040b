"""A model and a text small enough that a step takes milliseconds."""

import random
from pathlib import Path
from typing import Any

import pytest

from halfword.train.config import TrainConfig

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_dim": 32,
    "num_heads": 2,
    "seq_length": 16,
    "batch_size": 4,
    "num_steps": 5,
    "log_interval": 1000,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture
def tiny(text_file: Path):
    """Make settings of a tiny run, with changes; threads=1 keeps steps short on a busy machine."""

    def make(**changes: Any) -> TrainConfig:
        return TrainConfig(**{**TINY, "data": text_file, **changes})

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = "the cat sat on a mat and then ran off to find some other mouse".split()
    generator = random.Random(0)
    lines = (" ".join(generator.choices(words, k=8)) + ".\n" for _ in range(250))
    file = tmp_path_factory.mktemp("text") / "cats.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return file
