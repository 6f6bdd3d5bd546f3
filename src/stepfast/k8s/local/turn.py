"""One step of a manifest's run in the making; it lives for one call of `machine.step`."""

from __future__ import annotations

from dataclasses import replace

from stepfast.k8s.local.life import ContainerState, Index, Order, Pod, Run, Say


class Turn:
    """State and orders so far."""

    def __init__(self, run: Run, now: float) -> None:
        """Begin from `run` at `now`."""
        self.run = run
        self.now = now
        self.orders: list[Order] = []

    def update(self, **changes: object) -> None:
        """Replace fields of the state."""
        self.run = replace(self.run, **changes)  # type: ignore[arg-type]  # replace checks

    def emit(self, order: Order) -> None:
        """Add an order."""
        self.orders.append(order)

    def say(self, text: str) -> None:
        """Add a line for people."""
        self.emit(Say(text))

    def set_pod(self, pod: Pod) -> None:
        """A pod as it is now."""
        self.update(pods={**self.run.pods, pod.name: pod})

    def remove_pod(self, name: str) -> None:
        """A pod that is no more."""
        self.update(pods={n: pod for n, pod in self.run.pods.items() if n != name})

    def set_container(self, pod_name: str, container: str, state: ContainerState) -> None:
        """A container as it is now."""
        pod = self.run.pods[pod_name]
        self.set_pod(replace(pod, containers={**pod.containers, container: state}))

    def set_index(self, pod: Pod, index: Index) -> None:
        """What became of a pod's index."""
        self.update(indexes={**self.run.indexes, (pod.job, pod.index): index})
