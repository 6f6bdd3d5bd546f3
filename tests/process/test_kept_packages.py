"""With a real pip: what Dockerfile.onto does to an image whose torch is a vendor's."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "docker" / "kept_packages.py"


WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    """A wheel with one module and, if given, one requirement."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", WHEEL)
        file.writestr(f"{info}/RECORD", "")
    return path


class Image:
    """A virtual environment in the place of somebody's image, filled by this machine's pip."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, timeout=60)
        self.python = str(folder / "bin" / "python")

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--no-index"]
        return subprocess.run(
            [*command, "--disable-pip-version-check", "--only-binary", ":all:", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
            | {
                "PIP_CONFIG_FILE": os.devnull
            },  # no index, and no folder of wheels of this machine's
            check=False,
        )

    def look(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("image")
    made = Image(folder / "venv")
    vendors = wheel(folder / "vendor", "torch", "2.9.0a0+145a3a7bda.nv25.10")
    assert made.pip(str(vendors)).returncode == 0
    return made


def test_what_fits_is_added_and_the_vendors_torch_stays(image: Image, tmp_path: Path):
    ours = wheel(tmp_path, "stepfast", "1.0", "messages>=1")
    wheel(tmp_path, "messages", "1.1")
    wheel(tmp_path, "messages", "1.2")
    wheel(tmp_path, "torch", "2.13.0")
    kept = str(tmp_path / "kept.txt")
    (tmp_path / "pins").write_text("messages==1.1\ntorch==2.13.0\n")
    assert image.look("write", kept, str(tmp_path / "pins")).returncode == 0
    found = image.pip("--constraint", kept, "--find-links", str(tmp_path), str(ours))
    assert found.returncode == 0, found.stderr
    assert "messages-1.1 stepfast-1.0" in found.stdout, "the version that was tested"
    assert image.look("check", kept).returncode == 0


def test_what_would_replace_torch_is_refused_and_nothing_is_touched(image: Image, tmp_path: Path):
    greedy = wheel(tmp_path, "greedy", "1.0", "torch>=2.13")
    wheel(tmp_path, "torch", "2.13.0")
    kept = str(tmp_path / "kept.txt")
    assert image.look("write", kept, os.devnull).returncode == 0
    bound = image.pip("--constraint", kept, "--find-links", str(tmp_path), str(greedy))
    assert bound.returncode == 1
    assert "torch==2.9.0a0" in bound.stdout, bound.stdout
    assert image.look("check", kept).returncode == 0
    # without the constraints the same command replaces it, and the second look says so
    assert image.pip("--find-links", str(tmp_path), str(greedy)).returncode == 0
    looked = image.look("check", kept)
    assert looked.returncode == 1
    assert "torch was 2.9.0a0+145a3a7bda.nv25.10 and is 2.13.0" in looked.stderr
