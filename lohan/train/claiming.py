"""The folder of a run, and the stores that belong to it: free, taken up again, or cleared.

A start takes a folder by a mark in it (run.Mark), and only if nothing is there by the names that
the run will use. From then on what has these names is the run's own, and nothing else is removed or
replaced.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from lohan.checkpoint.replacing import check_own, check_target
from lohan.checkpoint.resharding import settle_world
from lohan.checkpoint.sets import StoreSet, current_set, find_sets
from lohan.config import Config
from lohan.data.cache import CACHE_FILES
from lohan.errors import ConfigError, StoreError
from lohan.model.shards import parse_store_name
from lohan.store.files import MANIFEST, remove_empty
from lohan.store.lock import StoreLock
from lohan.store.manifest import read_manifest
from lohan.store.snapshot import find_snapshot, is_whole, restore
from lohan.train.run_folder import MARK, Mark, RunFolder
from lohan.util.atomic import temporary_of
from lohan.util.display import Display

CLAIM = f"{MARK}.lock"


def sets_of(folder: RunFolder, config: Config, *, rank: int = 0) -> list[StoreSet]:
    """Whatever there is of the run's stores on this machine, whole or not, beginning where a rank
    has its own."""
    return find_sets(partial(folder.places, config), folder.store_name(config), seen_by=rank)


def stores_of(folder: RunFolder, config: Config) -> StoreSet:
    """The stores of all ranks, at their last common step."""
    sets = sets_of(folder, config)
    found = current_set(sets)
    if found is not None:
        return found
    check_begun(folder, config)
    part = sets[0]
    where = ", ".join(f"rank {rank} at {part.dirs[rank][0]}" for rank in part.missing())
    raise StoreError(
        f"the run in {folder.path} has {part.describe()}; not on this machine: {where}; mount "
        "the drives, or bring the stores here"
    )


def check_vacant(folder: RunFolder, config: Config) -> None:
    """Refuses a folder that holds a run, or anything under a name that the run would use."""
    if os.path.lexists(folder.path) and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; give a folder as --out")
    mark, known = folder.mark, _config_of(folder)
    sets = [] if mark is None and known is None else sets_of(folder, known or config)
    begun = any((path / MANIFEST).exists() for found in sets for path in found.primaries)
    if begun:
        raise ConfigError(
            f"{folder.path} holds a run already; continue it with "
            f"`lohan resume {shlex.quote(str(folder.path))}`, or give another --out"
        )
    if known is not None and folder.metrics_file.exists() and (mark or _was_run(folder, known)):
        raise ConfigError(_gone(folder, known))
    check_names(folder, config)
    check_exports(folder, config)


def _config_of(folder: RunFolder) -> Config | None:
    """None: run.toml is not there, or not one that a run has written."""
    if not folder.config_file.is_file():
        return None
    try:
        return folder.config()
    except ConfigError:
        if folder.mark is not None:
            raise
        return None


def _was_run(folder: RunFolder, config: Config) -> bool:
    """Of a folder without a mark, as earlier versions left them: whether a run was in it."""
    return folder.journal.exists() or config.out == folder.path


def check_names(folder: RunFolder, config: Config) -> None:
    """Refuses if anything that is not the run's has a name that the run would use."""
    wanted, mark = folder.names(config), folder.mark
    own = set(mark.names) if mark is not None else set()
    there = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
    taken = sorted(name for name in there if _meaning(name) in wanted - own)
    if taken:
        left = "" if mark is not None else ", or remove it if an earlier start has left it"
        raise ConfigError(
            f"{folder.path} holds {taken[0]!r}, which is not this run's, and a run has something "
            f"of its own by that name; give another --out, or move it away{left}"
        )


def _meaning(name: str) -> str:
    """Several ranks have several files instead of one."""
    return re.sub(r"trace-rank\d+\.json", "trace.json", parse_store_name(name)[0])


def check_exports(folder: RunFolder, config: Config) -> None:
    """Refuses where the models that the run exports would replace anything but its own."""
    budget, mark = config.budget, folder.mark
    ranks = range(max(1, budget.gpus)) if budget.ssd else ()
    inputs = [("--model", config.model), ("--data", config.data)]
    inputs += [("--eval-data", config.eval.data)] if config.eval.data is not None else []
    inputs += [("--ssd", place) for rank in ranks for place in folder.places(config, rank)]
    inputs += [("snapshot_dir", budget.snapshot_dir)] if budget.snapshot_dir is not None else []
    for target in folder.exports(config):
        real = target.resolve()
        for option, path in inputs:
            given = path.resolve()
            if real == given or real in given.parents:
                raise ConfigError(
                    f"{option} {path} lies in {target}, where the run would export its model; "
                    "give another --out, or set export = false under [output]"
                )
        if mark is not None:
            check_own(target, mark.id)
        elif os.path.lexists(target):
            check_target(target, overwrite=True)


def export_mark(folder: RunFolder, config: Config) -> str | None:
    """Before an export of the run's own: what its folder is marked with."""
    check_exports(folder, config)
    return None if folder.mark is None else folder.mark.id


def check_original(folder: RunFolder, config: Config) -> None:
    """Refuses to go on with a copy of a run whose store is not in its folder: the original has the
    same one."""
    first = RunFolder(config.out)
    if not config.budget.ssd or not first.config_file.is_file():
        return
    if first.path.samefile(folder.path) or first.tag(config) != folder.tag(config):
        return
    raise ConfigError(
        f"{folder.path} is a copy of the run in {first.path}, and both have one store; continue "
        f"that one with `lohan resume {shlex.quote(str(first.path))}`, or move it away"
    )


@contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Makes the folder; one start at a time, until the store's own lock is held. Folders that are
    still empty at the end go again."""
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot be made: {error.strerror}; give another --out"
        ) from error
    try:
        lock = StoreLock([folder.path], name=CLAIM)
        try:
            yield
        finally:
            (folder.path / CLAIM).unlink(missing_ok=True)
            lock.release()
    finally:
        remove_empty(created[::-1])


def take(folder: RunFolder, config: Config, mark: Mark, *, rank: int = 0) -> None:
    """Makes the folder the run's; what a start has left there that died before its first commit
    goes. On every machine the first rank does it."""
    before = folder.mark
    if before is not None and before.id == mark.id:
        return  # another machine has, and shares the folder
    check_names(folder, config)
    if before is not None:
        _remove_stores(folder, _config_of(folder) or config, rank=rank)
    names = folder.names(config) | set(before.names if before is not None else ())
    replace(mark, names=tuple(sorted(names))).write(folder.path)


def extend(folder: RunFolder, config: Config) -> None:
    """Before a run goes on with other settings than it was begun with: names that it has not used
    so far are its own from now on."""
    mark = folder.mark
    if mark is None:
        return
    check_names(folder, config)
    names = tuple(sorted({*mark.names, *folder.names(config)}))
    if names != mark.names:
        replace(mark, names=names).write(folder.path)


def _remove_stores(folder: RunFolder, config: Config, *, rank: int = 0) -> None:
    """Of a start that did not get as far as its first step."""
    for found in sets_of(folder, config, rank=rank):
        for path in found.primaries:
            manifest = read_manifest(path)
            if manifest is not None and manifest.meta.get("progress", {}).get("step"):
                raise StoreError(f"{path} holds a run already; give another --out")
        found.remove()


def check_begun(folder: RunFolder, config: Config) -> None:
    """Refuses a run that has no store, or was never committed by all its ranks."""
    sets = sets_of(folder, config)
    if not sets:
        raise StoreError(_gone(folder, config))
    if any(not found.missing() for found in sets) and current_set(sets) is None:
        raise StoreError(
            f"the run in {folder.path} died while its model was being loaded; start it again with "
            "the same `lohan train` command"
        )


def _gone(folder: RunFolder, config: Config) -> str:
    """Of a run without its store: what is left, and what can be done."""
    mount = "mount its drive if it is elsewhere, or " if config.budget.ssd else ""
    found = f"the run in {folder.path} has no store at {folder.store_dirs(config)[0]}"
    if not folder.metrics_file.exists():
        return f"{found}; {mount}start it again with the same `lohan train` command"
    parts = {
        "the exported model": folder.model, "the best one": folder.best,
        "the averaged one": folder.ema,
    }  # fmt: skip
    left = ", ".join(["its log", *(what for what, path in parts.items() if path.exists())])
    return (
        f"{found}, so it can neither go on nor be exported; what is left: {left}; {mount}train "
        f"anew with `lohan train --config {shlex.quote(str(folder.config_file))} --out DIR`"
    )


def settle_ranks(folder: RunFolder, config: Config, world: int, display: Display) -> None:
    """Before a run goes on: its stores are those of so many ranks."""
    if world > 1 and config.budget.durability != "step":
        raise ConfigError(
            f'durability = "{config.budget.durability}" goes with one rank, not {world}: their '
            "commits are agreed step by step; resume with --gpus 1"
        )
    settle_world(
        partial(folder.places, config), folder.store_name(config), world, note=display.note,
        progress=lambda done, total: display.advance("cutting the state anew", done, total),
    )  # fmt: skip


def clear(folder: RunFolder, config: Config) -> None:
    """Takes back what a failed start has made in a folder that it has taken."""
    _remove_stores(folder, config)
    mark = folder.mark
    for data in (folder.data, folder.eval_data):
        if mark is not None and data.name in mark.names:
            _remove_data(data)
    folder.config_file.unlink(missing_ok=True)
    temporary_of(folder.config_file).unlink(missing_ok=True)
    (folder.path / MARK).unlink(missing_ok=True)


def _remove_data(place: Path) -> None:
    """The files that preparing data writes, and their folder if nothing else is in it."""
    try:
        fields = json.loads((place / "meta.json").read_text()).get("fields", {})
    except (OSError, ValueError, AttributeError):
        fields = {}
    names = [*CACHE_FILES, *(f"{name}.bin" for name in fields)]
    for name in (*names, *(f"{name}.part" for name in names)):
        (place / name).unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()


def bring_back(folder: RunFolder, config: Config, display: Display) -> None:
    """A store written in place that died in a step, or while it was being put back, comes from its
    last snapshot. Without one, whoever opens the store says what is wrong with it."""
    dirs, place = folder.store_dirs(config), folder.snapshots(config)
    if is_whole(dirs):
        return
    try:
        find_snapshot(place)
    except StoreError:
        if not (dirs[0] / MANIFEST).exists():
            return
        raise StoreError(
            f"the run in {folder.path} was written in place (durability = checkpoint) and died in "
            f"a step, and there is no snapshot at {place}; start it again, with durability = step "
            "or with snapshot_every"
        ) from None
    there = "is not whole" if dirs[0].exists() else "is not there"
    display.note(f"the store in {dirs[0]} {there}; going back to the snapshot in {place}")
    restore(place, dirs).close()
