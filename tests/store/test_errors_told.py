"""Every failing system call in a store raises an error of LoHan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lohan.errors import LohanError, StorageIOError
from lohan.store import admin
from lohan.store.admin import restore
from lohan.store.files import StoreLock
from lohan.store.store import Store
from tests.support.faults import NumberedFaults
from tests.support.stores import REGIONS, commit_next, write_generation

Work = Callable[[Path], None]


def created(folder: Path) -> None:
    with Store.create(folder / "deep" / "store", REGIONS, engine="threads") as store:
        commit_next(store)


def kept(folder: Path) -> None:
    """Take a second snapshot, which replaces the first."""
    with Store.create(
        folder / "store", REGIONS, durability="checkpoint", engine="threads"
    ) as store:
        for _ in range(2):
            commit_next(store)
            admin.snapshot(store, folder / "snapshot", engine="threads")


def put_back(folder: Path) -> None:
    kept(folder)
    with Store.open(folder / "store", engine="threads") as store:
        write_generation(store, 2)
    restore(folder / "snapshot", [folder / "store"], engine="threads").close()


@pytest.mark.parametrize("work", [created, put_back])
def test_failed_calls_are_reported(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, reported = 1, 0
    while True:
        faults = NumberedFaults(at=at, error=OSError)
        folder = tmp_path / str(at)
        folder.mkdir()
        try:
            with faults.armed(monkeypatch):
                work(folder)
        except LohanError:
            reported += 1
        except OSError as error:
            error.add_note(f"call {at} of {work.__name__}: {faults.reached}")
            raise
        if not faults.reached:
            break
        at += 1
    assert reported > 5


def test_unreadable_lock_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(StorageIOError, match="the lock file cannot be read: Input/output error"):
        StoreLock([tmp_path])
    assert not list(tmp_path.iterdir())  # or a start that failed would be in the way of the next
