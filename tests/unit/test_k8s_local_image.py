"""Python lies where every container finds it, whatever its pod mounts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepfast.errors import ConfigError
from stepfast.k8s.local.image import Image


def _venv(monkeypatch: pytest.MonkeyPatch, *, prefix: str, base_prefix: str) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "base_prefix", base_prefix)
    monkeypatch.setattr(sys, "executable", f"{prefix}/bin/python")


def test_a_python_below_a_volume_lies_elsewhere_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _venv(monkeypatch, prefix="/scratch/env", base_prefix="/usr")
    image = Image(tmp_path, {}, hidden={"/scratch"}, is_plain=False)
    (place,) = [place for source, place, _ in image.binds if source == "/scratch/env"]
    assert not place.startswith("/scratch")
    assert f"{place}/bin" in image.environment()["PATH"].split(":")
    assert (tmp_path / "bin" / "stepfast").read_text().startswith(f"#!{place}/bin/python\n")


def test_a_python_beside_all_volumes_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _venv(monkeypatch, prefix="/scratchy/env", base_prefix="/usr")
    image = Image(tmp_path, {}, hidden={"/scratch"}, is_plain=False)
    assert "/scratchy/env/bin" in image.environment()["PATH"].split(":")
    assert not [source for source, _, _ in image.binds if source == "/scratchy/env"]


def test_without_mounts_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _venv(monkeypatch, prefix="/scratch/env", base_prefix="/scratch/base")
    image = Image(tmp_path, {}, hidden={"/scratch"}, is_plain=True)
    assert "/scratch/env/bin" in image.environment()["PATH"].split(":")


def test_a_hidden_base_of_a_virtual_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _venv(monkeypatch, prefix="/srv/env", base_prefix="/opt/conda")
    with pytest.raises(ConfigError, match=r"Python lies in /opt/conda.*outside of /opt"):
        Image(tmp_path, {}, hidden={"/opt"}, is_plain=False)
