"""Whether NVRx's asynchronous writer can be measured on this machine: one save, or why not.

A process of its own, for a library that is no part of this project may take it down.
"""

import os
import sys
import tempfile
from pathlib import Path


def main() -> None:
    import torch
    import torch.distributed as dist
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        writer = TorchAsyncCheckpoint()
        writer.async_save({"x": torch.ones(8)}, Path(directory) / "x.pt")
        writer.finalize_async_save(blocking=True, terminate=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (ImportError, RuntimeError, AssertionError, OSError) as error:
        text = str(error).strip().splitlines()
        print(f"{type(error).__name__}: {text[0] if text else 'no reason given'}")
        sys.exit(1)
