"""What the operating system allows this user, and how many cores there are.

Owns: judging limits. Does not own: setting any. A limit of -1 is none, as the kernel has it.
"""

from __future__ import annotations

from stepfast.core.quantities import counted
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

NO_LIMIT = -1
_FILES_BASE = 256  # agent, coordinator, zygote and store with room to spare
_FILES_PER_RANK = 64  # an agent's share; a rank's own process has the limit to itself
_FILES_OF_A_RANK = 1024  # sockets to peers, loader workers, the script's own
# Measured: a rank of 4 has 28, their agent 20, their store 17. Gloo adds one for each peer.
_FILES_LEAST = 40
_FILES_LEAST_PER_RANK = 4
_FILES_LEAST_PER_PEER = 2
_PROCESSES_BASE = 64
_PROCESSES_PER_RANK = 128  # threads count: torch's pools, loader workers
_LOCKED_BYTES_LOW = 64 << 20


def open_files(soft: int, ranks: int) -> Finding:
    """RLIMIT_NOFILE against what an agent and a rank need."""
    needed = _enough_files(ranks)
    return _enough("open files", soft, needed, f"ulimit -n {needed}, or LimitNOFILE / nofile")


def too_few_files(soft: int, ranks: int, world_size: int) -> str | None:
    """Why no job of so many ranks on this node, and in all, can even begin; None: it can."""
    least = _FILES_LEAST + _FILES_LEAST_PER_RANK * ranks + _FILES_LEAST_PER_PEER * world_size
    if soft == NO_LIMIT or soft >= least:
        return None
    return (
        f"{soft} open files are allowed for each process, and at least {least} are needed for"
        f" {counted(ranks, 'rank')}: ulimit -n {_enough_files(ranks)}, or LimitNOFILE / nofile"
    )


def _enough_files(ranks: int) -> int:
    return max(_FILES_OF_A_RANK, _FILES_BASE + _FILES_PER_RANK * ranks)


def processes(soft: int, ranks: int) -> Finding:
    """RLIMIT_NPROC, which counts threads of the user on the whole machine."""
    needed = _PROCESSES_BASE + _PROCESSES_PER_RANK * ranks
    return _enough("processes", soft, needed, f"ulimit -u {needed} or more, or nproc / pids.max")


def _enough(check: str, soft: int, needed: int, change: str) -> Finding:
    if soft == NO_LIMIT:
        return healthy(check, "no limit")
    evidence = f"{soft} allowed, {needed} are enough"
    return healthy(check, evidence) if soft >= needed else unhealthy(check, evidence, change)


def locked_memory(soft_bytes: int, *, has_gpu: bool) -> Finding:
    """RLIMIT_MEMLOCK: network adapters that write to memory themselves need it; nothing else."""
    if soft_bytes == NO_LIMIT:
        return healthy("locked memory", "no limit")
    evidence = f"{soft_bytes} bytes"
    if not has_gpu or soft_bytes >= _LOCKED_BYTES_LOW:
        return healthy("locked memory", evidence)
    change = "with InfiniBand or EFA set it to unlimited: ulimit -l unlimited"
    return unknown("locked memory", f"{evidence}, too little for RDMA", change)


def core_files(soft_bytes: int, pattern: str) -> Finding:
    """A rank that crashes is replaced once its memory is written out: that may take minutes."""
    if soft_bytes == 0:
        return healthy("core files", "off")
    size = "of any size" if soft_bytes == NO_LIMIT else f"up to {soft_bytes} bytes"
    if pattern.startswith("|"):
        helper = pattern[1:].split(" ")[0]
        change = "if recoveries from crashes are slow: ulimit -c 0"
        return unknown("core files", f"{size}, read by {helper} while the rank ends", change)
    evidence = f"{size}, written to {pattern or 'nowhere'} before a crashed rank is replaced"
    return unhealthy("core files", evidence, "ulimit -c 0, or a small limit")


def cores(count: int, ranks: int) -> Finding:
    """Cores that this process may use against the ranks of the node."""
    evidence = f"{count} for {counted(ranks, 'rank')}"
    if count >= ranks:
        return healthy("cores", evidence)
    change = "run at most one rank for each core; with fewer, hangs are seen late and steps wait"
    return unhealthy("cores", evidence, change)
