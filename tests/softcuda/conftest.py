"""Settings of the tests that run on software CUDA only."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lohan.util.units import MiB
from tests.softcuda import extension, installed


def pytest_ignore_collect() -> bool | None:
    return None if installed() else True


@pytest.fixture(autouse=True)
def fresh_devices() -> Iterator[None]:
    """Check the order of all accesses, then restore memory and delays and empty the caches."""
    import torch

    cuda = extension()
    cuda.set_order(True)
    cuda.set_guard(True)
    yield
    races = cuda.take_races()
    cuda.set_delays(0, 0, 0)
    cuda.set_poison(False)
    cuda.set_pinnable(2**62)
    for device in range(torch.cuda.device_count()):
        cuda.set_memory(device, 1024 * MiB)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not races, races
