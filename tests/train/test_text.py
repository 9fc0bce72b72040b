"""Text from Python itself, from files, and from data sets."""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from halfword.errors import UsageError
from halfword.train.config import TrainConfig
from halfword.train.text import EMBEDDED_CHARACTERS, load_corpus


def test_the_embedded_text_is_the_same_each_time_and_within_its_cap() -> None:
    corpus = load_corpus(TrainConfig())
    assert corpus == load_corpus(TrainConfig())
    assert 1_000_000 < len(corpus.train) + len(corpus.held_out) <= EMBEDDED_CHARACTERS
    assert len(corpus.sha256) == 64


def test_held_out_text_is_the_last_twentieth_unless_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 95 + "y" * 5)
    (tmp_path / "b.txt").write_text("z")
    corpus = load_corpus(TrainConfig(data=tmp_path / "a.txt"))
    assert (corpus.train, corpus.held_out) == ("x" * 95, "y" * 5)
    given = load_corpus(TrainConfig(data=tmp_path / "a.txt", eval_data=tmp_path / "b.txt"))
    assert (given.train, given.held_out) == ("x" * 95 + "y" * 5, "z")
    assert given.sha256 != corpus.sha256


def write_json_lines(file: Path, *records: Any) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_parquet(file: Path, **columns: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def test_each_kind_of_file_gives_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("gr\u00fcn\r\n".encode())
    write_json_lines(tmp_path / "b.jsonl", {"text": "one\u2028line"}, {"text": "two\n", "id": 3})
    write_parquet(tmp_path / "c.parquet", text=["red", None, "blue"], id=[1, 2, 3])
    (tmp_path / "notes.md").write_text("not read")
    expected = "gr\u00fcn\r\n" + "one\u2028line\ntwo\n" + "red\nblue\n"
    corpus = load_corpus(TrainConfig(data=tmp_path))  # a folder, in the order of names
    assert corpus.train + corpus.held_out == expected


class FakeHub:
    """Data sets that exist, by the arguments of `datasets.load_dataset`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offline: bool = False, **sets: Any) -> None:
        self.sets, self.offline = sets, offline
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_exists", self.exists)

    def exists(self, name: str, repo_type: str) -> bool:
        if self.offline:
            raise OfflineModeIsEnabled("offline")
        return name in {key.split(" ")[0] for key in self.sets}

    def load(self, *arguments: str) -> Any:
        if " ".join(arguments) not in self.sets:
            raise ConnectionError("not in the cache") if self.offline else ValueError("no\nconfig")
        splits = self.sets[" ".join(arguments)]
        return {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("wikitext/raw-v1", "wikitext raw-v1"),
        ("owner/wikitext", "owner/wikitext"),
        ("owner/wikitext/raw-v1", "owner/wikitext raw-v1"),
        ("wikitext", "wikitext"),
    ],
)
def test_a_data_set_is_found_by_name_and_config(monkeypatch, name, arguments, offline) -> None:
    splits = {"train": {"text": ["= Title =\n", "", "a b\n"]}, "validation": {"text": ["held\n"]}}
    FakeHub(monkeypatch, offline, **{arguments: splits})
    assert load_corpus(TrainConfig(dataset=name))[1:] == ("= Title =\n\na b\n", "held\n")


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"test": {"text": ["a"]}}, "has no split train, only test"),
        ({"train": {"words": ["a"], "id": [1]}}, 'has no column "text", only words, id'),
    ],
)
def test_a_data_set_without_text_to_train_on_is_refused(monkeypatch, splits, message) -> None:
    FakeHub(monkeypatch, demo=splits)
    with pytest.raises(UsageError, match=f"^--dataset demo: {message}$"):
        load_corpus(TrainConfig(dataset="demo"))


def test_a_data_set_that_cannot_be_had_is_told_in_one_line(monkeypatch) -> None:
    FakeHub(monkeypatch, **{"wikitext raw-v1": {}})
    with pytest.raises(UsageError, match=r"^--dataset foo: is not on the Hugging Face Hub"):
        load_corpus(TrainConfig(dataset="foo"))
    with pytest.raises(UsageError, match=r"^--dataset wikitext: cannot be loaded: no config$"):
        load_corpus(TrainConfig(dataset="wikitext"))
    FakeHub(monkeypatch, offline=True)
    with pytest.raises(UsageError, match=r"Hub cannot be reached; give local files as --data"):
        load_corpus(TrainConfig(dataset="wikitext"))
