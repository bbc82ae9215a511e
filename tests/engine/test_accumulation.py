"""One step over several calls of backward, compared with PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

import lohan
from lohan.engine.gradients import bytes_of_sums
from tests.support.models import batches, small_model

# With a tiny epsilon, AdamW turns the rounding of a near-zero gradient into a full step.
EPS = 1e-3


def plain(kind: str, data, *, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = small_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    losses = []
    for parts in data:
        for batch in parts:
            loss = model(**batch).loss / len(parts)
            loss.backward()
            losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "clip", "options"),
    [
        ("llama", 0.5, {}),
        ("llama", 0.0, {"update_mode": "optimized"}),
        ("gpt2", 0.5, {}),  # the head has the embedding's weights
        ("gpt2", 0.0, {"overlap": False}),
        ("llama", 0.5, {"device": "emulated"}),
    ],
)
def test_gradients_add_up_as_in_pytorch(kind, clip, options, tmp_path):
    rows = batches(7, batch=2, seq=8)
    data = [rows[:2], rows[2:3], rows[3:5], rows[5:]]  # one step has one part
    expected, weights = plain(kind, data, clip=clip)
    model = small_model(kind)
    memory = "64MiB" if "device" in options else None
    budget = lohan.Budget(host="64MiB", ssd=[tmp_path], device=memory)
    with lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=1e-2, eps=EPS),
        budget=budget,
        batch=rows[0],
        clip=clip,
        decay=lambda *_: False,
        **options,
    ) as session:
        losses = []
        for number, parts in enumerate(data):
            if number == 1:  # a plain step between
                losses.append(model(**parts[0]).loss)
                losses[-1].backward()
            else:
                with session.accumulate():
                    for batch in parts:
                        losses.append(model(**batch).loss / len(parts))
                        losses[-1].backward()
                        assert session.step == number
            assert session.step == number + 1
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
        actual = model.state_dict()
        for name, value in weights.items():
            assert torch.allclose(actual[name], value, atol=2e-5), name


def test_error_during_accumulation_drops_the_gradients_added_so_far(tmp_path):
    model = small_model("llama")
    rows = batches(3, batch=2, seq=8)
    other = copy.deepcopy(model)
    budgets = [lohan.Budget(host="64MiB", ssd=[tmp_path / name]) for name in "ab"]
    collected = []
    for run, budget in zip((model, other), budgets, strict=True):
        with lohan.attach(
            run, optimizer=lohan.SGD(lr=0.1, momentum=0.0), budget=budget, batch=rows[0]
        ) as session:
            if run is model:
                with pytest.raises(KeyError), session.accumulate():
                    run(**rows[0]).loss.backward()
                    raise KeyError
                with session.accumulate():
                    pass  # no gradient, no step
                twice = pytest.raises(lohan.LohanError, match="already being added up")
                with twice, session.accumulate(), session.accumulate():
                    pass
            assert session.step == 0
            run(**rows[1]).loss.backward()
            assert session.step == 1
            collected.append(run.state_dict())
    assert all(torch.equal(collected[0][name], collected[1][name]) for name in collected[0])


def test_accumulation_moves_caches_out_of_memory(tmp_path):
    rows = batches(4, batch=2, seq=8)
    expected, weights = plain("llama", [rows[:2], rows[2:]], clip=0.0)
    model = small_model("llama")
    probe = lohan.attach(
        copy.deepcopy(model),
        optimizer=lohan.AdamW(lr=1e-2, eps=EPS),
        budget=lohan.Budget(host="64MiB", ssd=[tmp_path / "probe"]),
        batch=rows[0],
    )
    with probe:  # a budget for the whole state, but not for sums beside it
        budget_bytes = probe.executor.pool.used_bytes
        sums_bytes = bytes_of_sums(probe.context.blocks.groups)
    with lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=1e-2, eps=EPS),
        budget=lohan.Budget(host=str(budget_bytes), ssd=[tmp_path / "run"]),
        batch=rows[0],
        decay=lambda *_: False,
    ) as session:
        losses, first = [], session.plan
        for parts in (rows[:2], rows[2:]):
            with session.accumulate():
                for batch in parts:
                    losses.append(model(**batch).loss / 2)
                    losses[-1].backward()
        assert session.plan != first
        assert session.context.host_bytes == budget_bytes - sums_bytes
        assert session.executor.pool.peak_bytes <= budget_bytes
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
        actual = model.state_dict()
        for name, value in weights.items():
            assert torch.allclose(actual[name], value, atol=2e-5), name


def test_refuses_sums_that_leave_no_room_for_a_plan(tmp_path):
    model, rows = small_model("llama"), batches(1, batch=2, seq=8)
    budget = lohan.Budget(host="1.2MiB", ssd=[tmp_path])
    optimizer = lohan.AdamW(lr=1e-2, eps=EPS)
    with lohan.attach(model, optimizer=optimizer, budget=budget, batch=rows[0]) as session:
        refused = pytest.raises(lohan.errors.BudgetError, match=r"accumulate: sums of gradients")
        with refused, session.accumulate():
            pass
        model(**rows[0]).loss.backward()  # the old plan continues
        assert session.step == 1
