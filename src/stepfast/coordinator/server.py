"""The coordinator's shell: one port, one WebSocket for each agent, one job machine.

Owns: connections, the tick, the journal's pen, the console's words. Does not own: any decision
(`core.job`). Invariants: who does not show the token gets no WebSocket; one connection for each
node, which speaks for itself alone; a message that is not of the protocol closes the connection and
changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from stepfast.coordinator.journal import Journal
from stepfast.coordinator.status import METRICS_PATH, JobStatus
from stepfast.coordinator.strangers import Strangers
from stepfast.core import job
from stepfast.core.job_state import (
    FromNode,
    JobInput,
    JobState,
    NodeConnectionLost,
    StopRequested,
    Tick,
)
from stepfast.core.membership import speaks_for
from stepfast.core.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    FromCoordinator,
    Hello,
)
from stepfast.core.node_health import HealthReported
from stepfast.core.outputs import EndProcess, Output, Persist, Record, SendToNode
from stepfast.core.quantities import counted
from stepfast.core.terms import NodeId
from stepfast.errors import OperatingError, StepfastError
from stepfast.events import Event, JobOpened, Note
from stepfast.observe.console import Lines, Progress
from stepfast.runtime.driver import Driver
from stepfast.runtime.ports import Clock
from stepfast.runtime.transport import CLOSE_REFUSED
from stepfast.runtime.wire import AGENT_TO_COORDINATOR, COORDINATOR_TO_AGENT

_TICK_S = 0.02
_OUTBOX_MESSAGES_MAX = 10_000  # a node that reads nothing for so long is cut off and joins again
_ACCEPTED_AT_ONCE = 16  # then the loop has its turn, and strangers that are too many are ended
_FLUSH_LIMIT_S = 1.0
_CLOSE_LIMIT_S = 3.0
# Of a coordinator that leaves: nodes that have to leave with it say so first; well within the grace
# that a cluster gives it.
_LEAVE_AFTER_S = 1.0
_LEAVE_LIMIT_S = 20.0
_LEAVE_LOOK_S = 0.05
_PROGRESS_INTERVAL_S = 0.5
_CLOSE_REASON_BYTES_MAX = 120  # of 123 that a close frame has room for
_STRANGER_TEXT_MAX = 300  # characters; a part of it is the stranger's own
_STRANGERS_NOTED_MAX = 100  # enough to see who it is; more would fill the disk for nothing
_BEATS_MISSED_MAX = 4  # an agent that missed so many heartbeats may be followed by another


class _Peer:
    """One connected agent."""

    def __init__(self, websocket: WebSocket) -> None:
        self.websocket = websocket
        self.is_followed = asyncio.Event()
        self.is_over = asyncio.Event()
        self.outbox: asyncio.Queue[FromCoordinator] = asyncio.Queue(_OUTBOX_MESSAGES_MAX)

    async def receive(self) -> bytes:
        """The next message. Raises OperatingError where a newer connection has followed this
        one.
        """
        reading = asyncio.ensure_future(self.websocket.receive_bytes())
        followed = asyncio.ensure_future(self.is_followed.wait())
        await asyncio.wait({reading, followed}, return_when=asyncio.FIRST_COMPLETED)
        followed.cancel()
        if not reading.done():
            reading.cancel()
            raise OperatingError("a newer connection of this node took its place")
        return reading.result()

    async def write(self) -> None:
        while True:
            message = await self.outbox.get()
            await self.websocket.send_bytes(COORDINATOR_TO_AGENT.encode(message))
            self.outbox.task_done()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours end the job in order, and the server with it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Have the kernel hold more connections than are accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(socket.SOMAXCONN)


class JobServer:
    """Serves one job until it has ended."""

    def __init__(
        self,
        state: JobState,
        *,
        journal: Journal,
        clock: Clock,
        token: str | None,
        say: Callable[[str], None],
        say_progress: Callable[[str], None],
    ) -> None:
        """`say` and `say_progress` show one line to a person."""
        self._journal = journal
        self._clock = clock
        self._token = token
        self._say = say
        self._say_progress = say_progress
        self._progress = Progress()
        self._lines = Lines()
        self.status = JobStatus(journal.events(), clock)
        self._progress_at = 0.0
        self._refused = 0
        self._strangers = Strangers(state.nodes)
        self._peers: dict[NodeId, _Peer] = {}
        self._nproc = state.settings.nproc_per_node
        self._driver: Driver[JobState, JobInput] = Driver(job.step, state, self, clock)
        self._ended = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.app = Starlette(
            routes=[
                WebSocketRoute("/agent", self._agent),
                Route("/healthz", self._healthz),
                Route(METRICS_PATH, self._metrics),
            ]
        )

    @property
    def state(self) -> JobState:
        """The job as it stands."""
        return self._driver.state

    def stop(self, reason: str, exit_code: int) -> None:
        """End the job in order; again: hurry."""
        self._feed(StopRequested(reason, exit_code))

    def leave(self) -> None:
        """End this process and not the job, for another coordinator comes back for it. A job that
        is ending is ended first, and nodes that have to leave as well are heard.
        """
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        loop = asyncio.get_running_loop()
        first, last = loop.time() + _LEAVE_AFTER_S, loop.time() + _LEAVE_LIMIT_S
        while loop.time() < first or (self._is_needed() and loop.time() < last):
            await asyncio.sleep(_LEAVE_LOOK_S)
        self._ended.set()

    def _is_needed(self) -> bool:
        return self.state.end is not None or bool(self.state.draining)

    async def run(self, listener: socket.socket, opened: JobOpened) -> None:
        """Serve until the job has ended and all nodes were told; `opened` is the first event."""
        self._write(opened, durable=True)
        config = uvicorn.Config(
            self.app,
            log_level="critical",  # it tells of each request that is none; anybody can send them
            backlog=_ACCEPTED_AT_ONCE,
            http=self._strangers.protocol(),
            ws="websockets-sansio",
            lifespan="off",
            ws_max_size=MESSAGE_BYTES_MAX,
            ws_ping_interval=None,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ticking = asyncio.create_task(self._tick())
        ended = asyncio.create_task(self._ended.wait())
        waits: set[asyncio.Future[Any]] = {serving, ticking, ended, self._fatal}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        ticking.cancel()
        try:
            for task in (self._fatal, ticking, serving):
                if task.done() and not ended.done():
                    task.result()  # raises what broke it
            await self._flush()
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=_CLOSE_LIMIT_S)
            self._fatal.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(Tick())
            self.status.turned(self.state)
            now = self._clock.monotonic()
            is_due = now - self._progress_at >= _PROGRESS_INTERVAL_S
            if is_due and self.state.steps and self.state.steps_max > 0:
                self._progress_at = now
                self._progress.at_step(min(self.state.steps.values()), now)
                self._say_progress(self._progress.line(self.state.generation))

    async def _flush(self) -> None:
        waits = [asyncio.create_task(peer.outbox.join()) for peer in self._peers.values()]
        if waits:
            await asyncio.wait(waits, timeout=_FLUSH_LIMIT_S)

    # --- agents ----------------------------------------------------------------------------------

    def _is_admitted(self, websocket: WebSocket) -> bool:
        if self._token is None:
            return True
        shown = websocket.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(shown.encode(), self._token.encode())

    async def _agent(self, websocket: WebSocket) -> None:
        if not self._is_admitted(websocket):
            self._note_stranger("a connection with a wrong or missing token was refused")
            await self._close(websocket, "")  # before it is accepted: an HTTP 403
            return
        try:
            await websocket.accept()
            hello = await self._hello(websocket)  # waited for as long as a stranger may stay
            if isinstance(hello, HealthReported):
                await self._hear_unfit(websocket, hello)
                return
        except (OperatingError, WebSocketDisconnect, RuntimeError, KeyError) as error:
            await self._refuse(websocket, f"no hello of this protocol: {error}")
            return
        if (refusal := self._refusal(hello)) is not None:
            await self._refuse(websocket, refusal)
            return
        assert websocket.client is not None, "a connection over TCP has another end"
        self._strangers.admit((websocket.client.host, websocket.client.port))
        await self._serve_agent(websocket, hello)

    async def _refuse(self, websocket: WebSocket, reason: str) -> None:
        self._note_stranger(reason)
        text = reason.encode()[:_CLOSE_REASON_BYTES_MAX].decode(errors="ignore")
        await self._close(websocket, text)

    async def _close(self, websocket: WebSocket, reason: str) -> None:
        with suppress(RuntimeError, WebSocketDisconnect):  # it may be gone already
            await websocket.close(CLOSE_REFUSED, reason)

    async def _hello(self, websocket: WebSocket) -> Hello | HealthReported:
        message = AGENT_TO_COORDINATOR.decode(await websocket.receive_bytes())
        if not isinstance(message, Hello | HealthReported):
            raise OperatingError(f"{type(message).__name__} before hello")
        return message

    async def _hear_unfit(self, websocket: WebSocket, told: HealthReported) -> None:
        """A node that does not join says why, and no more."""
        is_of_job = told.protocol == PROTOCOL_VERSION and 0 <= told.node < self.state.nodes
        if told.checked.admitted or not is_of_job:
            raise OperatingError("health without a hello")
        self._feed(FromNode(NodeId(told.node), told))
        await websocket.close()

    def _refusal(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"the agent speaks protocol {hello.protocol}, the coordinator {PROTOCOL_VERSION}"
        if not 0 <= hello.node < self.state.nodes:
            return f"there is no node {hello.node}; the job has {counted(self.state.nodes, 'node')}"
        if hello.node in self._peers and not self._may_take_over(hello):
            return f"node {hello.node} is already here; give each agent its own --node"
        return None

    def _may_take_over(self, hello: Hello) -> bool:
        """The same agent over a new connection, or another one where the old has fallen silent."""
        view = self.state.membership.nodes[hello.node]
        silent_s = self._clock.monotonic() - view.seen_at
        limit_s = self.state.timeouts.heartbeat_interval_s * _BEATS_MISSED_MAX
        return (hello.host, hello.pid) == (view.host, view.pid) or silent_s > limit_s

    async def _serve_agent(self, websocket: WebSocket, hello: Hello) -> None:
        node = hello.node
        while (old := self._peers.get(node)) is not None:
            old.is_followed.set()
            await asyncio.wait_for(old.is_over.wait(), _FLUSH_LIMIT_S)
        peer = _Peer(websocket)
        self._peers[node] = peer
        writing = asyncio.create_task(peer.write())
        reason = "its connection broke"
        try:
            self._feed(FromNode(node, hello))
            reason = await self._listen(node, peer, writing)
        finally:  # whatever it was: a node that is not let go of could never come back
            writing.cancel()
            del self._peers[node]
            peer.is_over.set()
            self._feed(NodeConnectionLost(node, reason))

    async def _listen(self, node: NodeId, peer: _Peer, writing: asyncio.Task[None]) -> str:
        """Take a node's messages in until its connection ends; why it ended."""
        while not writing.done():
            try:
                message = AGENT_TO_COORDINATOR.decode(await peer.receive())
            except OperatingError as error:
                return str(error)
            except RuntimeError:  # starlette's word for one that ended while it was written to
                break
            except (WebSocketDisconnect, KeyError) as error:
                # KeyError: starlette's word for a text frame.
                return f"the connection ended ({error})" if str(error) else "the connection ended"
            if isinstance(message, Hello) or not speaks_for(node, message, self._nproc):
                return "it spoke for another node"
            self._feed(FromNode(node, message))
        return "it could not be written to"

    def _feed(self, given: JobInput) -> None:
        """One step. What fails here (a full disk, a broken invariant) ends this process, not a
        peer; from then on nothing more is decided.
        """
        if self._fatal.done():
            return
        try:
            self._driver.feed(given)
        except StepfastError as error:
            self._fatal.set_exception(error)  # one line, said by the process's end
        except BaseException as error:
            self._fatal.set_exception(error)
            raise

    # --- the machine's hands ---------------------------------------------------------------------

    def perform(self, output: Output) -> None:
        """Carry out one order of the job's machine."""
        match output:
            case Persist(event):
                self._write(event, durable=True)
            case Record(event):
                self._write(event, durable=False)
            case SendToNode(node, message):
                self._send(node, message)
            case EndProcess():
                self._ended.set()
            case _:
                raise AssertionError(f"not a job's output: {output}")

    def _send(self, node: NodeId, message: FromCoordinator) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return
        try:
            peer.outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._note("node cut off", f"node {node} reads nothing")
            asyncio.get_running_loop().create_task(peer.websocket.close())

    def _note_stranger(self, text: str) -> None:
        """Anybody can knock, so the log has room for the first ones only."""
        self._refused += 1
        if self._refused <= _STRANGERS_NOTED_MAX:
            self._note("stranger", text[:_STRANGER_TEXT_MAX])

    def _note(self, topic: str, text: str) -> None:
        self._write(Note(topic=topic, text=text), durable=False)

    def _write(self, event: Event, *, durable: bool) -> None:
        self.status.take(self._journal.append(event, durable=durable))
        self._progress.take(event)
        if (line := self._lines.line_of(event)) is not None:
            self._say(line)

    async def _healthz(self, request: Request) -> JSONResponse:
        state = self.state
        return JSONResponse({"phase": state.phase.value, "generation": state.generation})

    async def _metrics(self, request: Request) -> Response:
        page = self.status.metrics()
        return Response(page.text, media_type=page.content_type)
