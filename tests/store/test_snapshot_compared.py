"""A snapshot verifies the checksums of the store, even where reads do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lohan.errors import ChecksumError
from lohan.store.admin import snapshot
from lohan.store.store import Store
from lohan.util.units import PAGE
from tests.support.stores import REGIONS, commit_next


def test_a_byte_that_changes_under_an_open_store_is_not_copied(tmp_path: Path):
    with Store.create(tmp_path / "s", REGIONS) as store:
        commit_next(store)  # what this process wrote is read without a check
        fd = os.open(tmp_path / "s" / "slot-a.bin", os.O_RDWR)
        old = os.pread(fd, 1, 3 * PAGE + 17)
        os.pwrite(fd, bytes([old[0] ^ 1]), 3 * PAGE + 17)
        os.fsync(fd)
        os.close(fd)
        with pytest.raises(ChecksumError, match=r"'block0/state' chunk 0 .* expected; check the"):
            snapshot(store, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
