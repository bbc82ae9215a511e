"""Uses of weights by graphs that never run their backward do not disturb the steps that follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.errors import LohanError
from lohan.util.units import MiB
from tests.support.delayed_runs import net_batches, small_net
from tests.support.models import assert_same, attached, master_weights

STEPS = 5


class Broken(Exception):
    pass


@contextmanager
def broken_inside(block: nn.Module) -> Iterator[None]:
    """Raise in the backward of a module inside `block`."""

    def fail(grad: torch.Tensor) -> None:
        raise Broken

    def forward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(fail)

    handle = block.norm.register_forward_hook(forward)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_device(place: Path) -> Iterator[lohan.Session]:
    device = EmulatedDevice(64 * MiB)
    budget = lohan.Budget(host="64MiB", ssd=[place])
    with attached(small_net(), place, budget=budget, device=device) as session:
        yield session


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with on_device(tmp_path_factory.mktemp("undisturbed")) as session:
        for batch in net_batches(STEPS):
            session.model(**batch).backward()
        return master_weights(session)


@pytest.mark.parametrize("failing", [0, 2])
def test_blocks_learn_on_after_an_error_in_backward(
    failing: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    with on_device(tmp_path) as session:
        for step, batch in enumerate(net_batches(STEPS)):
            if step == failing:
                failed = session.model(**batch)
                with broken_inside(session.model.blocks[1]), pytest.raises(Broken):
                    session.model(**batch).backward()
                with pytest.raises(LohanError, match="before a step that failed"):
                    failed.backward()
            session.model(**batch).backward()
        assert_same(master_weights(session), expected)


def test_a_loss_that_is_kept_without_its_backward(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    with on_device(tmp_path) as session:
        for step, batch in enumerate(net_batches(STEPS)):
            if step == 1:
                kept = session.model(**batch)
            session.model(**batch).backward()
        assert_same(master_weights(session), expected)
        with pytest.raises(LohanError, match="from before the last step"):
            kept.backward()
