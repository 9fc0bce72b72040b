"""The compiler and its cache: found, reused, rebuilt, shared by processes, refused."""

import multiprocessing
import os
from pathlib import Path

import pytest

from halfword.backends import compiling
from halfword.backends.compiling import CompileError, find_compiler, load

SOURCE = (
    '#include "value.h"\nextern "C" [[gnu::visibility("default")]] int value() { return VALUE; }\n'
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def headers(tmp_path):
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 42\n")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "halfword"


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_a_library_is_compiled_once(headers, cache):
    assert load(SOURCE, headers).value() == 42
    assert os.stat(cache).st_mode & 0o777 == 0o700
    (built,) = files(cache)
    before = built.stat()
    assert load(SOURCE, headers).value() == 42
    assert files(cache) == [built]
    assert built.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("what", ["source", "headers", "flags", "compiler", "processor"])
def test_whatever_it_is_made_of_makes_another_one(what, headers, cache, monkeypatch):
    load(SOURCE, headers)
    source = SOURCE
    if what == "source":
        source += "\n"
    elif what == "headers":
        (headers / "value.h").write_text("#define VALUE 43\n")
    elif what == "flags":
        monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-DNDEBUG"))
    elif what == "compiler":
        monkeypatch.setenv("CXX", f"{find_compiler().command[0]} -DNDEBUG")
    else:
        monkeypatch.setattr(compiling, "_processor", lambda: b"flags: another")
    assert load(source, headers).value() == (43 if what == "headers" else 42)
    assert len(files(cache)) == 2


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""])
def test_a_damaged_file_is_compiled_again(damage, headers, cache):
    load(SOURCE, headers)
    (built,) = files(cache)
    data = built.read_bytes()
    built.unlink()  # the mapped one stays as it is
    built.write_bytes(damage(data))
    assert load(SOURCE, headers).value() == 42
    assert files(cache) == [built]
    assert built.read_bytes() == data


def test_eight_processes_may_start_on_an_empty_cache(headers, cache):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert pool.starmap(_value, [(SOURCE, headers)] * 8, chunksize=1) == [42] * 8
    assert len(files(cache)) == 1


def _value(source: str, headers: Path) -> int:
    return load(source, headers).value()


def test_without_a_compiler_the_cache_still_serves(headers, cache, monkeypatch):
    load(SOURCE, headers)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert load(SOURCE, headers).value() == 42
    with pytest.raises(CompileError) as error:
        load(SOURCE + "\n", headers)
    assert str(error.value) == ("no C++ compiler found; install g++ or clang++, or name one in CXX")


def test_a_compiler_that_fails_says_why(headers, cache):
    with pytest.raises(CompileError, match="failed: .*error.*nonsense"):
        load("nonsense;\n", headers)
    assert not files(cache)


def test_a_folder_that_others_may_write_is_refused(headers, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(CompileError) as error:
        load(SOURCE, headers)
    assert str(error.value) == f"{cache} can be written by others; make it yours, with mode 700"


def test_where_nothing_can_be_kept_it_is_compiled_for_the_process(headers, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load(SOURCE, headers).value() == 42
