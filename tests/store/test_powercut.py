"""Cut the power at every operation of the store, with journals of two kinds.

Opening the store gives the last committed generation or the one in flight, complete and bit for
bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lohan.checkpoint.replacing import MARK, replacing, target_check
from lohan.checkpoint.resharding import StoreSet, open_set
from lohan.checkpoint.safetensors import FileTensor, ShardedWriter
from lohan.errors import StorageIOError, StoreError
from lohan.store import admin
from lohan.store.admin import find_snapshot, restore, verify
from lohan.store.io_engine import Volume
from lohan.store.manifest import checksum
from lohan.store.recovery import apply_recovery, commit_state_of, recovery_actions
from lohan.store.store import Store
from lohan.train.run_folder import RunFolder, append_row, repair_logs, step_rows
from lohan.util.files import write_new
from tests.support.faults import FileEngine, Tape, recorded_operations
from tests.support.stores import (
    REGIONS,
    STATE_CHUNKS,
    assert_holds,
    chunk_content,
    is_whole,
    write_generation,
)

JOURNALS, KEEPS = ("ordered", "per inode"), ("lost", "kept", "pages")
Check = Callable[[Path, object], str]


def steps(tape: Tape, store: Store, until: int) -> None:
    while store.generation < until:
        write_generation(store, store.generation + 1)
        store.commit({"step": store.generation + 1})
        tape.mark(store.generation)


def holds(dirs: Sequence[Path], promised: object) -> str:
    """Check that the store has the promised generation or the next one, and return the outcome.

    Before any is promised, it may have none, or opening may be refused with a clear message.
    """
    try:
        with Store.open(dirs, engine="threads") as store:
            actual = store.generation
            assert verify(store) == []
            assert_holds(store, actual)
            write_generation(store, actual + 1)  # and it goes on
            store.commit({"step": actual + 1})
    except StoreError:
        if promised is None:
            return "none"
        raise
    assert promised is None or actual in (promised, int(str(promised)) + 1)
    return "promised" if actual == promised else "in flight"


# -- what is recorded, and how it is checked -------------------------------------------------


def commits(root: Path, tape: Tape, count: int) -> Check:
    names = ["a", "b", "c"][:count]
    dirs = [root / name for name in names]
    with Store.create(dirs, REGIONS, engine=FileEngine(tape)) as store:
        steps(tape, store, 2)
    with Store.open(dirs, engine=FileEngine(tape)) as store:
        steps(tape, store, 3)
    return lambda disk, promised: holds([disk / name for name in names], promised)


def one_directory(root: Path, tape: Tape) -> Check:
    return commits(root, tape, 1)


def written_again(root: Path, tape: Tape) -> Check:
    """Commit by interval, so that steps between two commits write the next generation in place."""
    with Store.create(root / "a", REGIONS, engine=FileEngine(tape)) as store:
        for generation in range(4):
            for step in (100, 200, generation):
                write_generation(store, step)
            store.commit({"step": generation})
            tape.mark(generation)
    return lambda disk, promised: holds([disk / "a"], promised)


def three_directories(root: Path, tape: Tape) -> Check:
    return commits(root, tape, 3)


def two_ranks(root: Path, tape: Tape) -> Check:
    """Both prepare before either renames, as ranks do; here one after the other."""
    names = ["x", "y"]
    stores: list[Store] = []

    def meet_of(number: int) -> Callable[[], None]:
        def meet() -> None:
            if number == 0:  # the other prepares and commits while this one waits
                step_of(stores[1])

        return meet

    def step_of(store: Store) -> None:
        write_generation(store, store.generation + 1)
        store.commit({"step": store.generation + 1})

    for number, name in enumerate(names):
        stores.append(
            Store.create(root / name, REGIONS, engine=FileEngine(tape), barrier=meet_of(number))
        )
    for generation in range(3):
        step_of(stores[0])
        tape.mark(generation)
    for store in stores:
        store.close()

    def check(disk: Path, promised: object) -> str:
        paths = [disk / name for name in names]
        try:
            actions = recovery_actions([commit_state_of(path) for path in paths])
            if actions is None:
                raise StoreError("never committed")
            for path, action in zip(paths, actions, strict=True):
                apply_recovery(path, action)
            with open_set(StoreSet(tuple((path,) for path in paths))) as opened:
                actual = {store.generation for store in opened}
                assert len(actual) == 1
                for store in opened:
                    generation = actual.copy().pop()
                    for key, chunk, nbytes in STATE_CHUNKS:
                        crc = store.checksum(key, chunk)
                        assert crc == checksum_of(key, chunk, nbytes, generation)
                    assert verify(store) == []
        except (StoreError, FileNotFoundError):
            if promised is None:
                return "none"
            raise
        (generation,) = actual
        assert promised is None or generation in (promised, int(str(promised)) + 1)
        return "promised" if generation == promised else "in flight"

    return check


def checksum_of(key: str, chunk: int, nbytes: int, generation: int) -> int:
    return checksum(chunk_content(key, chunk, nbytes, generation))


def in_place(root: Path, tape: Tape) -> Check:
    """Take two snapshots with durability "checkpoint", stop in a step, and restore."""
    engine = FileEngine(tape)
    dirs = [root / "a", root / "b"]
    with Store.create(dirs, REGIONS, durability="checkpoint", engine=engine) as store:
        for generation in range(2):
            write_generation(store, generation)
            store.commit({"step": generation}, clean=True)
            admin.snapshot(store, root / "snapshot", engine=engine)  # type: ignore[arg-type]
            tape.mark(generation)
        write_generation(store, 2)
    restore(root / "snapshot", dirs, engine=FileEngine(tape)).close()
    tape.mark(1)

    def check(disk: Path, promised: object) -> str:
        places = [disk / "a", disk / "b"]
        outcome = "whole"
        if not is_whole(places[0]):
            try:
                find_snapshot(disk / "snapshot")
            except StoreError:
                assert promised is None
                return "none"
            restore(disk / "snapshot", places, engine="threads").close()
            outcome = "restored"
        with Store.open(places, engine="threads") as store:
            assert verify(store) == []
            assert_holds(store, store.generation)
            assert promised is None or store.generation in (promised, int(str(promised)) + 1)
        return outcome

    return check


def exports(root: Path, tape: Tape) -> Check:
    """Export a run three times to one folder; the last export fails.

    The check replaces the inodes in the journal by those that the names have on the replayed
    disk.
    """
    target, shape = root / "model", (4096,)

    def export(number: int, *, fails: bool = False) -> None:
        check = target_check(target, overwrite=True, mark="run")
        with replacing(target, check=check, mark="run") as folder:
            write_new(folder / "config.json", b"%d" % number)
            weights = [FileTensor("w", torch.float32, shape)]
            with ShardedWriter(folder, tensors=weights, max_shard_bytes=10**6) as writer:
                writer.write("w", torch.full(shape, float(number)))
            if fails:
                raise OSError(28, "No space left on device")

    for number in range(2):
        export(number)
        tape.mark(number)
    with suppress(StorageIOError):
        export(2, fails=True)

    def check(disk: Path, promised: object) -> str:
        place, journal = disk / target.name, disk / ".model.lohan-journal"
        if journal.exists() and (entry := json.loads(journal.read_bytes())):
            for what in entry:
                folder = disk / f".model.{what}"
                entry[what] = folder.stat().st_ino if entry[what] and folder.exists() else 0
            journal.write_text(json.dumps(entry))
        with suppress(ZeroDivisionError), replacing(place, check=lambda: None):
            1 / 0  # noqa: B018 - what a crash has left is settled, and nothing is exported
        left = {path.name for path in disk.iterdir()}
        assert left <= {target.name}, left
        if not left:
            assert promised is None
            return "none"
        number = int((place / "config.json").read_bytes())
        with safe_open(place / "model.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("w"), torch.full(shape, float(number)))
        assert promised is None or number in (promised, int(str(promised)) + 1)
        assert json.loads((place / MARK).read_text())["run"] == "run"
        return "promised" if number == promised else "in flight"

    return check


def logs(root: Path, tape: Tape) -> Check:
    """Rows of a log, its rewriting after a crash, and rows again."""
    folder = RunFolder(root)
    for number in range(1, 4):
        append_row(folder.metrics_file, {"step": number, "loss": 1.0 / number})
        tape.mark(number)
    repair_logs(folder, step=3, last=[])
    for number in range(4, 6):
        append_row(folder.metrics_file, {"step": number, "loss": 1.0 / number})
        tape.mark(number)

    def check(disk: Path, promised: object) -> str:
        actual = RunFolder(disk)
        rows = [row["step"] for row in step_rows(actual)]
        assert rows == list(range(1, len(rows) + 1)), rows
        assert promised is None or len(rows) in (promised, int(str(promised)) + 1)
        repair_logs(actual, step=len(rows), last=[])
        append_row(actual.metrics_file, {"step": len(rows) + 1, "loss": 1.0})
        assert len(step_rows(actual)) == len(rows) + 1
        return "promised" if len(rows) == (promised or 0) else "in flight"

    return check


SCENES = {
    f.__name__: f
    for f in (
        one_directory,
        written_again,
        three_directories,
        two_ranks,
        in_place,
        exports,
        logs,
    )
}


# -- the campaign ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tape, Check]]:
    created = {}
    for name, scene in SCENES.items():
        root = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch, recorded_operations(root, patch) as tape:
            created[name] = (tape, scene(root, tape))
    return created


def replay(
    tape: Tape, check: Check, place: Path, *, cuts: Sequence[tuple[int, str, str, int]]
) -> Counter[str]:
    tally: Counter[str] = Counter()
    for prefix, journal, keep, seed in cuts:
        disk = tape.disk(prefix, journal, keep, random.Random(seed))  # type: ignore[arg-type]
        disk.write_to(place)
        try:
            tally[check(place, tape.last_mark(prefix))] += 1
        except BaseException as error:
            error.add_note(f"cut behind operation {prefix}, {journal} journal, {keep}, seed {seed}")
            raise
        shutil.rmtree(place)
    return tally


@pytest.mark.parametrize("scene", SCENES)
def test_power_cuts(scene: str, tapes: dict[str, tuple[Tape, Check]], tmp_path: Path) -> None:
    tape, check = tapes[scene]
    chance = random.Random(7)
    cuts = [
        (chance.randint(0, len(tape.ops)), journal, keep, number)
        for number in range(7)
        for journal in JOURNALS
        for keep in KEEPS
    ]
    tally = replay(tape, check, tmp_path / "disk", cuts=cuts)
    assert len(tally) > 1


@pytest.mark.parametrize("left_out", ["data", "small files"])
def test_power_cut_detects_missing_sync(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same commits without one of their syncs do not survive the power cuts."""
    with monkeypatch.context() as patch, recorded_operations(tmp_path / "root", patch) as tape:
        if left_out == "data":
            patch.setattr(Volume, "sync", lambda volume, slot: None)
        else:
            patch.setattr(os, "fsync", lambda fd: None)
        (tmp_path / "root").mkdir()
        check = one_directory(tmp_path / "root", tape)
    cuts = [(len(tape.ops), journal, "lost", 0) for journal in JOURNALS]
    with pytest.raises((StoreError, AssertionError, FileNotFoundError)):
        replay(tape, check, tmp_path / "disk", cuts=cuts)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_power_cuts_at_every_operation(
    scene: str, tapes: dict[str, tuple[Tape, Check]], tmp_path: Path
) -> None:
    tape, check = tapes[scene]
    cuts = [
        (prefix, journal, keep, seed)
        for prefix in range(len(tape.ops) + 1)
        for journal in JOURNALS
        for keep in KEEPS
        for seed in range(3)
    ]
    tally = replay(tape, check, tmp_path / "disk", cuts=cuts)
    print(f"{scene}: {len(cuts)} states, {dict(tally)}")
    assert tally["promised"] + tally["whole"] + tally["restored"] > 0
