"""The folder of a run, and the stores that belong to it: free, taken up again, or cleared."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from lohan.config import Config
from lohan.display import Display
from lohan.errors import ConfigError, StoreError
from lohan.ranks.resharding import settle_world
from lohan.run import RunFolder
from lohan.storage.files import LOCK, MANIFEST
from lohan.storage.lock import StoreLock
from lohan.storage.sets import StoreSet, current_set, find_sets
from lohan.storage.snapshot import find_snapshot, is_whole, restore


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
    """Refuses a folder that holds a run."""
    started = folder.config_file.exists()
    sets = sets_of(folder, folder.config() if started else config)
    begun = any((path / MANIFEST).exists() for found in sets for path in found.primaries)
    if begun:
        raise ConfigError(
            f"{folder.path} holds a run already; continue it with `lohan resume {folder.path}`, "
            "or give another --out"
        )
    if started and folder.metrics_file.exists():
        raise ConfigError(_gone(folder, folder.config()))
    if folder.path.exists() and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; give a folder as --out")


@contextmanager
def claimed(folder: RunFolder) -> Iterator[bool]:
    """Makes the folder; one start at a time, until the store's own lock is held. Tells whether it
    is new: then a failed start takes it away again."""
    created = not folder.path.exists()
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot be made: {error.strerror}; give another --out"
        ) from error
    lock = StoreLock([folder.path])
    try:
        yield created
    finally:
        (folder.path / LOCK).unlink(missing_ok=True)
        lock.release()


def clear_leftovers(folder: RunFolder, config: Config, *, rank: int = 0) -> None:
    """Takes away a start that died before its first commit."""
    for known in ([folder.config()] if folder.config_file.exists() else []) + [config]:
        for found in sets_of(folder, known, rank=rank):
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
        f"anew with `lohan train --config {folder.config_file} --out DIR`"
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


def clear(folder: RunFolder, config: Config, *, whole: bool) -> None:
    """Takes back what a failed start has made."""
    for found in sets_of(folder, config):
        found.remove()
    if whole:
        shutil.rmtree(folder.path, ignore_errors=True)
    else:
        for data in (folder.data, folder.eval_data):
            shutil.rmtree(data, ignore_errors=True)
        folder.config_file.unlink(missing_ok=True)


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
