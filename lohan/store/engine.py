"""The I/O engine protocol: submit, get a ticket, wait with a deadline.

A buffer is a C-contiguous uint8 numpy array whose address, length and file offset are multiples
of ALIGN. The caller keeps it alive and untouched until the ticket has been waited for.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lohan.errors import ConfigError, StorageIOError

ALIGN = 4096
Buffer = npt.NDArray[np.uint8]


class Engine(Protocol):
    """Moves bytes between aligned buffers and files; every completion is checked."""

    @property
    def name(self) -> str: ...

    def open(self, path: str, *, size: int, create: bool) -> int:
        """File number of `path`. With `create`, preallocates exactly `size` bytes; without, the
        file must exist and have exactly `size` bytes."""

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submits a read of len(buffer) bytes; returns a ticket."""

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submits a write of len(buffer) bytes; returns a ticket."""

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Returns when the ticket's I/O is complete; raises StorageIOError naming path, offset,
        length and cause if it failed, came back short or missed the deadline. Each ticket is
        waited for exactly once; after a missed deadline it may be waited for again."""

    def sync(self, file: int) -> None:
        """fdatasync: everything written and waited for is durable when it returns."""

    def close(self) -> None:
        """Waits for what is in flight and closes all files."""


def aligned_buffer(size: int) -> Buffer:
    """An uninitialised buffer whose address is a multiple of ALIGN; `size` stays as given."""
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size]


def open_engine(kind: str = "auto", **options: Any) -> Engine:
    """The engine named `kind`: "uring", "threads", or "auto": io_uring where the kernel allows it,
    else threads. Options: uring depth=32, threads threads=4, both piece_bytes."""
    from lohan import _core

    if kind == "uring":
        return _core.UringEngine(**options)
    if kind == "threads":
        return _core.ThreadEngine(**options)
    if kind != "auto":
        raise ConfigError(f"engine {kind!r} is unknown; choose auto, uring or threads")
    try:
        return _core.UringEngine(**options)
    except StorageIOError:
        options.pop("depth", None)
        return _core.ThreadEngine(**options)
