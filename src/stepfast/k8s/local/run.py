"""One manifest, from its text to the end of its run on this machine.

Owns: the order of making and removing what belongs to a run. Does not own: the door (`cli`), the
run itself (`cluster`).
Invariant: when `run_workload` has returned, or its process has ended in any way, no mount is left:
the run's mounts are in a namespace of this process's own.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepfast.k8s.local import kernel
from stepfast.k8s.local.cluster import Cluster
from stepfast.k8s.local.control import Control
from stepfast.k8s.local.image import Image
from stepfast.k8s.local.life import EndRun
from stepfast.k8s.local.model import Workload
from stepfast.k8s.local.volumes import Volumes

CONTROL_FILE = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is of this machine and not of the manifest."""

    claims: Mapping[str, Path]  # directories of PersistentVolumeClaims
    files: Mapping[str, Path]  # this machine's directories by their places in the image
    control: Path | None  # the socket; in the run's own directory where none is given
    base_delay_s: float
    is_plain: bool  # no namespaces, though they could be had


def run_workload(workload: Workload, options: Options, show: Callable[[str], None]) -> EndRun:
    """Run it to its end. Calls itself in a mount namespace of its own from here on."""
    why = "they are not wanted" if options.is_plain else kernel.why_no_namespaces()
    if why is None:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.make_private()
        show("[k8s] each container in namespaces of its own (processes, mounts, names, IPC)")
    else:
        show(
            f"[k8s] no namespaces ({why}): containers are process groups, places and names of"
            " pods are put into their commands, a pod's address stays"
        )
    show("[k8s] all share this machine's network, and run as this user, not as runAsUser says")
    directory = Path(tempfile.mkdtemp(prefix="stepfast-k8s-"))
    try:
        return asyncio.run(_run(workload, options, show, directory, has_namespaces=why is None))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _run(
    workload: Workload,
    options: Options,
    show: Callable[[str], None],
    directory: Path,
    *,
    has_namespaces: bool,
) -> EndRun:
    mounts = (m.path for j in workload.jobs for c in j.pod.containers for m in c.mounts)
    image = Image(directory, options.files, hidden=frozenset(mounts), is_plain=not has_namespaces)
    volumes = Volumes(directory, options.claims, has_mounts=has_namespaces)
    cluster = Cluster(
        workload,
        directory=directory,
        volumes=volumes,
        image=image,
        has_namespaces=has_namespaces,
        base_delay_s=options.base_delay_s,
        show=show,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cluster.stop, number)
    control = options.control or directory / CONTROL_FILE
    async with Control(cluster, control):
        show(f"[k8s] commands are taken at {control}")
        return await cluster.run()
