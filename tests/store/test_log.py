"""The log of gradients: entries, commits, folds, damage, and a power cut at every operation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lohan.errors import ChecksumError, StoreError
from lohan.store import admin
from lohan.store.files import LOG, LOG_DATA, NoRoomError
from lohan.store.log import GradientLog
from lohan.store.store import Store
from lohan.util.units import PAGE
from tests.support.faults import FileEngine, Tape, recorded_operations
from tests.support.stores import REGIONS, chunk_content, read_chunk, write_generation

LOGGED = (("block0", (2 * PAGE, PAGE)), ("block1", (PAGE,)))
CHUNKS = tuple((key, chunk) for key, sizes in LOGGED for chunk in range(len(sizes)))


def log_of(store: Store) -> GradientLog:
    assert store.log is not None
    return store.log


def append_step(store: Store, step: int) -> None:
    """Append gradients of a step and commit it. Every step writes one page of each chunk."""
    log = log_of(store)
    tickets = [log.append(k, c, chunk_content(k, c, PAGE, 1000 + step)) for k, c in CHUNKS]
    log.wait_all(tickets)
    store.commit_logged({"step": step}, {"update": step})


def fold(store: Store, step: int) -> None:
    write_generation(store, step)
    store.commit({"step": step})


def assert_logged(store: Store, steps: Sequence[int]) -> None:
    """Check that the live entries are those of these steps, with their bits."""
    log = log_of(store)
    assert [entry.record for entry in log.entries] == [{"update": step} for step in steps]
    for entry, step in zip(log.entries, steps, strict=True):
        for number, (key, chunk) in enumerate(CHUNKS):
            buffer = np.zeros_like(chunk_content(key, chunk, entry.nbytes[number], 0))
            buffer = chunk_content(key, chunk, entry.nbytes[number], 0)
            log.wait(log.read(entry.segment, key, chunk, buffer))
            assert np.array_equal(buffer, chunk_content(key, chunk, PAGE, 1000 + step)), (
                key,
                chunk,
            )


def new_store(dirs: Sequence[Path], **how: object) -> Store:
    store = Store.create(dirs, REGIONS, engine="threads", **how)  # type: ignore[arg-type]
    fold(store, 0)
    store.start_log(LOGGED, segments=3)
    return store


def test_a_logged_step_survives_without_a_fold(tmp_path: Path) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    store = new_store(dirs)
    append_step(store, 1)
    append_step(store, 2)
    assert store.generation == 0 and store.meta == {"step": 2}
    store.close()
    with Store.open(dirs, engine="threads", replays=True) as store:
        assert store.meta == {"step": 2} and store.generation == 0
        assert_logged(store, [1, 2])
        fold(store, 2)
    assert not any((path / name).exists() for path in dirs for name in (LOG, LOG_DATA))
    with Store.open(dirs, engine="threads") as store:
        assert store.meta == {"step": 2} and store.log is None


def test_refuses_a_store_whose_steps_are_not_folded(tmp_path: Path) -> None:
    new = new_store([tmp_path / "a"])
    append_step(new, 1)
    new.close()
    with pytest.raises(StoreError, match=r"1 step in the log of gradients; `lohan store fold"):
        Store.open(tmp_path / "a", engine="threads")


def test_a_fold_frees_segments_and_drops_entries(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        for step in range(1, 13):
            append_step(store, step)
            if step % 2 == 0:
                fold(store, step)
                assert not log_of(store).live and store.meta == {"step": step}
        assert store.generation == 6


def test_the_next_step_may_be_appended_before_the_fold_is_committed(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        append_step(store, 1)
        append_step(store, 2)
        log = log_of(store)
        tickets = [log.append(k, c, chunk_content(k, c, PAGE, 1003)) for k, c in CHUNKS]
        log.wait_all(tickets)
        fold(store, 2)
        store.commit_logged({"step": 3}, {"update": 3})
        assert_logged(store, [3])
        append_step(store, 4)
        append_step(store, 5)
        assert_logged(store, [3, 4, 5])


def test_refuses_more_steps_than_segments(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        for step in (1, 2, 3):
            append_step(store, step)
        with pytest.raises(StoreError, match="all of them hold steps that are not folded"):
            append_step(store, 4)
        with pytest.raises(StoreError, match="not folded; fold them first"):
            store.start_log(LOGGED, segments=4)
        with pytest.raises(StoreError, match="commit of meta alone, but steps are logged"):
            store.commit({"step": 9}, advance=False)
        assert_logged(store, [1, 2, 3])


def test_refuses_a_step_with_missing_gradients(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        log = log_of(store)
        log.wait(log.append("block0", 0, chunk_content("block0", 0, PAGE, 1)))
        with pytest.raises(StoreError, match=r"'block0' chunk 1 were not written \(2 of 3"):
            store.commit_logged({"step": 1}, {})


def test_discards_gradients_of_a_step_that_failed(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        append_step(store, 1)
        log = log_of(store)
        log.append("block0", 0, chunk_content("block0", 0, PAGE, 7))
        store.discard()
        append_step(store, 2)
        assert_logged(store, [1, 2])


@pytest.mark.parametrize("damage", ["flipped", "torn"])
def test_names_a_damaged_entry(tmp_path: Path, damage: str) -> None:
    store = new_store([tmp_path / "a"])
    append_step(store, 1)
    append_step(store, 2)
    segment = log_of(store).entries[1].segment
    size = log_of(store).layout.disk_slot_bytes(0)
    store.close()
    with (tmp_path / "a" / LOG_DATA).open("r+b") as data:
        data.seek(segment * size)
        actual = bytearray(data.read(PAGE))
        if damage == "flipped":
            actual[100] ^= 1
        else:
            actual[PAGE // 2 :] = bytes(PAGE // 2)
        data.seek(segment * size)
        data.write(actual)
    with (
        Store.open(tmp_path / "a", engine="threads", replays=True) as store,
        pytest.raises(ChecksumError, match=r"log.bin: .*'block0' chunk 0 in logged step 2 of 2"),
    ):
        assert_logged(store, [1, 2])


def test_damage_behind_the_last_step_does_no_harm(tmp_path: Path) -> None:
    store = new_store([tmp_path / "a"])
    append_step(store, 1)
    free = log_of(store).open_segment
    size = log_of(store).layout.disk_slot_bytes(0)
    store.close()
    with (tmp_path / "a" / LOG_DATA).open("r+b") as data:
        data.seek(free * size)
        data.write(b"\xff" * size)
    with Store.open(tmp_path / "a", engine="threads", replays=True) as store:
        assert_logged(store, [1])


def test_names_a_damaged_log_manifest(tmp_path: Path) -> None:
    store = new_store([tmp_path / "a"])
    append_step(store, 1)
    store.close()
    path = tmp_path / "a" / LOG
    path.write_bytes(path.read_bytes().replace(b'"update":1', b'"update":2'))
    with pytest.raises(ChecksumError, match=r"log\.json: CRC-32C is"):
        Store.open(tmp_path / "a", engine="threads", replays=True)


def test_refuses_a_log_that_was_cut(tmp_path: Path) -> None:
    store = new_store([tmp_path / "a"])
    append_step(store, 1)
    store.close()
    with (tmp_path / "a" / LOG_DATA).open("r+b") as data:
        data.truncate(PAGE)
    with pytest.raises(StoreError, match=rf"log\.bin: has {PAGE} bytes, {12 * PAGE} expected"):
        Store.open(tmp_path / "a", engine="threads", replays=True)


def test_refuses_a_log_without_room(tmp_path: Path) -> None:
    with Store.create(tmp_path / "a", REGIONS, engine="threads") as store:
        fold(store, 0)
        with pytest.raises(NoRoomError, match="are free there"):
            store.start_log([("block0", (2**50,))], segments=3)
        assert store.log is None and not (tmp_path / "a" / LOG_DATA).exists()


def recorded(root: Path, tape: Tape, dirs: Sequence[Path]) -> None:
    """Log, fold and log again; every mark promises a step."""
    with Store.create(dirs, REGIONS, engine=FileEngine(tape)) as store:
        fold(store, 0)
        store.start_log(LOGGED, segments=3)
        for step in range(1, 6):
            append_step(store, step)
            tape.mark(step)
            if step % 2 == 0:
                fold(store, step)
        fold(store, 5)


def step_on(dirs: Sequence[Path]) -> int:
    """Return the step that a store holds, after checking all its bytes and going on."""
    with Store.open(dirs, engine="threads", replays=True) as store:
        step = int(store.meta["step"])
        base = step - (len(store.log.entries) if store.log is not None else 0)
        for region in REGIONS:
            for chunk, nbytes in enumerate(region.chunks if not region.scratch else ()):
                expected = chunk_content(region.key, chunk, nbytes, base)
                assert np.array_equal(read_chunk(store, region.key, chunk, nbytes), expected)
        if store.log is not None:
            assert_logged(store, range(base + 1, step + 1))
        fold(store, step + 1)
        store.start_log(LOGGED, segments=2)
        append_step(store, step + 2)
    return step


@pytest.mark.parametrize("count", [1, 2])
def test_no_power_cut_loses_a_logged_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    root = tmp_path / "recorded"
    root.mkdir()
    names = ["a", "b"][:count]
    with recorded_operations(root, monkeypatch) as tape:
        recorded(root, tape, [root / name for name in names])
    chance, seen = random.Random(3), Counter[str]()
    for prefix in range(len(tape.ops) + 1):
        promised = tape.last_mark(prefix)
        for journal in ("ordered", "per inode"):
            keep = chance.choice(["lost", "kept", "pages"])
            disk = tmp_path / f"{prefix}-{journal}"
            tape.disk(prefix, journal, keep, chance).write_to(disk)  # type: ignore[arg-type]
            try:
                step = step_on([disk / name for name in names])
            except StoreError:
                assert promised is None, (prefix, journal, keep)
                seen["none"] += 1
                continue
            assert promised is None or step in (promised, promised + 1), (prefix, journal, keep)
            seen["promised" if step == promised else "in flight"] += 1
    assert seen["promised"] > 50 and seen["in flight"] > 5, seen


def test_describes_the_last_logged_step(tmp_path: Path) -> None:
    with new_store([tmp_path / "a"]) as store:
        store.commit({"progress": {"step": 0}}, advance=False)
        log = log_of(store)
        log.wait_all([log.append(k, c, chunk_content(k, c, PAGE, 1)) for k, c in CHUNKS])
        store.commit_logged({"progress": {"step": 1}}, {})
        assert admin.describe(tmp_path / "a")["step"] == 1
        fold(store, 2)
        store.commit({"progress": {"step": 2}}, advance=False)
        assert admin.describe(tmp_path / "a")["step"] == 2


def test_a_log_that_is_removed_while_it_is_used_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.store.store.PRESENCE_INTERVAL_S", 0.0)
    with new_store([tmp_path / "a"]) as store:
        append_step(store, 1)
        (tmp_path / "a" / LOG_DATA).unlink()
        with pytest.raises(StoreError, match=r"log\.bin: was removed while the run used it"):
            append_step(store, 2)


def test_refuses_a_store_whose_log_would_not_fit(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="are free there"):
        Store.create(tmp_path / "a", REGIONS, engine="threads", reserved_bytes=2**60)
    assert not (tmp_path / "a").exists()
