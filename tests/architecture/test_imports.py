"""The arrows between the rooms hold, and importing costs what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.source_tree import PACKAGE, ROOT, files

# What a process that only watches must never load.
TENSOR_LIBRARIES = ("torch", "torchdata", "numpy")
# What `import stepfast` alone must not cost; anything beyond the standard library is refused too.
HEAVY_STANDARD_MODULES = ("asyncio", "multiprocessing", "concurrent.futures", "ssl", "socket")

_MODULES_AFTER_IMPORT = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_loaded_by(*names: str) -> set[str]:
    """What a fresh interpreter has loaded after importing `names`, beyond what it starts with."""
    done = subprocess.run(
        [sys.executable, "-c", _MODULES_AFTER_IMPORT, *names],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(*rooms: str) -> list[str]:
    """The dotted names of every module in these rooms (or of the single modules so named)."""
    paths: list[Path] = []
    for room in rooms:
        if (PACKAGE / room).is_dir():
            paths += files(".py", under=PACKAGE / room)
        elif (PACKAGE / f"{room}.py").is_file():
            paths.append(PACKAGE / f"{room}.py")
    dotted = (path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths)
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in dotted]


def loaded_of(libraries: tuple[str, ...], loaded: set[str]) -> list[str]:
    return sorted(name for name in libraries if name in loaded)


def test_import_contracts_hold():
    # --no-cache: two runs may be at it at once. stdout names the chains that break a contract.
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_its_place_in_the_contracts():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for room in sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")):
        assert f"({room})" in text or f'"{room}"' in text, f"{room} has no layer in pyproject.toml"


@pytest.mark.parametrize("room", ["agent", "coordinator"])
def test_a_watching_process_never_loads_tensor_libraries(room: str):
    names = modules_of(room)
    assert names, f"no module in {room}"
    loaded = modules_loaded_by(*names)
    assert loaded_of(TENSOR_LIBRARIES, loaded) == []
    assert not {name for name in loaded if name.startswith("stepfast.train")}


def test_the_door_and_the_rooms_below_never_load_tensor_libraries():
    rooms = ("cli", "config", "errors", "events", "core", "runtime", "health", "observe", "k8s")
    assert loaded_of(TENSOR_LIBRARIES, modules_loaded_by(*modules_of(*rooms))) == []


def test_importing_stepfast_loads_nothing():
    loaded = modules_loaded_by("stepfast")
    assert loaded_of(HEAVY_STANDARD_MODULES, loaded) == []
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"stepfast"}
    assert foreign == set()
    assert loaded >= {"stepfast"}


def test_importing_stepfast_starts_no_thread():
    code = "import threading, stepfast; print(threading.active_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "1"
