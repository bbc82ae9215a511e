"""Snapshots share blocks with their store if the file system can.

XFS and btrfs are created in a loop device, which needs root and their tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lohan.errors import StorageIOError
from lohan.store import io_engine
from lohan.store.admin import restore, rewind, snapshot
from lohan.store.extents import Region
from lohan.store.io_engine import aligned_buffer
from lohan.store.store import Store
from lohan.util.units import MiB
from tests.support import HANG_S

MAKE = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}
CHUNKS, CHUNK = 16, 2 * MiB
REGIONS = [Region("a", (CHUNK,) * CHUNKS), Region("fixed", (CHUNK,), fixed=True)]
TOTAL = (CHUNKS + 1) * CHUNK


@pytest.fixture(params=MAKE)
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    image, place = tmp_path / "image", tmp_path / "mounted"
    if not shutil.which(MAKE[request.param][0]):
        pytest.skip(f"no {MAKE[request.param][0]} here")
    with image.open("wb") as file:
        file.truncate(400 * MiB)
    place.mkdir()
    for command in ([*MAKE[request.param], image], ["mount", "-o", "loop", image, place]):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        if ended.returncode:
            pytest.skip(f"{command[0]}: {ended.stderr.strip()[:200]}; needs root and loop devices")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True, timeout=HANG_S)


def write(store: Store, value: int) -> None:
    for region in REGIONS:
        if region.fixed and store.generation >= 0:
            continue
        for chunk in range(len(region.chunks)):
            piece = aligned_buffer(CHUNK)
            piece[:] = (value + chunk) % 251
            store.wait(store.write(region.key, chunk, piece))
    store.commit({"value": value}, clean=True)


def values(store: Store) -> list[int]:
    collected = []
    for chunk in range(CHUNKS):
        piece = aligned_buffer(CHUNK)
        store.wait(store.read("a", chunk, piece))
        assert (piece == piece[0]).all()
        collected.append(int(piece[0]))
    return collected


def used(place: Path) -> int:
    os.sync()
    actual = os.statvfs(place)
    return (actual.f_blocks - actual.f_bfree) * actual.f_frsize


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_snapshot_shares_blocks_until_the_store_is_written(
    mounted: Path, tmp_path: Path, durability: str
) -> None:
    with Store.create(mounted / "s", REGIONS, durability=durability) as store:
        write(store, 1)
        before, written = used(mounted), store.counters.bytes_written
        assert snapshot(store, mounted / "kept") == TOTAL
        assert used(mounted) - before < TOTAL / 4
        assert store.counters.bytes_read == 0 and store.counters.bytes_written == written
        for value in (2, 3, 4):  # both slots are written over, in place
            write(store, value)
        # Without what is fixed, over the one before; then the store goes back to it.
        assert snapshot(store, mounted / "later", with_fixed=False) == TOTAL - CHUNK
        write(store, 5)
        rewind(store, mounted / "later")
        assert values(store) == [4 + n for n in range(CHUNKS)] and store.meta["value"] == 4
        # To another file system it is copied.
        store.commit(advance=False, clean=True)
        assert snapshot(store, tmp_path / "copied") == 0
    for kept, value in ((mounted / "kept", 1), (tmp_path / "copied", 4)):
        with restore(kept, tmp_path / "restored") as again:
            assert values(again) == [value + n for n in range(CHUNKS)]


def test_copies_if_the_file_system_refuses_reflinks_and_reports_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision depends on the error of the call only."""
    requests: list[int] = []

    def refuse(number: int) -> None:
        def ioctl(file: int, request: int, argument: bytes) -> int:
            assert request == io_engine.FICLONERANGE
            requests.append(len(argument))
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(io_engine.fcntl, "ioctl", ioctl)

    with Store.create(tmp_path / "s", REGIONS) as store:
        write(store, 7)
        for number in io_engine.NO_REFLINK:
            refuse(number)
            assert snapshot(store, tmp_path / "copy") == 0
        assert set(requests) == {32}
        refuse(5)
        with pytest.raises(StorageIOError, match="a snapshot failed: Input/output error"):
            snapshot(store, tmp_path / "copy")
    with Store.open(tmp_path / "copy") as whole:  # the one before is still there
        assert values(whole) == [7 + n for n in range(CHUNKS)]
        piece = aligned_buffer(CHUNK)
        whole.wait(whole.read("fixed", 0, piece))
        assert np.unique(piece).tolist() == [7]
