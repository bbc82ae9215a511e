"""Stores with known bytes, an I/O engine in memory, and the files of a folder."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import StorageIOError
from lohan.store.extents import Region
from lohan.store.io_engine import Buffer, aligned_buffer
from lohan.store.store import Store
from lohan.util.units import PAGE

# -- an engine in memory ---------------------------------------------------------------------------


@dataclass
class _Request:
    write: bool
    file: int
    offset: int
    buffer: Buffer
    ready_at: float

    @property
    def verb(self) -> str:
        return "write" if self.write else "read"


class MemoryEngine:
    """An I/O engine for tests that keeps files as bytearrays.

    Bytes move when a ticket is waited for, not before, so that a missing wait is detected.
    `files` outlives the engine if the caller passes it in.
    """

    name = "memory"
    direct = False

    def __init__(self, *, files: dict[str, bytearray] | None = None, delay_s: float = 0.0) -> None:
        self.files = {} if files is None else files
        self._delay_s = delay_s
        self._paths: list[str] = []
        self._sizes: list[int] = []
        self._requests: dict[int, _Request] = {}
        self._next_ticket = 1
        self._closed = False
        self._lock = threading.Lock()

    def open(self, path: str, *, size: int, create: bool) -> int:
        with self._lock:
            self._check_open()
            if create:
                old = self.files.get(path, bytearray())
                self.files[path] = old[:size] + bytearray(max(0, size - len(old)))
            elif path not in self.files:
                raise StorageIOError(
                    f"opening {path} failed: ENOENT (No such file or directory); "
                    "check the path; the folder must exist"
                )
            elif len(self.files[path]) != size:
                raise StorageIOError(
                    f"opening {path} failed: expected {size} bytes, found {len(self.files[path])}; "
                    "the file was truncated or belongs to another store"
                )
            self._paths.append(path)
            self._sizes.append(size)
            return len(self._paths) - 1

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        if not buffer.flags.writeable:
            raise ValueError("buffer is read-only but would be written")
        return self._submit(False, file, offset, buffer)

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._submit(True, file, offset, buffer)

    def wait(self, ticket: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            request = self._requests.get(ticket)
        if request is None:
            if self._closed:
                raise StorageIOError("the I/O engine is closed; open a new one")
            raise ValueError(f"ticket {ticket} is unknown or was waited for before")
        if request.ready_at > deadline:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise StorageIOError(
                f"{self._range(request)} missed its deadline of {timeout_s:.3g} s; "
                "check the drive (dmesg, iostat) or raise the I/O timeout"
            )
        time.sleep(max(0.0, request.ready_at - time.monotonic()))
        with self._lock:
            del self._requests[ticket]
            self._move(request)

    def sync(self, file: int) -> None:
        with self._lock:
            self._check_open()
            self._check_file(file)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            requests, self._requests = list(self._requests.values()), {}
            for request in requests:
                self._move(request)

    def _submit(self, write: bool, file: int, offset: int, buffer: Buffer) -> int:
        with self._lock:
            self._check_open()
            self._check_file(file)
            request = _Request(write, file, offset, buffer, time.monotonic() + self._delay_s)
            _check_request(offset, buffer)
            if offset + len(buffer) > self._sizes[file]:
                raise ValueError(
                    f"{self._range(request)} ends after the file's {self._sizes[file]} bytes"
                )
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._requests[ticket] = request
            return ticket

    def _move(self, request: _Request) -> None:
        data = self.files[self._paths[request.file]]
        start, stop = request.offset, request.offset + len(request.buffer)
        if stop > len(data):
            raise StorageIOError(
                f"{self._range(request)} came back short: expected {len(request.buffer)}, "
                f"got {max(0, len(data) - start)}; the file was truncated, "
                "restore it or resume from another copy"
            )
        if request.write:
            data[start:stop] = request.buffer.tobytes()
        else:
            request.buffer[:] = np.frombuffer(data, np.uint8)[start:stop]

    def _range(self, request: _Request) -> str:
        return (
            f"{request.verb} of {len(request.buffer)} bytes at offset {request.offset} "
            f"of {self._paths[request.file]}"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StorageIOError("the I/O engine is closed; open a new one")

    def _check_file(self, file: int) -> None:
        if not 0 <= file < len(self._paths):
            raise ValueError(f"file {file} is not open; {len(self._paths)} files are")


def _check_request(offset: int, buffer: Buffer) -> None:
    """Raise the ValueError or TypeError with which an engine refuses a request."""
    if buffer.dtype != np.uint8:
        raise TypeError(f"buffer must have dtype uint8, got {buffer.dtype}")
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError("buffer must be one-dimensional and contiguous")
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    address = buffer.ctypes.data if len(buffer) else 0
    named = {"offset": offset, "buffer length": len(buffer), "buffer address": address}
    for what, value in named.items():
        if value % PAGE:
            raise ValueError(f"{what} {value} is not a multiple of {PAGE}")


# -- stores with known bytes -----------------------------------------------------------------------

REGIONS = (
    Region("block0/weights", (2 * PAGE, PAGE)),
    Region("block0/state", (3 * PAGE, PAGE, PAGE)),
    Region("activations", (PAGE, 2 * PAGE), scratch=True),
)
STATE_CHUNKS = tuple(
    (r.key, i, n) for r in REGIONS if not r.scratch for i, n in enumerate(r.chunks)
)


def chunk_content(key: str, chunk: int, nbytes: int, generation: int) -> Buffer:
    seed = zlib.crc32(f"{key}/{chunk}/{generation}".encode())
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return buffer


def write_generation(store: Store, generation: int) -> None:
    tickets = [
        store.write(key, i, chunk_content(key, i, n, generation)) for key, i, n in STATE_CHUNKS
    ]
    for ticket in tickets:
        store.wait(ticket)


def commit_next(store: Store) -> None:
    """Write and commit the next generation."""
    generation = store.generation + 1
    write_generation(store, generation)
    store.commit({"step": generation})


def read_chunk(
    store: Store, key: str, chunk: int, nbytes: int, *, uncommitted: bool = False
) -> Buffer:
    buffer = aligned_buffer(nbytes)
    store.wait(store.read(key, chunk, buffer, uncommitted=uncommitted))
    return buffer


def assert_holds(store: Store, generation: int) -> None:
    assert store.generation == generation
    assert store.meta == {"step": generation}
    for key, chunk, nbytes in STATE_CHUNKS:
        expected = chunk_content(key, chunk, nbytes, generation)
        assert np.array_equal(read_chunk(store, key, chunk, nbytes), expected), (key, chunk)


def file_names(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


FIXED_REGION = Region("base", (4 * PAGE, PAGE), fixed=True)
REGIONS_WITH_FIXED = (REGIONS[0], FIXED_REGION, *REGIONS[1:])


def write_fixed_region(store: Store) -> None:
    for chunk, size in enumerate(FIXED_REGION.chunks):
        store.wait(store.write("base", chunk, chunk_content("base", chunk, size, 0)))


# -- the files of a folder -------------------------------------------------------------------------


def file_digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file and the target of every link, by path."""
    collected = {}
    for place, folders, files in os.walk(folder):
        for name in (*files, *folders):
            path = Path(place) / name
            if path.is_symlink():
                collected[str(path)] = f"-> {path.readlink()}"
            elif path.is_file():
                collected[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return collected


def assert_files_kept(before: dict[str, str], folder: Path, what: Any) -> None:
    """Check that all files of `before` still have their content."""
    after = file_digests(folder)
    lost = [name for name, content in before.items() if after.get(name) != content]
    assert not lost, (what, lost)
