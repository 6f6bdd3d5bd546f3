"""The child processes of the claims: each has a CUDA context of its own, and may be lost.

    python -m gpu.children [--fake] WHAT [ARGUMENT]

Each says lines of JSON. Never run on a GPU; `--fake` runs it over the double of `torch.cuda`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from stepfast.train.forking import harm_to_forks
from stepfast.train.report import class_of

_WILD = 'extern "C" __global__ void wild(int* p) { *(int*)16 = 1; }'
_HELD_BYTES = 256 << 20


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def compute(cuda: Any, device: torch.device) -> None:
    """A little work that is waited for."""
    cuda.current_stream().query()
    (torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)).sum().item()


def provoke(kind: str, cuda: Any, device: torch.device) -> None:
    """Make the device fail in one way; the error may show only later."""
    if hasattr(cuda, "lose_context"):
        if kind == "out of memory":
            cuda.take_bytes(1 << 60)
        cuda.lose_context({"device assert": 710, "illegal access": 700}[kind])
    elif kind == "device assert":
        torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)]
    elif kind == "illegal access":
        torch.cuda._compile_kernel(_WILD, "wild")(args=[torch.zeros(1, device=device)])
    else:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    cuda.synchronize()


def sticky(cuda: Any, device: torch.device, kind: str) -> None:
    """Meet an error, and try the device again."""
    is_real = not hasattr(cuda, "lose_context")
    if is_real and kind == "illegal access" and not hasattr(torch.cuda, "_compile_kernel"):
        say(skipped=f"torch {torch.__version__} compiles no kernel at run time")
        return
    compute(cuda, device)
    try:
        provoke(kind, cuda, device)
        say(error_class="none")
        return
    except RuntimeError as error:
        first = class_of(error), f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        compute(cuda, device)
        cuda.synchronize()
        goes_on = True
    except RuntimeError:
        goes_on = False
    say(error_class=first[0].value, text=first[1], goes_on=goes_on)


def hold(cuda: Any, device: torch.device) -> None:
    """Hold a context and memory, and compute until the end; each line says how far it is."""
    memory = torch.ones(1024 if device.type == "cpu" else _HELD_BYTES, dtype=torch.uint8).to(device)
    for number in range(1 << 30):
        compute(cuda, device)
        say(pid=os.getpid(), number=number, bytes=memory.numel())
        time.sleep(0.01)


def fork(cuda: Any, device: torch.device) -> None:
    """What a zygote does: load, look for devices, fork; the child computes on the device."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch.distributed.fsdp

    available, harm_before = torch.cuda.is_available(), harm_to_forks()
    reader, writer = os.pipe()
    if os.fork() == 0:
        began = time.perf_counter()
        try:
            cuda.set_device(0)
            compute(cuda, device)
            answer = f"{time.perf_counter() - began}"
        except RuntimeError as error:
            answer = f"failed: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.wait()
    cuda.init()
    harm_after = harm_to_forks() if cuda is torch.cuda else "initialises CUDA"
    say(available=available, harm_before=harm_before, child=answer, harm_after=harm_after)


def main() -> None:
    arguments = sys.argv[1:]
    is_fake = arguments[:1] == ["--fake"]
    what, *rest = arguments[is_fake:]
    signal.alarm(600)  # whoever started this may be gone
    if is_fake:
        from fakes.device import FakeCuda

        cuda, device = FakeCuda(), torch.device("cpu")
    else:
        cuda, device = torch.cuda, torch.device("cuda", 0)
    {"sticky": sticky, "hold": hold, "fork": fork}[what](cuda, device, *rest)


if __name__ == "__main__":
    main()
