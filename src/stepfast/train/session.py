"""The user's side: `Run`, one object for each time the resilient function is entered.

Owns: what the user calls, and the errors that say what to change. Does not own: generations
(`train.wrapper`), state in memory (`checkpoint`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Step
from stepfast.errors import ScriptError
from stepfast.train import torch_private
from stepfast.train.data import TrackedLoader, is_loader
from stepfast.train.hooks import install_hooks
from stepfast.train.kept import Built, Tracked
from stepfast.train.logging import LogBuffer

if TYPE_CHECKING:
    from stepfast.train.host import Host

T = TypeVar("T")


class Run:
    """One stay in the resilient function. Made by stepfast; the function's first argument."""

    def __init__(self, host: Host) -> None:
        """Begin a stay."""
        self._host = host
        self._building = False
        self._stepping = False
        self._in_turn = False
        self._step = Step(0)
        self._once_calls = 0
        self._log = LogBuffer()
        self.is_over = (
            False  # set by stepfast: a generator that is finalised later says nothing more
        )

    @property
    def rank(self) -> int:
        """This process's number in the job, from 0."""
        return self._host.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._host.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank: `cpu`, or `cuda:LOCAL_RANK`."""
        if self._host.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self._host.device_type, self._host.local_rank)

    @property
    def resuming(self) -> bool:
        """Whether `track` will restore state, so that weights need not be read or made first."""
        return self._host.is_resuming

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh over all ranks; its dimension is called `dp`."""
        return self.init_mesh((self.world_size,), ("dp",))

    def init_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over all ranks, made once and then the same object. Collective: all ranks call it.

        `shape`: its product is the world size. `names`: one for each dimension.
        """
        key = (tuple(shape), tuple(names))
        kept = self._host.kept.meshes.get(key)
        if kept is not None:
            self._revive(kept)
            return kept.value  # type: ignore[no-any-return]  # a mesh
        if self._building:
            mesh, record = self._make_mesh(*key), None
        else:
            with self._host.recording() as record:
                mesh = self._make_mesh(*key)
        built = Built(mesh, record)  # type: ignore[arg-type]  # a Record or None
        self._host.kept.meshes[key] = built
        return mesh

    def _make_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def once(self, build: Callable[[Run], T]) -> T:
        """`build(run)`, called once for each process and world layout, kept across restarts in
        process.

        What it returns should hold everything that is expensive to make again. Groups and meshes
        made meanwhile are made again, in order, when the result is kept.
        """
        if self._building:
            raise ScriptError(
                "run.once was called inside a function given to run.once; call them in turn"
            )
        name = f"{self._once_calls}:{getattr(build, '__qualname__', type(build).__name__)}"
        self._once_calls += 1
        kept = self._host.kept.built.get(name)
        if kept is None:
            return self._build(name, build)
        self._revive(kept)
        if kept.has_state:
            assert self._host.kept.tracked is not None, "kept with its state"
            torch_private.reset_after_interrupt(self._host.kept.tracked.modules, kept.flags)
            self._host.attach_state()
        return kept.value  # type: ignore[no-any-return]  # the same function's result

    def _build(self, name: str, build: Callable[[Run], T]) -> T:
        tracked_before = self._host.kept.tracked
        with self._host.recording() as record:
            self._building = True
            try:
                value = build(self)
            finally:
                self._building = False
        built = Built(value, record)  # type: ignore[arg-type]  # a Record or None
        tracked = self._host.kept.tracked
        if tracked is not tracked_before and tracked is not None:
            built.has_state = True
            if torch_private.version_obstacle() is None:
                built.flags = torch_private.module_flags(tracked.modules)
        self._host.kept.built[name] = built
        return value

    def _revive(self, kept: Built) -> None:
        """Make a kept object's groups again, once in each generation."""
        revived = self._host.kept.revived
        if kept.record is not None and not any(kept.record is r for r in revived):
            self._host.replay_groups(kept.record)
            revived.append(kept.record)

    def track(self, **objects: Any) -> SimpleNamespace:
        """Name the objects whose state is the job's; they come back under the same names.

        Modules, optimizers, schedulers, scalers, generators, tensors, dicts and lists of tensors
        and plain values, and anything with `state_dict` and `load_state_dict`. A loader comes back
        as an endless iterator over its epochs. Where the job resumes, state is restored here, in
        place. Raises ScriptError for an object without state, and names the path of what is in its
        state and cannot be kept.
        """
        if self._host.kept.tracked is not None:
            raise ScriptError("run.track was called twice; call it once, with everything")
        if not objects:
            raise ScriptError("run.track() was called with nothing; name at least the model")
        wrapped = {
            name: TrackedLoader(name, value, self._host.whereabout) if is_loader(value) else value
            for name, value in objects.items()
        }
        namespace = SimpleNamespace(**wrapped)
        tracked = Tracked(
            tree=StateTree(wrapped, rank=self._host.rank),
            namespace=namespace,
            loaders=tuple(v for v in wrapped.values() if isinstance(v, TrackedLoader)),
            modules=tuple(v for v in wrapped.values() if isinstance(v, nn.Module)),
            optimizers=tuple(v for v in wrapped.values() if isinstance(v, torch.optim.Optimizer)),
        )
        self._host.kept.tracked = tracked
        install_hooks(tracked, self._host, lambda: self._host.kept.step)
        self._host.attach_state()
        return namespace

    def steps(self, total: int) -> Iterator[int]:
        """The loop's steps: from where the job stands up to `total`. One turn is one optimizer
        step.
        """
        if self._stepping:
            raise ScriptError("run.steps was called twice; a job has one loop of steps")
        if self._host.kept.tracked is None:
            raise ScriptError(
                "nothing is tracked; call run.track(model=..., optimizer=...) before run.steps"
            )
        self._stepping = True
        return self._turns(total)

    def _turns(self, total: int) -> Iterator[int]:
        step = self._host.begin_steps()
        self._step = step
        try:
            while step < total and not self._host.loop_left:
                self._step = self._host.kept.step = step
                self._host.turn_began(step)
                self._in_turn = True
                yield step
                self._in_turn = False
                step = Step(step + 1)
                self._deliver(step)
                self._host.turn_ended(step, is_last=step >= total)
        finally:
            if not self.is_over:
                self._step = step
                self._close_turn()
                self._host.steps_ended(step)

    def _close_turn(self) -> None:
        """Where the loop was left by `break`: what of its last turn counts."""
        if self._in_turn:
            self._in_turn = False
            self._step = self._host.turn_left(self._step)

    def _deliver(self, step: Step) -> None:
        for at, values in self._log.take(step):
            self._host.logged(at, values)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A phase inside a turn with a time limit of its own, learned from its own times."""
        self._host.section_began(name)
        began = time.monotonic()
        yield
        self._host.section_ended(name, time.monotonic() - began)

    def log(self, **values: Any) -> None:
        """Numbers of this turn. Never synchronises the device; delivered once, when the turn is
        whole.

        Rank 0's are shown and recorded; other ranks may call it and are not heard. Values are
        numbers, strings, or tensors of one element; a sharded tensor has to be reduced first.
        """
        if self.rank == 0:
            self._log.put(self._step, values)

    def finish(self) -> Step:
        """Called by stepfast when the function has returned: the step that was reached.

        Raises ScriptError where nothing was protected, for there was no loop of steps.
        """
        if not self._stepping:
            raise ScriptError(
                "the function returned without a loop over run.steps; write"
                " `for step in run.steps(total):` in the place of your own range"
            )
        self._close_turn()
        self._deliver(Step(self._step + 1))
        return self._step
