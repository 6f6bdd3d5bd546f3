"""What a loader's state costs at each boundary, by how many workers it has; a process of its own.

python bench/loader_cost.py 8          seconds of each turn's capture of the loader alone, as JSON
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.train.data import TrackedLoader
from stepfast.train.whereabouts import Whereabout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

TURNS = 40
WARM_UP_TURNS = 10


def seconds_of_captures(workers: int) -> list[float]:
    """The state of the loader, its conversion to bytes included."""
    words = ["--workers", str(workers), "--batch-size", "2", "--sequence-length", "256"]
    args = train_llama.parse_args(words)
    run: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    corpus = train_llama.read_corpus(Path(args.data))
    loader, _ = train_llama.build_data(run, args, corpus)
    batches = TrackedLoader("batches", loader, Whereabout())
    tree = StateTree({"batches": batches})
    found = []
    for _ in range(TURNS):
        next(batches)
        time.sleep(0.005)  # a short step: the workers fetch ahead meanwhile
        began = time.perf_counter()
        tree.collect()
        found.append(time.perf_counter() - began)
    batches.drop()
    return found[WARM_UP_TURNS:]


if __name__ == "__main__":
    print(json.dumps(seconds_of_captures(int(sys.argv[1]))))
