"""What the checkpoint bench claims and expected: each limit, each sketch, the judging of samples.

Owns: limits, expectations, the arithmetic from samples to claims. Does not own: measuring, files.
Sources of the sketches, made before the first run of a training loop: single costs on two cores and
this kind of disk (memcpy 6.7 GB/s, write and fsync 1.25 GB/s, cold reads 2.2 GB/s, xxh3 12 GB/s,
each for one process alone), 150 MB a rank for `small`, 805 for `medium`, 342 for the larger state.
"""

import statistics
from collections.abc import Sequence
from typing import Any

SPEED_MIN = 0.97  # of the speed without snapshots
BOUNDARY_MS_MAX = 2.0
HELD_SHARE_MAX = 0.03  # boundary and fence, of a step
PERSIST_MIN = 0.80  # of bare write and fsync
RESTORE_MIN = 0.80  # of a copy; from the store, of the slower of reading and hashing
BLOCKED_RATIO_MIN = 5.0  # every peer's, to stepfast's
LOST_RATIO_MIN = 2.0
LOST_FLOOR_S = 0.001  # what is lost within the noise counts as this

# What was expected, in the row's unit.
SKETCH = {
    "speed with a snapshot at every step": 0.975,  # 22 ms of a core's 900
    "held at the boundary": 1.4,
    "held, share of a step": 0.002,
    "persisting / bare write and fsync": 0.95,  # hash 28 ms beside 430
    "restore from a slot / copy": 0.78,  # 84,000 page faults, sixteen pages each
    "restore from the store / read, cold": 0.85,  # 60 ms of copying behind 380 of reading
    "restore from the store / read, cached": 0.35,  # read, hash and copy one after the other
    "stepfast: blocked": 1.5,
    "torch.save: blocked": 300.0,
    "dcp.save: blocked": 400.0,
    "async thread: blocked": 110.0,
    "async thread, staged beside: blocked": 10.0,
    "async process: blocked": 110.0,
    "async process, staged beside: blocked": 10.0,
    "stepfast: lost": 150.0,
    "torch.save: lost": 300.0,
    "dcp.save: lost": 400.0,
    "async thread: lost": 500.0,
    "async thread, staged beside: lost": 450.0,
    "async process: lost": 600.0,
    "async process, staged beside: lost": 450.0,
    "stepfast: blocked, 1.6 GB": 3.0,  # a quarter more tensors than in `small`
    "torch.save: blocked, 1.6 GB": 1500.0,
    "async thread, staged beside: blocked, 1.6 GB": 40.0,
    "async process, staged beside: blocked, 1.6 GB": 40.0,
    "stepfast: lost, 1.6 GB": 800.0,
    "torch.save: lost, 1.6 GB": 1500.0,
    "loader state, 8 workers": 1.0,
    "loader state, no workers": 0.1,
}

DOES_NOT_SHOW = (
    "CUDA: states lie in the memory of the CPU, where copying takes the training's own cores",
    "object stores, network file systems, several nodes: one agent, one local disk",
    "states larger than memory allows here, or steps shorter than the copy of their state",
    "NVRx's writer, where a row says why it could not run",
    "peers with a state dict that other layouts can load as well (get_state_dict takes longer)",
)


def row(
    system: str,
    measure: str,
    unit: str,
    samples: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """One line of a result. With a limit it is a claim, met or not."""
    median = statistics.median(samples)
    limit = at_least if at_least is not None else at_most
    within = None
    if limit is not None:
        within = median >= limit if at_least is not None else median <= limit
    return {
        "system": system,
        "measure": measure,
        "unit": unit,
        "samples": [round(sample, 4) for sample in samples],
        "median": round(median, 4),
        "min": round(min(samples), 4),
        "max": round(max(samples), 4),
        "limit": limit,
        "limit_is": None if limit is None else "at least" if at_least is not None else "at most",
        "within_limit": within,
        "sketch": SKETCH.get(measure, SKETCH.get(f"{system}: {measure}")),
        "note": note,
    }


def ratio_row(
    measure: str, over: Sequence[float], under: Sequence[float], at_least: float | None
) -> dict[str, Any]:
    """Paired samples, one divided by the other."""
    pairs = zip(over, under, strict=True)
    return row("stepfast", measure, "ratio", [a / b for a, b in pairs], at_least=at_least)


def against_peers(
    blocked_ms: dict[str, list[float]], lost_ms: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """The third claim, for each peer: medians, stepfast's in the denominator."""
    rows = []
    own_blocked = statistics.median(blocked_ms["stepfast"])
    own_lost = max(statistics.median(lost_ms["stepfast"]), LOST_FLOOR_S * 1e3)
    for name in blocked_ms:
        if name == "stepfast":
            continue
        blocked = [sample / own_blocked for sample in blocked_ms[name]]
        lost = [sample / own_lost for sample in lost_ms[name]]
        rows.append(row(name, "blocked / stepfast's", "ratio", blocked, at_least=BLOCKED_RATIO_MIN))
        rows.append(row(name, "lost / stepfast's", "ratio", lost, at_least=LOST_RATIO_MIN))
    return rows


def storage_claims(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The second claim, from seconds by what was done."""
    hashed, cached = samples["limit: hash (xxh3-64)"], samples["limit: read, cached"]
    cold = samples["limit: read, cold"]
    slower_cold = [max(pair) for pair in zip(cold, hashed, strict=True)]
    slower_cached = [max(pair) for pair in zip(cached, hashed, strict=True)]
    from_store = "stepfast: restore from the store, "
    return [
        ratio_row(
            "persisting / bare write and fsync",
            samples["limit: write and fsync"],
            samples["stepfast: durable"],
            PERSIST_MIN,
        ),
        ratio_row(
            "restore from a slot / copy",
            samples["limit: copy out of a tmpfs mapping"],
            samples["stepfast: restore from a slot"],
            RESTORE_MIN,
        ),
        ratio_row(
            "restore from the store / read, cold", slower_cold, samples[f"{from_store}cold"],
            RESTORE_MIN,
        ),
        ratio_row(
            "restore from the store / read, cached",
            slower_cached,
            samples[f"{from_store}cached"],
            None,
        ),
    ]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    heads = ("system", "measure", "unit", "n", "median", "min", "max", "sketch", "limit", "")
    lines = [heads, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    sign = {None: "", "at least": ">= ", "at most": "<= "}[line["limit_is"]]
    limit = "" if line["limit"] is None else f"{sign}{line['limit']:g}"
    verdict = {None: "", True: "met", False: "NOT MET"}[line["within_limit"]]
    sketch = "" if line["sketch"] is None else f"{line['sketch']:g}"
    numbers = (f"{line[name]:.4g}" for name in ("median", "min", "max"))
    words = (line["system"], line["measure"], line["unit"], str(len(line["samples"])))
    return (*words, *numbers, sketch, limit, verdict)
