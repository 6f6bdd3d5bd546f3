"""One tracked object of a checkpoint as a model that others load: whole tensors in a few files.

Owns: the consolidated files and their index, as Hugging Face libraries have them.
Does not own: putting tensors together (`whole`).

Invariant: the index is written last, durably; before that there is no model in the directory. One
tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.whole import WholeCheckpoint
from stepfast.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES_MAX = 5_000_000_000  # what Hugging Face's own libraries split at
_ALIGNMENT_BYTES = 8  # of the data, as the safetensors library has it


def export_safetensors(
    checkpoint: WholeCheckpoint,
    target: Path,
    *,
    tracked: str = "model",
    file_bytes_max: int = FILE_BYTES_MAX,
    progress: Callable[[int, int], None],
) -> list[str]:
    """Write the object that was tracked as `tracked` into the directory `target`; its files.

    The names lose the object's own in front. ConfigError where the checkpoint has no tensors of
    that object, or the directory has a model already. `progress(done, total)` is told the bytes.
    """
    prefix = f"{tracked}."
    names = [name for name in checkpoint.shared_names if name.startswith(prefix)]
    if not names:
        objects = sorted({name.split(".")[0] for name in checkpoint.shared_names})
        raise ConfigError(
            f"the checkpoint has no tensors of {tracked!r}; it has those of {', '.join(objects)}"
        )
    store = DirectoryStore(target)
    if store.size_bytes(INDEX_FILE) is not None:
        raise ConfigError(f"{target} has a model already; choose another directory")
    total_bytes = sum(checkpoint.size_bytes(name) for name in names)
    files = _split(checkpoint, names, file_bytes_max)
    weight_map: dict[str, str] = {}
    done_bytes = 0
    for number, in_file in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with store.writer(file_name) as writer:
            writer.write(_header(checkpoint, in_file, prefix))
            for name in in_file:
                writer.write(checkpoint.whole(name))
                done_bytes += checkpoint.size_bytes(name)
                progress(done_bytes, total_bytes)
        weight_map.update((name.removeprefix(prefix), file_name) for name in in_file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    store.put_if_absent(INDEX_FILE, msgspec.json.format(msgspec.json.encode(index), indent=2))
    return [*dict.fromkeys(weight_map.values()), INDEX_FILE]


def _split(checkpoint: WholeCheckpoint, names: list[str], bytes_max: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    used_bytes = 0
    for name in names:
        size_bytes = checkpoint.size_bytes(name)
        if files[-1] and used_bytes + size_bytes > bytes_max:
            files.append([])
            used_bytes = 0
        files[-1].append(name)
        used_bytes += size_bytes
    return files


def _header(checkpoint: WholeCheckpoint, names: list[str], prefix: str) -> bytes:
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = checkpoint.info(name)
        start, end = end, end + checkpoint.size_bytes(name)
        tensors[name.removeprefix(prefix)] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": (start, end),
        }
    text = msgspec.json.encode(tensors)
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
