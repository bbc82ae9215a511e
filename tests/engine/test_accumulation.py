"""One step over several calls of backward: what PyTorch does, in memory or through a file."""

from __future__ import annotations

import copy

import pytest
import torch

import lohan
from lohan.engine import accumulation
from tests.support.small_models import batches, small_model

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
    ("kind", "clip", "options", "in_file"),
    [
        ("llama", 0.5, {}, False),
        ("llama", 0.0, {"update_mode": "optimized"}, True),
        ("gpt2", 0.5, {}, True),  # the head has the embedding's weights
        ("gpt2", 0.0, {"overlap": False}, False),
        ("llama", 0.5, {"device": "emulated"}, True),
    ],
)
def test_gradients_add_up_as_in_pytorch(kind, clip, options, in_file, tmp_path, monkeypatch):
    files = []
    if in_file:
        monkeypatch.setattr(accumulation, "OWNER", "x")
        reserve = accumulation.HostPool.reserve

        def refuse(self, owner, count):
            if owner == "x":
                raise lohan.errors.BudgetError("no room")
            reserve(self, owner, count)

        monkeypatch.setattr(accumulation.HostPool, "reserve", refuse)
        made = accumulation.GradientFile
        monkeypatch.setattr(
            accumulation, "GradientFile", lambda *a: files.append(made(*a)) or files[-1]
        )
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
        found = model.state_dict()
        for name, value in weights.items():
            assert torch.allclose(found[name], value, atol=2e-5), name
    assert len(files) == (3 if in_file else 0)


def test_an_error_inside_drops_what_was_added(tmp_path):
    model = small_model("llama")
    rows = batches(3, batch=2, seq=8)
    other = copy.deepcopy(model)
    budgets = [lohan.Budget(host="64MiB", ssd=[tmp_path / name]) for name in "ab"]
    found = []
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
                twice = pytest.raises(lohan.LohanError, match="added up already")
                with twice, session.accumulate(), session.accumulate():
                    pass
            assert session.step == 0
            run(**rows[1]).loss.backward()
            assert session.step == 1
            found.append(run.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
