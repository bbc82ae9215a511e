"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Models here are so small that a second compute thread only waits for the first; with other work
# on the machine that wait dominates. Children inherit it. It must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes processes quickly (processes.py)."""
    from tests.processes import Forge

    made = Forge(tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.fixture
def native_settings() -> Iterator[None]:
    """The core's instruction set and threads are afterwards as they were."""
    from lohan import _core

    isa, threads = _core.isa(), _core.threads()
    yield
    _core.set_isa(isa)
    _core.set_threads(threads)
