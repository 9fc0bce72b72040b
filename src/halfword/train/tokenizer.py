"""From text to token ids: plain bytes, a BPE trained on the text, or a given tokenizer file."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from halfword.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

NUM_BYTES = 256
CHUNK_CHARACTERS = 1 << 20  # encoded at a time: memory for token lists stays bounded


class Tokenizer(Protocol):
    """Text to ids below `vocab_size`."""

    vocab_size: int

    def encode(self, text: str) -> Tensor:
        """Give the ids, (tokens,), in the smallest dtype that is at hand."""

    def to_json(self) -> str:
        """Give the text of a tokenizer.json that encodes the same."""


def load_tokenizer(name: str, training_text: str) -> Tokenizer:
    """Make the tokenizer that --tokenizer names; a BPE is trained on the text, or cached."""
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("bpe:"):
        return FileTokenizer(_bpe(name, training_text))
    return FileTokenizer(_read(Path(name)))


class ByteTokenizer:
    """UTF-8 bytes are the tokens."""

    vocab_size = NUM_BYTES

    def encode(self, text: str) -> Tensor:
        """Give the bytes, (bytes,) uint8."""
        return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())

    def to_json(self) -> str:
        """Give a byte-level BPE without merges whose ids are the bytes."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        ids = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer.to_str()


class FileTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: "HuggingFaceTokenizer") -> None:
        self._tokenizer = tokenizer
        # Not their number: a tokenizer from elsewhere may leave ids out.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str) -> Tensor:
        """Give the ids, (tokens,) int32, without the tokenizer's own begin and end marks."""
        parts = [torch.empty(0, dtype=torch.int32)]
        for chunk in _chunks(text):
            ids = self._tokenizer.encode(chunk, add_special_tokens=False).ids
            parts.append(torch.tensor(ids, dtype=torch.int32))
        return torch.cat(parts)

    def to_json(self) -> str:
        """Give the tokenizer's own file."""
        return self._tokenizer.to_str()


def _read(path: Path) -> "HuggingFaceTokenizer":
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if os.path.isdir(path) else path
    if not os.path.exists(file):
        fix = "no such file; use bytes, bpe:N, or a tokenizer.json or the folder it is in"
        raise UsageError("--tokenizer", file, fix)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        line = " ".join(str(error).split())
        raise UsageError("--tokenizer", file, f"is not a tokenizer.json: {line}") from None


def _bpe(name: str, text: str) -> "HuggingFaceTokenizer":
    """Take a byte-level BPE of N tokens from the cache, or train it and put it there."""
    from tokenizers import Tokenizer

    size = name.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < NUM_BYTES:
        fix = f"bpe:N needs a whole number N of at least {NUM_BYTES}, as in bpe:4096"
        raise UsageError("--tokenizer", name, fix)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    file = _cache_folder() / f"bpe-{int(size)}-{key}.json"
    if file.exists():
        try:
            return Tokenizer.from_file(str(file))
        except Exception:  # damaged: make it again
            pass
    tokenizer = _train_bpe(int(size), text)
    try:
        _write_aside_and_rename(file, tokenizer.to_str())
    except OSError as error:
        warnings.warn(f"the tokenizer was not cached in {file}: {error.strerror}", stacklevel=2)
    return tokenizer


def _train_bpe(size: int, text: str) -> "HuggingFaceTokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chunks(text), trainer)
    return tokenizer


def _byte_characters() -> list[str]:
    """Give the character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")  # https://specifications.freedesktop.org/basedir/
    return (Path(base) if base else Path.home() / ".cache") / "halfword" / "tokenizers"


def _write_aside_and_rename(file: Path, text: str) -> None:
    """Write a file so that others see all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False
    ) as aside:
        aside.write(text)
    os.replace(aside.name, file)


def _chunks(text: str) -> Iterator[str]:
    """Cut text after line ends, so that no word is cut."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + CHUNK_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end
