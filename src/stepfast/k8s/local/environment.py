"""A container's environment and command, as kubelet makes them.

Owns: the downward API, references to Secrets, `$(NAME)`. Does not own: any file. Pure.
Invariant: a field that is not known here is refused, never left empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from stepfast.errors import ConfigError
from stepfast.k8s.local.life import Pod
from stepfast.k8s.local.model import INDEX_KEY, JOBSET_PREFIX, Container, Workload

_REFERENCE = re.compile(r"\$\$|\$\(([^)\s]+)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - looked for, never bound

SecretOf = Callable[[str, str], str]
"""`secret_of(name, key)`: its text."""


def variables(
    workload: Workload, pod: Pod, container: Container, address: str, secret_of: SecretOf
) -> dict[str, str]:
    """In order: a later one may refer to an earlier one."""
    found = {"HOSTNAME": pod.hostname, "JOB_COMPLETION_INDEX": str(pod.index)}
    for variable in container.variables:
        if variable.field_path:
            found[variable.name] = field_of(workload, pod, variable.field_path, address)
        elif variable.secret:
            found[variable.name] = secret_of(variable.secret, variable.key)
        else:
            found[variable.name] = expanded(variable.value, found)
    return found


def expanded(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` by its value where there is one, `$$` by one `$`."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def field_of(workload: Workload, pod: Pod, path: str, address: str) -> str:
    """A field of the downward API. Raises ConfigError for one that is not known here."""
    fields = {
        "status.podIP": address,
        "status.hostIP": "127.0.0.1",
        "metadata.name": pod.name,
        "metadata.namespace": workload.namespace,
        "metadata.uid": f"00000000-0000-0000-0000-{pod.number:012d}",
        "spec.nodeName": f"local-{pod.hostname}",
        "spec.serviceAccountName": "",
    }
    if path in fields:
        return fields[path]
    match = _KEYED.fullmatch(path)
    if match is None:
        raise ConfigError(f"fieldRef {path} is not known here")
    template = workload.job(pod.job).pod
    kept = template.labels if match[1] == "labels" else template.annotations
    return {**kept, **_given(workload, pod)}.get(match[2], "")


def _given(workload: Workload, pod: Pod) -> dict[str, str]:
    """What the controllers write on a pod, as labels and as annotations."""
    job = workload.job(pod.job)
    found = {INDEX_KEY: str(pod.index), "batch.kubernetes.io/job-name": job.name}
    if workload.is_set:
        found |= {
            f"{JOBSET_PREFIX}/jobset-name": workload.name,
            f"{JOBSET_PREFIX}/replicatedjob-name": job.replicated,
            f"{JOBSET_PREFIX}/job-index": job.name.rpartition("-")[2],
            f"{JOBSET_PREFIX}/restart-attempt": str(pod.attempt),
        }
    return found


def command(container: Container, known: Mapping[str, str], address: str) -> list[str]:
    """The command as it is run. All pods share this machine's network, so "any address" becomes
    the pod's own.
    """
    words = [expanded(word, known) for word in container.command]
    return [word.replace(f"{ANY_ADDRESS}:", f"{address}:") for word in words]


def names_of(workload: Workload, pod: Pod) -> list[str]:
    """The pod's names in DNS; short ones are found by the search list of a pod's resolver."""
    host, below = pod.hostname, workload.subdomain
    if not below:
        return [host]
    service = f"{host}.{below}"
    inside = f"{service}.{workload.namespace}"
    return [f"{inside}.svc.cluster.local", f"{inside}.svc", inside, service, host]
