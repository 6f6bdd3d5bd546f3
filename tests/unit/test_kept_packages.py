"""deploy/docker/kept_packages.py: what an image of others has, and whether it still has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "docker" / "kept_packages.py"


@pytest.fixture(scope="module")
def kept() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kept_packages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(folder: Path, name: str, version: str) -> None:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_vendors_versions_become_constraints(kept: ModuleType, tmp_path: Path):
    put(tmp_path, "Torch", "2.9.0a0+145a3a7bda.nv25.10")
    put(tmp_path, "ruamel.yaml", "0.18")
    put(tmp_path, "devscripts", "2.23.4ubuntu1")
    put(tmp_path, "stepfast", "0.0.1")
    assert kept.constraints(kept.installed([str(tmp_path)])) == (
        "# devscripts==2.23.4ubuntu1\nruamel-yaml==0.18\ntorch==2.9.0a0+145a3a7bda.nv25.10\n"
    )


def test_what_is_not_there_gets_the_tested_version(kept: ModuleType):
    pins = "# torch has no build tag\nNumPy==2.4.6\ntorch==2.13.0\nmoto[s3]\nfor_us==1.1\n"
    before = kept.constraints({"torch": "2.9"}, pins)
    assert before == (
        "torch==2.9\nnumpy==2.4.6  # not there before\nfor-us==1.1  # not there before\n"
    )
    assert kept.changes(before, {"torch": "2.9", "for-us": "1.1"}) == []


def test_of_two_copies_the_one_that_is_imported_counts(kept: ModuleType, tmp_path: Path):
    put(tmp_path / "first", "torch", "2")
    put(tmp_path / "second", "torch", "1")
    path = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert kept.installed(path) == {"torch": "2"}


def test_what_changed_is_told(kept: ModuleType):
    before = "numpy==1.26\ntorch==2.9\n# odd==1ubuntu1\n"
    after = {"torch": "2.10", "numpy": "1.26", "new": "1"}
    assert kept.changes(before, after) == [
        "torch was 2.9 and is 2.10",
        "odd was 1ubuntu1 and is gone",
    ]
    assert kept.changes(before, {"torch": "2.9", "numpy": "1.26", "odd": "1ubuntu1"}) == []


def test_the_command_writes_and_checks(
    kept: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "kept.txt"
    pins = tmp_path / "constraints.txt"
    pins.write_text("no-such-distribution==1\n")
    assert kept.main(["write", str(file), str(pins)]) == 0
    assert "no-such-distribution==1  # not there before\n" in file.read_text()
    assert f"pytest=={pytest.__version__}\n" in file.read_text()
    assert kept.main(["check", str(file)]) == 0
    file.write_text(file.read_text() + "pytest==0\n")
    assert kept.main(["check", str(file)]) == 1
    assert f"pytest was 0 and is {pytest.__version__}" in capsys.readouterr().err
    assert kept.main([]) == 2
