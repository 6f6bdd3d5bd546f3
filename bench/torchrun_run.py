"""What train_llama's own functions need of a run, where torchrun started the ranks.

Owns: that, for the scripts here that are no stepfast jobs. The process group stands already.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def torchrun_run(*, resuming: bool = False) -> SimpleNamespace:
    """A stand-in for `stepfast.Run`, on CPU, with one mesh over all ranks."""
    world_size = dist.get_world_size()
    return SimpleNamespace(
        rank=dist.get_rank(),
        world_size=world_size,
        device=torch.device("cpu"),
        mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)),
        resuming=resuming,
    )
