"""Clipping by the global norm equals torch.nn.utils.clip_grad_norm_ before an in-memory AdamW."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import lohan
from lohan import _core
from lohan.schedule.placement import needs_all_gradients
from lohan.store.files import SCRATCH
from tests.support.delayed_runs import PlanTuning, memory_engine, net_batches, small_net, tune_plans
from tests.support.models import assert_close, attached, decay_groups, loss_of, lr, master_weights

STEPS = 5


def clipped_run(
    model: nn.Module, train_batches: list[dict[str, torch.Tensor]], limit: float
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, norms before clipping and fp32 weights of the in-memory run."""
    model = copy.deepcopy(model)
    wide = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(decay_groups(wide, 0.1), lr=1.0, betas=(0.9, 0.95), eps=1e-3)
    losses, norms = [], []
    for step, batch in enumerate(train_batches):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(wide.parameters(), limit or math.inf).item())
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, norms, {name: p.detach() for name, p in wide.named_parameters()}


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_the_plan_knows_the_room_for_held_gradients(clip, tmp_path):
    """The plan counts the room for held gradients that the store has.

    It was decided when the store was created, and stays also where no gradient goes to SSD or
    none is held any more.
    """
    reserved = set()
    for now, resume in ((clip, False), (1.0, True), (0.0, True)):
        with attached(small_net(), tmp_path, clip=now, resume=resume) as session:
            rows = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "ssd"}
            file = session.store.dirs[0] / SCRATCH
            size = file.stat().st_size if file.exists() else 0
            assert rows.get("room for held gradients", 0) == size
            assert not session.plan.spilled_gradients
            reserved.add(size)
    assert len(reserved) == 1 and (reserved.pop() > 0) is (clip > 0)


def run(model, train_batches, place, *, limit):
    """Train with clipping and return losses, norms and weights.

    The large eps keeps Adam from dividing by the size of the gradient, so that a wrong factor
    is detected.
    """
    adamw = lohan.AdamW(lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    losses, norms = [], []
    with attached(model, place, optimizer=adamw, clip=limit, engine=memory_engine()) as session:
        for batch in train_batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            norms.append(session.grad_norm)
        return losses, norms, master_weights(session)


@pytest.mark.parametrize("side", ["above", "near", "below", "off"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "several"])
def test_clipped_run_equals_torch(kind, side, tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning(cached=0.3, spilled=0.5))
    model, rows = small_net(kind), net_batches(STEPS, kind=kind)
    _, free, unclipped = clipped_run(model, rows, 0.0)
    limit = {
        "above": min(free) / 5,
        "near": sorted(free)[STEPS // 2],
        "below": max(free) * 5,
        "off": 0.0,
    }[side]
    expected_losses, expected_norms, expected = clipped_run(model, rows, limit)
    losses, norms, weights = run(model, rows, tmp_path, limit=limit)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected, 2e-6)
    if limit:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        clipped = [norm > limit for norm in norms]
        assert {
            "above": all(clipped),
            "near": any(clipped) and not all(clipped),
            "below": not any(clipped),
        }[side]
    else:
        assert norms == [None] * STEPS
    way = max(float((expected[n] - unclipped[n]).abs().max()) for n in expected)
    assert (way > 2e-5) is (side == "above") or side == "near"


@pytest.mark.parametrize("side", ["above", "below"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bf16_equals_torch(kind, side, tmp_path, monkeypatch):
    """Within bf16's rounding; a missing factor is far outside it."""
    tune_plans(monkeypatch, PlanTuning(spilled=1.0))
    model, rows = small_net(kind, dtype=torch.bfloat16), net_batches(STEPS, kind=kind)
    _, free, unclipped = clipped_run(model, rows, 0.0)
    limit = min(free) / 5 if side == "above" else max(free) * 5
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    expected_losses, expected_norms, expected = clipped_run(model, rows, limit)
    losses, norms, weights = run(model, rows, tmp_path, limit=limit)
    assert losses == pytest.approx(expected_losses, rel=0.01)
    assert norms == pytest.approx(expected_norms, rel=0.02)

    def away(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))

    way = away(expected, start)
    assert away(weights, expected) < 0.05 * way
    assert (away(unclipped, expected) > 0.3 * way) is (side == "above")


def test_without_clipping_nothing_is_held(tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning())
    with attached(small_net("tied"), tmp_path, clip=0.0, update_mode="optimized") as session:
        assert not needs_all_gradients(session.plan)
        assert not any(region.scratch for region in session.store.layout.regions)
        seen = []
        original = session.executor.runner.run
        session.executor.runner.run = lambda action, context: (
            seen.append(action.kind),
            original(action, context),
        )
        for batch in net_batches(3):
            session.model(**batch).backward()
        session.flush()
        assert set(seen) == {"U"}
        assert session.executor.runner.pending.on_host == {}
        assert session.grad_norm is None


def test_held_gradients_are_released_after_their_update(tmp_path, monkeypatch):
    """After the updates, no gradient of the step is left in memory."""
    tune_plans(monkeypatch, PlanTuning(spilled=0.5))
    with attached(small_net("tied"), tmp_path, clip=0.1) as session:
        for batch in net_batches(3):
            session.model(**batch).backward()
        assert session.executor.runner.pending.on_host
        session.flush()
        assert session.executor.runner.pending.on_host == {}


# -- the kernel -----------------------------------------------------------------------------------

SIZES = [0, 1, 7, 8, 9, 1000, 2**15 - 1, 2**15, 2**15 + 1, 3 * 2**15 + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_of_squares_against_exact_arithmetic(dtype, size):
    generator = torch.Generator().manual_seed(size)
    x = (
        torch.randn(size, generator=generator)
        * 10.0 ** torch.randint(-3, 3, (size,), generator=generator)
    ).to(dtype)
    exact = math.fsum(float(v) ** 2 for v in x.double())
    assert _core.sum_squares(x) == pytest.approx(exact, rel=1e-13, abs=0.0)


def test_sum_of_squares_keeps_what_single_precision_loses():
    x = torch.full((2**15 + 3,), 1e-3)
    x[0] = 1e3
    exact = math.fsum(float(v) ** 2 for v in x.double())
    assert _core.sum_squares(x) == pytest.approx(exact, rel=1e-12)
    assert float(x.square().cumsum(0)[-1]) != pytest.approx(exact, rel=1e-12)
    assert _core.sum_squares(torch.full((10,), 1e30)) == pytest.approx(1e61)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 8, 2**15 + 1])
def test_sum_of_squares_passes_on_inf_and_nan(dtype, at):
    x = torch.ones(2**15 + 2, dtype=dtype)
    x[at] = -math.inf
    assert _core.sum_squares(x) == math.inf
    x[at] = math.nan
    assert math.isnan(_core.sum_squares(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.int32),
        np.zeros(4, dtype=np.uint8),
    ],
)
def test_sum_of_squares_refuses_other_types(x):
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        _core.sum_squares(x)


def test_sum_of_squares_has_the_same_bits_with_any_number_of_threads():
    x = torch.randn(2**18 + 77, generator=torch.Generator().manual_seed(1))
    before = _core.threads()
    collected = set()
    try:
        for threads in (1, 2, 3, 7):
            _core.set_threads(threads)
            collected |= {(_core.sum_squares(x), _core.sum_squares(x.bfloat16())) for _ in range(5)}
    finally:
        _core.set_threads(before)
    assert len(collected) == 1
