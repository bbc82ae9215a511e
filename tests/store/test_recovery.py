"""Faults during recovery: an interrupted restore, late reads, hung syncs, lost slots, locks."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lohan.errors import ConfigError, LohanError, StorageIOError, StoreError
from lohan.store import admin, files, manifest
from lohan.store.admin import restore
from lohan.store.files import NoRoomError, lock_holder
from lohan.store.io_engine import Buffer, aligned_buffer
from lohan.store.store import Status, Store
from lohan.util.units import PAGE
from tests.support.faults import InjectedError, NumberedFaults
from tests.support.stores import (
    REGIONS,
    STATE_CHUNKS,
    MemoryEngine,
    assert_holds,
    chunk_content,
    commit_next,
    file_names,
    is_whole,
    write_generation,
)

Operation = Callable[[Path, list[Path]], None]

# -- a restore that dies ---------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Create a store that died in a step, and its snapshot."""
    dirs = [tmp_path / "a", tmp_path / "b"]
    with Store.create(dirs, REGIONS, durability="checkpoint", engine="threads") as store:
        commit_next(store)
        admin.snapshot(store, tmp_path / "snapshot")
        write_generation(store, 1)
    assert not is_whole(dirs[0])
    return dirs


@pytest.mark.parametrize("call", ["replace", "unlink", "rmdir", "fsync", "mkdir"])
def test_a_restore_that_dies_is_repeated(
    tmp_path: Path, dirs: list[Path], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at every call of a kind, and restoring again succeeds."""
    real, place = getattr(os, call), tmp_path / "snapshot"
    at, died = 1, True
    while died:
        count = 0

        def dying(*given, at=at, **named):
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return real(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, dying)
            try:
                restore(place, dirs, engine="threads").close()
                died = False
            except Killed:
                pass
        if died:
            assert is_whole(place)
            if at % 2:  # also where the next one dies too
                with restore(place, dirs, engine="threads") as store:
                    assert_holds(store, 0)
                    write_generation(store, 1)
        at += 5 if call == "unlink" else 1
    assert at > 2
    with Store.open(dirs[0]) as store:
        assert_holds(store, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "snapshot"]


def restored(tmp_path: Path, dirs: list[Path]) -> None:
    restore(tmp_path / "snapshot", dirs, engine="threads").close()


def removed(tmp_path: Path, dirs: list[Path]) -> None:
    if (dirs[0] / "store.json").exists():  # else a first try has come that far
        admin.remove(dirs)


def second_faults(
    tmp_path: Path,
    dirs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    operation: Operation,
    error: InjectedError,
    *,
    stride: int,
) -> None:
    """Inject a fault at numbered calls; repeating the operation must succeed."""
    at = 1
    while True:
        faults = NumberedFaults(at=at, error=error)
        with faults.armed(monkeypatch), suppress(LohanError, OSError, KeyboardInterrupt):
            operation(tmp_path, dirs)
        assert is_whole(tmp_path / "snapshot")
        operation(tmp_path, dirs)
        if operation is restored:
            with Store.open(dirs[0]) as store:
                assert_holds(store, 0)
        else:
            left = [name for path in dirs for name in file_names(path)]  # empty directories may be
            assert set(left) <= {"lock"}
        restored(tmp_path, dirs)
        if not faults.reached:
            return
        at += stride


OPERATIONS = [restored, removed]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_second_faults(
    tmp_path: Path,
    dirs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    operation: Operation,
    error: InjectedError,
) -> None:
    second_faults(tmp_path, dirs, monkeypatch, operation, error, stride=29)


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_second_faults_at_every_call(
    tmp_path: Path,
    dirs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    operation: Operation,
    error: InjectedError,
) -> None:
    second_faults(tmp_path, dirs, monkeypatch, operation, error, stride=1)


def test_restore_replaces_the_store_after_the_copy(
    tmp_path: Path, dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given):
        raise StorageIOError("no space left")

    before = {name: (tmp_path / name).stat().st_size for name in file_names(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(admin, "_copy_state", full)
        with pytest.raises(StorageIOError):
            restore(tmp_path / "snapshot", dirs)
    assert {name: (tmp_path / name).stat().st_size for name in file_names(tmp_path)} == before


def test_restore_removes_the_store_first_without_room(
    tmp_path: Path, dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.check_free_space

    def check(needed):
        if any(path.exists() for path in dirs):
            raise NoRoomError("too little")
        real(needed)

    monkeypatch.setattr(files, "check_free_space", check)
    with restore(tmp_path / "snapshot", dirs) as store:
        assert_holds(store, 0)


def test_a_restored_store_of_several_directories_is_found_by_its_first(
    tmp_path: Path, dirs: list[Path]
) -> None:
    restore(tmp_path / "snapshot", dirs).close()
    with Store.open(dirs[0]) as store:
        assert_holds(store, 0)
    assert admin.remove(dirs[0]) == dirs


def test_restore_keeps_foreign_files(tmp_path: Path, dirs: list[Path]) -> None:
    (dirs[1] / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes.txt', no file of a store"):
        restore(tmp_path / "snapshot", dirs)
    assert (dirs[1] / "notes.txt").read_text() == "mine"


def test_a_removal_that_dies_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(path: Path) -> None:
        raise Killed

    dirs = [tmp_path / "a", tmp_path / "b"]
    with Store.create(dirs, REGIONS, engine="threads") as store:
        commit_next(store)
    with monkeypatch.context() as patch:
        patch.setattr(admin, "delete_files", dying)
        with pytest.raises(Killed):
            admin.remove(dirs[0])
    with pytest.raises(StoreError, match="did not finish"):
        Store.open(dirs[0])
    assert admin.remove(dirs[0]) == dirs


# -- late reads ------------------------------------------------------------------------------


class LateEngine(MemoryEngine):
    """An engine whose read of a chosen file completes on request, or never in time."""

    late = False

    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.held: dict[int, Buffer] = {}

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        ticket = super().read(file, offset, buffer)
        if self.late:
            self.held[ticket] = buffer
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> None:
        if ticket in self.held and self.late:
            threading.Event().wait(timeout_s)
            raise StorageIOError("missed its deadline")
        super().wait(ticket, timeout_s)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_late_read_is_over_before_its_buffer_is_used_again(
    tmp_path: Path, comes_back: bool
) -> None:
    engine = LateEngine()
    with Store.create(tmp_path / "s", REGIONS, engine=engine, timeout_s=0.02) as store:
        commit_next(store)
        key, chunk, nbytes = STATE_CHUNKS[0]
        buffer = aligned_buffer(nbytes)
        engine.late = True
        ticket = store.read(key, chunk, buffer)
        with pytest.raises(StorageIOError, match="deadline"):
            store.wait(ticket)
        engine.late = not comes_back
        store.discard()
        if not comes_back:
            assert store.health.status is Status.FAILED
            with pytest.raises(StoreError, match="did not come back"):
                store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
            engine.late = False
            return
        assert store.health.status is Status.CLEAN
        buffer[:] = 7
        engine.close()  # whatever was still in flight would land now
        assert np.all(buffer == 7)


# -- syncs that hang -------------------------------------------------------------------------


class HungEngine(MemoryEngine):
    hangs = False
    go = threading.Event()

    def sync(self, file: int) -> None:
        if self.hangs:
            self.go.wait(60)


def test_a_hung_fdatasync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HungEngine()
    with Store.create(tmp_path / "s", REGIONS, engine=engine) as store:
        commit_next(store)
        write_generation(store, 1)
        engine.hangs = True
        monkeypatch.setenv("LOHAN_SYNC_TIMEOUT", "0.05")
        with pytest.raises(StorageIOError, match=r"slot-b\.bin: a sync .* after 0\.05 s"):
            store.commit({"step": 1})
        assert store.health.status is Status.FAILED
    HungEngine.go.set()
    with Store.open(tmp_path / "s", engine=MemoryEngine(files=engine.files)) as store:
        assert_holds(store, 0)


def test_a_hung_fsync_of_a_small_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setenv("LOHAN_SYNC_TIMEOUT", "0.05")
    monkeypatch.setattr(os, "fsync", lambda fd: go.wait(60))
    with pytest.raises(StorageIOError, match=r"small\.tmp: a sync has not returned after 0\.05 s"):
        manifest.write_durably(tmp_path / "small", b"bytes")
    go.set()


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_bad_sync_timeout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LOHAN_SYNC_TIMEOUT", value)
    with pytest.raises(ConfigError, match=f"LOHAN_SYNC_TIMEOUT={value} is no number of seconds"):
        manifest.write_durably(tmp_path / "small", b"bytes")


# -- slots lost before their first commit ----------------------------------------------------


@pytest.mark.parametrize("size", [None, 0, PAGE, 100 * PAGE])
def test_a_slot_that_is_not_committed_is_made_anew(tmp_path: Path, size: int | None) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    with Store.create(dirs, REGIONS, engine="threads") as store:
        commit_next(store)
    for path in dirs:
        if size is None:
            (path / "slot-b.bin").unlink()
        else:
            os.truncate(path / "slot-b.bin", size)
    with Store.open(dirs[0]) as store:
        assert_holds(store, 0)
        commit_next(store)
    with Store.open(dirs[0]) as store:
        assert_holds(store, 1)


def test_both_slots_are_synced_before_the_first_commit(tmp_path: Path) -> None:
    class Listening(MemoryEngine):
        def sync(self, file: int) -> None:
            synced.add(Path(self._paths[file]).name)

    synced: set[str] = set()
    with Store.create(tmp_path / "s", REGIONS, engine=Listening()):
        assert synced >= {"slot-a.bin", "slot-b.bin"}


# -- leftovers and locks ---------------------------------------------------------------------


def test_leftovers_of_dead_processes_go_and_nothing_else(tmp_path: Path) -> None:
    dead, used, whole, foreign = (tmp_path / name for name in ("dead", "used", "whole", "mine"))
    Store.create(dead, REGIONS, engine="threads")._store_lock.release()  # as a killed process
    with Store.create(whole, REGIONS, engine="threads") as store:
        commit_next(store)
    foreign.mkdir()
    (foreign / "photo").write_text("mine")
    with Store.create(used, REGIONS, engine="threads"):
        admin.remove_unfinished([dead, used, whole, foreign, tmp_path / "none"])
        assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "used", "whole"]
        assert "slot-a.bin" in file_names(used) and file_names(foreign) == ["photo"]


def test_removing_a_store_takes_a_dead_sessions_activations_too(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", REGIONS, engine="threads") as store:
        commit_next(store)
    left = Store.create(tmp_path / "s-activations", REGIONS, engine="threads")
    left._store_lock.release()
    admin.remove(tmp_path / "s")
    assert file_names(tmp_path) == []


def test_a_number_in_the_lock_file_says_nothing_without_the_lock(tmp_path: Path) -> None:
    """After a crash, the number may belong to another process."""
    with Store.create(tmp_path / "s", REGIONS, engine="threads") as store:
        commit_next(store)
        assert lock_holder(tmp_path / "s") == os.getpid()
    (tmp_path / "s" / "lock").write_text(f"{os.getppid()}\n")
    assert lock_holder(tmp_path / "s") is None
    assert admin.describe(tmp_path / "s")["in_use_by"] is None
    shutil.rmtree(tmp_path / "s")
    assert lock_holder(tmp_path / "s") is None
