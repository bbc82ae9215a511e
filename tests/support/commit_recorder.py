"""Record the system calls of a commit, and die between any two of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.memory_engine import MemoryEngine


class Killed(BaseException):
    """Raised in place of the end of the process: no code after it runs."""


class Recorder:
    """Records every system call of a commit, in order, and dies at the n-th boundary.

    Each call has one boundary before it and one after it.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._die_at, self._boundaries = 0, 0

    def arm(self, monkeypatch: pytest.MonkeyPatch, *, die_at: int = 0) -> None:
        self._die_at = die_at
        for name in ("write", "fsync", "replace"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, call: Callable) -> Callable:
        def wrapped(*args):
            self.boundary()
            target = args[-1] if name == "replace" else Path(f"/proc/self/fd/{args[0]}").readlink()
            result = call(*args)
            self.calls.append(f"{name} {Path(target).name}")
            self.boundary()
            return result

        return wrapped

    def boundary(self) -> None:
        self._boundaries += 1
        if self._boundaries == self._die_at:
            raise Killed


def recorded_engine(recorder: Recorder, memory: dict[str, bytearray]) -> MemoryEngine:
    class Recorded(MemoryEngine):
        def sync(self, file: int) -> None:
            recorder.boundary()
            recorder.calls.append(f"sync {Path(self._paths[file]).name}")
            recorder.boundary()

    return Recorded(files=memory)
