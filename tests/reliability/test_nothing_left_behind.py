"""The memory of a process does not grow with traces and whole runs.

benchmarks/soak.py tests the same for an hour.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from benchmarks.soak import LIMITS, growing
from lohan.capture.tracing import inventory
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs


def fake_tensors() -> int:
    gc.collect()
    return sum(type(item) is FakeTensor for item in gc.get_objects())


def test_trace_does_not_keep_its_graph_alive() -> None:
    """A trace frees its graph.

    exp and softmax save their own results, which creates a reference cycle with a hook that
    keeps them.
    """
    block = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Tanh())
    before = fake_tensors()
    for _ in range(2):
        assert inventory(block, (torch.zeros(2, 4, 8, device="meta"),)).graph.saved
    assert fake_tensors() == before


def test_a_run_leaves_no_types_behind(tmp_path: Path, lohan) -> None:
    """Registries would keep a class that is created for a model."""
    inputs = write_tiny_inputs(tmp_path)

    def types_after(number: int) -> Counter[str]:
        ended = lohan("train", *tiny_arguments(inputs, tmp_path / f"run-{number}"))
        assert ended.code == 0, ended.err
        gc.collect()
        collected = Counter(repr(kind) for kind in pytree.SUPPORTED_NODES)
        collected.update(repr(kind) for kind in gc.get_objects() if isinstance(kind, type))
        return collected

    types_after(0)  # imports, and caches of the process
    before = types_after(1)
    assert types_after(2) - before == Counter()


def noisy(name: str, *, rate: float, jump: float = 0.0) -> list[int]:
    """Return 60 cycles with noise of the size that soak has seen, and a growing cache."""
    draw, noise = random.Random(0), 24 * LIMITS[name]
    start = itertools.count(300_000_000)
    return [
        next(start) + int(rate * i + draw.uniform(0, noise) + jump * (i > 40)) for i in range(60)
    ]


@pytest.mark.parametrize("name", [name for name in LIMITS if LIMITS[name]])
def test_soak_sees_a_leak_within_its_noise(name: str) -> None:
    """Halves of a noisy series overlap long after its slope is plain."""
    limit = LIMITS[name]
    leaking = noisy(name, rate=2.5 * limit)
    assert growing(name, leaking)
    assert not growing(name, noisy(name, rate=0.0))
    assert not growing(name, noisy(name, rate=0.0, jump=30 * limit)), "a cache that grew once"


@pytest.mark.parametrize("name", [name for name in LIMITS if not LIMITS[name]])
def test_soak_sees_a_descriptor_that_stays_open(name: str) -> None:
    assert not growing(name, [7, 8, 7, 7, 8, 7, 7, 8])
    assert growing(name, [7, 7, 8, 8, 8, 8, 9, 9])
