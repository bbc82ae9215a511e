"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.isolation import isolate_from_user

HOME = isolate_from_user()

# Models here are so small that a second compute thread only waits for the first; with other work
# on the machine that wait dominates. Children inherit it. It must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Files that take longest, most of them for the processes they start. Workers take whole files, in
# this order and then as collected, so that none of these is left for the end.
LONG = (
    "test_readme",
    "test_no_file_lost",
    "test_crash",
    "test_backend",
    "test_team",
    "test_many_gpus",
    "test_activations",
    "test_overlap",
    "test_devices",
    "test_demo",
    "test_verify",
    "test_team_loops",
    "test_architectures",
    "test_memory",
    "test_device_memory",
    "test_evaluation",
    "test_examples",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """Freeze the objects that imports and test collection have created.

    They live until the end, so garbage collections need not examine them again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start processes quickly (support/forked_commands.py)."""
    from tests.support.forked_commands import Forge

    made = Forge(tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_cached_profiles() -> Iterator[None]:
    """Remove profiles that a test has cached, so that the next test does not plan by them."""
    yield
    shutil.rmtree(HOME / ".cache" / "lohan", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def right_checksums() -> Iterator[None]:
    """Whoever brings the checksum of what is written has the right one: in every test."""
    from lohan.store.manifest import checksum
    from lohan.store.store import Store

    write = Store.write

    def checked(store: Any, key: str, chunk: int, buffer: Any, *, crc: int | None = None) -> Any:
        assert crc is None or crc == checksum(buffer), f"{key} chunk {chunk}"
        return write(store, key, chunk, buffer, crc=crc)

    Store.write = checked
    yield
    Store.write = write


@pytest.fixture
def native_settings() -> Iterator[None]:
    """Restore the instruction set and the thread count of the native core afterwards."""
    from lohan import _core

    isa, threads = _core.isa(), _core.threads()
    yield
    _core.set_isa(isa)
    _core.set_threads(threads)
