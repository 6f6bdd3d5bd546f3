"""A node's processes, for real: made, killed, watched, swept. One zygote serves the whole file
where it can."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.running_node import (
    LIMIT_S,
    READY_LIMIT_S,
    Node,
    below_this_process,
    job_directory,
)
from stepfast.agent.zygotes import COPIES
from stepfast.errors import OperatingError
from stepfast.runtime import spawning
from stepfast.runtime.descendants import ProcessId, ProcessTable, read_process, read_tag

pytestmark = pytest.mark.sweeps


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = job_directory(tmp_path_factory.mktemp("node"))
    library = directory / "library"
    library.mkdir()
    (library / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    # All that torch has of it without a GPU: what it says once a context was made.
    (library / "initialises_cuda.py").write_text("import torch\ntorch.cuda._initialized = True\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(library), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "3")
        node = Node(directory)
        try:
            node.run(node.processes.wait_ready(READY_LIMIT_S))
            yield node
        finally:
            assert node.run(node.processes.close(0)) == []
            node.closing.close()
            node.runner.close()
            spawning.become_subreaper(False)
    assert ProcessTable.read().descendants(os.getpid()) == []


def tagged_like(pid: int) -> list[int]:
    tag = read_tag(pid)
    assert tag
    return [
        entry.id.pid
        for entry in ProcessTable.read().entries.values()
        if not entry.ended and read_tag(entry.id.pid) == tag
    ]


def test_a_harmful_import_is_taken_out_and_a_failed_one_is_told(node: Node) -> None:
    notes = {note.module: note.reason for note in node.notes}
    assert "thread" in notes["starts_a_thread"]
    assert "ModuleNotFoundError" in notes["not_installed_anywhere"]
    assert "initialises CUDA when it is imported" in notes["initialises_cuda"]
    assert node.ready[0].excluded == ["starts_a_thread", "initialises_cuda"]
    print(
        f"zygote ready after {node.ready[0].seconds:.2f} s, {node.ready[0].modules} modules", notes
    )


def test_a_rank_is_born_clean(node: Node) -> None:
    rank = node.fork("look", "one", "two")
    assert rank.socket.recv(4) == b"here"
    node.until(lambda: rank.pid in node.rank_ends)
    log = node.log()
    script = node.directory / "script.py"
    for line in (
        f"argv ['{script}', 'one', 'two']",
        f"path {node.directory}",
        "cwd /",
        "added yes omp 3",
        "nvml 1 False",
        f"copies {os.environ.get('GLIBC_TUNABLES', COPIES['GLIBC_TUNABLES'])}",
        f"session True parent {os.getpid()}",
        "stdin /dev/null sockets 1",
        "memfds 0 pipes 0",
        "term True gc True",
        "threads 1",
        "dynamo True fsdp True",
    ):
        assert line in log.splitlines(), log


def test_a_fork_takes_milliseconds(node: Node) -> None:
    for _ in range(3):
        started_s = time.monotonic()
        rank = node.fork("leave", "0")
        forked_s = time.monotonic()
        assert rank.socket.recv(4) == b"here"
        spoke_s = time.monotonic()
        print(
            f"forked in {(forked_s - started_s) * 1e3:.1f} ms,"
            f" spoke after {(spoke_s - started_s) * 1e3:.1f} ms"
        )
        node.until(lambda: rank.pid in node.rank_ends)
        assert spoke_s - started_s < 1.0


def test_exit_code_exit_functions_and_traceback_are_kept(node: Node) -> None:
    rank = node.fork("leave", "7")
    node.until(lambda: rank.pid in node.rank_ends)
    assert node.rank_ends[rank.pid].exit_code == 7
    assert "exit function ran" in node.log()
    failed = node.fork("fail")
    node.until(lambda: failed.pid in node.rank_ends)
    assert node.rank_ends[failed.pid].exit_code == 1
    assert "ValueError: of the user's" in node.log()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_kill_is_noticed_at_once_and_the_log_is_whole(node: Node, stopped: bool) -> None:
    rank = node.fork("wait")
    assert rank.socket.recv(4) == b"here"
    node.until(lambda: "written before the end" in node.log())
    if stopped:
        assert node.processes.signal_rank(rank.pid, signal.SIGSTOP)
    killed_s = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    node.until(lambda: rank.pid in node.rank_ends)
    end = node.rank_ends[rank.pid]
    print(f"killed to callback: {(end.detected_at_s - killed_s) * 1e3:.1f} ms")
    assert end.signal == signal.SIGKILL
    assert end.detected_at_s - killed_s < 0.5
    assert not node.processes.signal_rank(rank.pid, signal.SIGTERM)


@pytest.mark.parametrize("how", ["end_rank", "killed"])
def test_descendants_end_with_their_rank(node: Node, how: str) -> None:
    bystander = node.fork("family")
    rank = node.fork("family")
    for each in (bystander, rank):
        assert each.socket.recv(4) == b"here"
    family = tagged_like(rank.pid)
    assert len(family) == 5
    if how == "end_rank":
        node.processes.end_rank(rank.pid)
    else:
        os.kill(rank.pid, signal.SIGKILL)
    node.until(lambda: rank.pid in node.rank_ends)
    node.until(lambda: all(read_process(pid) is None for pid in family))
    assert len(tagged_like(bystander.pid)) == 5
    node.processes.end_rank(bystander.pid)
    node.until(lambda: bystander.pid in node.rank_ends)


def test_a_store_listens_on_one_address_and_is_replaced_when_it_dies(node: Node) -> None:
    ports = [node.run(node.processes.open_store("127.0.0.1")) for _ in range(3)]
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    assert f"0100007F:{ports[2]:04X} 00000000:0000 0A" in listening
    assert listening.count(f":{ports[2]:04X} 00000000:0000 0A") == 1
    assert f":{ports[0]:04X} 00000000:0000 0A" not in listening, "only the newest two are kept"
    with pytest.raises(OperatingError):
        node.run(node.processes.open_store("192.0.2.1"))
    killed = node.processes.store_pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    node.until(lambda: killed in node.store_ends)
    started_s = time.monotonic()
    port = node.run(node.processes.open_store())
    print(f"new store process and server: {(time.monotonic() - started_s) * 1e3:.1f} ms")
    socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()


def test_a_killed_zygote_is_replaced_and_ranks_stay(node: Node) -> None:
    rank = node.fork("wait")
    assert rank.socket.recv(4) == b"here"
    zygote_pid = node.processes.zygote_pid
    assert zygote_pid is not None
    os.kill(zygote_pid, signal.SIGSTOP)

    async def fork_into_the_dying() -> None:
        pending = asyncio.create_task(node.processes.fork_rank(node.launch("wait")))
        await asyncio.sleep(0.05)
        os.kill(zygote_pid, signal.SIGKILL)
        with pytest.raises(OperatingError):
            await pending

    ended_s = time.monotonic()
    node.run(fork_into_the_dying())
    node.until(lambda: node.zygote_ends)
    again = node.fork("leave", "0")
    print(
        f"new zygote forks after {time.monotonic() - ended_s:.2f} s;"
        f" ready {node.ready[-1].seconds:.2f} s"
    )
    node.until(lambda: again.pid in node.rank_ends)
    assert node.zygote_ends[0].pid == zygote_pid
    assert read_process(rank.pid) is not None
    assert rank.pid in node.processes.rank_pids
    node.processes.end_rank(rank.pid)
    node.until(lambda: rank.pid in node.rank_ends)
    assert node.ready[-1].excluded == ["starts_a_thread", "initialises_cuda"]


def test_a_zygote_that_does_not_answer_is_killed_and_replaced(node: Node) -> None:
    stopped = node.processes.zygote_pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(OperatingError, match="was killed"):
        node.run(node.processes.fork_rank(node.launch("wait"), timeout_s=0.2))
    rank = node.fork("leave", "0")
    node.until(lambda: rank.pid in node.rank_ends)
    assert node.processes.zygote_pid != stopped


def test_a_rank_whose_asker_gave_up_is_ended(node: Node) -> None:
    zygote_pid = node.processes.zygote_pid
    assert zygote_pid is not None
    os.kill(zygote_pid, signal.SIGSTOP)

    async def give_up() -> None:
        pending = asyncio.create_task(node.processes.fork_rank(node.launch("wait")))
        await asyncio.sleep(0.05)
        pending.cancel()
        await asyncio.wait([pending])
        assert pending.cancelled()
        os.kill(zygote_pid, signal.SIGCONT)

    before = below_this_process()
    node.run(give_up())
    rank = node.fork("leave", "0")
    node.until(lambda: rank.pid in node.rank_ends)
    node.until(lambda: below_this_process() <= before)
    assert node.processes.rank_pids == []


AGENT = """
    import asyncio, sys
    from pathlib import Path
    from stepfast.agent.processes import NodeCallbacks, NodeProcesses
    from stepfast.runtime.spawning import RankLaunch

    async def main(directory):
        node = NodeProcesses(
            script="", log_directory=Path(directory), callbacks=NodeCallbacks(on_rank_end=print)
        )
        node.start()
        await node.wait_ready(60)
        await node.open_store()
        for _ in range(2):
            launch = RankLaunch(
                script=directory + "/script.py", script_args=[], working_directory="/",
                log_path=directory + "/agent-rank.log", label="rank", entry="entries:family",
            )
            rank = await node.fork_rank(launch)
            await asyncio.get_running_loop().sock_recv(rank.socket, 4)
            print(rank.pid, flush=True)
        assert "torch" not in sys.modules
        print("done", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main(sys.argv[1]))
"""


def test_everything_ends_with_a_killed_agent(node: Node) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT), str(node.directory)],
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            assert agent.stdout is not None
            lines = list(itertools.takewhile(lambda line: line != "done\n", agent.stdout))
            assert len(lines) == 2, "the agent ended before its time"
            below = [e.id for e in ProcessTable.read().descendants(agent.pid) if not e.ended]
            assert len(below) == 2 + 2 * 5
            os.kill(int(lines[0]), signal.SIGSTOP)
        finally:
            agent.kill()
    killed_s = time.monotonic()
    node.until(lambda: not living(below), limit_s=2.0)
    print(f"all gone {(time.monotonic() - killed_s) * 1e3:.0f} ms after the agent's SIGKILL")


def living(processes: list[ProcessId]) -> list[ProcessId]:
    table = ProcessTable.read()
    return [each for each in processes if (entry := table.same(each)) and not entry.ended]
