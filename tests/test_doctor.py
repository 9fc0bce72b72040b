import pytest

from halfword.backends import native
from halfword.backends.compiling import find_compiler
from halfword.doctor import doctor


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def found(**arguments):
    return {finding.subject: finding for finding in doctor(**arguments)}


def test_the_reference_always_works():
    assert found()["reference backend"].works


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_building_ahead_serves_a_machine_without_a_compiler(monkeypatch, tmp_path):
    assert found()["native backend"].detail == "C++, to be compiled when first used"
    assert not list(tmp_path.glob("halfword/*.so"))
    assert found(build=True)["native backend"].works
    (built,) = tmp_path.glob("halfword/*.so")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    after = found()
    assert not after["C++ compiler"].works
    assert after["native backend"].works
    assert after["native backend"].detail == f"C++, compiled in {built}"


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    lines = [str(finding) for finding in doctor()]
    assert lines[1] == (
        "C++ compiler       no  none found; install g++ or clang++, or name one in CXX"
    )
    assert lines[3] == ("native backend     no  needs a C++ compiler; the reference runs instead")
