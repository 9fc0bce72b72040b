"""The structure: imports run one way, and the core is light."""

import ast
import subprocess
import sys
from pathlib import Path

import halfword

PACKAGE = Path(halfword.__file__).parent

# Lowest first; a module may import what stands on lines above its own, and its own package.
LAYERS = [
    {"ops", "noise", "errors"},
    {"rules", "formats", "shards"},
    {"stored"},
    {"backends"},
    {"settings", "clip", "accumulate", "diagnostics"},
    {"groups", "release", "memory"},
    {"loading"},
    {"member"},
    {"members"},
    {"capture"},
    {"optimizer"},
    {"algorithms", "masters", "parallel", "checkpoint", "doctor"},
    {"__init__"},
    {"train", "report"},
    {"demo", "planning", "options"},
    {"cli"},
    {"__main__"},
]
CORE = set().union(*LAYERS[:13]) - {"errors"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> set[str]:
    """Return the top-level modules of halfword that a file imports, ``__init__`` for the face."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfword":
            below = node.module.split(".")[1:]
            names = [below[0]] if below else [alias.name for alias in node.names]
            found |= {name if name in LEVEL else "__init__" for name in names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "halfword":
                    found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def test_imports_run_one_way():
    for path in PACKAGE.rglob("*.py"):
        own = _module(path)
        for imported in _imports(path) - {own}:
            assert LEVEL[imported] < LEVEL[own], f"{path.relative_to(PACKAGE)} imports {imported}"


def test_rules_and_formats_never_meet():
    for path in PACKAGE.rglob("*.py"):
        if _module(path) in ("rules", "formats"):
            assert not _imports(path) & ({"rules", "formats"} - {_module(path)}), path


def test_trainer_and_report_use_the_public_face():
    for path in PACKAGE.rglob("*.py"):
        if _module(path) in ("train", "report", "demo"):
            private = CORE - {"__init__", "checkpoint", "memory", "parallel"}  # these are public
            assert not _imports(path) & private, f"{path.relative_to(PACKAGE)}: {_imports(path)}"


def test_importing_halfword_is_quick_and_brings_no_tool():
    """Under 0.3 s beyond torch, of the processor's time: the machine may be busy."""
    code = (
        "import torch, time, sys; t = time.process_time(); import halfword; "
        "print(time.process_time() - t); "
        "print(*({'typer', 'pydantic', 'matplotlib', 'triton', 'rich'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(5):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        time, tools = run.stdout.split("\n")[:2]
        assert tools == ""
        seconds.append(float(time))
    assert sorted(seconds)[2] < 0.3


def test_files_are_short():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path
