"""Each check of a machine, both ways: as it should be, and as it should not."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from stepfast.checkpoint.directory import DirectoryStore
from stepfast.health import accelerator, kernel, limits, memory, network, script, storage, versions
from stepfast.health.verdicts import MASK, Finding, Verdict, shown

HEALTHY, UNHEALTHY, UNKNOWN = Verdict.HEALTHY, Verdict.UNHEALTHY, Verdict.UNKNOWN
GIB = 1 << 30


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (versions.python_version((3, 12, 1)), HEALTHY),
        (versions.python_version((3, 10, 9)), UNHEALTHY),
        (versions.stepfast_version("0.1.0", "0.1.0"), HEALTHY),
        (versions.stepfast_version("0.1.0", "0.2.0"), UNHEALTHY),
        (versions.stepfast_version("0.1.0", None), UNKNOWN),
        (versions.torch_version("2.13.0+cpu"), HEALTHY),
        (versions.torch_version("2.7.1"), UNHEALTHY),
        (versions.torch_version(None), UNHEALTHY),
        (versions.torch_version("main-abc"), UNKNOWN),
        (versions.torch_loads("2.13.0", None, None), HEALTHY),
        (versions.torch_loads("2.9.0", "verified for 2.13 only", None), UNKNOWN),
        (versions.torch_loads(None, None, "ImportError: libcudart"), UNHEALTHY),
        (limits.open_files(65536, 8), HEALTHY),
        (limits.open_files(limits.NO_LIMIT, 8), HEALTHY),
        (limits.open_files(256, 1), UNHEALTHY),
        (limits.open_files(24, 1), UNHEALTHY),
        (limits.processes(30000, 8), HEALTHY),
        (limits.processes(200, 8), UNHEALTHY),
        (limits.locked_memory(8 << 20, has_gpu=False), HEALTHY),
        (limits.locked_memory(limits.NO_LIMIT, has_gpu=True), HEALTHY),
        (limits.locked_memory(8 << 20, has_gpu=True), UNKNOWN),
        (limits.core_files(0, "core"), HEALTHY),
        (limits.core_files(limits.NO_LIMIT, "core.%p"), UNHEALTHY),
        (limits.core_files(limits.NO_LIMIT, "|/usr/lib/systemd-coredump %P"), UNKNOWN),
        (limits.cores(8, 8), HEALTHY),
        (limits.cores(2, 4), UNHEALTHY),
        (kernel.wall_clock(1_800_000_000.0, "2027"), HEALTHY),
        (kernel.wall_clock(86_400.0, "1970-01-02"), UNHEALTHY),
        (storage.leftovers([]), HEALTHY),
        (storage.leftovers(["step-000000005-gen-0001"]), UNKNOWN),
        (accelerator.gpus([], None, 2), HEALTHY),
        (accelerator.gpus(["nvidia0"], None, 1), UNHEALTHY),
        (accelerator.gpus(["nvidia0"], ["H200"], 1), HEALTHY),
        (accelerator.gpus(["nvidia0"], ["H200"], 2), UNHEALTHY),
        (script.imports({}, 3), HEALTHY),
        (script.imports({"wandb": "ImportError: no"}, 3), UNHEALTHY),
        (script.imports(None, 0, "not within 5 s"), UNHEALTHY),
    ],
)
def test_a_verdict(finding: Finding, verdict: Verdict):
    assert finding.verdict is verdict, finding
    assert finding.evidence
    assert finding.change or verdict is not UNHEALTHY, "what is unhealthy says what to change"


# --- the kernel ---


def test_the_real_kernel_has_what_stepfast_needs():
    found = kernel.facilities(kernel.real_tries())
    assert {f.check: f.verdict for f in found} == dict.fromkeys(kernel.real_tries(), HEALTHY)


def test_a_facility_that_is_missing_or_forbidden_is_named():
    def forbidden() -> None:
        raise PermissionError(1, "Operation not permitted")

    found = kernel.facilities({"pidfd": forbidden, "memfd": lambda: None})
    assert [f.verdict for f in found] == [UNHEALTHY, HEALTHY]
    assert "seccomp" in found[0].change


def test_confinement_is_said_and_held_against_nobody():
    finding = kernel.confinement("Name:\tx\nSeccomp:\t2\n", "1\n")
    assert finding.verdict is HEALTHY
    assert "a seccomp filter, ptrace scope 1" in finding.evidence


# --- memory ---

MOUNTS = """22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:25 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw
31 22 0:26 / /dev/shm/a\\040b rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/shm/jobs", "tmpfs"), ("/dev/shm", "tmpfs"), ("/dev/shm/a b/c", "xfs"), ("/x", "ext4")],
)
def test_the_file_system_of_a_path(path: str, kind: str):
    assert memory.file_system_of(Path(path), MOUNTS) == kind


