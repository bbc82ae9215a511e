"""Copies between a device and pageable memory, on separate threads.

Such a copy blocks the calling thread until the device has done it, after everything that its stream
waits for. A lane may block. The launching thread must not, because the device gets no new work
while it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lohan.device.base import Event


class DeferredEvent:
    """The event of a copy that another thread enqueues."""

    def __init__(self, future: Future[Event]) -> None:
        self._future = future

    def resolve(self) -> Event:
        """Return the device's event once the copy is enqueued, or raise its error."""
        return self._future.result()

    def synchronize(self) -> None:
        self.resolve().synchronize()


class PageableCopies:
    """The threads for pageable copies, one per lane, each created with the lane's first copy.

    Copies of a lane keep their order.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter  # called by each thread before its first copy
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def hand_over(self, lane: str, copy: Callable[[], Event]) -> DeferredEvent:
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(
                1, thread_name_prefix=f"lohan-pageable-{lane}", initializer=self._enter
            )
        return DeferredEvent(self._threads[lane].submit(copy))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
