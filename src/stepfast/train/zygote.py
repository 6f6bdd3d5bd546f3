"""The zygote: has torch and the script's imports loaded, and makes a rank from itself in
milliseconds.

    python -P -m stepfast.train.zygote --control-fd N --plan-fd M

Owns: preloading, taking a harmful import out again, forking. Does not own: what a rank does
(`train.birth`, `train.entry`), nor when one is made (`agent.processes`).

Invariants: exactly one thread, no CUDA, no module of the user's own, whenever it serves. One
request at a time. It outlives its agent by one act: it kills whatever that agent's ranks left,
stopped ones and holders of the GIL too.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Final, NoReturn

import msgspec

from stepfast.errors import OperatingError
from stepfast.runtime import spawning
from stepfast.runtime.descendants import (
    ProcessId,
    ProcessTable,
    belonging_to,
    try_signal,
)
from stepfast.train import birth
from stepfast.train.forking import fork_twice, harm_to_forks
from stepfast.train.preload import Learning, is_excluded, script_imports, try_import

# A library that computes with threads starts them when it is imported, unless it is told that one
# is enough.
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# A library that asks whether there is a GPU when it is imported would initialise CUDA by it, and
# nothing forked later could use it; so torch is told to ask NVML. Ranks keep that, unless the user
# has set it himself. Never run on a GPU.
NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
TORCH_MODULES: Final = ("torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp")
STEPFAST_MODULES: Final = ("stepfast.train.entry", "stepfast.train.storehost")
EXECUTIONS_MAX: Final = 8
SWEEP_ROUNDS_MAX: Final = 20
SWEEP_PAUSE_S: Final = 0.02


class Zygote:
    """One zygote process: `preload`, then `serve` until the agent's end of the socket closes."""

    def __init__(self, control: socket.socket, plan_descriptor: int) -> None:
        self._control = control
        self._plan_descriptor = plan_descriptor
        self._plan = spawning.read_plan(plan_descriptor)
        self._started_s = time.monotonic()
        self._user_variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
        self._user_variables[NVML_CHECK] = os.environ.get(NVML_CHECK, "1")
        self._node_tag = os.environ.get(spawning.TAG_VARIABLE, "").partition(":")[0] + ":"
        self._forked: list[ProcessId] = []
        self._learning: Learning | None = None
        self._pid = os.getpid()
        # An import that hangs never looks at the socket; the kernel tells of the agent's end, too.
        signal.signal(signal.SIGTERM, self._terminated)
        spawning.die_with_parent(signal.SIGTERM)

    def preload(self) -> None:
        """Load all that is wanted and harmless; may execute this process again instead of
        returning."""
        os.environ.update(dict.fromkeys((*THREAD_VARIABLES, NVML_CHECK), "1"))
        import torch  # the first heavy import, after the variables that keep it to one thread

        if self._plan.learned is None:
            self._learning = Learning()
        for name in self._names_to_start_with():
            self._load(name)
        self._collect_learned()
        for name in self._plan.learned or ():
            self._load(name)
        assert not torch.cuda.is_initialized()

    def _names_to_start_with(self) -> Iterator[str]:
        yield from TORCH_MODULES
        yield from STEPFAST_MODULES
        yield from script_imports(self._plan.script)
        yield from self._plan.names

    def _collect_learned(self) -> None:
        """Wait for the throw-away child, where there is one, and put its list into the plan."""
        if self._learning is None:
            return
        try:
            learned = self._learning.wait_for_modules()
        except OperatingError as error:
            self._tell("", str(error))
            learned = []
        self._learning = None
        self._plan = msgspec.structs.replace(self._plan, learned=learned)

    def _load(self, name: str) -> None:
        """Import one module, unless it is excluded; execute again without it where it does harm."""
        if is_excluded(name, self._plan.excluded) or name in sys.modules:
            return
        if self._agent_is_gone():
            self.end()
        if reason := try_import(name):
            self._tell(name, reason)
        if harm := harm_to_forks():
            self._execute_without(name, harm)

    def _execute_without(self, name: str, harm: str) -> NoReturn:
        self._tell(name, f"{harm} when it is imported")
        # Collected before the memory is lost, so that the step is trained once, however often this
        # runs again.
        self._collect_learned()
        excluded = [*self._plan.excluded, name]
        executions = self._plan.executions + 1
        if executions >= EXECUTIONS_MAX:
            self._tell("", f"preloads torch alone after {EXECUTIONS_MAX} harmful imports")
            self._plan = msgspec.structs.replace(self._plan, script="", names=[], learned=[])
        plan = msgspec.structs.replace(self._plan, excluded=excluded, executions=executions)
        spawning.write_plan(self._plan_descriptor, plan)
        self._restore_user_variables()
        descriptors = self._control.fileno(), self._plan_descriptor
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, spawning.zygote_command(*descriptors))

    def _restore_user_variables(self) -> None:
        for name, value in self._user_variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _tell(self, module: str, reason: str) -> None:
        try:
            spawning.send(self._control, spawning.PreloadNote(module=module, reason=reason))
        except OperatingError:
            self.end()

    def _terminated(self, signal_number: int, frame: object) -> None:
        """SIGTERM: of the kernel's, because the agent ended, or anybody's, who means this
        process."""
        if os.getpid() == self._pid and os.getppid() != self._plan.agent_pid:
            self.end()
        os._exit(128 + signal_number)

    def _agent_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._control.fileno(), 0)
        return bool(poll.poll(0))

    def serve(self) -> NoReturn:
        """Answer requests until the agent is gone, then `end`."""
        gc.collect()
        gc.freeze()
        gc.disable()
        ready = spawning.Ready(
            seconds=time.monotonic() - self._started_s,
            modules=len(sys.modules),
            learned=self._plan.learned,
            excluded=self._plan.excluded,
        )
        self._answer(ready)
        while True:
            received = spawning.receive(self._control)
            if received is None:
                self.end()
            message, descriptors = received
            assert isinstance(message, spawning.ForkRank | spawning.ForkStore), (
                f"unexpected {message!r}"
            )
            assert len(descriptors) == 1, "a new process comes with exactly one socket end"
            self._answer(self._fork(message, descriptors[0]))
            self._forget_the_dead()

    def _answer(self, message: spawning.Message) -> None:
        try:
            spawning.send(self._control, message)
        except OperatingError:
            self.end()

    def _fork(self, request: spawning.ToZygote, descriptor: int) -> spawning.Message:
        try:
            process = fork_twice(lambda: self._be_born(request, descriptor))
        except OSError as error:
            return spawning.Refused(request_id=request.request_id, reason=f"fork failed: {error}")
        finally:
            os.close(descriptor)
        self._forked.append(process)
        return spawning.Forked(
            request_id=request.request_id,
            pid=process.pid,
            start_time_ticks=process.start_time_ticks,
        )

    def _be_born(self, request: spawning.ToZygote, descriptor: int) -> NoReturn:
        """In the new process: leave everything of the zygote's behind, then become what was asked
        for."""
        self._control.close()
        os.close(self._plan_descriptor)
        self._restore_user_variables()
        birth.become(request, descriptor, self._plan.agent_pid)

    def _forget_the_dead(self) -> None:
        """Keep only ranks of which something lives, or a pid that is used again would look like one
        of them."""
        table = ProcessTable.read()
        sessions = {entry.session for entry in table.entries.values()}
        self._forked = [
            process for process in self._forked if table.same(process) or process.pid in sessions
        ]

    def end(self) -> NoReturn:
        """The last act: kill every process of this agent's ranks, and its store; then exit."""
        for _ in range(SWEEP_ROUNDS_MAX):
            left = belonging_to(ProcessTable.read(), self._forked, (self._node_tag,))
            left = [entry for entry in left if entry.id.pid != os.getpid()]
            if not left:
                break
            for entry in left:
                try_signal(entry.id, signal.SIGKILL)
            time.sleep(SWEEP_PAUSE_S)
        os._exit(0)


def main() -> NoReturn:
    """Started by the agent, by name."""
    parser = argparse.ArgumentParser(prog="stepfast.train.zygote")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--plan-fd", type=int, required=True)
    options = parser.parse_args()
    os.set_inheritable(options.control_fd, False)
    os.set_inheritable(options.plan_fd, False)
    zygote = Zygote(socket.socket(fileno=options.control_fd), options.plan_fd)
    zygote.preload()
    zygote.serve()


if __name__ == "__main__":
    main()