def test_no_mounts_no_file_system():
    assert memory.file_system_of(Path("/dev/shm"), "") is None


def test_the_memory_directory(tmp_path: Path):
    verdicts = {k: memory.memory_directory(tmp_path, k).verdict for k in ("tmpfs", "ext4", None)}
    assert verdicts == {"tmpfs": HEALTHY, "ext4": UNHEALTHY, None: UNKNOWN}
    assert memory.memory_directory(tmp_path / "none", "tmpfs").verdict is UNHEALTHY


def room(state_bytes: int, **changes: int) -> Finding:
    plain = {"ranks": 2, "slots_per_rank": 4, "free_bytes": 8 * GIB, "available_bytes": 16 * GIB}
    return memory.room(state_bytes=state_bytes, **{**plain, **changes})


def test_slots_fit_or_do_not():
    assert room(GIB).verdict is HEALTHY
    assert room(GIB + 1).verdict is UNHEALTHY
    assert room(GIB, available_bytes=4 * GIB).verdict is UNHEALTHY, "a tmpfs may promise too much"
    unsaid = room(0)
    assert unsaid.verdict is UNKNOWN
    assert "with 2 ranks up to 1.0 GiB of state each" in unsaid.evidence


def test_the_container_limits_what_is_available():
    meminfo = "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"
    assert memory.available_bytes(meminfo, "max\n", "5\n") == 2048 * 1024
    assert memory.available_bytes(meminfo, "1000\n", "400\n") == 600


# --- storage ---


