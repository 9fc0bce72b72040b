"""Which backends work on this machine, and why one does not."""

from dataclasses import dataclass

from halfword.backends import native, triton
from halfword.backends.compiling import CompileError, cache_folder, find, find_compiler
from halfword.backends.pieces import HEADERS, pieces


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is.
        works: whether it is as it should be.
        detail: what was found, and the fix where it is not.
    """

    subject: str
    works: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.subject:18} {'ok' if self.works else 'no':3} {self.detail}"


def doctor(build: bool = False) -> list[Finding]:
    """Look at every backend and at what it needs.

    Args:
        build: compile the native backend now where that has not been done, so that images without a
            compiler can hold it. One library has every rule and format, hence every preset.
    """
    findings = [
        Finding("reference backend", True, "torch operations; any device"),
        _compiler(),
        _cache(),
        _native(build),
        _triton(),
    ]
    missing = pieces().missing.values()
    return findings + [Finding("native backend", False, reason) for reason in missing]


def _compiler() -> Finding:
    compiler = find_compiler()
    if compiler is None:
        return Finding(
            "C++ compiler", False, "none found; install g++ or clang++, or name one in CXX"
        )
    return Finding("C++ compiler", True, " ".join(compiler.command))


def _cache() -> Finding:
    try:
        return Finding("cache", True, str(cache_folder()))
    except (CompileError, OSError, RuntimeError) as error:
        return Finding("cache", False, str(error))


def _native(build: bool) -> Finding:
    if build:
        reason = native.unavailable()
        return Finding("native backend", reason is None, reason or "C++, compiled for this machine")
    try:
        path = find(pieces().source, HEADERS, cache_folder())
    except (CompileError, OSError, RuntimeError):
        path = None
    if path is not None:
        return Finding("native backend", True, f"C++, compiled in {path}")
    if find_compiler() is None:
        return Finding("native backend", False, "needs a C++ compiler; the reference runs instead")
    return Finding("native backend", True, "C++, to be compiled when first used")


def _triton() -> Finding:
    reason = triton.unavailable()
    return Finding("triton backend", reason is None, reason or "Triton, compiled when first used")
