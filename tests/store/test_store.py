"""The store without faults: generations, stripes, locks, removal, snapshots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store import admin, files
from lohan.store.admin import find_snapshot, restore, snapshot, verify
from lohan.store.extents import Region
from lohan.store.io_engine import DeadlineError, aligned_buffer
from lohan.store.manifest import PROGRESS
from lohan.store.store import Status, Store
from lohan.util.units import PAGE
from tests.support import HANG_S
from tests.support.stores import (
    REGIONS,
    STATE_CHUNKS,
    MemoryEngine,
    assert_holds,
    chunk_content,
    commit_next,
    file_names,
    read_chunk,
    write_generation,
)


@pytest.fixture(params=["uring", "threads", "memory"])
def engine(request: pytest.FixtureRequest):
    """Return an engine by name, or one memory engine that all stores of a test share."""
    return MemoryEngine() if request.param == "memory" else request.param


def new_store(place: Path, *, generation: int = 0, **options) -> Store:
    store = Store.create(place, REGIONS, **options)
    for _ in range(generation + 1):
        commit_next(store)
    return store


# -- generations -----------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_committed_generation_comes_back(tmp_path: Path, engine, durability: str):
    with Store.create(tmp_path / "s", REGIONS, durability=durability, engine=engine) as store:
        assert store.health.status is Status.CREATING
        for generation in range(3):
            write_generation(store, generation)
            store.commit({"step": generation}, clean=True)
            assert_holds(store, generation)
    with Store.open(tmp_path / "s", engine=engine) as store:
        assert_holds(store, 2)
        assert store.layout.regions == REGIONS
        assert verify(store) == []


def test_the_committed_generation_stays_readable_while_the_next_is_written(tmp_path: Path, engine):
    with new_store(tmp_path / "s", generation=1, engine=engine) as store:
        write_generation(store, 2)
        assert_holds(store, 1)
        for key, chunk, nbytes in STATE_CHUNKS:
            uncommitted = read_chunk(store, key, chunk, nbytes, uncommitted=True)
            assert np.array_equal(uncommitted, chunk_content(key, chunk, nbytes, 2))
        store.commit({"step": 2})
        assert_holds(store, 2)


def test_drops_uncommitted_writes_on_open(tmp_path: Path, engine):
    with new_store(tmp_path / "s", engine=engine) as store:
        write_generation(store, 1)
    with Store.open(tmp_path / "s", engine=engine) as store:
        assert_holds(store, 0)


def test_discard_lets_the_step_run_again(tmp_path: Path, engine):
    with new_store(tmp_path / "s", engine=engine) as store:
        key, chunk, nbytes = STATE_CHUNKS[0]
        store.write(key, chunk, chunk_content(key, chunk, nbytes, 9))  # not even waited for
        store.discard()
        with pytest.raises(StoreError, match="not been written and waited for"):
            store.read(key, chunk, aligned_buffer(nbytes), uncommitted=True)
        assert_holds(store, 0)
        commit_next(store)
        assert_holds(store, 1)


def test_meta_alone_can_be_committed(tmp_path: Path, engine):
    with new_store(tmp_path / "s", engine=engine) as store:
        store.commit({"step": 0, "skipped": 1}, advance=False)
        assert store.generation == 0
    with Store.open(tmp_path / "s", engine=engine) as store:
        assert store.meta == {"step": 0, "skipped": 1}
        write_generation(store, 1)
        with pytest.raises(StoreError, match="5 of 5 chunks of generation 1 are written"):
            store.commit({}, advance=False)


def test_commit_refuses_what_is_not_complete(tmp_path: Path):
    with new_store(tmp_path / "s") as store:
        with pytest.raises(StoreError, match=r"'block0/weights' chunk 0 was not written \(0 of 5"):
            store.commit({})
        tickets = [store.write(k, i, chunk_content(k, i, n, 1)) for k, i, n in STATE_CHUNKS]
        for ticket in tickets[:-1]:
            store.wait(ticket)
        with pytest.raises(StoreError, match="write of region 'block0/state' chunk 2 is in flight"):
            store.commit({})
        store.wait(tickets[-1])
        with pytest.raises(StoreError, match="already been waited for"):
            store.wait(tickets[-1])
        with pytest.raises(StoreError, match="plain JSON"):
            store.commit({"rng": object()})
        store.commit({"step": 1})
        assert_holds(store, 1)


def test_a_chunk_in_use_is_not_overwritten(tmp_path: Path):
    with new_store(tmp_path / "s", engine=MemoryEngine()) as store:
        key, chunk, nbytes = STATE_CHUNKS[0]
        first = store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
        with pytest.raises(StoreError, match="while a write of it in flight"):
            store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
        store.wait(first)
        reading = store.read(key, chunk, aligned_buffer(nbytes), uncommitted=True)
        with pytest.raises(StoreError, match="while 1 read"):
            store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
        store.wait(reading)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (aligned_buffer(PAGE), "has 8192 bytes, the buffer has 4096"),
        (aligned_buffer(4 * PAGE)[1 : 2 * PAGE + 1], "no multiple of 4096"),
        (aligned_buffer(4 * PAGE)[::2], "contiguous uint8"),
        (aligned_buffer(2 * PAGE).view(np.int8), "contiguous uint8"),
    ],
)
def test_unfit_buffers_are_refused(tmp_path: Path, buffer, message: str):
    with new_store(tmp_path / "s") as store, pytest.raises(StoreError, match=message):
        store.read("block0/weights", 0, buffer)


def test_a_late_read_can_be_waited_for_again(tmp_path: Path):
    memory: dict[str, bytearray] = {}
    new_store(tmp_path / "s", engine=MemoryEngine(files=memory)).close()
    slow = MemoryEngine(files=memory, delay_s=1.0)
    with Store.open(tmp_path / "s", engine=slow) as store:
        key, chunk, nbytes = STATE_CHUNKS[0]
        buffer = aligned_buffer(nbytes)
        ticket = store.read(key, chunk, buffer)
        with pytest.raises(DeadlineError, match=r"'block0/weights' chunk 0.*deadline"):
            store.wait(ticket, timeout_s=0.01)
        store.commit({"late": True}, advance=False)  # a read does not stand in its way
        store.wait(ticket)
        assert np.array_equal(buffer, chunk_content(key, chunk, nbytes, 0))


def test_write_that_completes_after_discard_is_ignored(tmp_path: Path):
    memory: dict[str, bytearray] = {}
    new_store(tmp_path / "s", engine=MemoryEngine(files=memory)).close()
    slow = MemoryEngine(files=memory, delay_s=1.5)
    with Store.open(tmp_path / "s", engine=slow) as store:
        key, chunk, nbytes = STATE_CHUNKS[0]
        ticket = store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
        waiting = threading.Thread(target=store.wait, args=(ticket,))
        waiting.start()
        time.sleep(0.1)
        store.discard()
        with pytest.raises(StoreError, match="while a write of it in flight"):
            store.write(key, chunk, chunk_content(key, chunk, nbytes, 1))
        waiting.join()
        with pytest.raises(StoreError, match="not been written and waited for"):
            store.read(key, chunk, aligned_buffer(nbytes), uncommitted=True)


# -- scratch ---------------------------------------------------------------------------------


def test_scratch_is_written_and_read_freely(tmp_path: Path, engine):
    with new_store(tmp_path / "s", engine=engine) as store:
        with pytest.raises(StoreError, match="by this process"):
            store.read("activations", 0, aligned_buffer(PAGE))
        for value in (1, 2):
            store.wait(store.write("activations", 0, chunk_content("x", 0, PAGE, value)))
            assert np.array_equal(
                read_chunk(store, "activations", 0, PAGE), chunk_content("x", 0, PAGE, value)
            )
        with pytest.raises(StoreError, match="scratch; it has no checksum"):
            store.checksum("activations", 0)
        commit_next(store)
        assert np.array_equal(
            read_chunk(store, "activations", 0, PAGE), chunk_content("x", 0, PAGE, 2)
        )
    with Store.open(tmp_path / "s", engine=engine) as store:
        with pytest.raises(StoreError, match="by this process"):
            store.read("activations", 0, aligned_buffer(PAGE))
        assert_holds(store, 1)


def test_the_first_pages_of_a_scratch_chunk_may_be_moved_alone(tmp_path: Path, engine):
    with new_store(tmp_path / "s", engine=engine) as store:
        before = store.counters
        for pages in (2, 1):  # what was there before is not read behind what was written
            store.wait(store.write("activations", 1, chunk_content("x", 0, pages * PAGE, pages)))
            result = read_chunk(store, "activations", 1, pages * PAGE)
            assert np.array_equal(result, chunk_content("x", 0, pages * PAGE, pages))
        moved = store.counters
        assert moved.bytes_written - before.bytes_written == 3 * PAGE
        assert moved.bytes_read - before.bytes_read == 3 * PAGE
        with pytest.raises(StoreError, match="4096 bytes were written, a read asks for 8192"):
            store.read("activations", 1, aligned_buffer(2 * PAGE))
        for count in (0, PAGE + 512, 3 * PAGE):
            with pytest.raises(StoreError, match="has 8192 bytes, the buffer has"):
                store.write("activations", 1, aligned_buffer(4 * PAGE)[:count])
        with pytest.raises(StoreError, match="has 8192 bytes, the buffer has 4096"):
            store.write("block0/weights", 0, aligned_buffer(PAGE))


# -- several directories ---------------------------------------------------------------------


def test_a_store_is_striped_by_weight_and_found_from_its_first_directory(tmp_path: Path):
    dirs = [tmp_path / name for name in ("a", "b", "c")]
    regions = [Region("r", (PAGE,) * 60)]
    with Store.create(dirs, regions, weights=[1, 2, 3]) as store:
        for chunk in range(60):
            store.wait(store.write("r", chunk, chunk_content("r", chunk, PAGE, 0)))
        store.commit({"step": 0})
        assert store.counters.bytes_written == 60 * PAGE
    assert [(d / "slot-a.bin").stat().st_size // PAGE for d in dirs] == [10, 20, 30]
    with Store.open(dirs[0]) as store:
        assert store.dirs == tuple(dirs)
        for chunk in range(60):
            assert np.array_equal(
                read_chunk(store, "r", chunk, PAGE), chunk_content("r", chunk, PAGE, 0)
            )
        assert store.counters.bytes_read == 60 * PAGE


def test_fewer_chunks_than_directories(tmp_path: Path):
    dirs = [tmp_path / name for name in "abc"]
    with Store.create(dirs, [Region("r", (PAGE,))]) as store:
        store.wait(store.write("r", 0, chunk_content("r", 0, PAGE, 0)))
        store.commit({})
    with Store.open(dirs) as store:
        assert np.array_equal(read_chunk(store, "r", 0, PAGE), chunk_content("r", 0, PAGE, 0))


def test_directories_that_moved_or_do_not_belong(tmp_path: Path):
    new_store([tmp_path / "a", tmp_path / "b"]).close()
    new_store([tmp_path / "other"]).close()
    (tmp_path / "b").rename(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"/b is not a store.*mounted"):
        Store.open(tmp_path / "a")
    with Store.open([tmp_path / "a", tmp_path / "moved"]) as store:
        assert_holds(store, 0)
    with pytest.raises(StoreError, match="other belongs to store"):
        Store.open([tmp_path / "a", tmp_path / "other"])
    with pytest.raises(StoreError, match="directory 2 of 2 of store"):
        Store.open([tmp_path / "moved", tmp_path / "a"])
    with pytest.raises(StoreError, match="has 2 directories, 3 given"):
        Store.open([tmp_path / "a", tmp_path / "moved", tmp_path / "other"])
    with pytest.raises(StoreError, match="not all different"):
        Store.open([tmp_path / "a", tmp_path / "a"])


# -- creation --------------------------------------------------------------------------------


def test_too_little_space_is_reported_before_writing(tmp_path: Path):
    huge = [Region("r", (2**60,))]
    with pytest.raises(StoreError, match=r"needs 2097152\.00 TiB in .*/s, but .* are free there"):
        Store.create(tmp_path / "deep" / "s", huge)
    assert file_names(tmp_path) == []


def test_directories_on_one_file_system_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    status = os.statvfs(tmp_path)
    free = 3 * 2**20 // status.f_frsize
    values = list(status)
    values[4] = free
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    regions = [Region("r", (2**20,) * 2)]
    with pytest.raises(StoreError, match=r"3\.00 MiB are free there"):
        Store.create([tmp_path / "a", tmp_path / "b"], regions, durability="checkpoint")
    assert file_names(tmp_path) == []


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path):
    class Full(MemoryEngine):
        def open(self, path: str, *, size: int, create: bool) -> int:
            if path.endswith("slot-b.bin"):
                raise StoreError("no space")
            return super().open(path, size=size, create=create)

    (tmp_path / "b").mkdir()  # the caller's own, stays
    with pytest.raises(StoreError, match="no space"):
        Store.create([tmp_path / "x" / "a", tmp_path / "b"], REGIONS, engine=Full())
    assert file_names(tmp_path) == ["b"]


def test_a_store_closed_before_its_first_commit_is_gone(tmp_path: Path):
    with Store.create([tmp_path / "x" / "a", tmp_path / "b"], REGIONS) as store:
        write_generation(store, 0)
        with pytest.raises(StoreError, match="nothing is committed yet"):
            store.read(*STATE_CHUNKS[0][:2], aligned_buffer(STATE_CHUNKS[0][2]))
        with pytest.raises(StoreError, match="still being created"):
            store.commit({}, advance=False)
    assert file_names(tmp_path) == []


def test_a_creation_that_was_killed_says_so_and_can_be_removed(tmp_path: Path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    code = f"""
import os
from tests.support.stores import REGIONS, write_generation
from lohan.store.store import Store
store = Store.create({[str(d) for d in dirs]!r}, REGIONS)
write_generation(store, 0)
os._exit(9)
"""
    run_python(code)
    with pytest.raises(StoreError, match="creation did not finish; remove it with `lohan store rm"):
        Store.open(dirs[0])
    with pytest.raises(StoreError, match="already holds a store"):
        Store.create(dirs[0], REGIONS)
    assert admin.describe(dirs[0])["state"] == "unfinished"
    assert admin.remove(dirs[0]) == dirs
    assert file_names(tmp_path) == []


def test_foreign_directories_are_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"is not empty \(it holds 'thesis.tex'\)"):
        Store.create(tmp_path, REGIONS)
    with pytest.raises(StoreError, match=r"thesis\.tex is a file"):
        Store.create(tmp_path / "thesis.tex", REGIONS)
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="is not a store"):
        admin.remove(tmp_path)
    assert file_names(tmp_path) == ["thesis.tex"]


def test_unknown_durability(tmp_path: Path):
    with pytest.raises(StoreError, match="'sometimes' is unknown"):
        Store.create(tmp_path / "s", REGIONS, durability="sometimes")


# -- locks -----------------------------------------------------------------------------------


def run_python(code: str, *, expect: int = 9) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_second_process_is_refused(tmp_path: Path):
    with new_store([tmp_path / "a", tmp_path / "b"]):
        message = run_python(
            f"""
