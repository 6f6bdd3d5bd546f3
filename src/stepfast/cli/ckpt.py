"""`stepfast ckpt`: look at checkpoints, check and compare them, remove old ones, import others'.

Owns: which store and checkpoint a person means; words and tables. Does not own: the store's work
(`checkpoint`).

Invariants: only `prune`, `export` and `import` change anything. Exit codes: 0; 1 where `verify`
found damage, `diff` a difference, a source is damaged, or the store failed; 78 for a command that
cannot work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import stepfast
from stepfast.checkpoint.catalog import (
    Finding,
    Retention,
    Survey,
    load_manifest,
    prune,
    survey,
    verify,
)
from stepfast.checkpoint.export import export_safetensors
from stepfast.checkpoint.imported import Selection, import_checkpoint, open_source
from stepfast.checkpoint.imported import choose as choose_tensors
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.manifest import (
    Manifest,
    TensorInfo,
    checkpoint_name,
    digest_of,
    parse_checkpoint_name,
)
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.checkpoint.whole import WholeCheckpoint, compare
from stepfast.cli.tables import aligned
from stepfast.core.terms import SnapshotId
from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, ConfigError, StateError
from stepfast.observe.sizes import counted, size_text

EVENTS_FILE = "events.jsonl"  # of a job directory
JOB_FOLDER = "checkpoints"  # of a job directory
_BAR_CHARS = 30
_NAMES_SHOWN = 3


def run_ckpt(options: argparse.Namespace) -> int:
    """Carry out one of the subcommands; returns the exit code."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls,
        "show": _show,
        "verify": _verify,
        "diff": _diff,
        "prune": _prune,
        "export": _export,
        "import": _import,
    }
    return commands[options.ckpt_command](options)


def locate(url: str) -> tuple[CheckpointStore, SnapshotId | None]:
    """The store that `url` means, and the checkpoint, where it leads to a single one.

    A store, a job directory (then its `checkpoints`), or a checkpoint in a store.
    """
    above, _, last = url.rstrip("/").rpartition("/")
    snapshot = parse_checkpoint_name(last)
    if "://" in url and not url.startswith("file://"):
        return open_store(above if snapshot is not None else url), snapshot
    path = Path(open_store(url).url)
    if snapshot is not None:
        path = path.parent
    elif (path / JOB_FOLDER).is_dir():
        path /= JOB_FOLDER
    if not path.is_dir():
        is_file = path.exists()
        raise ConfigError(
            f"{path} is a file; give a store, a job directory, or a checkpoint's directory"
            if is_file
            else f"there is no directory {path}"
        )
    return open_store(path), snapshot


def choose(store: CheckpointStore, given: SnapshotId | None, step: str | None) -> SnapshotId:
    """The checkpoint at `step` (a number, or a checkpoint's name), or the newest one."""
    if given is not None and step is None:
        return given
    there = [manifest.snapshot for manifest in survey(store).manifests]
    if not there:
        raise StateError(f"there is no whole checkpoint in {store.url}")
    if step is None:
        return there[0]
    for snapshot in there:
        if step in (str(snapshot.step), checkpoint_name(snapshot.step, snapshot.generation)):
            return snapshot
    steps = ", ".join(str(snapshot.step) for snapshot in there)
    raise ConfigError(f"there is no checkpoint {step!r} in {store.url}; there are: {steps}")


def _ls(options: argparse.Namespace) -> int:
    store, given = locate(options.url)
    seen = survey(store) if given is None else _alone(survey(store), given)
    if options.json:
        _say_json(
            {
                "url": store.url,
                "checkpoints": [_summary(manifest) for manifest in seen.manifests],
                "damaged": seen.damaged,
                "unfinished": [checkpoint_name(s.step, s.generation) for s in seen.unfinished],
            }
        )
        return EXIT_FINISHED
    rows = [
        (
            str(m.step), str(m.generation), str(m.world_size), str(len(m.tensors)),
            size_text(m.size_bytes), _time(m.created_at_s), m.job_id,
        )
        for m in seen.manifests
    ]  # fmt: skip
    if rows:
        _say_table(("STEP", "GENERATION", "RANKS", "TENSORS", "SIZE", "CREATED", "JOB"), rows)
    else:
        _say(f"no checkpoint in {store.url}{_elsewhere(store.url)}")
    for finding in seen.damaged:
        _say(f"damaged: {finding.name}: {finding.text}")
    for snapshot in seen.unfinished:
        _say(f"not committed: {checkpoint_name(snapshot.step, snapshot.generation)}")
    return EXIT_FINISHED


def _elsewhere(url: str) -> str:
    """A hint where a job's own directory is empty of checkpoints."""
    path = Path(url)
    is_job = any((place / EVENTS_FILE).is_file() for place in (path, path.parent))
    return "; if its run had --checkpoints, name that place" if is_job else ""


