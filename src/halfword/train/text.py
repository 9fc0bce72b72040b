"""Where text comes from: Python's own documentation and code, local files, or a named data set."""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from halfword.errors import UsageError
from halfword.train.config import TrainConfig

EMBEDDED_CHARACTERS = 4_000_000
HELD_OUT_PART = 0.05  # of the text, from its end, where no other held-out text is given


class Corpus(NamedTuple):
    """Text to train on and text to evaluate on."""

    name: str
    train: str
    held_out: str

    @property
    def sha256(self) -> str:
        """Of all text, in UTF-8: the same for a text given whole and the same text split."""
        digest = hashlib.sha256(self.train.encode())
        digest.update(self.held_out.encode())
        return digest.hexdigest()


def load_corpus(config: TrainConfig) -> Corpus:
    """Read the text that the settings name."""
    held_out: str | None = None
    if config.dataset:
        name = config.dataset
        train, held_out = _read_dataset(config.dataset, with_validation=config.eval_data is None)
    elif config.data:
        name = str(config.data)
        train = _read_path("--data", config.data)
    else:
        name = "text that comes with Python"
        train = _embedded_text()
    if config.eval_data:
        held_out = _read_path("--eval_data", config.eval_data)
    if held_out is None:
        cut = len(train) - int(len(train) * HELD_OUT_PART)
        train, held_out = train[:cut], train[cut:]
    return Corpus(name, train, held_out)


def _embedded_text() -> str:
    """`pydoc_data.topics`, then the standard library's modules, by name, up to the cap."""
    from pydoc_data.topics import topics

    parts = [topics[name] for name in sorted(topics)]
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if not file.name.startswith("_sysconfigdata"):  # how this one Python was compiled
            parts.append(file.read_text(encoding="utf-8"))
    return "\n".join(parts)[:EMBEDDED_CHARACTERS]


def _read_path(option: str, path: Path) -> str:
    """Read a file, or the files of a folder in the order of their names."""
    try:
        text = "".join(READERS[file.suffix](option, file) for file in _files(option, path))
    except OSError as error:
        fix = f"cannot be read: {error.strerror or error}"
        raise UsageError(option, error.filename or path, fix) from None
    if not text:
        raise UsageError(option, path, "is empty")
    return text


def _files(option: str, path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(option, path, "does not exist")
    kinds = ", ".join(READERS)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in READERS)
        if not files:
            raise UsageError(option, path, f"holds no {kinds} file")
        return files
    if path.suffix not in READERS:
        raise UsageError(option, path, f"unknown kind of file; use a {kinds} file")
    return [path]


def _read_txt(option: str, file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        fix = f"is not text in UTF-8 (byte {error.start}); convert it, or leave it out"
        raise UsageError(option, file, fix) from None
    if "\0" in text:
        raise UsageError(option, file, "holds NUL characters: it is binary, not text")
    return text


def _read_jsonl(option: str, file: Path) -> str:
    records = []
    for number, line in enumerate(_read_txt(option, file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise UsageError(option, file, f"line {number} is not JSON") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UsageError(option, file, f'line {number} has no string "text"')
        if not _is_unicode(text):
            raise UsageError(option, file, f"line {number} has half of a surrogate pair in it")
        records.append(text)
    return _join(records)


def _read_parquet(option: str, file: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(file).names
        if "text" not in columns:
            fix = f'has no column "text", only {", ".join(columns)}'
            raise UsageError(option, file, fix)
        column = pyarrow.parquet.read_table(file, columns=["text"])["text"].to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(option, file, f"is not Parquet, or damaged: {_line(error)}") from None
    return _join(column)


def _read_dataset(name: str, *, with_validation: bool) -> tuple[str, str | None]:
    """Read a data set's train and validation splits; None where it has no validation split."""
    splits = _load_splits(name)
    if "train" not in splits:
        raise UsageError("--dataset", name, f"has no split train, only {', '.join(splits)}")
    columns = splits["train"].column_names
    if "text" not in columns:
        raise UsageError("--dataset", name, f'has no column "text", only {", ".join(columns)}')
    train = _join(splits["train"]["text"])
    if with_validation and "validation" in splits:
        return train, _join(splits["validation"]["text"])
    return train, None


def _load_splits(name: str) -> Any:
    """Find which reading of the name exists, and fetch it or take it from the cache."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    fix = (
        "the Hugging Face Hub cannot be reached; give local files as --data, or set "
        "HF_HUB_OFFLINE=1 to use a copy downloaded before"
    )
    unreachable = UsageError("--dataset", name, fix)
    readings = _readings(name)
    try:  # one quick question first: datasets itself would retry for the better part of a minute
        readings = [it for it in readings if HfApi().repo_exists(it[0], repo_type="dataset")]
    except OfflineModeIsEnabled:
        pass
    except Exception:  # whatever the HTTP library raises
        raise unreachable from None
    if not readings:
        raise UsageError("--dataset", name, "is not on the Hugging Face Hub, or is private")
    for reading in readings:
        try:
            return datasets.load_dataset(*reading)
        except ConnectionError:  # offline, and not in the cache
            continue
        except (ValueError, RuntimeError, OSError) as error:
            raise UsageError("--dataset", name, f"cannot be loaded: {_line(error)}") from None
    raise unreachable


def _readings(name: str) -> list[tuple[str, ...]]:
    """What NAME/CONFIG may mean; OWNER/NAME looks the same.

    >>> _readings("wikitext/wikitext-103-raw-v1")
    [('wikitext/wikitext-103-raw-v1',), ('wikitext', 'wikitext-103-raw-v1')]
    >>> _readings("Salesforce/wikitext/wikitext-103-raw-v1")
    [('Salesforce/wikitext', 'wikitext-103-raw-v1')]
    """
    parts = name.split("/")
    if len(parts) == 1:
        return [(name,)]
    if len(parts) == 2:
        return [(name,), (parts[0], parts[1])]
    return [("/".join(parts[:2]), "/".join(parts[2:]))]


def _join(records: Iterable[str | None]) -> str:
    """Put records one after another, each ending its line."""
    texts = (record for record in records if record is not None)
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


READERS: dict[str, Callable[[str, Path], str]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
