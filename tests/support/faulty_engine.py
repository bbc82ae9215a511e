"""FaultyEngine: any engine with failures at chosen operations and random delays.

    engine = FaultyEngine(inner, Fault("eio", "read", nth=3), max_delay_s=0.01, seed=7)

The failing operation raises StorageIOError from wait() (from the call itself for open and sync).
With delays, a request reaches the inner engine only when it is waited for, so code that forgets to
wait sees stale bytes.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lohan.errors import StorageIOError
from lohan.store.io_engine import Buffer, IOEngine
from lohan.util.units import PAGE

Kind = Literal["eio", "enospc", "short_read", "torn_write"]
Op = Literal["open", "read", "write", "sync"]

_CAUSE = {
    "eio": "EIO (Input/output error)",
    "enospc": "ENOSPC (No space left on device)",
    "torn_write": "EIO (Input/output error)",
}


@dataclass(frozen=True)
class Fault:
    """`kind` happens to the `nth` operation of type `op`, counted from 1."""

    kind: Kind
    op: Op
    nth: int = 1

    def __post_init__(self) -> None:
        needs = {"short_read": "read", "torn_write": "write"}.get(self.kind)
        if needs is not None and self.op != needs:
            raise ValueError(f"{self.kind} needs op={needs!r}, got {self.op!r}")


@dataclass
class _Held:
    op: Op
    file: int
    offset: int
    buffer: Buffer
    fault: Fault | None


class FaultyEngine:
    def __init__(
        self, inner: IOEngine, *faults: Fault, max_delay_s: float = 0.0, seed: int = 0
    ) -> None:
        self.inner = inner
        self.faults = faults
        self.counts: dict[str, int] = {"open": 0, "read": 0, "write": 0, "sync": 0}
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._paths: dict[int, str] = {}
        self._held: dict[int, _Held] = {}
        self._inner_tickets: dict[int, int] = {}
        self._next_ticket = 1
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"faulty-{self.inner.name}"

    def open(self, path: str, *, size: int, create: bool) -> int:
        fault = self._count("open")
        if fault is not None:
            raise StorageIOError(f"opening {path} ({size} bytes) failed: {_CAUSE[fault.kind]}")
        file = self.inner.open(path, size=size, create=create)
        self._paths[file] = path
        return file

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._submit("read", file, offset, buffer)

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._submit("write", file, offset, buffer)

    def wait(self, ticket: int, timeout_s: float) -> None:
        with self._lock:
            held = self._held.pop(ticket, None)
            inner_ticket = self._inner_tickets.pop(ticket, None)
            delay_s = self._random.uniform(0.0, self._max_delay_s)
        if inner_ticket is not None:
            self.inner.wait(inner_ticket, timeout_s)
            return
        if held is None:
            raise ValueError(f"ticket {ticket} is unknown or was waited for before")
        time.sleep(delay_s)
        if held.fault is None:
            self._transfer(held, held.buffer, timeout_s)
        else:
            self._fail(held, held.fault, timeout_s)

    def sync(self, file: int) -> None:
        fault = self._count("sync")
        if fault is not None:
            raise StorageIOError(f"fdatasync of {self._paths[file]} failed: {_CAUSE[fault.kind]}")
        self.inner.sync(file)

    def close(self) -> None:
        self.inner.close()

    def _count(self, op: Op) -> Fault | None:
        with self._lock:
            self.counts[op] += 1
            matching = (f for f in self.faults if f.op == op and f.nth == self.counts[op])
            return next(matching, None)

    def _submit(self, op: Op, file: int, offset: int, buffer: Buffer) -> int:
        fault = self._count(op)
        hold = fault is not None or self._max_delay_s > 0
        inner_ticket = 0 if hold else self._start(op, file, offset, buffer)
        with self._lock:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            if hold:
                self._held[ticket] = _Held(op, file, offset, buffer, fault)
            else:
                self._inner_tickets[ticket] = inner_ticket
            return ticket

    def _start(self, op: Op, file: int, offset: int, buffer: Buffer) -> int:
        call = self.inner.write if op == "write" else self.inner.read
        return call(file, offset, buffer)

    def _transfer(self, held: _Held, part: Buffer, timeout_s: float) -> None:
        self.inner.wait(self._start(held.op, held.file, held.offset, part), timeout_s)

    def _fail(self, held: _Held, fault: Fault, timeout_s: float) -> None:
        where = (
            f"{held.op} of {len(held.buffer)} bytes at offset {held.offset} "
            f"of {self._paths[held.file]}"
        )
        prefix = len(held.buffer) // 2 // PAGE * PAGE
        if fault.kind in ("short_read", "torn_write"):
            self._transfer(held, held.buffer[:prefix], timeout_s)
        if fault.kind == "short_read":
            held.buffer[prefix:] = np.uint8(0xA5)
            raise StorageIOError(
                f"{where} came back short: expected {len(held.buffer)}, got {prefix}"
            )
        raise StorageIOError(f"{where} failed: {_CAUSE[fault.kind]}")
