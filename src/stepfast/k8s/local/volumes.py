"""The volumes of pods: where their bytes lie on this machine.

Owns: making and removing them, Secrets that nobody has given. Does not own: who mounts them.
Invariants: a pod's own volumes are empty when it begins and gone when it is; a Secret's value is
the same for all pods; no value of one is printed.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from stepfast.errors import ConfigError
from stepfast.k8s.local import kernel
from stepfast.k8s.local.life import Pod
from stepfast.k8s.local.model import Mount, PodTemplate, Volume

_SECRET_BYTES = 24


class Volumes:
    """All volumes of one run, below one directory."""

    def __init__(self, directory: Path, claims: Mapping[str, Path], *, has_mounts: bool) -> None:
        """`claims`: a directory for each PersistentVolumeClaim that is to outlive the run;
        `has_mounts`: a tmpfs can be mounted.
        """
        self._directory = directory
        self._claims = dict(claims)
        self._has_mounts = has_mounts
        self._secrets: dict[tuple[str, str], str] = {}

    def secret(self, name: str, key: str) -> str:
        """Its value; made up the first time."""
        if (name, key) not in self._secrets:
            self._secrets[name, key] = secrets.token_urlsafe(_SECRET_BYTES)
        return self._secrets[name, key]

    def make(self, pod: Pod, template: PodTemplate) -> None:
        """Empty volumes for a pod that begins."""
        for volume in template.volumes:
            place = self.place(pod, volume)
            place.mkdir(parents=True, exist_ok=True)
            if volume.kind == "memory" and self._has_mounts:
                kernel.mount_memory(place, size_bytes=volume.size_bytes, mode=0o1777)
            elif volume.kind == "secret":
                self._write_secret(place, volume)

    def remove(self, pod: Pod, template: PodTemplate) -> None:
        """What was the pod's alone."""
        for volume in template.volumes:
            if volume.kind == "memory" and self._has_mounts:
                kernel.unmount(self.place(pod, volume))
        shutil.rmtree(self._directory / pod.name, ignore_errors=True)

    def place(self, pod: Pod, volume: Volume) -> Path:
        """Where its bytes lie."""
        if volume.kind == "claim":
            default = self._directory / f"claim-{volume.source}"
            return self._claims.get(volume.source, default)
        return self._directory / pod.name / volume.name

    def mounted(self, pod: Pod, template: PodTemplate, mount: Mount) -> Path:
        """What a container mounts; a subPath is made where there is none yet."""
        for volume in template.volumes:
            if volume.name == mount.volume:
                place = self.place(pod, volume) / mount.sub_path
                place.mkdir(parents=True, exist_ok=True)
                return place
        raise ConfigError(f"volumeMounts: the pod has no volume {mount.volume}")

    def _write_secret(self, place: Path, volume: Volume) -> None:
        if not volume.items:
            raise ConfigError(f"volume {volume.name}: items must say which keys the Secret has")
        for key, path in volume.items:
            file = place / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.secret(volume.source, key))
            file.chmod(volume.mode)
