"""Streams and events of the emulated device: work that is given now and done later, in order.

They answer to the names that torch.Stream and torch.Event have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from lohan.errors import LohanError

STALL_S = 600.0  # as on the lanes


class EmulatedEvent:
    """Comes when its stream gets there, with the error that the stream met, if any."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self._error: BaseException | None = None

    def come(self, error: BaseException | None = None) -> None:
        self._error = error
        self._come.set()

    @property
    def passed(self) -> bool:
        return self._come.is_set()

    def synchronize(self) -> None:
        if not self._come.wait(STALL_S):
            raise LohanError(
                f"an event of the emulated device has not come for {STALL_S:.0f} s; a stream "
                "hangs: stop the run and resume it"
            )
        if self._error is not None:
            raise self._error


class EmulatedStream:
    """A thread that does what it is given, one after the other. After an error the next event
    comes with that error, so that nobody waits for ever."""

    def __init__(self, name: str) -> None:
        self._given: deque[Callable[[], None]] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"emulated-{name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._change:
            self._given.append(work)
            self._change.notify()

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        made = event or EmulatedEvent()
        self.give(lambda: self._pass(made))
        return made

    def wait_event(self, event: EmulatedEvent) -> None:
        self.give(event.synchronize)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(STALL_S)

    def _pass(self, event: EmulatedEvent) -> None:
        error, self._error = self._error, None
        event.come(error)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._given or self._closed)
                if not self._given:
                    return
                work = self._given.popleft()
            try:
                work()
            except BaseException as error:
                self._error = self._error or error


class Link:
    """One direction: so many bytes a second, or as fast as memory goes."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_s = 0.0

    def pass_through(self, count: int) -> None:
        """Returns when so many bytes have gone through. Time that sleeping takes too long is made
        up for by the next bytes."""
        if self._rate is None:
            return
        now = time.perf_counter()
        self._free_s = max(self._free_s, now - 0.002) + count / self._rate
        if self._free_s > now:
            time.sleep(self._free_s - now)
