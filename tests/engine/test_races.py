"""Delay one lane at everything it does, so that a missing wait for it is detected.

`benchmarks/remove_waits.py` removes waits from the code one at a time and runs these tests.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.planner.planner import Planned, PlanProblem, closed_form_plan
from lohan.schedule.actions import Action
from lohan.util.units import MiB
from tests.support.delayed_runs import (
    PlanTuning,
    delay_actions,
    memory_engine,
    net_batches,
    small_net,
    tune_plans,
)
from tests.support.models import attached, stored_bytes

LATE_S = 0.004
LANES = ["compute", "h2d", "d2h", "ssd", "optimizer"]
STEPS = 3
MOVED = ("blocks.0", "blocks.1", "blocks.2")  # more than there are buffers for them


def make_late(session: lohan.Session, late: str) -> None:
    """Delay a lane's thread and the stream that it enqueues work on."""
    session.executor.lanes.stall_s = 10.0

    def lane(action: Action) -> None:
        if action.lane == late:
            time.sleep(LATE_S)

    delay_actions(session, lane)
    device = session.context.device
    assert isinstance(device, EmulatedDevice)
    lane_of = {"slices": "h2d"}  # slices come to the device over the same link
    device.delay = lambda stream: time.sleep(LATE_S if lane_of.get(stream, stream) == late else 0)


def outcome(
    model: torch.nn.Module,
    train_batches: list[dict[str, torch.Tensor]],
    late: str | None,
    **options: Any,
) -> tuple[list[str], dict[str, bytes]]:
    """Return losses and stored bytes."""
    options.setdefault("engine", memory_engine())
    with TemporaryDirectory() as place, attached(model, Path(place), **options) as session:
        if late is not None:
            make_late(session, late)
        losses = []
        for batch in train_batches:
            loss = model(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            loss.backward()
            losses.append(repr(loss.item()))
        return losses, stored_bytes(session)


# -- weights, gradients, updates ------------------------------------------------------------------


def net_run(clip: float, mode: str, late: str | None, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        tuning = PlanTuning(window=2, slots=1, ring=2, grads=1, device_slots=1)
        if clip:  # one ring buffer; some chunks whose state is not read before their update
            tuning = replace(tuning, ring=1, spilled=0.6, cached=0.4)
        tune_plans(patch, tuning)
        dataset = net_batches(STEPS, kind="tied")
        return outcome(small_net("tied"), dataset, late, clip=clip, update_mode=mode, **options)


@cache
def net_on_cpu(clip: float) -> Any:
    return net_run(clip, "serial", None, overlap=False)


@pytest.mark.parametrize("late", LANES)
@pytest.mark.parametrize(("mode", "clip"), [("optimized", 0.0), ("balanced", 0.3)])
def test_delayed_lanes_change_no_weight_or_gradient(mode, clip, late):
    actual = net_run(clip, mode, late, device=EmulatedDevice(64 * MiB))
    assert actual == net_on_cpu(clip)


# -- activations ----------------------------------------------------------------------------------


def keeping(patch: pytest.MonkeyPatch) -> None:
    """Keep all activations, the first blocks' on SSD, with few slots and buffers in memory."""

    def planned(problem: PlanProblem) -> Planned:
        plan = closed_form_plan(problem)
        moved = tuple(site.name for site in problem.blocks.sites if site.name in MOVED)
        sizes = (MiB,) * len(moved)
        changed = replace(
            plan,
            spilled_sites=moved,
            spilled_site_bytes=sizes,
            act_buffers=2,
            staying=(),
            window=1,
            weight_slots=2,
            host_cached_weights=(),
            device_slots=min(plan.device_slots, 2),
        )
        return Planned(changed, None)

    patch.setattr("lohan.engine.attach.make_plan", planned)


def keeping_run(clip: float, late: str | None, **options: Any) -> Any:
    dataset = net_batches(STEPS)
    with pytest.MonkeyPatch.context() as patch:
        keeping(patch)
        return outcome(
            small_net(),
            dataset,
            late,
            batch=dataset[0],
            micro_batch=1,
            activations="all",
            clip=clip,
            **options,
        )


@cache
def keeping_on_cpu(clip: float) -> Any:
    return keeping_run(clip, None, overlap=False)


@pytest.mark.parametrize("late", LANES)
def test_delayed_lanes_change_no_activation(late):
    """Four slices a block: halves of a buffer on the device are used again within it."""
    clip = 0.3 if late in ("ssd", "optimizer") else 0.0  # with it, updates do not come between
    assert keeping_run(clip, late, device=EmulatedDevice(64 * MiB)) == keeping_on_cpu(clip)


# -- a step that skips part of what was scheduled ahead --------------------------------------------


def skipping_run(**options: Any) -> Any:
    """Drop a forward in the second step, so that the third expects two forwards."""
    dataset, model = net_batches(STEPS, kind="gpt2"), small_net("gpt2")
    with TemporaryDirectory() as place, attached(model, Path(place), **options) as session:
        if session.context.device.has_own_memory:
            make_late(session, "compute")
        losses = []
        for number, batch in enumerate(dataset):
            if number == 1:
                model(**batch)
            loss = model(**batch).loss
            loss.backward()
            losses.append(repr(loss.item()))
        return losses, stored_bytes(session)


def test_skipped_forward_waits_for_compute(monkeypatch):
    """A forward that is dropped must not let a load overwrite weights that compute still reads.

    The embedding is tied to the head, so the second forward finds it in the slot in which the head
    still computes, and the load that follows in this slot waits for the second forward.
    """
    tune_plans(monkeypatch, PlanTuning(window=2, device_slots=1))
    serial = skipping_run(engine=memory_engine(), overlap=False)
    assert skipping_run(engine=memory_engine(), device=EmulatedDevice(64 * MiB)) == serial