def _alone(seen: Survey, snapshot: SnapshotId) -> Survey:
    """What there is of one checkpoint."""
    directory = checkpoint_name(snapshot.step, snapshot.generation)
    return Survey(
        manifests=tuple(m for m in seen.manifests if m.snapshot == snapshot),
        damaged=tuple(f for f in seen.damaged if f.name.startswith(f"{directory}/")),
        unfinished=tuple(s for s in seen.unfinished if s == snapshot),
    )


def _show(options: argparse.Namespace) -> int:
    store, given = locate(options.url)
    manifest = load_manifest(store, choose(store, given, options.step))
    if options.json:
        _say_json({"url": f"{store.url}/{manifest.name}", "manifest": manifest})
        return EXIT_FINISHED
    _say(f"{store.url}/{manifest.name}")
    _say(f"step {manifest.step} of generation {manifest.generation}, job {manifest.job_id}")
    _say(f"created {_time(manifest.created_at_s)} by stepfast {manifest.stepfast_version}")
    nodes = f"{counted(manifest.world_size, 'rank')}, {manifest.nproc_per_node} on a node"
    _say(f"{nodes}, torch {manifest.torch_version}, {size_text(manifest.size_bytes)}")
    for key, value in manifest.user.items():
        _say(f"{key}: {value}")
    _say("")
    _say_table(
        ("FILE", "SIZE", "DIGEST"),
        [(f.name, size_text(f.size_bytes), digest_of(f)) for f in manifest.files],
    )
    _say("")
    _say_table(
        ("TENSOR", "TYPE", "SHAPE"),
        [(name, info.dtype, _shape(info)) for name, info in manifest.tensors.items()],
    )
    return EXIT_FINISHED


def _verify(options: argparse.Namespace) -> int:
    store, given = locate(options.url)
    findings: list[Finding] = []
    if given is None and options.step is None:
        seen = survey(store)
        snapshots = [manifest.snapshot for manifest in reversed(seen.manifests)]
        findings += seen.damaged
        if not snapshots and not findings:
            raise StateError(f"there is no checkpoint in {store.url}")
    else:
        snapshots = [choose(store, given, options.step)]
    reports = []
    for snapshot in snapshots:
        name = checkpoint_name(snapshot.step, snapshot.generation)
        bar = _Bar(name)
        began_s = time.monotonic()
        found = verify(store, snapshot, bar.show, options.threads)
        bar.clear()
        findings += found
        reports.append({"checkpoint": name, "whole": not found})
        if not options.json and not found:
            rate = bar.total_bytes / max(1e-9, time.monotonic() - began_s)
            _say(f"{name}: whole, {size_text(bar.total_bytes)} read at {size_text(rate)}/s")
    if options.json:
        _say_json({"url": store.url, "checkpoints": reports, "findings": findings})
    else:
        for finding in findings:
            _say(f"DAMAGED {finding.name}: {finding.damage}: {finding.text}")
    return EXIT_TRY_AGAIN if findings else EXIT_FINISHED


def _diff(options: argparse.Namespace) -> int:
    sides = []
    for url in (options.before, options.after):
        store, given = locate(url)
        stored = StoredCheckpoint.open(store, choose(store, given, None))
        sides.append((stored.place, WholeCheckpoint(stored)))
    (before_name, before), (after_name, after) = sides
    differences = compare(before, after)
    if options.json:
        named = {"before": before_name, "after": after_name, "differences": differences}
        _say_json(named)
        return EXIT_TRY_AGAIN if differences else EXIT_FINISHED
    _say(f"--- {before_name}")
    _say(f"+++ {after_name}")
    for one in differences:
        match one.before, one.after:
            case None, TensorInfo() as info:
                _say(f"added    {one.name} {info.dtype} {_shape(info)}")
            case TensorInfo() as info, None:
                _say(f"removed  {one.name} {info.dtype} {_shape(info)}")
            case TensorInfo() as old, TensorInfo() as new if old != new:
                _say(f"changed  {one.name} {old.dtype} {_shape(old)} -> {new.dtype} {_shape(new)}")
            case _:
                _say(f"changed  {one.name}")
    _say(f"{len(differences)} differences" if differences else "no difference")
    return EXIT_TRY_AGAIN if differences else EXIT_FINISHED


def _prune(options: argparse.Namespace) -> int:
    if options.keep_last < 1 or options.keep_every < 0:
        raise ConfigError("--keep-last must be at least 1, and --keep-every at least 0")
    store, given = locate(options.url)
    if given is not None:
        raise ConfigError(f"prune works on a whole store: {store.url}")
    retention = Retention(keep_last=options.keep_last, keep_every_steps=options.keep_every)
    gone = prune(store, retention, dry_run=options.dry_run)
    names = [checkpoint_name(snapshot.step, snapshot.generation) for snapshot in gone]
    if options.json:
        _say_json({"url": store.url, "dry_run": options.dry_run, "removed": names})
        return EXIT_FINISHED
    rule = f"the newest {options.keep_last}"
    if options.keep_every:
        rule += f" and each at a multiple of {options.keep_every} steps"
    _say(f"kept by the rule: {rule}")
    for name in names:
        _say(f"{'would remove' if options.dry_run else 'removed'} {name}")
    if not names:
        _say("nothing to remove")
    return EXIT_FINISHED


