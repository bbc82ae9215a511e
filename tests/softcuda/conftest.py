"""`make test-cuda` runs what is here, on software CUDA alone."""

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
    """A gigabyte each, and streams on time; what a test has left in caches goes."""
    import torch

    cuda = extension()
    yield
    cuda.set_delays(0, 0, 0)
    cuda.set_poison(False)
    cuda.set_pinnable(2**62)
    for device in range(torch.cuda.device_count()):
        cuda.set_memory(device, 1024 * MiB)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
