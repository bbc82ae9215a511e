"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# The asserts of helpers then show their values, as those of tests do.
pytest.register_assert_rewrite("tests.support")

from tests.support.isolation import isolate_from_user, restore_ctrl_c  # noqa: E402

HOME = isolate_from_user()
restore_ctrl_c()

# Examples have no time limit: on a machine with other work, any of them can take a second.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# Models here are so small that a second compute thread only waits for the first; with other work
# on the machine that wait dominates. Children inherit it. It must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take longest, most of them for the processes they start. Workers take whole files, in
# this order and then as collected, so that none of these is left for the end.
LONG = (
    "end_to_end/test_crash",
    "end_to_end/test_no_file_lost",
    "device/test_team",
    "hf/test_trainer",
    "hf/test_scripts",
    "hf/test_stores",
    "planner/test_machine_plan",
    "docs/test_readme",
    "end_to_end/test_many_gpus",
    "engine/test_kept_activations",
    "engine/test_overlap",
    "device/test_emulated",
    "examples/test_demo",
    "tools/test_verify",
    "device/test_team_loops",
    "train/test_preference",
    "train/test_model_card",
    "train/test_supervised",
    "train/test_diffusion",
    "replay/test_replay",
    "end_to_end/test_architectures",
    "end_to_end/test_memory",
    "end_to_end/test_device_memory",
    "train/test_evaluation",
    "examples/test_examples",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(f"{item.path.parent.name}/{item.path.stem}", len(LONG)))


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

    result = Forge(tmp_path_factory.mktemp("forge"))
    yield result
    result.close()


@pytest.fixture
def lohan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `lohan ARGS` in this process, as the installed program does."""
    from lohan.cli import main
    from tests.support.forked_commands import Ended

    def run(*args: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, args)])
        try:
            main.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


@pytest.fixture(autouse=True)
def no_cached_profiles() -> Iterator[None]:
    """Remove profiles that a test has cached, so that the next test does not plan by them."""
    yield
    shutil.rmtree(HOME / ".cache" / "lohan", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def right_checksums() -> Iterator[None]:
    """Verify, in every test, each checksum that a caller passes with a write."""
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