class Forgetful(DirectoryStore):
    """A store without conditional put, as some imitations of S3 are."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self.writer(name) as writer:
            writer.write(data)
        return True


def clock(*moments: float):
    return iter(moments).__next__


def test_a_store_that_keeps_its_promises(tmp_path: Path):
    found = storage.checkpoint_store(DirectoryStore(tmp_path / "s"), clock(0.0, 0.1))
    assert [(f.check, f.verdict) for f in found] == [
        ("checkpoint store", HEALTHY),
        ("store speed", HEALTHY),
    ]
    assert list((tmp_path / "s").iterdir()) == [], "nothing stays of what was tried"


def test_a_store_that_gives_a_name_twice(tmp_path: Path):
    found = storage.checkpoint_store(Forgetful(tmp_path), clock(0.0, 0.1))
    assert found[0].verdict is UNHEALTHY
    assert list(tmp_path.iterdir()) == []


def test_a_slow_store_is_said(tmp_path: Path):
    found = storage.checkpoint_store(DirectoryStore(tmp_path), clock(0.0, 10.0))
    assert found[1].verdict is UNKNOWN
    assert "interval" in found[1].change


def test_a_store_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    found = storage.checkpoint_store(DirectoryStore(tmp_path / "file" / "s"), clock())
    assert [f.verdict for f in found] == [UNHEALTHY]
    assert "file" in found[0].evidence


def test_the_job_directory(tmp_path: Path):
    assert storage.job_directory(tmp_path / "jobs" / "a").verdict is HEALTHY
    assert list(tmp_path.iterdir()) == [], "only looked at"
    (tmp_path / "file").write_text("")
    assert storage.job_directory(tmp_path / "file").verdict is UNHEALTHY


# --- names ---


def no_name() -> str:
    raise OSError("no such host")


def test_names_that_resolve_or_are_refused_at_once():
    assert network.loopback_name(lambda: "localhost").verdict is HEALTHY
    assert network.loopback_name(no_name).verdict is HEALTHY, "no name costs nothing"
    assert network.own_name("me", lambda: "10.0.0.1").verdict is HEALTHY
    refused = network.own_name("me", no_name)
    assert refused.verdict is UNKNOWN
    assert "GLOO_SOCKET_IFNAME" in refused.change


def test_a_resolver_that_hangs_is_not_waited_for():
    never = threading.Event()

    def hang() -> str:
        never.wait()
        return "late"

    try:
        for finding in (
            network.loopback_name(hang, limit_s=0.02),
            network.own_name("me", hang, limit_s=0.02),
        ):
            assert finding.verdict is UNHEALTHY, finding
            assert "more than" in finding.evidence
    finally:
        never.set()


# --- the environment ---


def environment(variables: dict[str, str], *, has_gpu: bool = True) -> list[Finding]:
    return accelerator.environment(variables, interfaces=["lo", "eth0"], has_gpu=has_gpu, ranks=2)


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_NCCL_BLOCKING_WAIT": "1"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"NCCL_SOCKET_IFNAME": "=eth"},
        {"GLOO_SOCKET_IFNAME": "ib0"},
        {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"},
    ],
)
def test_a_contradiction_is_named(variables: dict[str, str]):
    (finding,) = environment(variables)
    assert finding.verdict is UNHEALTHY
    assert next(iter(variables)) in finding.evidence


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TORCH_NCCL_BLOCKING_WAIT": "0"},
        {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "eth"},
    ],
)
def test_what_is_fine_is_listed(variables: dict[str, str]):
    (finding,) = environment(variables)
    assert finding.verdict is HEALTHY
    assert all(name in finding.evidence for name in variables)


def test_without_a_gpu_nccl_is_no_failure():
    (finding,) = environment({"TORCH_NCCL_BLOCKING_WAIT": "1"}, has_gpu=False)
    assert finding.verdict is UNKNOWN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEPFAST_TOKEN", "abc"),
        ("NCCL_API_KEY", "abc"),
        ("NCCL_DEBUG_FILE", "ghp0123456789abcdefghijklmnop"),
        ("TORCH_X", "https://me:pw@host/x"),
    ],
)
def test_secrets_are_never_shown(name: str, value: str):
    text = shown(name, value)
    assert MASK in text
    assert value not in text and "pw@" not in text
    (finding,) = environment({name: value})
    assert value not in finding.evidence


def test_settings_are_shown():
    assert shown("NCCL_DEBUG", "INFO") == "NCCL_DEBUG=INFO"
    assert shown("NCCL_SOCKET_IFNAME", "eth0,eth1") == "NCCL_SOCKET_IFNAME=eth0,eth1"


# --- the script ---

WHOLE = """
import stepfast
@stepfast.resilient
def train(run):
    s = run.track(model=1)
    for step in run.steps(3):
        pass
"""


def test_a_script_is_read(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(WHOLE)
    finding, tree = script.reads(path)
    assert finding.verdict is HEALTHY
    assert tree is not None
    assert [f.verdict for f in script.uses(tree, tmp_path)] == [HEALTHY] * 3
    path.write_text("def (")
    assert script.reads(path)[0].verdict is UNHEALTHY
    assert script.reads(tmp_path / "none.py")[0].verdict is UNHEALTHY


def test_what_a_script_lacks_may_be_in_a_module_of_its_own(tmp_path: Path):
    tree = ast.parse("import mine\nmine.train()\n")
    assert [f.verdict for f in script.uses(tree, tmp_path)] == [UNHEALTHY] * 3
    (tmp_path / "mine.py").write_text("")
    assert [f.verdict for f in script.uses(tree, tmp_path)] == [UNKNOWN] * 3


def test_a_job_that_cannot_begin_hears_how_many_files_it_needs():
    assert limits.too_few_files(limits.NO_LIMIT, 8, 64) is None
    assert limits.too_few_files(1024, 8, 64) is None
    told = limits.too_few_files(51, 2, 2)
    assert told is not None and "51 open files" in told and "52" in told and "1024" in told
    assert limits.too_few_files(52, 2, 2) is None
