"""Shared libraries from C++ source: the system's compiler, its flags, and the cache of results.

A library's name in the cache holds three digests: of what it was made from (source, headers, flags,
processor), of the compiler, and of the file itself. So a damaged file is known as such before it is
mapped, and where there is no compiler any compiler's result will do.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-O3",
    "-funroll-loops",
    # One rounding for each operation: no fused multiply-add, no reordering.
    "-ffp-contract=off",
    # Nobody reads errno or the floating-point status; values are IEEE's all the same.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
)


class CompileError(Exception):
    """A library could not be had; the message says why."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: what runs it.
        digest: changes when the compiler does.
    """

    command: tuple[str, ...]
    digest: str


def load(source: str, headers: Path) -> ctypes.CDLL:
    """Return the library of a translation unit, compiled now unless the cache holds it.

    Raises:
        CompileError: it is not in the cache, and cannot be compiled.
    """
    if os.name != "posix":
        raise CompileError(f"no C++ on {platform.system()}; use Linux or macOS")
    try:
        folder = cache_folder()
    except (OSError, RuntimeError):  # nowhere to keep it: compile for this process alone
        with tempfile.TemporaryDirectory(prefix="halfword-") as aside:
            return _open(build(source, headers, Path(aside)))
    return _open(find(source, headers, folder) or build(source, headers, folder))


def find(source: str, headers: Path, folder: Path) -> Path | None:
    """Return the library's file in ``folder``, or None; damaged ones are removed."""
    compiler = find_compiler()
    compiled_by = compiler.digest if compiler else "*"
    for path in sorted(folder.glob(f"{_inputs(source, headers)}-{compiled_by}-*.so")):
        if path.stem.endswith(_digest(path.read_bytes())):
            return path
        path.unlink(missing_ok=True)
    return None


def build(source: str, headers: Path, folder: Path) -> Path:
    """Compile a library into ``folder``: aside first, then renamed.

    Raises:
        CompileError: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        built = Path(aside) / "library.so"
        # From standard input, so that no temporary name gets into the result.
        command = [*compiler.command, *FLAGS, f"-I{headers}", "-x", "c++", "-", "-o", str(built)]
        run = subprocess.run(command, input=source, capture_output=True, text=True)
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line]
            raise CompileError(f"{compiler.command[0]} failed: {''.join(errors[:1])}")
        made_of = f"{_inputs(source, headers)}-{compiler.digest}"
        # Whoever else compiles the same puts an equal file in the same place.
        return built.replace(folder / f"{made_of}-{_digest(built.read_bytes())}.so")


def find_compiler() -> Compiler | None:
    """Return the compiler that ``CXX`` names, else the first of c++, g++, clang++ on the path."""
    for candidate in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        program, *options = shlex.split(candidate)
        found = shutil.which(program)
        if found:
            # Asking for its version would start a process at every launch.
            status = os.stat(found)
            identity = f"{os.path.realpath(found)} {status.st_size} {status.st_mtime_ns} {options}"
            return Compiler((found, *options), _digest(identity.encode()))
    return None


def cache_folder() -> Path:
    """Return the folder of compiled libraries, made for this user alone where it is missing.

    Raises:
        OSError, RuntimeError: it cannot be made or written, or there is no home.
        CompileError: others may write into it, and with it into this process.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "halfword"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(f"{folder} can be written by others; make it yours, with mode 700")
    if not os.access(folder, os.W_OK):
        raise PermissionError(folder)
    return folder


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(str(error)) from error


def _inputs(source: str, headers: Path) -> str:
    contents = [path.name.encode() + path.read_bytes() for path in sorted(headers.glob("*.h"))]
    return _digest(source.encode(), *contents, " ".join(FLAGS).encode(), _processor())


def _processor() -> bytes:
    """Describe the instructions that the flags let a compiler use here."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = file.read(1 << 14).splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return next((line for line in lines if line.lower().startswith((b"flags", b"features"))), b"")


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
