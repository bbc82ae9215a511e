"""The result is the one an in-memory AdamW run gives."""

from __future__ import annotations

import pytest
import torch

import lohan
from lohan.checkpoint import StoreReader
from lohan.state import MODES
from tests.models import batches, plain_run, small_model

STEPS = 20


def lr(step: int) -> float:
    return 5e-4 * min(1.0, (step + 1) / 5)


def lohan_run(model, data, tmp_path, *, micro_batch=None, weight_decay=0.1, engine="auto"):
    adamw = lohan.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    budget = lohan.Budget(host="256MiB", ssd=[tmp_path])
    losses = []
    with lohan.attach(
        model, optimizer=adamw, budget=budget, micro_batch=micro_batch, engine=engine
    ) as session:
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert session.step == len(data)
        return losses, master_weights(session)


def master_weights(session):
    reader = StoreReader(
        session.store, session.executor.blocks.groups, mode=MODES[session.plan.mode],
        chunk_params=session.plan.chunk_params,
    )  # fmt: skip
    return {
        name: reader.read_flat(name, 0, torch.Size(reader.shape(name)).numel()).view(
            reader.shape(name)
        )
        for name in reader.names()
    }


def assert_close(weights, expected, limit):
    """Absolute, since Adam turns the rounding noise of a gradient that is zero in exact arithmetic
    (the key bias of attention) into updates; fp32 PyTorch is as far from an fp64 run there."""
    worst = {name: float((weights[name] - expected[name]).abs().max()) for name in expected}
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(("batch", "micro_batch"), [(1, None), (4, None), (4, 2), (4, 3), (3, 1)])
def test_fp32_equals_in_memory_adamw(kind, batch, micro_batch, tmp_path):
    model = small_model(kind)
    data = batches(STEPS, batch=batch, seq=24)
    expected_losses, expected = plain_run(model, data, lr=lr, weight_decay=0.1)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=micro_batch)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert weights.keys() == expected.keys()
    assert_close(weights, expected, 1e-5)
