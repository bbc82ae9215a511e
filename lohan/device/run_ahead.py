"""A limit on how far the launching thread runs ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from lohan.device.base import Device, Event

SLICES_AHEAD = 2


class RunAhead:
    """A limit of two slices that are launched but not finished.

    A stream holds about a thousand launches. If it is full, a launch blocks in a busy loop, and so
    do launches of other threads on other streams, so copies for the next block would not be
    enqueued. Two slices are enough to keep the device busy, and here the thread sleeps.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Event] = deque()  # end marks of the slices that may not have finished

    @contextmanager
    def slice(self) -> Iterator[None]:
        """Wait for the slice before the last, then launch one."""
        if len(self._ends) >= SLICES_AHEAD:
            self._ends.popleft().synchronize()
        yield
        self._ends.append(self._device.mark())
