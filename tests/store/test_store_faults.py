"""Any fault at any time leads to a clear error and leaves the last committed generation intact."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store import admin
from lohan.store.admin import verify
from lohan.store.io_engine import aligned_buffer, open_engine
from lohan.store.manifest import checksum
from lohan.store.store import Status, Store
from lohan.util.units import PAGE
from tests.support.faults import CommitRecorder, EngineFault, FaultyEngine, Killed, recorded_engine
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

STEPS = 3


def kill(store: Store) -> None:
    """Release the locks of a store as the kernel does for a dead process; its files stay."""
    store._store_lock.release()


def train(store: Store, committed: list[int]) -> None:
    """Read, modify, write; remembers what was committed."""
    for _ in range(STEPS):
        generation = store.generation + 1
        for key, chunk, nbytes in STATE_CHUNKS:
            if generation > 0:
                read_chunk(store, key, chunk, nbytes)
            store.wait(store.write(key, chunk, chunk_content(key, chunk, nbytes, generation)))
        store.commit({"step": generation})
        committed.append(generation)


def faulty_runs() -> list[EngineFault]:
    chunks, syncs = len(STATE_CHUNKS), 2 * STEPS
    writes = [
        EngineFault(k, "write", n + 1) for n in range(STEPS * chunks) for k in ("eio", "enospc")
    ]
    torn = [EngineFault("torn_write", "write", n + 1) for n in range(0, STEPS * chunks, 3)]
    reads = [EngineFault("eio", "read", n + 1) for n in range((STEPS - 1) * chunks)]
    short = [EngineFault("short_read", "read", n + 1) for n in range(0, (STEPS - 1) * chunks, 3)]
    opens = [EngineFault("enospc", "open", n + 1) for n in range(5)]
    return [
        *writes,
        *torn,
        *reads,
        *short,
        *opens,
        *(EngineFault("eio", "sync", n + 1) for n in range(syncs)),
    ]


@pytest.mark.parametrize("fault", faulty_runs(), ids=lambda f: f"{f.kind}-{f.op}-{f.nth}")
def test_any_failed_operation_leaves_the_last_committed_generation(
    tmp_path: Path, fault: EngineFault
):
    memory: dict[str, bytearray] = {}
    dirs = [tmp_path / "x" / "a", tmp_path / "b"]
    engine = FaultyEngine(MemoryEngine(files=memory), fault)
    committed: list[int] = []
    with (
        pytest.raises(StorageIOError) as caught,
        Store.create(dirs, REGIONS, engine=engine) as store,
    ):
        train(store, committed)
    assert str(tmp_path) in str(caught.value)
    if fault.op in ("read", "write"):
        assert "region 'block0/" in str(caught.value) and "at offset" in str(caught.value)
    if not committed:
        assert file_names(tmp_path) == []
        return
    with Store.open(dirs[0], engine=MemoryEngine(files=memory)) as store:
        assert_holds(store, committed[-1])
        commit_next(store)
        assert_holds(store, committed[-1] + 1)


@pytest.mark.parametrize("kind", ["threads", "uring"])
@pytest.mark.parametrize("nth", [3, 8])
def test_a_failed_step_can_be_discarded_and_run_again(tmp_path: Path, kind: str, nth: int):
    engine = FaultyEngine(
        open_engine(kind), EngineFault("torn_write", "write", nth + len(STATE_CHUNKS))
    )
    with Store.create(tmp_path / "s", REGIONS, engine=engine) as store:
        commit_next(store)
        for generation in (1, 2):
            try:
                write_generation(store, generation)
            except StorageIOError:
                with pytest.raises(StoreError, match=r"in flight|was not written"):
                    store.commit({})
                store.discard()
                assert_holds(store, generation - 1)
                write_generation(store, generation)
            store.commit({"step": generation})
    engine.close()
    with Store.open(tmp_path / "s") as store:
        assert_holds(store, 2)


def test_random_delays_change_nothing(tmp_path: Path):
    engine = FaultyEngine(MemoryEngine(), max_delay_s=0.002, seed=3)
    with Store.create(tmp_path / "s", REGIONS, engine=engine) as store:
        train(store, [])
        assert_holds(store, STEPS - 1)


# -- inside the commit -----------------------------------------------------------------------


def test_a_commit_makes_each_thing_durable_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory: dict[str, bytearray] = {}
    with Store.create(
        [tmp_path / "a", tmp_path / "b"], REGIONS, engine=MemoryEngine(files=memory)
    ) as store:
        commit_next(store)
    recorder = CommitRecorder()
    recorder.arm(monkeypatch)
    with Store.open(tmp_path / "a", engine=recorded_engine(recorder, memory)) as store:
        commit_next(store)
    assert recorder.calls == [
        "sync slot-b.bin",
        "sync slot-b.bin",
        "write slot-b.crc.tmp",
        "fsync slot-b.crc.tmp",
        "replace slot-b.crc",
        "fsync a",
        "write manifest.json.tmp",
        "fsync manifest.json.tmp",
        "replace manifest.json",
        "fsync a",
    ]


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
@pytest.mark.parametrize("die_at", range(1, 19))
def test_a_crash_at_any_boundary_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, die_at: int
):
    memory: dict[str, bytearray] = {}
    place = tmp_path / "s"
    with Store.create(
        place, REGIONS, durability=durability, engine=MemoryEngine(files=memory)
    ) as store:
        for generation in range(2):
            write_generation(store, generation)
            store.commit({"step": generation}, clean=True)
    recorder = CommitRecorder()
    store = Store.open(place, engine=recorded_engine(recorder, memory))
    write_generation(store, 2)
    with monkeypatch.context() as patch:
        recorder.arm(patch, die_at=die_at)
        with pytest.raises(Killed):
            store.commit({"step": 2}, clean=True)
    renamed = "replace manifest.json" in recorder.calls
    kill(store)
    if durability == "checkpoint" and not renamed:
        with pytest.raises(StoreError, match="died in the middle of a step"):
            Store.open(place, engine=MemoryEngine(files=memory))
        return
    with Store.open(place, engine=MemoryEngine(files=memory)) as store:
        assert_holds(store, 2 if renamed else 1)
        assert verify(store) == []


@pytest.mark.parametrize("die_at", range(1, 45))
def test_a_crash_at_any_boundary_of_a_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int
):
    dirs = [tmp_path / "a", tmp_path / "b"]
    memory: dict[str, bytearray] = {}
    recorder = CommitRecorder()
    stores: list[Store] = []
    monkeypatch.setattr(Store, "close", lambda store: kill(store))
    with monkeypatch.context() as patch:
        recorder.arm(patch, die_at=die_at)
        with pytest.raises(Killed):
            stores.append(Store.create(dirs, REGIONS, engine=recorded_engine(recorder, memory)))
            commit_next(stores[0])
    for store in stores:
        kill(store)
    monkeypatch.undo()
    if "replace manifest.json" in recorder.calls:
        with Store.open(dirs[0], engine=MemoryEngine(files=memory)) as store:
            assert_holds(store, 0)
    elif "replace store.json" in recorder.calls:
        with pytest.raises(StoreError, match="did not finish"):
            Store.open(dirs[0], engine=MemoryEngine(files=memory))
        admin.remove(dirs[0])
        assert file_names(tmp_path) == []
    else:
        with Store.create(dirs, REGIONS, engine=MemoryEngine()) as store:  # as if nothing was
            commit_next(store)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_commit_that_fails_stops_the_store_and_a_fresh_open_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store.create(tmp_path / "s", REGIONS) as store:
        commit_next(store)
        write_generation(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageIOError, match=r"slot-b\.crc: cannot write .* No space left"):
                store.commit({"step": 1})
        assert store.health.status is Status.FAILED
        with pytest.raises(StoreError, match=r"commit of generation 1 failed.*; resume the run"):
            store.write(*STATE_CHUNKS[0][:2], chunk_content(*STATE_CHUNKS[0], 1))
        assert_holds(store, 0)
    with Store.open(tmp_path / "s") as store:
        assert_holds(store, 0)
        commit_next(store)
        assert_holds(store, 1)


# -- kill -9 ---------------------------------------------------------------------------------

LOOP = """
import sys
from lohan.store.store import Store
from tests.support.stores import (
    assert_holds,
    commit_next,
)
with Store.open(sys.argv[1]) as store:
    assert_holds(store, store.generation)
    print(store.generation, flush=True)
    while True:
        commit_next(store)
        print(store.generation, flush=True)
