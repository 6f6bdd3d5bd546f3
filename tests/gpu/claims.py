"""Every claim about a GPU: what it says, how it is measured, what shows it without one.

The order is the report's. `tests/gpu_status.py` makes docs/gpu-status.md of it.
"""

from __future__ import annotations

from gpu import health, jobs, memory, processes
from gpu.bench import Claim

_STAGING = "tests/unit/test_staging.py::"
_DEVICE = "tests/unit/test_device.py::"
_FAULTS = "tests/unit/core/test_faults.py::"
_RECOVERY = "tests/unit/core/test_job_recovery.py::"
_PROCESSES = "tests/process/test_processes.py::"
_GATE = "tests/process/test_gate.py::"
_GPUS = "tests/unit/test_health_gpus.py::"
_REPORT = "tests/unit/test_report.py::"

CLAIMS = (
    Claim(
        name="staging stall",
        says="A snapshot of each step makes a turn longer by at most a tenth of what its copy"
        " takes, or 1 ms.",
        measure=memory.staging_stall,
        doubles=(
            f"{_STAGING}test_the_stream_copier_copies_behind_what_is_queued",
            f"{_STAGING}test_what_may_change_at_once_is_queued_before_it_can_and_the_host_goes_on",
            f"{_STAGING}test_a_copy_behind_work_that_never_ends_has_not_ended",
        ),
        not_shown="a model's own kernels, which share the copy engine and the memory's bandwidth",
    ),
    Claim(
        name="pinned memory given back",
        says="Slots are registered as pinned once each, and none is when its slot is gone.",
        measure=memory.pinned_given_back,
        doubles=(
            f"{_STAGING}test_slots_are_pinned_once_each_and_given_back_when_they_go",
            f"{_STAGING}test_memory_that_cannot_be_pinned_is_one_clear_line",
        ),
    ),
    Claim(
        name="progress is the device's",
        says="The host marks a turn and goes on; the turn counts when the device has ended it.",
        measure=memory.host_ahead,
        doubles=(
            f"{_DEVICE}test_a_turn_has_begun_when_the_device_has_ended_the_one_before",
            f"{_DEVICE}test_a_device_far_behind_gets_no_more_marks",
            f"{_DEVICE}test_each_thread_has_the_ranks_device_and_no_other_gets_a_context",
            f"{_DEVICE}test_who_only_looks_spoils_no_graph_that_the_training_captures",
            f"{_FAULTS}test_who_waits_for_its_device_is_no_culprit_while_anothers_is_idle",
        ),
        not_shown="an event recorded into a full queue, which would hold the interpreter's lock",
    ),
    Claim(
        name="sticky errors are told",
        says="A device assert and an illegal access are told as errors of the device and stay with"
        " the process; memory that ran out is neither.",
        measure=processes.sticky_errors,
        doubles=(
            f"{_REPORT}test_an_error_that_stays_is_the_devices_whatever_it_is_wrapped_in",
            f"{_REPORT}test_memory_that_ran_out_is_no_error_that_stays",
            f"{_DEVICE}test_a_broken_device_is_told_once_by_whoever_meets_it",
        ),
    ),
    Claim(
        name="an uncorrectable ECC error is told",
        says="The same of memory that is broken.",
        measure=processes.ecc_error,
        doubles=(f"{_DEVICE}test_a_broken_device_is_told_once_by_whoever_meets_it",),
    ),
    Claim(
        name="SIGKILL beside live contexts",
        says="A process killed with a live CUDA context holds up no other on its GPU, and its"
        " memory comes back within 10 s.",
        measure=processes.sigkill_beside_contexts,
    ),
    Claim(
        name="fork before CUDA",
        says="What a zygote loads and asks initialises no CUDA; a fork of it computes on the GPU.",
        measure=processes.fork_before_cuda,
        doubles=(
            f"{_PROCESSES}test_a_harmful_import_is_taken_out_and_a_failed_one_is_told",
            f"{_PROCESSES}test_a_rank_is_born_clean",
        ),
    ),
    Claim(
        name="a node looked at",
        says="NVML's answers about GPUs that train are read as healthy, or named as unknown.",
        measure=health.node_looked_at,
        doubles=(
            f"{_GATE}test_a_machine_that_is_well_is_healthy",
            f"{_GATE}test_a_gpu_that_is_not_well_is_found",
            f"{_GATE}test_a_driver_that_hangs_is_not_waited_for_and_is_no_healthy_one",
            f"{_GPUS}test_the_stand_in_keeps_to_the_names_and_numbers_of_the_real_module",
        ),
        not_shown="what a GPU that is not well answers",
    ),
    Claim(
        name="NCCL abort and re-init",
        says="In one process NCCL's world is aborted and made again, five times.",
        measure=jobs.nccl_abort,
        doubles=("tests/process/test_interrupt.py::test_two_blocked_groups_are_released_together",),
        not_shown="peers that hang: one rank has none",
    ),
    Claim(
        name="NCCL abort with peers",
        says="Ranks that wait in NCCL for one that raised are woken, and keep their processes.",
        measure=jobs.nccl_peers,
        gpus=2,
        doubles=(
            "tests/process/test_interrupt.py::test_two_blocked_groups_are_released_together",
            "tests/cluster/test_recovery.py::test_each_kind_on_ranks_0_1_and_3",
        ),
    ),
    Claim(
        name="CUDA context kept",
        says="After a recovery in process every rank goes on with its process and context.",
        measure=jobs.context_kept,
    ),
    Claim(
        name="a sticky error costs one process",
        says="The rank that met it gets a fresh process; the others keep theirs.",
        measure=jobs.device_error_replaced,
        doubles=(f"{_RECOVERY}test_an_error_of_the_device_costs_its_process_at_once",),
    ),
    Claim(
        name="device memory is flat",
        says="After 100 recoveries the device holds at most 16 MiB more than after five.",
        measure=jobs.memory_flat,
        doubles=(
            f"{_DEVICE}test_the_allocators_cache_is_emptied_where_that_helps",
            "tests/cluster/test_leaks.py::test_many_restarts_leak_nothing",
        ),
    ),
    Claim(
        name="resume is bitwise",
        says="A job with failures ends in the state, bit for bit, of the same job without.",
        measure=jobs.bitwise_resume,
        doubles=(f"{_DEVICE}test_the_devices_generator_begins_every_generation_as_the_first",),
        not_shown="kernels that are not deterministic by themselves: two plain runs differ, too",
    ),
)
