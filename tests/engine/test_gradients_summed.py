"""Gradients of one parameter from several slices or uses are added in fp32 for any dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lohan
from lohan.engine.gradients import GradientSink
from lohan.model.state import FLOAT
from lohan.store.store import Store
from lohan.util.units import PAGE, align_up
from tests.support.delayed_runs import (
    PlanTuning,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.models import attached, master_weights

WIDTH, RATE = 8, 2.0**-10
ROWS = (256.0, 1.0, 1.0, 1.0)  # bf16 has no number between 256 and 258


class Twice(nn.Module):
    """Blocks that begin as the identity; if `tied`, the first runs twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.tied = tied
        with torch.no_grad():
            for block in self.blocks:
                block.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.blocks[0](x) if self.tied else x).float().sum()


@pytest.mark.parametrize(
    "tied, micro_batch, expected",
    [(False, 1, sum(ROWS)), (True, 1, 2 * sum(ROWS)), (False, None, 260.0)],
)
def test_sums_gradients_of_micro_batches_in_fp32(tied, micro_batch, expected, tmp_path):
    """Without slices, one product has all rows and rounds once: 259 to 260."""
    model = Twice(tied).to(torch.bfloat16)
    sgd = lohan.SGD(lr=RATE, momentum=0.0)
    batch = {"x": torch.tensor(ROWS, dtype=torch.bfloat16)[:, None].expand(-1, WIDTH).contiguous()}
    options = {"optimizer": sgd, "micro_batch": micro_batch, "batch": batch}
    with attached(model, tmp_path, **options) as session:
        model(**batch).backward()
        moved = torch.eye(WIDTH) - master_weights(session)["blocks.0.weight"]
    assert (moved / RATE).unique().tolist() == [expected]


def test_no_gradient_is_made_of_what_is_frozen(tmp_path, monkeypatch):
    created: list[str] = []
    add = GradientSink.add

    def noted(sink: GradientSink, group: str, *args: Any, **named: Any) -> None:
        created.append(group)
        add(sink, group, *args, **named)

    monkeypatch.setattr(GradientSink, "add", noted)
    model = Twice(tied=False)
    model.blocks[1].requires_grad_(False)
    with attached(model, tmp_path) as session:
        model(torch.ones(2, WIDTH)).backward()
        trained = {group.key for group in session.executor.blocks.trained}
    assert len(trained) == 1 and set(created) == trained


@pytest.mark.parametrize(
    "dtype, micro_batch, expected_bytes, shared",
    [
        (torch.bfloat16, None, 2, 4),  # two sites add to the shared weights
        (torch.bfloat16, 2, 4, 4),  # sums of slices
        (torch.float32, None, 4, 4),
    ],
)
def test_gradients_go_to_ssd_as_wide_as_they_are(
    dtype, micro_batch, expected_bytes, shared, tmp_path, monkeypatch
):
    """Bytes of every spilled chunk, written and read; bits are those of the run in order."""
    tune_plans(monkeypatch, PlanTuning(spilled=1.0))
    results, moved = [], list[tuple[str, str, int, int]]()
    for name in ("read", "write"):
        submit = getattr(Store, name)

        def noted(store, key, chunk, buffer, *rest, submit=submit, name=name, **named):
            if key.startswith("g/"):
                size = store.layout.find(key, chunk).nbytes
                moved.append((name, key.removeprefix("g/"), buffer.nbytes, size))
            return submit(store, key, chunk, buffer, *rest, **named)

        monkeypatch.setattr(Store, name, noted)
    for overlap in (True, False):
        dataset = net_batches(3, kind="tied", dtype=dtype)
        options = {
            "clip": 0.01,
            "batch": dataset[0],
            "micro_batch": micro_batch,
            "overlap": overlap,
        }
        results.append(
            train_with_delays(
                small_net("tied", dtype=dtype), dataset, tmp_path / str(overlap), **options
            )
        )
        assert {name for name, *_ in moved} == {"read", "write"}
        assert {"entry", "exit", "blocks.0"} < {key for _, key, *_ in moved}
        for _, key, count, size in moved:  # a chunk of the store has room for fp32
            width = shared if key == "entry" else expected_bytes
            assert count == align_up(size // FLOAT * width, PAGE), key
        moved.clear()
    results[0].check(results[1])
