"""Which modules a zygote loads before it serves: what a training step needs, and what the script
imports.

Owns: the throw-away child that trains one tiny step and reports what it loaded; reading a script's
imports from its syntax tree; loading by name. Does not own: taking an import out again
(`train.zygote`).

Invariant: no module of the user's own is ever named here. They may do anything when imported, and
are read fresh by every rank.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stepfast.errors import OperatingError
from stepfast.runtime import spawning

LEARN_LIMIT_S: Final = 20.0
LEARNED_BYTES_MAX: Final = 1 << 20
_LIBRARY_DIRECTORIES: Final = ("site-packages", "dist-packages")


class Learning:
    """A throw-away child at work: start it, do something else, then collect what it found."""

    def __init__(self) -> None:
        """Fork the child; torch must be imported, and this process must have one thread."""
        self._deadline_s = time.monotonic() + LEARN_LIMIT_S
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _report_and_exit(writer)
        os.close(writer)

    def wait_for_modules(self) -> list[str]:
        """The modules that the step loaded, in order; raises OperatingError where the child fails
        or takes too long."""
        content = b""
        try:
            while True:
                remaining_s = self._deadline_s - time.monotonic()
                if remaining_s <= 0 or not select.select([self._reader], [], [], remaining_s)[0]:
                    raise OperatingError(
                        f"the throw-away training step took longer than {LEARN_LIMIT_S:g} s"
                    )
                chunk = os.read(self._reader, LEARNED_BYTES_MAX)
                if not chunk:
                    break
                content += chunk
        finally:
            self.cancel()
        if not content:
            raise OperatingError(
                "the throw-away training step failed; the zygote's log has its traceback"
            )
        return msgspec.msgpack.decode(content, type=list[str])

    def cancel(self) -> None:
        """End the child; twice is the same as once."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._reader)
            self._pid = 0


def _report_and_exit(writer: int) -> None:
    """The child's whole life; never returns."""
    status = 1
    try:
        spawning.die_with_parent(signal.SIGKILL)
        before = set(sys.modules)
        _train_one_step()
        names = [name for name in sys.modules if name not in before and _is_importable(name)]
        content = memoryview(msgspec.msgpack.encode(names))
        while content:
            content = content[os.write(writer, content) :]
        status = 0
    except BaseException:  # noqa: BLE001 - the last frame of a throw-away child
        # Whatever it was, the parent goes on without the list; the traceback stays in the zygote's
        # log.
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _is_importable(name: str) -> bool:
    """Whether importing `name` in another process would give the same module."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return (
        spec is not None
        and spec.name == name
        and name != "__main__"
        and not name.startswith("__mp_")
    )


def _train_one_step() -> None:
    """Forward, backward and AdamW of a small FSDP2 model in a world of one; touches no device but
    the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The loopback by name: resolving the host's own name may take long or fail.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loss = torch.nn.functional.cross_entropy(
        model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    _load_one_batch()


def _load_one_batch() -> None:
    import torch

    if importlib.util.find_spec("torchdata") is None:
        return
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 8)), batch_size=2)
    next(iter(loader))
    loader.state_dict()


def script_imports(script: str) -> list[str]:
    """The third-party modules that `script` imports when it starts, in order, each once.

    Not the standard library, and never the user's own. A script that cannot be read or parsed has
    none: the rank that runs it tells the user.
    """
    path = Path(script)
    try:
        tree = ast.parse(path.read_bytes(), filename=script)
    except (OSError, SyntaxError, ValueError):
        return []
    names = dict.fromkeys(_imported_names(tree.body))
    return [name for name in names if is_third_party(name.partition(".")[0], path.resolve().parent)]


def _imported_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names imported by statements that run at the top level, whichever branch they are in."""
    for statement in body:
        match statement:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.If(test=test, body=then, orelse=otherwise):
                if not _is_typing_only(test):
                    yield from _imported_names(then)
                yield from _imported_names(otherwise)
            case ast.Try(body=tried, handlers=_, orelse=otherwise, finalbody=final):
                # Handlers hold the fallback for what is not installed: loading both would be a
                # guess too many.
                yield from _imported_names([*tried, *otherwise, *final])
            case ast.With(body=inner):
                yield from _imported_names(inner)


def _is_typing_only(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in ast.unparse(test)


def is_third_party(top_level_name: str, script_directory: Path) -> bool:
    """Whether the package is an installed one, and no file beside the script hides it."""
    if top_level_name in sys.stdlib_module_names or top_level_name == "__main__":
        return False
    if (script_directory / f"{top_level_name}.py").exists() or (
        script_directory / top_level_name
    ).is_dir():
        return False
    try:
        spec = importlib.util.find_spec(top_level_name)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = (
        [spec.origin]
        if spec.has_location and spec.origin
        else list(spec.submodule_search_locations or ())
    )
    return bool(places) and all(
        any(part in _LIBRARY_DIRECTORIES for part in Path(place).parts) for place in places
    )


def is_excluded(name: str, excluded: list[str]) -> bool:
    """Whether `name` is one of the excluded modules or inside of one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in excluded)


def try_import(name: str) -> str:
    """Import `name`; the reason where that failed, else empty."""
    if name in sys.modules:
        return ""
    try:
        importlib.import_module(name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - foreign code
        # Foreign code runs here, and some of it calls sys.exit: no failure of it may cost the
        # zygote.
        return f"{type(error).__name__}: {error}"
    return ""