def _export(options: argparse.Namespace) -> int:
    store, given = locate(options.url)
    snapshot = choose(store, given, options.step)
    if options.format != "safetensors":
        return _export_by_torch(StoredCheckpoint.open(store, snapshot), options)
    checkpoint = WholeCheckpoint(StoredCheckpoint.open(store, snapshot))
    bar = _Bar("export")
    files = export_safetensors(
        checkpoint, Path(options.directory), tracked=options.object, progress=bar.show
    )
    bar.clear()
    if options.json:
        _say_json({"url": checkpoint.stored.place, "files": files})
    else:
        _say(f"{checkpoint.stored.place}: {len(files)} files in {options.directory}")
    return EXIT_FINISHED


def _export_by_torch(checkpoint: StoredCheckpoint, options: argparse.Namespace) -> int:
    try:
        # Here alone: every other command works, and starts at once, without torch.
        from stepfast.checkpoint.tensors.export import ExportFormat, export
    except ImportError as error:
        raise ConfigError(
            f"--format {options.format} needs torch ({error}): pip install 'stepfast[train]'"
        ) from error
    target = Path(options.directory)
    count = export(checkpoint, target, ExportFormat(options.format), objects=[options.object])
    if options.json:
        _say_json({"url": checkpoint.place, "tensors": count})
    else:
        _say(f"{checkpoint.place}: {count} tensors in {target}")
    return EXIT_FINISHED


def _import(options: argparse.Namespace) -> int:
    if options.step < 0:
        raise ConfigError(f"--step must be at least 0, not {options.step}")
    selection = Selection(options.object, options.prefix, tuple(options.without))
    source = open_source(Path(options.source))
    chosen = choose_tensors(source, selection)
    bar = _Bar("import")
    store = _store_to_be(options.store)
    manifest = import_checkpoint(
        source,
        chosen,
        store,
        tracked=selection.tracked,
        step=options.step,
        version=stepfast.__version__,
        progress=bar.show,
    )
    bar.clear()
    url = f"{store.url}/{manifest.name}"
    if options.json:
        count = len(manifest.tensors)
        _say_json({"url": url, "tensors": count, "left_out": sorted(chosen.left_out)})
        return EXIT_FINISHED
    size = size_text(sum(tensor.size_bytes for _, tensor in chosen.tensors.values()))
    _say(f"{source.place} ({source.kind}): {len(manifest.tensors)} tensors, {size}, in {url}")
    if chosen.left_out:
        shown = ", ".join(sorted(chosen.left_out)[:_NAMES_SHOWN])
        more = "" if len(chosen.left_out) <= _NAMES_SHOWN else ", ..."
        _say(f"left out: {len(chosen.left_out)} ({shown}{more})")
    _say(
        f"to start from it: stepfast run --checkpoints {store.url} SCRIPT, and before SCRIPT a flag"
        f" for each tracked object but {selection.tracked}, for example --start-fresh optimizer"
    )
    return EXIT_FINISHED


def _store_to_be(url: str) -> CheckpointStore:
    """The store that `url` means, which need not be there yet."""
    if parse_checkpoint_name(url.rstrip("/").rpartition("/")[2]) is not None:
        raise ConfigError(f"{url} is a checkpoint; give the store that it is to be in, and --step")
    store = open_store(url)
    path = Path(store.url)
    if "://" not in store.url and (path / JOB_FOLDER).is_dir():
        return open_store(path / JOB_FOLDER)
    return store


class _Bar:
    """A progress bar on a terminal, and nothing elsewhere."""

    def __init__(self, label: str) -> None:
        self.total_bytes = 0
        self._label = label
        self._is_shown = sys.stderr.isatty()
        self._percent = -1

    def show(self, done_bytes: int, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        percent = 100 * done_bytes // max(1, total_bytes)
        if self._is_shown and percent != self._percent:
            self._percent = percent
            bar = ("#" * (percent * _BAR_CHARS // 100)).ljust(_BAR_CHARS, ".")
            sys.stderr.write(f"\r{self._label} [{bar}] {percent:3d} % of {size_text(total_bytes)}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "step": manifest.step,
        "generation": manifest.generation,
        "job_id": manifest.job_id,
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors),
        "size_bytes": manifest.size_bytes,
        "created_at_s": manifest.created_at_s,
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _say_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def _say_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for line in aligned([head, *rows], indent=""):
        _say(line)


def _time(since_epoch_s: float) -> str:
    return datetime.fromtimestamp(since_epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _shape(info: TensorInfo) -> str:
    return f"[{', '.join(map(str, info.shape))}]"
