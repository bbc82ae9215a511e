"""`Session.train_step` hides that a clipped step may have to be run again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lohan.errors import ConfigError
from tests.support.delayed_runs import PlanTuning, net_batches, small_net, tune_plans
from tests.support.models import attached, stored_bytes

STEPS, LIMIT = 5, 0.5


def run(place: Path, *, own_loop: bool, **options: Any) -> tuple[list[float], Any, int]:
    """Return the losses, the stored bytes, and how many steps were run twice."""
    losses, again = [], 0
    # The first steps are not clipped, so that the third speculates, and is clipped.
    scales = (1e-3, 1e-3, 1.0, 1e-3, 1.0)
    with attached(small_net("tied", dropout=0.1), place, clip=LIMIT, **options) as session:
        torch.manual_seed(3)
        for batch, scale in zip(net_batches(STEPS), scales, strict=True):
            calls = []

            def loss(batch: dict[str, torch.Tensor], scale=scale, calls=calls) -> torch.Tensor:
                calls.append(batch)
                out = session.model(**batch)
                return (out if isinstance(out, torch.Tensor) else out.loss) * scale

            if own_loop:
                actual = loss(batch)
                actual.backward()
                assert not session.must_run_again
            else:
                actual = session.train_step(batch, loss)
            losses.append(actual.item())
            again += len(calls) - 1
        assert session.step == STEPS
        return losses, stored_bytes(session), again


def test_a_step_that_has_to_be_run_again_gives_the_same_bits(tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning(spilled=0.0))
    wanted = run(tmp_path / "plain", own_loop=True, overlap=False)
    tune_plans(monkeypatch, PlanTuning(spilled=1.0))
    losses, stored, again = run(tmp_path / "again", own_loop=False, run_again=True)
    assert (losses, stored) == wanted[:2]
    assert again == 2


def test_an_output_without_a_loss_is_refused(tmp_path):
    with attached(small_net("tied"), tmp_path) as session:
        (batch,) = net_batches(1)
        session.model.forward = lambda **_: SimpleNamespace(loss=None)
        with pytest.raises(ConfigError, match="is not a loss and has none"):
            session.train_step(batch)
        del session.model.forward
        assert session.step == 0
        session.train_step(batch)
        assert session.step == 1
