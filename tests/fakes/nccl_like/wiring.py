"""A job over this backend: what is NCCL's in the product takes it instead.

Owns: the description of the backend for stepfast, a trace in the form of a flight recorder's. Does
not own: anything of the product: the table of backends by device is its own.
"""

from __future__ import annotations

import json

import torch

from fakes.nccl_like import group
from fakes.nccl_like.device import DEVICE
from stepfast.train import backends

NCCL_LIKE = backends.Backend(
    spec=f"cpu:{group.NAME}",
    device=torch.device("cpu"),
    settings=backends.NCCL_SETTINGS,
    defaults=backends.NCCL_DEFAULTS,
    trace=lambda: trace(),
)


def use() -> None:
    """From now on the groups of this process's job on a CPU are such ones."""
    group.register()
    backends.OF_DEVICE["cpu"] = NCCL_LIKE


def trace() -> bytes:
    """What every communicator of this process has launched."""
    entries = [
        {
            "pg": held.group_name,
            "launched": held._get_sequence_number_for_group(),
            "busy": held.is_busy,
        }
        for held in DEVICE.groups
    ]
    return json.dumps({"entries": entries, "is_aborting": DEVICE.is_any_aborting}).encode()
