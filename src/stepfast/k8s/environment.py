"""Environment variables that a manifest had better not set, and why.

Owns: the lists, for what is rendered and for what is checked: AWS's own advice for current versions
of the OFI plugin (doc/efa-env-var.md), what PyTorch renamed in 2.2, what looks like a secret. Does
not own: what a job sets (`pods`).
"""

from __future__ import annotations

import re

_PLUGIN = "the OFI plugin sets what fits the platform; a fixed value is wrong on the next"
_OBSOLETE = "obsolete with current EFA drivers and libfabric"
_RENAMED = "PyTorch calls it TORCH_{} since 2.2, and this name warns or does nothing"
DENIED = {
    "FI_EFA_USE_DEVICE_RDMA": _OBSOLETE,
    "FI_EFA_FORK_SAFE": _OBSOLETE,
    "FI_EFA_ENABLE_SHM_TRANSFER": _OBSOLETE,
    "FI_PROVIDER": "the plugin chooses it, and efa fails where there is no EFA",
    "NCCL_PROTO": "it was for plugins up to 1.5",
    "NCCL_ALGO": "NCCL's own choice depends on size and topology",
    "NCCL_BUFFSIZE": _PLUGIN,
    "NCCL_P2P_NET_CHUNKSIZE": _PLUGIN,
    "NCCL_NVLS_CHUNKSIZE": _PLUGIN,
    "NCCL_NVLSTREE_MAX_CHUNKSIZE": _PLUGIN,
    "NCCL_MIN_NCHANNELS": _PLUGIN,
    "NCCL_NSOCKS_PERTHREAD": "it is for TCP, and slows EFA's bootstrap",
    "NCCL_SOCKET_NTHREADS": "it is for TCP, and slows EFA's bootstrap",
    "NCCL_NET_GDR_LEVEL": _PLUGIN,
    "NCCL_ASYNC_ERROR_HANDLING": _RENAMED.format("NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": _RENAMED.format("NCCL_BLOCKING_WAIT"),
}
NVLS = "NCCL_NVLS_ENABLE"  # 0 costs bandwidth on NVSwitch nodes; NVRx's in-process restart asks it

_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)\b", re.IGNORECASE
)
_SECRET_PATH = re.compile(r"(FILE|PATH|DIR|URL|NAME)\Z", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def harm_of(name: str, value: str) -> str:
    """Why a variable does harm wherever it is set; empty where it does none."""
    if name in DENIED:
        return DENIED[name]
    if name.startswith("RDMAV_"):
        return "AWS says not to use it with EFA"
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return f"{value} writes lines for every group of every generation"
    return ""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's name or value is that of a secret."""
    called = _SECRET_NAME.search(name) is not None and _SECRET_PATH.search(name) is None
    return called or _SECRET_VALUE.search(value) is not None
