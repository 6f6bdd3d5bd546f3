"""The example's job with one difference: each rank writes down when its turns begin.

Into BENCH_DIR/turns-RANK, one line of monotonic seconds for each. Imports stand here as they do in
the example: what a script imports at its top is what the zygote preloads.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchdata.stateful_dataloader  # noqa: F401 - for the zygote, which reads this file's imports

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

loss_as_it_is = train_llama.next_byte_loss


def loss_of_a_turn(*args: Any) -> torch.Tensor:
    """Called once a turn: no micro-batches, no evaluation."""
    with (Path(os.environ["BENCH_DIR"]) / f"turns-{dist.get_rank()}").open("a") as file:
        file.write(f"{time.monotonic():.6f}\n")
    return loss_as_it_is(*args)


train_llama.next_byte_loss = loss_of_a_turn

if __name__ == "__main__":
    train_llama.main()
