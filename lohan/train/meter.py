"""Time, bytes and busy lanes of steps, each from the end of one row of metrics to the end of the
next.

Work that a step leaves running, or that runs after its row is made (updates without overlap, a
flush), lies between two rows and counts in the later one: nothing is lost or counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from lohan.store.store import Counters
from lohan.util.system import rss_bytes
from lohan.util.trace import Span, Trace, busy_s


class Drive(Protocol):
    """A store, or a session with all that it moves."""

    @property
    def counters(self) -> Counters: ...


class Meter:
    """Runs from the moment it is made."""

    def __init__(self, store: Drive, trace: Trace) -> None:
        self._store, self._trace = store, trace
        self._start_s, self._before = time.perf_counter(), store.counters
        self._aside_s, self._aside_read = 0.0, 0
        self.spans: list[Span] = []  # of the last row
        self._spans: list[Span] = []  # of the row to come, from before what was put aside
        trace.take_step()

    def row(self, *, tokens: int) -> dict[str, Any]:
        """What was measured since the last row."""
        stop, after = time.perf_counter(), self._store.counters
        self.spans, self._spans = [*self._spans, *self._trace.take_step()], []
        busy = busy_s(self.spans, self._start_s, stop)
        step_s = stop - self._start_s - self._aside_s
        made = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "rss_bytes": rss_bytes(),
            "ssd_read_bytes": after.bytes_read - self._before.bytes_read - self._aside_read,
            "ssd_written_bytes": after.bytes_written - self._before.bytes_written,
            "busy": {lane: round(s / step_s, 4) for lane, s in busy.items() if s},
            "binding": max(busy, key=lambda lane: busy[lane]),
        }
        self._start_s, self._before = stop, after
        self._aside_s, self._aside_read = 0.0, 0
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what is no part of a step, from lanes at rest to lanes at rest: copying a snapshot,
        an evaluation."""
        start, before = time.perf_counter(), self._store.counters.bytes_read
        self._spans += self._trace.take_step()
        yield
        self._trace.take_step()
        self._aside_s += time.perf_counter() - start
        self._aside_read += self._store.counters.bytes_read - before
