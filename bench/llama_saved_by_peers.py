"""The example's model and data as a plain torchrun script that saves in one way after the other.

Turns without a save, then one save and turns until it is durable on all ranks; then the next system
in turn. Into BENCH_DIR/saves-RANK, one JSON line for each: the clean turns, the turns meanwhile,
what held the training thread at the boundary and at the fence, the time to durable.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from saving import PEERS, Saver, peer, state_of
from torchrun_run import torchrun_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

CLEAN_TURNS = 3
SAVE_LIMIT_S = 120.0  # the first ones start processes that import torch


class Loop:
    """The training, a turn at a time."""

    def __init__(self, words: list[str]) -> None:
        args = train_llama.parse_args([*words, "--steps", "1000000"])
        run = torchrun_run()
        self.model = train_llama.build_model(run, train_llama.SIZES[args.size], args.seed)
        self.optimizer, self._schedule = train_llama.build_optimizer(self.model, args)
        corpus = train_llama.read_corpus(Path(args.data))
        self._batches = iter(train_llama.build_data(run, args, corpus)[0])
        self.began_s = time.monotonic()
        self.boundary_s = self.fence_s = 0.0

    def turn(self, saver: Saver | None = None, folder: Path | None = None) -> float:
        """One turn; a save at its beginning where there is a folder. Returns its seconds."""
        self.boundary_s = self.fence_s = 0.0
        if saver is not None and folder is not None:
            began = time.monotonic()
            saver.save(state_of(self.model, self.optimizer), folder)
            self.boundary_s = time.monotonic() - began
        (window_BT,) = next(self._batches)
        train_llama.next_byte_loss(self.model, window_BT).backward()
        if saver is not None:
            began = time.monotonic()
            saver.fence()
            self.fence_s = time.monotonic() - began
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        now = time.monotonic()
        turn_s, self.began_s = now - self.began_s, now
        return turn_s

    def all_agree(self, here: bool) -> bool:
        """Whether it is so on all ranks; asked in every turn, so that it is in all times."""
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def one_save(loop: Loop, saver: Saver, folder: Path) -> dict[str, Any]:
    clean_s = []
    for _ in range(CLEAN_TURNS):
        clean_s.append(loop.turn())
        loop.all_agree(True)
    began_s = loop.began_s
    turns_s = [loop.turn(saver, folder)]
    boundary_s, fence_s = loop.boundary_s, loop.fence_s
    while not loop.all_agree(saver.durable_at_s() is not None):
        turns_s.append(loop.turn(saver))
        assert sum(turns_s) < SAVE_LIMIT_S, f"{saver.name}: not durable after {SAVE_LIMIT_S:g} s"
    durable_at_s = saver.durable_at_s()
    assert durable_at_s is not None, "agreed"
    return {
        "system": saver.name,
        "clean_s": clean_s,
        "turns_s": turns_s,
        "boundary_s": boundary_s,
        "fence_s": fence_s,
        "durable_s": durable_at_s - began_s,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    directory, rounds = Path(os.environ["BENCH_DIR"]), int(os.environ["BENCH_ROUNDS"])
    loop = Loop(sys.argv[1:])
    for _ in range(3):
        loop.turn()
    savers = [peer(name) for name in PEERS]
    with (directory / f"saves-{dist.get_rank()}").open("w") as out:
        for number in range(-1, rounds):  # the first round starts processes and makes memory
            turned = number % len(savers)
            for saver in savers[turned:] + savers[:turned]:
                folder = Path(os.environ["BENCH_STORE"]) / "peer"
                found = one_save(loop, saver, folder)
                if number >= 0:
                    out.write(json.dumps(found) + "\n")
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(folder)
                dist.barrier()
                loop.began_s = time.monotonic()
    for saver in savers:
        saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
