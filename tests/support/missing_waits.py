"""Accelerators without one kind of wait, and a run in which the missing wait must show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import Passed
from tests.support.delayed_runs import Result, train
from tests.support.small_models import batches, small_model


class NeverWaits(AcceleratorDevice):
    """Compute does not wait for copies."""

    def wait(self, event: Any) -> None:
        return


class CopiesAtOnce(AcceleratorDevice):
    """Copies do not wait for compute."""

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        return super().copy(lane, pairs)


class SaysDone(AcceleratorDevice):
    """Lanes do not wait for their own copies."""

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        super().copy(lane, pairs, after=after)
        return _Nothing()

    def wait(self, event: Any) -> None:
        if not isinstance(event, _Nothing):
            super().wait(event)


class ComputesAtOnce(AcceleratorDevice):
    """What compute was given counts as done."""

    def mark(self) -> Any:
        return _Nothing()

    def copy(self, lane: str, pairs: Any, *, after: Any = None) -> Any:
        return super().copy(lane, pairs, after=None if isinstance(after, _Nothing) else after)


class _Nothing(Passed):
    """An event of nothing."""


CARELESS = [  # how late copies and operators must be, in microseconds, for it to show
    (NeverWaits, 10_000, 0),
    (CopiesAtOnce, 0, 500),
    (SaysDone, 5000, 0),
    (ComputesAtOnce, 0, 500),
]


def kept_slices(device: AcceleratorDevice | str) -> Result:
    """Four slices a block, of which two are on the device at a time."""
    train_batches = batches(2, batch=4, seq=24)
    with TemporaryDirectory() as place:
        return train(
            small_model("llama"),
            train_batches,
            Path(place),
            batch=train_batches[0],
            micro_batch=1,
            activations="all",
            device=device,
        )


@functools.cache
def with_all_waits() -> Result:
    return kept_slices(AcceleratorDevice())


LATER = (1, 5, 25)  # times as late: on a busy machine the host itself is late


def shows(careless: type[AcceleratorDevice], late: Callable[[int], None]) -> bool:
    """Return whether a run without these waits has another result or a device error.

    `late` delays the streams; it is called with several factors.
    """
    wanted = with_all_waits()
    for times in LATER:
        late(times)
        try:
            actual = kept_slices(careless())
        except RuntimeError:  # its clock is asked for what has not come
            return True
        same = list(map(repr, actual.losses)) == list(map(repr, wanted.losses))
        if not same or actual.stored != wanted.stored:
            return True
    return False
