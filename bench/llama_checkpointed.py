"""The example's model and data as a plain torchrun script that resumes by itself.

torchrun restarts processes and keeps no state, so this loop saves a distributed checkpoint at each
step and loads the newest whole one when it starts: the same promise as stepfast's, a fault costs
one step at most. Faults come from BENCH_FAULTS (words of `stepfast run --fault`, `;` between them),
completed steps go to BENCH_DIR/steps-RANK, one line each: restart, step, monotonic seconds.
"""

import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stepfast.chaos.inject import Injector
from torchrun_run import torchrun_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

KEPT_CHECKPOINTS = 2


class Checkpoints:
    """One folder for each step, whole once DCP's `.metadata` is there: it is written last."""

    def __init__(self, directory: Path, state: SimpleNamespace) -> None:
        self._directory = directory
        self._state = state
        directory.mkdir(parents=True, exist_ok=True)

    def newest_step(self) -> int:
        """The newest whole one, 0 without any; the same on all ranks, for none trains yet."""
        whole = [int(path.parent.name) for path in self._directory.glob("*/.metadata")]
        return max(whole, default=0)

    def save(self, step: int) -> None:
        folder = self._directory / str(step)
        folder.mkdir(exist_ok=True)
        plain = {name: getattr(self._state, name).state_dict() for name in ("schedule", "loader")}
        torch.save(plain, folder / f"plain-{dist.get_rank()}")
        dcp.save(self._sharded(), checkpoint_id=folder)
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory / str(step - KEPT_CHECKPOINTS), ignore_errors=True)

    def load(self, step: int) -> None:
        folder = self._directory / str(step)
        sharded = self._sharded()
        dcp.load(sharded, checkpoint_id=folder)
        set_state_dict(
            self._state.model,
            self._state.optimizer,
            model_state_dict=sharded["model"],
            optim_state_dict=sharded["optimizer"],
        )
        plain = torch.load(folder / f"plain-{dist.get_rank()}", weights_only=True)
        for name, state in plain.items():
            getattr(self._state, name).load_state_dict(state)

    def _sharded(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self._state.model, self._state.optimizer)
        return {"model": model, "optimizer": optimizer}


def train(steps: int) -> None:
    directory = Path(os.environ["BENCH_DIR"])
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    args = train_llama.parse_args(["--steps", str(steps)])
    checkpoints_at = directory / "checkpoints"
    run = torchrun_run(resuming=checkpoints_at.exists())
    model = train_llama.build_model(run, train_llama.SIZES["debug"], args.seed)
    optimizer, schedule = train_llama.build_optimizer(model, args)
    loader, _ = train_llama.build_data(run, args, train_llama.read_corpus(Path(args.data)))
    state = SimpleNamespace(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    checkpoints = Checkpoints(checkpoints_at, state)
    if first := checkpoints.newest_step():
        checkpoints.load(first)
    faults = Injector(
        os.environ["BENCH_FAULTS"].split(";"),
        rank=run.rank,
        marks=directory / "marks",
        note=lambda _, text: append(directory / "faults", text),
    )
    batches = iter(loader)  # one epoch is longer than any job here
    for step in range(first, steps):
        (window_BT,) = next(batches)
        faults.reach("forward", step)
        train_llama.next_byte_loss(model, window_BT).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        checkpoints.save(step + 1)
        append(directory / f"steps-{run.rank}", f"{restart} {step + 1} {time.monotonic():.6f}")


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def main() -> None:
    timeout = timedelta(seconds=float(os.environ["BENCH_GROUP_TIMEOUT_S"]))
    dist.init_process_group("gloo", timeout=timeout)
    torch.set_num_threads(1)
    train(int(os.environ["BENCH_STEPS"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
