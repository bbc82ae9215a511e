"""Faults at numbered calls of file operations: of the os module, and of an engine.

    faults = Faults(at=3, error=OSError)
    with faults.armed(monkeypatch):
        session.close()
    faults.reached  # whether there was a third call

Only calls between `arm` and the fault count; each is numbered once, from 1.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lohan.errors import StorageIOError
from lohan.store.io_engine import IOEngine

CALLS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir", "ftruncate")
Error = type[OSError] | type[KeyboardInterrupt]


class Faults:
    def __init__(self, *, at: int, error: Error = OSError) -> None:
        self._at, self._error = at, error
        self._counting, self.calls = False, 0

    @property
    def reached(self) -> bool:
        return self.calls >= self._at

    @contextmanager
    def armed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._numbered(getattr(os, name)))
            self._counting = True
            try:
                yield
            finally:
                self._counting = False

    def count(self, *, in_engine: bool = False) -> None:
        if not self._counting:
            return
        self.calls += 1
        if self.calls != self._at:
            return
        if self._error is KeyboardInterrupt:
            raise KeyboardInterrupt
        if in_engine:
            raise StorageIOError("injected: EIO (Input/output error)")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _numbered(self, call: Any) -> Any:
        def numbered(*given: Any, **named: Any) -> Any:
            self.count()
            return call(*given, **named)

        return numbered


class NumberedEngine:
    """An engine whose calls count. A wait that is hit has waited: the I/O is over, and failed."""

    name = "numbered"

    def __init__(self, inner: IOEngine) -> None:
        self.inner, self.faults = inner, Faults(at=0)

    def open(self, path: str, *, size: int, create: bool) -> int:
        self.faults.count(in_engine=True)
        return self.inner.open(path, size=size, create=create)

    def read(self, file: int, offset: int, buffer: Any) -> int:
        self.faults.count(in_engine=True)
        return self.inner.read(file, offset, buffer)

    def write(self, file: int, offset: int, buffer: Any) -> int:
        self.faults.count(in_engine=True)
        return self.inner.write(file, offset, buffer)

    def wait(self, ticket: int, timeout_s: float) -> None:
        try:
            self.faults.count(in_engine=True)
        except StorageIOError:
            self.inner.wait(ticket, timeout_s)
            raise
        self.inner.wait(ticket, timeout_s)

    def sync(self, file: int) -> None:
        self.faults.count(in_engine=True)
        self.inner.sync(file)

    def close(self) -> None:
        self.inner.close()
