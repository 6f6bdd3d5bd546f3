"""A manifest's JobSet or Jobs as a `Workload`.

Owns: which fields are followed; the refusal of those without which a run would mean something else.
Does not own: whether the manifest is a good one (`stepfast k8s validate`).
Invariant: a refusal is one line with the place in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.errors import ConfigError
from stepfast.k8s.local.model import (
    Container,
    ExitCodes,
    FailureRule,
    Job,
    Mount,
    PodTemplate,
    Probe,
    SetRule,
    Variable,
    Volume,
    Workload,
)
from stepfast.k8s.validate.documents import Document, Node, read_documents
from stepfast.k8s.validate.quantities import quantity

_PROBES = {"startup": "startupProbe", "liveness": "livenessProbe", "readiness": "readinessProbe"}
_MODE = 0o644
_GRACE_S = 30
_BACKOFF_LIMIT = 6
_BACKOFF_LIMIT_BY_INDEX = 2**31 - 1


def read_workload(file: str, content: bytes) -> Workload:
    """The one JobSet in the file, or its Jobs. Raises ConfigError where it cannot be run here."""
    documents, problems = read_documents(file, content)
    for problem in problems:
        raise ConfigError(f"{file}:{problem.line}: {problem.reason}")
    kinds = [document.kind for document in documents]
    if "TrainJob" in kinds:
        raise ConfigError(f"{file}: a TrainJob is run by its operator; render with --kind jobset")
    sets = [document for document in documents if document.kind == "JobSet"]
    jobs = [document for document in documents if document.kind == "Job"]
    if len(sets) + bool(jobs) != 1:
        found = ", ".join(kinds) or "nothing"
        raise ConfigError(f"{file} must have one JobSet, or Jobs; it has {found}")
    return _set(sets[0]) if sets else _jobs(jobs)


def _set(document: Document) -> Workload:
    spec, name = document.root.at("spec"), document.name
    policy = spec.at("failurePolicy")
    restarts = policy.at("maxRestarts").number or 0
    success = spec.at("successPolicy")
    jobs: list[Job] = []
    for replicated in spec.at("replicatedJobs").items:
        role, replicas = replicated.at("name").text, replicated.at("replicas").number
        for index in range(1 if replicas is None else replicas):
            inner = replicated.at("template", "spec")
            jobs.append(_job(inner, f"{name}-{role}-{index}", role))
    if not jobs:
        raise ConfigError(f"{document.file}: the JobSet {name} has no replicatedJobs")
    return Workload(
        name=name,
        namespace=document.namespace,
        subdomain=spec.at("network", "subdomain").text or name,
        is_set=True,
        jobs=tuple(jobs),
        restarts_max=restarts if policy.exists else None,
        rules=tuple(_set_rule(rule) for rule in policy.at("rules").items),
        success_of=_texts(success.at("targetReplicatedJobs")),
        is_any_enough=success.at("operator").text == "Any",
    )


def _jobs(documents: list[Document]) -> Workload:
    jobs = tuple(_job(d.root.at("spec"), d.name, d.name) for d in documents)
    subdomains = (d.root.at("spec", "template", "spec", "subdomain").text for d in documents)
    return Workload(
        name=documents[0].name,
        namespace=documents[0].namespace,
        subdomain=next((text for text in subdomains if text), ""),
        is_set=False,
        jobs=jobs,
    )


def _set_rule(rule: Node) -> SetRule:
    return SetRule(
        action=rule.at("action").text,
        reasons=_texts(rule.at("onJobFailureReasons")),
        patterns=_texts(rule.at("onJobFailureMessagePatterns")),
        targets=_texts(rule.at("targetReplicatedJobs")),
    )


def _job(spec: Node, name: str, replicated: str) -> Job:
    if spec.at("completionMode").text != "Indexed":
        raise _refusal(spec, "completionMode", "only Indexed Jobs are run here")
    by_index = spec.at("backoffLimitPerIndex").number
    default = _BACKOFF_LIMIT if by_index is None else _BACKOFF_LIMIT_BY_INDEX
    limit = spec.at("backoffLimit").number
    completions = spec.at("completions").number or 1
    return Job(
        name=name,
        replicated=replicated,
        completions=completions,
        parallelism=spec.at("parallelism").number or completions,
        pod=_pod(spec.at("template")),
        backoff_limit=default if limit is None else limit,
        index_limit=by_index,
        failed_indexes_max=spec.at("maxFailedIndexes").number,
        rules=tuple(_failure_rules(spec.at("podFailurePolicy", "rules"))),
    )


def _failure_rules(rules: Node) -> Iterator[FailureRule]:
    for rule in rules.items:
        action, exits = rule.at("action").text, rule.at("onExitCodes")
        if exits.exists:
            container = exits.at("containerName").text
            yield FailureRule(action=action, container=container, exits=_exit_codes(exits))
        elif any(c.at("type").text == "DisruptionTarget" for c in rule.at("onPodConditions").items):
            yield FailureRule(action=action)


def _exit_codes(exits: Node) -> ExitCodes:
    codes = frozenset(code.number for code in exits.at("values").items if code.number is not None)
    return ExitCodes(is_in=exits.at("operator").text == "In", codes=codes)


def _pod(template: Node) -> PodTemplate:
    spec = template.at("spec")
    if spec.at("initContainers").items:
        raise _refusal(spec, "initContainers", "they are not run here; take them out to try it")
    containers = tuple(_container(container) for container in spec.at("containers").items)
    if not containers:
        raise _refusal(spec, "containers", "a pod needs one")
    grace_s = spec.at("terminationGracePeriodSeconds").number
    return PodTemplate(
        containers=containers,
        volumes=tuple(_volume(volume) for volume in spec.at("volumes").items),
        labels=template.at("metadata", "labels").texts,
        annotations=template.at("metadata", "annotations").texts,
        restart_policy=spec.at("restartPolicy").text or "Always",
        grace_s=_GRACE_S if grace_s is None else grace_s,
    )


def _container(container: Node) -> Container:
    command = (*_texts(container.at("command")), *_texts(container.at("args")))
    if not container.at("command").items:
        raise _refusal(container, "command", "there is no image here whose own could be run")
    return Container(
        name=container.at("name").text,
        command=command,
        variables=tuple(_variable(variable) for variable in container.at("env").items),
        mounts=tuple(_mount(mount) for mount in container.at("volumeMounts").items),
        probes={
            name: _probe(container.at(key), container)
            for name, key in _PROBES.items()
            if container.at(key).exists
        },
        restart_policy=container.at("restartPolicy").text,
        restarts_on=tuple(
            _exit_codes(rule.at("exitCodes"))
            for rule in container.at("restartPolicyRules").items
            if rule.at("action").text == "Restart"
        ),
        working_directory=container.at("workingDir").text or "/",
    )


def _variable(variable: Node) -> Variable:
    name, source = variable.at("name").text, variable.at("valueFrom")
    if not source.exists:
        return Variable(name=name, value=variable.at("value").text)
    secret = source.at("secretKeyRef")
    if secret.exists:
        return Variable(name=name, secret=secret.at("name").text, key=secret.at("key").text)
    path = source.at("fieldRef", "fieldPath").text
    if not path:
        raise _refusal(variable, "valueFrom", "only fieldRef and secretKeyRef are known here")
    return Variable(name=name, field_path=path)


def _mount(mount: Node) -> Mount:
    return Mount(
        volume=mount.at("name").text,
        path=mount.at("mountPath").text,
        sub_path=mount.at("subPath").text,
        is_read_only=mount.at("readOnly").value is True,
    )


def _volume(volume: Node) -> Volume:
    name = volume.at("name").text
    empty, secret, claim = (
        volume.at(key) for key in ("emptyDir", "secret", "persistentVolumeClaim")
    )
    if empty.exists:
        size = quantity(empty.at("sizeLimit").value)
        kind = "memory" if empty.at("medium").text == "Memory" else "disk"
        return Volume(name=name, kind=kind, size_bytes=None if size is None else int(size))
    if secret.exists:
        items = tuple((i.at("key").text, i.at("path").text) for i in secret.at("items").items)
        mode, source = secret.at("defaultMode").number, secret.at("secretName").text
        mode = _MODE if mode is None else mode
        return Volume(name=name, kind="secret", source=source, items=items, mode=mode)
    if claim.exists:
        return Volume(name=name, kind="claim", source=claim.at("claimName").text)
    raise _refusal(volume, "", "only emptyDir, secret and persistentVolumeClaim are known here")


def _probe(probe: Node, container: Node) -> Probe:
    http, tcp, command = (probe.at(key) for key in ("httpGet", "tcpSocket", "exec"))
    if not (http.exists or tcp.exists or command.exists):
        raise _refusal(probe, "", "only httpGet, tcpSocket and exec probes are known here")
    return Probe(
        path=(http.at("path").text or "/") if http.exists else None,
        port=_port(http.at("port") if http.exists else tcp.at("port"), container),
        command=_texts(command.at("command")),
        delay_s=probe.at("initialDelaySeconds").number or 0,
        period_s=probe.at("periodSeconds").number or 10,
        timeout_s=probe.at("timeoutSeconds").number or 1,
        failures_max=probe.at("failureThreshold").number or 3,
        successes_min=probe.at("successThreshold").number or 1,
    )


def _port(port: Node, container: Node) -> int:
    if port.number is not None or not port.exists:
        return port.number or 0
    for named in container.at("ports").items:
        if named.at("name").text == port.text:
            return named.at("containerPort").number or 0
    raise _refusal(port, "", f"no port of the container is called {port.text!r}")


def _texts(node: Node) -> tuple[str, ...]:
    return tuple(item.text for item in node.items)


def _refusal(node: Node, key: str, text: str) -> ConfigError:
    place = node.at(key) if key else node
    line = node.document.line_of(place.path)
    return ConfigError(f"{node.document.file}:{line}: {place.words}: {text}")
