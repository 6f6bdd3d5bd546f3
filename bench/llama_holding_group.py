"""The example's job with one difference: the model holds a process group, as user code often does.

A group that something holds cannot be exchanged, so every recovery builds the model again. Imports
stand here as they do in the example: what a script imports at its top is what the zygote preloads.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torchdata.stateful_dataloader  # noqa: F401 - for the zygote, which reads this file's imports

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

build_as_it_is = train_llama.build


def build_and_hold(run: Any, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
    state, held_out_NT = build_as_it_is(run, *args, **kwargs)
    state.model.group = run.mesh.get_group()
    return state, held_out_NT


train_llama.build = build_and_hold

if __name__ == "__main__":
    train_llama.main()
