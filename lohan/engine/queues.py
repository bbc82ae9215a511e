"""The queues of lanes.py: what is to be done on a lane, in order, and what has become of it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from lohan.errors import LohanError
from lohan.schedule.actions import Action


class Job:
    """An action on its lane. `done` is set when it has happened."""

    __slots__ = ("action", "context", "done", "number", "waits")

    def __init__(self, number: int, action: Action, waits: list[Job], context: Any) -> None:
        self.number, self.action, self.waits, self.context = number, action, waits, context
        self.done = threading.Event()


class Queue:
    """A first-in first-out queue that can be dropped and settled."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._busy = False
        self._closed = False
        self._change = threading.Condition()

    def put(self, item: Any) -> None:
        with self._change:
            self._items.append(item)
            self._change.notify_all()

    def take(self) -> Any:
        with self._change:
            self._change.wait_for(lambda: self._items or self._closed)
            if not self._items:
                return None
            self._busy = True
            return self._items.popleft()

    def finished(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()

    def drop(self) -> None:
        with self._change:
            # What was submitted is in flight: it must be completed, not forgotten.
            self._items = deque(item for item in self._items if isinstance(item, tuple))

    def settle(self, timeout_s: float) -> None:
        with self._change:
            if not self._change.wait_for(lambda: not self._items and not self._busy, timeout_s):
                raise LohanError(f"a lane did not come to rest within {timeout_s:.0f} s")

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._items.clear()
            self._change.notify_all()
