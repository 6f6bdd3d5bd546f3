"""Many generations in the same processes: nothing of an old one stays, and each forms quickly."""

from __future__ import annotations

import threading

from process.groups_cluster import Cluster
from process.groups_workloads import SETTLE_LIMIT_S, Collectives

ROUNDS = 50
RESIDENT_SLACK_MIB = 8  # the allocator's own; what leaks would be more in forty generations


def test_fifty_generations_leave_nothing():
    cluster = Cluster(4, Collectives)
    try:
        seen = []
        for round_number in range(ROUNDS):
            cluster.open_generation(-1)
            threading.Event().wait(0.03 + 0.001 * (round_number % 17))
            cluster.abort()
            answers = cluster.answers(limit_s=2 * SETTLE_LIMIT_S)
            assert {answer[0] for answer in answers.values()} == {"quiet"}, answers
            seen.append(answers)
        for rank in range(4):
            early, late = seen[9][rank][1][0], seen[49][rank][1][0]
            print(rank, early, late)
            early["resident MiB"] += RESIDENT_SLACK_MIB
            grown = {k: (early[k], late[k]) for k in early if late[k] > early[k]}
            assert not grown, (rank, grown)
        forms = sorted(
            a[2]["form"] for answers in seen[5:] for a in answers.values() if "form" in a[2]
        )
        wakes = sorted(
            a[2]["left"] - a[2]["abort"] for answers in seen[5:] for a in answers.values()
        )
        print(
            "form ms",
            forms[len(forms) // 2] * 1e3,
            forms[-1] * 1e3,
            "wake ms",
            wakes[len(wakes) // 2] * 1e3,
            wakes[-1] * 1e3,
        )
    finally:
        cluster.close()


def test_undisturbed_end():
    cluster = Cluster(4, Collectives)
    try:
        cluster.open_generation(10)
        for rank, (kind, progress, _) in cluster.answers().items():
            assert kind == "done", progress
            assert progress.operations == (30 if rank < 3 else 20)
            assert progress.world_operations == 10
    finally:
        cluster.close()
