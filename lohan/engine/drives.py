"""How fast the drives are, through a store like that of a run: same engine, checksums, commits."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lohan.engine.pool import HostPool
from lohan.errors import ConfigError
from lohan.store.extents import Region
from lohan.store.flight import Ticket
from lohan.store.store import Store
from lohan.util.units import MiB

KEY, SMALL = "probe", "small"
IN_FLIGHT = 4  # chunks
WEIGHT_SHARE = 3  # in fp32 one chunk in three is weights; a step reads those twice
SMALL_BYTES = 4096
_PREFIX = "lohan-profile-"


@dataclass(frozen=True)
class Rates:
    """Bytes per second; `mixed` is the total of both directions in the pattern of a step."""

    read: float
    write: float
    mixed: float
    action_s: float  # of the smallest read, from submission to completion
    commit_s: float


class DriveProbe:
    """A store of equal chunks, both generations written, and buffers to move them with."""

    def __init__(self, dirs: Sequence[Path], *, chunk_bytes: int, total_bytes: int) -> None:
        self._count = max(WEIGHT_SHARE, total_bytes // chunk_bytes)
        regions = [Region(KEY, (chunk_bytes,) * self._count), Region(SMALL, (SMALL_BYTES,))]
        self._store = Store.create(dirs, regions)  # first: it checks that there is room
        pool = HostPool(IN_FLIGHT * chunk_bytes + SMALL_BYTES)
        self._buffers = [pool.allocate("chunks", chunk_bytes).bytes for _ in range(IN_FLIGHT)]
        self._small = pool.allocate("small chunk", SMALL_BYTES).bytes
        generator = np.random.default_rng(0)  # a drive may make short work of zeros
        for buffer in self._buffers:
            buffer[:] = generator.integers(0, 256, len(buffer), dtype=np.uint8)
        self.commits_s: list[float] = []
        for _ in range(2):  # first writes to a preallocated file cost more than later ones
            self._pass("write")
        self.commits_s.clear()

    def rate(self, kind: str, *, seconds: float) -> float:
        """Median over passes of bytes per second, commits not counted; `kind`: read|write|mixed."""
        rates: list[float] = []
        stop = time.perf_counter() + seconds
        while not rates or time.perf_counter() < stop:
            rates.append(self._pass_rate(kind))
        return median(rates)

    def _pass_rate(self, kind: str) -> float:
        before, start = self._moved(), time.perf_counter()
        committing = self._pass(kind)
        return (self._moved() - before) / (time.perf_counter() - start - committing)

    def action_s(self, *, count: int = 50) -> float:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self._store.wait(self._store.read(SMALL, 0, self._small))
            taken.append(time.perf_counter() - start)
        return median(taken)

    @contextmanager
    def busy(self, kind: str) -> Iterator[list[float]]:
        """Keeps the drives at work on a thread of its own; bytes per second of the passes so
        far."""
        stop, failed, rates = threading.Event(), list[BaseException](), list[float]()

        def work() -> None:
            try:
                while not stop.is_set():
                    rates.append(self._pass_rate(kind))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="drive probe")
        thread.start()
        try:
            yield rates
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        self._store.close()

    def _moved(self) -> int:
        return self._store.counters.bytes_read + self._store.counters.bytes_written

    def _pass(self, kind: str) -> float:
        """All requests in order, as many in flight as there are buffers; seconds of the commit."""
        under_way: deque[Ticket] = deque()
        for number, (verb, index) in enumerate(requests(kind, self._count)):
            if len(under_way) == IN_FLIGHT:
                self._store.wait(under_way.popleft())
            submit = self._store.read if verb == "read" else self._store.write
            under_way.append(submit(KEY, index, self._buffers[number % IN_FLIGHT]))
        for ticket in under_way:
            self._store.wait(ticket)
        if kind == "read":
            return 0.0
        self._store.wait(self._store.write(SMALL, 0, self._small))
        start = time.perf_counter()
        self._store.commit()
        self.commits_s.append(time.perf_counter() - start)
        return self.commits_s[-1]


def requests(kind: str, count: int) -> Iterator[tuple[str, int]]:
    """One pass: every chunk once, or as in a step: all are read and written, weights read again."""
    for index in range(count):
        if kind in ("read", "mixed"):
            yield "read", index
        if kind == "mixed" and index % WEIGHT_SHARE == 0:
            yield "read", (index + count // 2) % count
        if kind in ("write", "mixed"):
            yield "write", index


@contextmanager
def opened(
    dirs: Sequence[Path], *, total_bytes: int, chunk_bytes: int = 16 * MiB
) -> Iterator[DriveProbe]:
    """A probe in folders of its own below these, removed afterwards with all that it wrote."""
    with ExitStack() as stack:
        folders = []
        for path in dirs:
            if not path.is_dir():
                raise ConfigError(f"--ssd {path}: no such folder; create it or choose another")
            try:
                made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path)
            except OSError as error:
                raise ConfigError(
                    f"--ssd {path}: cannot be written to: {error.strerror}; choose another"
                ) from None
            folders.append(Path(stack.enter_context(made)))
        probe = DriveProbe(folders, chunk_bytes=chunk_bytes, total_bytes=total_bytes)
        stack.callback(probe.close)
        yield probe


def rates(probe: DriveProbe, *, seconds: float) -> Rates:
    read = probe.rate("read", seconds=seconds)
    write = probe.rate("write", seconds=seconds)
    mixed = probe.rate("mixed", seconds=seconds)
    return Rates(read, write, mixed, probe.action_s(), median(probe.commits_s))
