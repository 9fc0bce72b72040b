"""Bytes, a BPE trained on the text and cached, and tokenizers from a file."""

from pathlib import Path

import pytest
import torch

from halfword.errors import UsageError
from halfword.train import tokenizer as module
from halfword.train.tokenizer import load_tokenizer

TEXT = "the cat sat on the mat, the gr\u00fcne cat\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "halfword" / "tokenizers"


def decode(tokens: torch.Tensor, file: Path) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).decode(tokens.tolist())


def test_bytes_are_utf8() -> None:
    tokenizer = load_tokenizer("bytes", TEXT)
    tokens = tokenizer.encode(TEXT)
    assert bytes(tokens.tolist()).decode() == TEXT
    assert (tokenizer.vocab_size, tokens.dtype) == (256, torch.uint8)


def test_a_bpe_is_shorter_than_bytes_and_loses_nothing(cache: Path) -> None:
    tokenizer = load_tokenizer("bpe:270", TEXT)
    tokens = tokenizer.encode(TEXT)
    (file,) = cache.iterdir()
    assert tokenizer.vocab_size == 270 > int(tokens.max())
    assert len(tokens) < 0.6 * len(TEXT.encode())
    assert decode(tokens, file) == TEXT


def test_text_is_encoded_in_chunks_that_cut_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_tokenizer("bpe:270", TEXT).encode(TEXT)
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 50)
    assert torch.equal(load_tokenizer("bpe:270", TEXT).encode(TEXT), whole)


def test_a_bpe_is_trained_once_for_each_text_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer("bpe:270", TEXT).encode(TEXT)
    monkeypatch.setattr(module, "_train_bpe", lambda size, text: pytest.fail("trained again"))
    assert torch.equal(load_tokenizer("bpe:270", TEXT).encode(TEXT), first)
    for name, text in [("bpe:271", TEXT), ("bpe:270", TEXT + "more")]:
        with pytest.raises(pytest.fail.Exception):
            load_tokenizer(name, text)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"model": {}}', b"\xff\x00"])
def test_a_damaged_cache_is_made_again(cache: Path, damage: bytes) -> None:
    first = load_tokenizer("bpe:270", TEXT).encode(TEXT)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert torch.equal(load_tokenizer("bpe:270", TEXT).encode(TEXT), first)
    assert [file.read_bytes() for file in cache.iterdir()] == [whole]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="was not cached in"):
        assert load_tokenizer("bpe:270", TEXT).vocab_size == 270


def test_a_tokenizer_is_read_from_its_file_or_its_folder(cache: Path, tmp_path: Path) -> None:
    expected = load_tokenizer("bpe:270", TEXT).encode(TEXT)
    (file,) = cache.iterdir()
    file.rename(tmp_path / "tokenizer.json")
    for name in (tmp_path / "tokenizer.json", tmp_path):
        assert torch.equal(load_tokenizer(str(name), "").encode(TEXT), expected)


@pytest.mark.parametrize("name", ["bpe:", "bpe:255", "bpe:4k", "bpe:-1", "bpe:1e3"])
def test_a_bpe_needs_a_size(name: str) -> None:
    with pytest.raises(UsageError, match=f"^--tokenizer {name}: bpe:N needs a whole number N"):
        load_tokenizer(name, TEXT)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--tokenizer gpt9: no such file; use bytes, bpe:N"):
        load_tokenizer("gpt9", TEXT)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer.json: is not a tokenizer.json: "):
        load_tokenizer(str(tmp_path), TEXT)
