"""Stores that are removed, read-only, or written in place only partly."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lohan
from lohan.errors import ChecksumError, LohanError, StoreError
from lohan.store import store as store_module
from lohan.store.extents import Region
from lohan.store.io_engine import aligned_buffer
from lohan.store.store import Store
from lohan.util.units import PAGE
from tests.support.models import batches, small_model


def created(place: Path, **options: Any) -> Store:
    store = Store.create(place, [Region("a", (PAGE,)), Region("b", (PAGE,))], **options)
    for key in "ab":
        write(store, key, ord(key))
    store.commit()
    return store


def write(store: Store, key: str, value: int) -> None:
    buffer = aligned_buffer(PAGE)
    buffer[:] = value
    store.wait(store.write(key, 0, buffer))


def read(store: Store, key: str) -> np.ndarray:
    buffer = aligned_buffer(PAGE)
    store.wait(store.read(key, 0, buffer))
    return buffer


@pytest.mark.parametrize("name", [None, "store.json", "slot-a.bin"])
def test_removed_file_is_noticed_by_next_read(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PRESENCE_INTERVAL_S", 0.0)
    with created(tmp_path / "store") as store:
        store.health.check()
        if name is None:
            shutil.rmtree(tmp_path / "store")
        else:
            (tmp_path / "store" / name).unlink()
        with pytest.raises(StoreError, match="was removed while the run used it"):
            read(store, "a")


def test_removed_store_is_noticed_between_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a session that keeps everything in host memory and reads nothing in a step."""
    monkeypatch.setattr(store_module, "PRESENCE_INTERVAL_S", 0.0)
    data = batches(6, batch=2, seq=16)
    model = small_model("llama")
    budget = lohan.Budget(host="256MiB", ssd=[tmp_path], commit_every="1h")
    session = lohan.attach(model, optimizer=lohan.AdamW(lr=1e-3), budget=budget, batch=data[0])
    with pytest.raises(StoreError, match="was removed while the run used it"):
        for step, batch in enumerate(data):
            model(**batch).loss.backward()
            if step == 2:
                session.commit()  # none is in flight
                shutil.rmtree(session.store.dirs[0], ignore_errors=True)
        pytest.fail("the run has not noticed it")
    with suppress(LohanError):
        session.close()


def test_commit_in_place_leaves_unwritten_chunks_to_verify(tmp_path: Path) -> None:
    created(tmp_path / "store", durability="checkpoint").close()
    slot = tmp_path / "store" / "slot-a.bin"
    with Store.open(tmp_path / "store") as store:
        extent = store.layout.find("b", 0)
        with slot.open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"!")
        write(store, "a", 7)
        store.commit()
        assert (read(store, "a") == 7).all()
        with pytest.raises(ChecksumError, match="region 'b' chunk 0"):
            read(store, "b")


def test_read_only_drive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created(tmp_path / "store").close()
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=r"store: its file system is read-only; .*dmesg") as caught:
        Store.open(tmp_path / "store")
    assert "lock file" not in str(caught.value)
