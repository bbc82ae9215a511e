"""A device with less memory than planned leads to a smaller plan, once."""

from __future__ import annotations

import pytest
import torch

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.engine.replanning import OomGuard
from lohan.errors import BudgetError
from lohan.util.units import KiB
from tests.support.delayed_runs import net_batches, small_net
from tests.support.models import attached


class Optimist(EmulatedDevice):
    """A device that reports more memory than it has."""

    def __init__(self, memory: int, *, says: int) -> None:
        super().__init__(memory)
        self._says = says

    def memory_bytes(self) -> int:
        return self._says


def step_of(session: lohan.Session, batch: dict[str, torch.Tensor]) -> float:
    loss = session.model(**batch)
    loss.backward()
    return loss.item()


def test_smaller_plan_is_tried_once_and_reported(tmp_path):
    dataset = net_batches(2)
    messages: list[str] = []
    device = Optimist(250 * KiB, says=400 * KiB)
    with attached(small_net(), tmp_path, batch=dataset[0], device=device) as session:
        before = session.plan
        losses = [OomGuard(session, messages.append).run(lambda: step_of(session, dataset[0]))]
        assert session.plan.tier_bytes("device") < before.tier_bytes("device")
        assert session.context.device_bytes == 300 * KiB
        losses.append(step_of(session, dataset[1]))
        assert session.step == 2 and device.memory.peak <= 250 * KiB
        micro_batch = session.plan.micro_batch
    assert len(messages) == 1
    assert "ran out of memory in step 1" in messages[0] and "300.00 KiB" in messages[0]
    with attached(small_net(), tmp_path / "cpu", micro_batch=micro_batch) as session:
        assert [step_of(session, batch) for batch in dataset] == losses


def test_second_out_of_memory_is_an_error(tmp_path):
    dataset = net_batches(1)
    device = Optimist(90 * KiB, says=200 * KiB)
    with attached(small_net(), tmp_path, batch=dataset[0], device=device) as session:
        with pytest.raises(
            BudgetError, match=r"in step 1 with a plan for 150.00 KiB.*--device-memory"
        ):
            OomGuard(session, lambda text: None).run(lambda: step_of(session, dataset[0]))
        assert session.step == 0


def test_refuses_a_device_without_room_for_the_weight_slots(tmp_path):
    dataset = net_batches(1)
    with pytest.raises(BudgetError, match=r"no room for \d weight slots.*--device-memory"):
        attached(small_net(), tmp_path, batch=dataset[0], device=Optimist(60 * KiB, says=500 * KiB))


def test_retry_repeats_the_random_numbers(tmp_path):
    dataset, drawn = net_batches(1)[0], list[float]()

    def step() -> float:
        drawn.append(torch.rand(()).item())
        if len(drawn) == 1:
            raise torch.OutOfMemoryError("all of it is taken")
        return step_of(session, dataset)

    with attached(
        small_net(), tmp_path, batch=dataset, device=Optimist(400 * KiB, says=400 * KiB)
    ) as session:
        OomGuard(session, lambda text: None).run(step)
        assert session.step == 1
    assert len(drawn) == 2 and drawn[0] == drawn[1]


@pytest.mark.parametrize("failing", [2, 3])
def test_the_first_step_that_overlaps_is_guarded_too(failing, tmp_path):
    """A later shortage is an error with advice; the smaller plan uses less memory than before."""
    dataset, messages, tries = net_batches(3), list[str](), list[int]()

    def step() -> float:
        number = session.step + 1
        tries.append(number)
        if number == failing and tries.count(number) == 1:
            raise torch.OutOfMemoryError("all of it is taken")
        return step_of(session, dataset[number - 1])

    device = Optimist(400 * KiB, says=4000 * KiB)
    with attached(small_net(), tmp_path, batch=dataset[0], device=device) as session:
        guard, before = OomGuard(session, messages.append), session.plan.tier_bytes("device")
        guard.run(step)
        if failing == 2:
            while session.step < 2:
                guard.run(step)
            assert len(messages) == 1 and "memory in step 2" in messages[0]
            assert session.plan.tier_bytes("device") < before
            return
        guard.run(step)
        with pytest.raises(BudgetError, match=r"in step 3 .*--device-memory.*resume the run"):
            guard.run(step)
        assert not messages