from lohan.errors import StoreError
from lohan.store.store import Store
try:
    Store.open({str(tmp_path / "a")!r})
except StoreError as error:
    print(error)
""",
            expect=0,
        )
        assert f"{tmp_path / 'a'} is in use by process {os.getpid()}" in message
        with pytest.raises(StoreError, match="is in use by process"):
            admin.remove(tmp_path / "a")
        assert admin.describe(tmp_path / "a")["in_use_by"] == os.getpid()
    with Store.open(tmp_path / "a") as store:
        assert_holds(store, 0)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    run_python(
        f"""
import os, sys, time
from tests.support.stores import REGIONS, commit_next
from lohan.store.store import Store
store = Store.create({str(tmp_path / "s")!r}, REGIONS)
commit_next(store)
if os.fork() == 0:
    os.close(1); os.close(2)
    time.sleep(20)
    os._exit(0)
os._exit(9)
"""
    )
    with Store.open(tmp_path / "s") as store:
        assert_holds(store, 0)


# -- threads ---------------------------------------------------------------------------------


def test_several_threads_move_chunks_at_once(tmp_path: Path, engine):
    regions = [Region(f"r{i}", (PAGE,) * 8) for i in range(4)]
    failures: list[BaseException] = []

    def work(store: Store, key: str, generation: int) -> None:
        try:
            for chunk in range(8):
                if generation:
                    old = read_chunk(store, key, chunk, PAGE)
                    assert np.array_equal(old, chunk_content(key, chunk, PAGE, generation - 1))
                store.wait(store.write(key, chunk, chunk_content(key, chunk, PAGE, generation)))
        except BaseException as error:
            failures.append(error)

    with Store.create(tmp_path / "s", regions, engine=engine) as store:
        for generation in range(3):
            threads = [
                threading.Thread(target=work, args=(store, r.key, generation)) for r in regions
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []
            store.commit({"step": generation})
        assert store.counters.bytes_written == 3 * 32 * PAGE


# -- one slot, in place ----------------------------------------------------------------------


def test_in_place_steps_count_from_the_next_clean_commit(tmp_path: Path, engine):
    place = tmp_path / "s"
    with Store.create(place, REGIONS, durability="checkpoint", engine=engine) as store:
        commit_next(store)  # the first commit is always durable
        assert store.health.status is Status.CLEAN
        key, chunk, nbytes = STATE_CHUNKS[0]
        store.wait(store.write(key, chunk, chunk_content(key, chunk, nbytes, 1)))
        assert store.health.status is Status.DIRTY
        assert admin.describe(place)["state"] == "not clean"
        with pytest.raises(StoreError, match="overwritten in place"):
            store.read(key, chunk, aligned_buffer(nbytes))
        commit_next(store)
        commit_next(store)
        assert_holds(store, 2)
        assert json.loads((place / files.MANIFEST).read_text())["generation"] == 0
        store.commit(advance=False, clean=True)
        assert store.health.status is Status.CLEAN
    with Store.open(place, engine=engine) as store:
        assert_holds(store, 2)
    assert not (place / "slot-b.bin").exists()


def test_a_store_left_in_the_middle_of_an_in_place_step_says_so(tmp_path: Path):
    with Store.create(tmp_path / "s", REGIONS, durability="checkpoint") as store:
        for number in range(2):
            write_generation(store, number)
            store.commit({PROGRESS: {"step": number}})
    with pytest.raises(StoreError, match=r"middle of a step.*generation 0 \(step 0\).*snapshot"):
        Store.open(tmp_path / "s")


def test_an_in_place_step_cannot_be_discarded(tmp_path: Path):
    with Store.create(tmp_path / "s", REGIONS, durability="checkpoint") as store:
        commit_next(store)
        store.discard()  # nothing written: nothing lost
        assert_holds(store, 0)
        write_generation(store, 1)
        store.discard()
        with pytest.raises(StoreError, match="written in place did not finish"):
            store.read(*STATE_CHUNKS[0][:2], aligned_buffer(STATE_CHUNKS[0][2]))


def test_snapshot_and_restore(tmp_path: Path):
    dirs, place = [tmp_path / "a", tmp_path / "b"], tmp_path / "snapshot"
    with Store.create(dirs, REGIONS, durability="checkpoint") as store:
        for _ in range(2):
            commit_next(store)
            store.commit(advance=False, clean=True)
            snapshot(store, place)
        assert not (place / "scratch.bin").exists()
        commit_next(store)
        with pytest.raises(StoreError, match="needs a clean store, this one is written in place"):
            snapshot(store, place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "snapshot"]
    with pytest.raises(StoreError, match="resume from the last snapshot"):
        Store.open(dirs)
    with restore(place, dirs) as store:
        assert_holds(store, 1)
        assert store.layout.regions == REGIONS
        store.wait(store.write("activations", 0, chunk_content("x", 0, PAGE, 0)))
        commit_next(store)
        assert_holds(store, 2)


def test_a_snapshot_of_a_two_slot_store_restores_to_any_durability(tmp_path: Path):
    with new_store(tmp_path / "s", generation=3) as store:
        snapshot(store, tmp_path / "snapshot")
    with restore(tmp_path / "snapshot", tmp_path / "t", durability="step") as store:
        assert_holds(store, 3)
        commit_next(store)
    with Store.open(tmp_path / "t") as store:
        assert_holds(store, 4)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_replacing_a_snapshot_always_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
):
    place = tmp_path / "snapshot"
    with new_store(tmp_path / "s") as store:
        snapshot(store, place)
        commit_next(store)
        real, done = os.replace, []

        def replace(source, target):
            if Path(source).is_dir() or len(done) > 2:
                if len(done) == renames:
                    raise OSError("killed")
                done.append(source)
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        if renames < 2:
            with pytest.raises(StorageIOError, match="killed"):
                snapshot(store, place)
        else:
            snapshot(store, place)
        monkeypatch.undo()
        with Store.open(find_snapshot(place), with_scratch=False) as copy:
            assert_holds(copy, 1 if renames == 2 else 0)
        snapshot(store, place)
        with Store.open(find_snapshot(place), with_scratch=False) as copy:
            assert_holds(copy, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "snapshot"]


def test_a_damaged_snapshot_is_not_restored(tmp_path: Path):
    with new_store(tmp_path / "s") as store:
        snapshot(store, tmp_path / "snapshot")
    flip_byte(tmp_path / "snapshot" / "slot-a.bin", 5)
    with pytest.raises(ChecksumError, match="'block0/weights' chunk 0"):
        restore(tmp_path / "snapshot", tmp_path / "t")
    assert not (tmp_path / "t").exists()
    with pytest.raises(StoreError, match="no snapshot at"):
        restore(tmp_path / "nowhere", tmp_path / "t")


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- from the outside ------------------------------------------------------------------------


def test_list_describe_remove(tmp_path: Path):
    run_a, run_b = tmp_path / "runs" / "a" / "store", tmp_path / "runs" / "b" / "store"
    new_store([run_a, tmp_path / "nvme"], generation=1).close()
    new_store(run_b).close()
    assert admin.list_stores(tmp_path) == [run_a, run_b]
    reported = admin.describe(run_a)
    assert (reported["generation"], reported["durability"], reported["meta"]) == (
        1,
        "step",
        {"step": 1},
    )
    assert reported["state"] == "clean" and reported["in_use_by"] is None
    assert reported["state_bytes"] == sum(n for _, _, n in STATE_CHUNKS)
    assert [d["present"] for d in reported["dirs"]] == [True, True]
    (tmp_path / "nvme" / "note.txt").write_text("mine")
    assert admin.remove(run_a) == [run_a, tmp_path / "nvme"]
    assert file_names(tmp_path / "nvme") == ["note.txt"]
    assert not run_a.exists()
    assert admin.list_stores(tmp_path) == [run_b]


def test_several_ranks_make_one_directory(tmp_path):
    """Whoever is faster: it is there for all of them."""
    with ThreadPoolExecutor(4) as pool:
        for attempt in range(40):
            place, start = tmp_path / str(attempt) / "a" / "b", threading.Barrier(4)

            def make(_: int, place: Path = place, start: threading.Barrier = start) -> list[Path]:
                start.wait(HANG_S)
                return files.make_directories([place])

            result = list(pool.map(make, range(4)))
            assert sorted(p for one in result for p in one) == [
                place.parent.parent,
                place.parent,
                place,
            ]