"""


def test_kill_at_random_instants(tmp_path: Path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    with Store.create(dirs, REGIONS) as store:
        commit_next(store)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    chance = random.Random(5)
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(dirs[0])],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        seen = [int(line) for line in (first, *child.stdout.read().split())]
        child.wait()
        with Store.open(dirs[0]) as store:
            assert store.generation in (seen[-1], seen[-1] + 1)
            assert_holds(store, store.generation)


# -- damage ----------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    with Store.create(tmp_path / "s", REGIONS) as store:
        commit_next(store)
        commit_next(store)
    return tmp_path / "s"


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found_at_the_first_read(whole: Path):
    damage(whole / "slot-b.bin", 3 * PAGE + 17)
    key, chunk, nbytes = STATE_CHUNKS[2]
    expected = checksum(chunk_content(key, chunk, nbytes, 1))
    with Store.open(whole) as store:
        ticket = store.read(key, chunk, aligned_buffer(nbytes))
        with pytest.raises(ChecksumError) as caught:
            store.wait(ticket)
        for part in (repr(key), f"chunk {chunk}", "slot-b.bin", f"offset {3 * PAGE}"):
            assert part in str(caught.value)
        assert f"{expected:#010x}" in str(caught.value)
        (finding,) = verify(store)
        assert (finding.key, finding.chunk, finding.offset) == (key, chunk, 3 * PAGE)
        assert finding.path == whole / "slot-b.bin"
        read_chunk(store, *STATE_CHUNKS[0])  # the others are as they were
        commit_next(store)  # and the next generation does not depend on it
        assert_holds(store, 2)


def test_verify_setting_decides_which_reads_are_checked(whole: Path):
    key, chunk, nbytes = STATE_CHUNKS[0]
    for when, first, second in (
        ("first-read", False, False),
        ("always", False, True),
        ("never", False, False),
    ):
        with Store.open(whole, engine="threads", verify=when) as store:
            assert not raises_checksum(store, key, chunk, nbytes) or first
            damage(whole / "slot-b.bin", 9)
            assert raises_checksum(store, key, chunk, nbytes) is second, when
            damage(whole / "slot-b.bin", 9)
    damage(whole / "slot-b.bin", 9)
    with Store.open(whole, verify="never") as store:
        assert not raises_checksum(store, key, chunk, nbytes)
        assert len(verify(store)) == 1


def test_verifies_only_chunks_that_this_process_did_not_write(whole: Path):
    with Store.open(whole, engine="threads") as store:
        commit_next(store)
        damage(whole / "slot-a.bin", 9)
        assert not raises_checksum(store, *STATE_CHUNKS[0])
        assert len(verify(store)) == 1


def raises_checksum(store: Store, key: str, chunk: int, nbytes: int) -> bool:
    try:
        read_chunk(store, key, chunk, nbytes)
    except ChecksumError:
        return True
    return False


def test_verify_goes_through_a_bounded_buffer_and_reports_progress(
    whole: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lohan.store.admin.READ_BYTES", PAGE)
    damage(whole / "slot-b.bin", 2 * PAGE - 1)
    seen: list[tuple[int, int]] = []
    with Store.open(whole) as store:
        findings = verify(store, progress=lambda done, total: seen.append((done, total)))
    assert [(f.key, f.chunk) for f in findings] == [("block0/weights", 0)]
    total = sum(n for _, _, n in STATE_CHUNKS)
    assert seen[-1] == (total, total) and len(seen) == len(STATE_CHUNKS)


def test_verify_goes_on_after_a_read_error(whole: Path):
    engine = FaultyEngine(open_engine("threads"), EngineFault("eio", "read", 2))
    with Store.open(whole, engine=engine) as store:
        (finding,) = verify(store)
    engine.close()
    assert (finding.key, finding.chunk) == STATE_CHUNKS[1][:2]
    assert "EIO" in finding.problem


def edit_manifest(**changes: object) -> Callable[[Path], None]:
    def edit(whole: Path) -> None:
        path = whole / "manifest.json"
        fields = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps(fields))

    return edit


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda whole: os.truncate(whole / name, size)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate("slot-b.bin", PAGE), r"slot-b\.bin: has 4096 bytes, 32768 expected"),
        (truncate("slot-b.crc", 8), r"slot-b\.crc: has 8 bytes, 20 expected"),
        (truncate("manifest.json", 30), r"manifest\.json: cannot be understood"),
        (truncate("store.json", 0), r"store\.json: cannot be understood"),
        (edit_manifest(generation=7), r"manifest\.json: CRC-32C is 0x"),
        (edit_manifest(version=99), "format version 99, this program reads 2"),
        (edit_manifest(format="other"), "format is 'other', 'lohan-store' expected"),
        (lambda whole: damage(whole / "slot-b.crc", 3), r"slot-b\.crc: CRC-32C is 0x.* says 0x"),
        (lambda whole: damage(whole / "store.json", 40), r"store\.json"),
        (lambda whole: (whole / "slot-b.bin").unlink(), r"slot-b\.bin"),
        (lambda whole: (whole / "slot-b.crc").unlink(), r"slot-b\.crc: cannot read"),
        (lambda whole: (whole / "manifest.json").unlink(), "creation did not finish"),
    ],
)
def test_a_damaged_store_says_which_file(whole: Path, harm: Callable, message: str):
    harm(whole)
    with pytest.raises(StoreError, match=message):
        Store.open(whole)


def test_the_slot_that_is_not_committed_may_hold_anything(whole: Path):
    data = np.full((whole / "slot-a.bin").stat().st_size, 0xA5, np.uint8)
    (whole / "slot-a.bin").write_bytes(data.tobytes())
    (whole / "slot-a.crc").unlink()
    (whole / "manifest.json.tmp").write_text("half a manif")
    with Store.open(whole) as store:
        assert_holds(store, 1)
        commit_next(store)
    with Store.open(whole) as store:
        assert_holds(store, 2)
