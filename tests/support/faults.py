"""Failing I/O: faults of an engine, of system calls and of numbered calls, and power cuts."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lohan.errors import StorageIOError
from lohan.store.io_engine import Buffer, IOEngine
from lohan.util.units import PAGE
from tests.support.stores import MemoryEngine

if TYPE_CHECKING:
    import pytest

# -- faults and delays of an engine ----------------------------------------------------------------

EngineFaultKind = Literal["eio", "enospc", "short_read", "torn_write"]
EngineOp = Literal["open", "read", "write", "sync"]

_FAULT_CAUSES = {
    "eio": "EIO (Input/output error)",
    "enospc": "ENOSPC (No space left on device)",
    "torn_write": "EIO (Input/output error)",
}


@dataclass(frozen=True)
class EngineFault:
    """`kind` happens to the `nth` operation of type `op`, counted from 1."""

    kind: EngineFaultKind
    op: EngineOp
    nth: int = 1

    def __post_init__(self) -> None:
        needs = {"short_read": "read", "torn_write": "write"}.get(self.kind)
        if needs is not None and self.op != needs:
            raise ValueError(f"{self.kind} needs op={needs!r}, got {self.op!r}")


@dataclass
class _HeldRequest:
    op: EngineOp
    file: int
    offset: int
    buffer: Buffer
    fault: EngineFault | None


class FaultyEngine:
    """An engine with failures at chosen operations and random delays.

        engine = FaultyEngine(inner, EngineFault("eio", "read", nth=3), max_delay_s=0.01, seed=7)

    The failing operation raises StorageIOError from wait(), or from the call itself for open and
    sync. With delays, a request reaches the inner engine only when it is waited for, so code that
    forgets to wait sees stale bytes.
    """

    def __init__(
        self, inner: IOEngine, *faults: EngineFault, max_delay_s: float = 0.0, seed: int = 0
    ) -> None:
        self.inner = inner
        self.faults = faults
        self.counts: dict[str, int] = {"open": 0, "read": 0, "write": 0, "sync": 0}
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._paths: dict[int, str] = {}
        self._held: dict[int, _HeldRequest] = {}
        self._inner_tickets: dict[int, int] = {}
        self._next_ticket = 1
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"faulty-{self.inner.name}"

    def open(self, path: str, *, size: int, create: bool) -> int:
        fault = self._count("open")
        if fault is not None:
            raise StorageIOError(
                f"opening {path} ({size} bytes) failed: {_FAULT_CAUSES[fault.kind]}"
            )
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
            raise StorageIOError(
                f"fdatasync of {self._paths[file]} failed: {_FAULT_CAUSES[fault.kind]}"
            )
        self.inner.sync(file)

    def close(self) -> None:
        self.inner.close()

    def _count(self, op: EngineOp) -> EngineFault | None:
        with self._lock:
            self.counts[op] += 1
            matching = (f for f in self.faults if f.op == op and f.nth == self.counts[op])
            return next(matching, None)

    def _submit(self, op: EngineOp, file: int, offset: int, buffer: Buffer) -> int:
        fault = self._count(op)
        hold = fault is not None or self._max_delay_s > 0
        inner_ticket = 0 if hold else self._start(op, file, offset, buffer)
        with self._lock:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            if hold:
                self._held[ticket] = _HeldRequest(op, file, offset, buffer, fault)
            else:
                self._inner_tickets[ticket] = inner_ticket
            return ticket

    def _start(self, op: EngineOp, file: int, offset: int, buffer: Buffer) -> int:
        call = self.inner.write if op == "write" else self.inner.read
        return call(file, offset, buffer)

    def _transfer(self, held: _HeldRequest, part: Buffer, timeout_s: float) -> None:
        self.inner.wait(self._start(held.op, held.file, held.offset, part), timeout_s)

    def _fail(self, held: _HeldRequest, fault: EngineFault, timeout_s: float) -> None:
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
        raise StorageIOError(f"{where} failed: {_FAULT_CAUSES[fault.kind]}")


# -- faults at numbered calls ----------------------------------------------------------------------

NUMBERED_CALLS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir", "ftruncate")
InjectedError = type[OSError] | type[KeyboardInterrupt]


class NumberedFaults:
    """A fault at a numbered call of the os module or of an engine.

        faults = NumberedFaults(at=3, error=OSError)
        with faults.armed(monkeypatch):
            session.close()
        faults.reached  # whether there was a third call

    Only calls between `armed` and the fault count; each is numbered once, from 1.
    """

    def __init__(self, *, at: int, error: InjectedError = OSError) -> None:
        self._at, self._error = at, error
        self._counting, self.calls = False, 0

    @property
    def reached(self) -> bool:
        return self.calls >= self._at

    @contextmanager
    def armed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in NUMBERED_CALLS:
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
    """An engine whose calls are numbered. A wait that fails has waited for its I/O."""

    name = "numbered"

    def __init__(self, inner: IOEngine) -> None:
        self.inner, self.faults = inner, NumberedFaults(at=0)

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


# -- recorded system calls of a commit -------------------------------------------------------------


class Killed(BaseException):
    """Raised in place of the end of the process: no code after it runs."""


class CommitRecorder:
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


def recorded_engine(recorder: CommitRecorder, memory: dict[str, bytearray]) -> MemoryEngine:
    class Recorded(MemoryEngine):
        def sync(self, file: int) -> None:
            recorder.boundary()
            recorder.calls.append(f"sync {Path(self._paths[file]).name}")
            recorder.boundary()

    return Recorded(files=memory)


# -- power cuts ------------------------------------------------------------------------------------

FileOpKind = Literal[
    "mkdir", "create", "rename", "unlink", "rmdir", "write", "size", "sync", "mark"
]
Journal = Literal["ordered", "per inode"]
NAME_OPS = ("mkdir", "create", "rename", "unlink", "rmdir")


@dataclass(frozen=True)
class FileOp:
    """One operation on the file or directory `inode`; changes of names also have paths."""

    kind: FileOpKind
    inode: int
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""
    note: Any = None


@dataclass
class Disk:
    """Names and bytes by inode; None: a directory."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, bytearray | None] = field(default_factory=dict)

    def apply_name(self, op: FileOp) -> bool:
        """Apply a change of a name; return False if it depends on one that was lost."""
        names = self.names
        parent = str(Path(op.target or op.path).parent)
        if op.kind in ("mkdir", "create"):
            if parent not in names or op.path in names:
                return False
            names[op.path] = op.inode
            self.files.setdefault(op.inode, None if op.kind == "mkdir" else bytearray())
        elif op.kind in ("unlink", "rmdir"):
            if names.get(op.path) != op.inode or self._below(op.path):
                return False
            del names[op.path]
        else:
            if names.get(op.path) != op.inode or parent not in names or self._below(op.target):
                return False
            moved = [op.path, *self._below(op.path)]
            for path in moved:
                names[op.target + path[len(op.path) :]] = names.pop(path)
        return True

    def _below(self, path: str) -> list[str]:
        return [name for name in self.names if name.startswith(path + "/")]

    def write_to(self, root: Path) -> None:
        for path in sorted(self.names):
            data = self.files[self.names[path]]
            if path == ".":
                root.mkdir(parents=True, exist_ok=True)
            elif data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)


class Tape:
    """A record of file operations under a folder, and the disks that a power cut can leave."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = root, list[FileOp]()
        self._inodes: dict[str, int] = {".": 0}
        self._next = 1

    def mark(self, note: Any) -> None:
        """Record what is promised from here on."""
        self.ops.append(FileOp("mark", -1, note=note))

    def key(self, path: str | os.PathLike[str]) -> str | None:
        try:
            actual = Path(path).absolute().relative_to(self.root)
        except ValueError:
            return None
        return str(actual)

    def created(self, path: Any, kind: FileOpKind) -> None:
        key = self.key(path)
        if key is not None and key not in self._inodes:
            self._inodes[key] = self._next
            self.ops.append(FileOp(kind, self._next, path=key))
            self._next += 1

    def gone(self, path: Any, kind: FileOpKind) -> None:
        key = self.key(path)
        if key is not None:
            self.ops.append(FileOp(kind, self._inodes.pop(key), path=key))

    def renamed(self, path: Any, target: Any) -> None:
        old, new = self.key(path), self.key(target)
        if old is None or new is None:
            return
        inode = self._inodes[old]
        self.ops.append(FileOp("rename", inode, path=old, target=new))
        for name in [n for n in self._inodes if n == old or n.startswith(old + "/")]:
            self._inodes[new + name[len(old) :]] = self._inodes.pop(name)

    def wrote(self, path: Any, offset: int, data: bytes) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(FileOp("write", self._inodes[key], offset=offset, data=data))

    def sized(self, path: Any, size: int) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(FileOp("size", self._inodes[key], offset=size))

    def synced(self, path: Any) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(FileOp("sync", self._inodes[key], path=key))

    # -- replay -----------------------------------------------------------------------------------

    def last_mark(self, prefix: int) -> Any:
        notes = [op.note for op in self.ops[:prefix] if op.kind == "mark"]
        return notes[-1] if notes else None

    def disk(self, prefix: int, journal: Journal, keep: str, chance: random.Random) -> Disk:
        """Return a possible state of the disk after a power cut behind `prefix` operations.

        `keep` says what happens to unsynced bytes: "lost", "kept" or "pages".
        """
        ops = self.ops[:prefix]
        disk = Disk({".": 0}, {0: None})
        self._replay_names(ops, disk, journal, chance)
        last_sync = {op.inode: number for number, op in enumerate(ops) if op.kind == "sync"}
        for number, op in enumerate(ops):
            durable = number < last_sync.get(op.inode, -1)
            if op.kind not in ("write", "size"):
                continue
            if not durable and keep == "lost":
                continue
            data = disk.files.setdefault(op.inode, bytearray())
            assert data is not None
            if op.kind == "size":
                if durable or keep == "kept" or chance.random() < 0.5:
                    _resize(data, op.offset)
                continue
            for start in range(0, len(op.data), PAGE):
                page = op.data[start : start + PAGE]
                if durable or keep == "kept" or chance.random() < 0.5:
                    _resize(data, max(len(data), op.offset + start + len(page)))
                    data[op.offset + start : op.offset + start + len(page)] = page
        return disk

    def _replay_names(
        self, ops: list[FileOp], disk: Disk, journal: Journal, chance: random.Random
    ) -> None:
        if journal == "ordered":
            syncs = [number for number, op in enumerate(ops) if op.kind == "sync"]
            least = syncs[-1] if syncs else 0
            until = chance.randint(least, len(ops))
            for op in ops[:until]:
                if op.kind in NAME_OPS:
                    assert disk.apply_name(op), op
            return
        for number, op in enumerate(ops):
            if op.kind in NAME_OPS and (_is_synced(ops, number) or chance.random() < 0.5):
                disk.apply_name(op)


def _is_synced(ops: list[FileOp], number: int) -> bool:
    """Return whether the change of a name is durable.

    It is if the directory of the name or the inode was synced later, or if the whole directory
    was removed and that removal is durable.
    """
    op = ops[number]
    folders = {other.inode for other in ops if other.kind == "mkdir"}
    parents = {str(Path(path).parent) for path in (op.path, op.target) if path}
    return any(
        (
            later.kind == "sync"
            and (later.path in parents or (later.inode == op.inode and op.inode not in folders))
        )
        or (later.kind == "rmdir" and later.path in parents and _is_synced(ops, at))
        for at, later in enumerate(ops[number + 1 :], number + 1)
    )


def _resize(data: bytearray, size: int) -> None:
    if len(data) > size:
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


class FileEngine:
    """Plain reads and writes of real files, each recorded."""

    name = "files"

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._paths: list[str] = []
        self._waiting: dict[int, tuple[bool, int, int, Buffer]] = {}
        self._next = 0

    def open(self, path: str, *, size: int, create: bool) -> int:
        if create:
            with open(path, "ab"):
                self._tape.created(path, "create")
            os.truncate(path, size)
            self._tape.sized(path, size)
        self._paths.append(path)
        return len(self._paths) - 1

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._submit(False, file, offset, buffer)

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._submit(True, file, offset, buffer)

    def _submit(self, write: bool, file: int, offset: int, buffer: Buffer) -> int:
        self._next += 1
        self._waiting[self._next] = (write, file, offset, buffer)
        return self._next

    def wait(self, ticket: int, timeout_s: float) -> None:
        write, file, offset, buffer = self._waiting.pop(ticket)
        path = self._paths[file]
        with open(path, "r+b") as opened:
            opened.seek(offset)
            if write:
                opened.write(buffer.tobytes())
                self._tape.wrote(path, offset, buffer.tobytes())
            else:
                assert opened.readinto(memoryview(buffer)) == len(buffer)

    def sync(self, file: int) -> None:
        self._tape.synced(self._paths[file])

    def close(self) -> None:
        self._waiting.clear()


def path_of_descriptor(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def path_below_descriptor(path: Any, dir_fd: int | None) -> Any:
    """Return the whole path of a file that shutil.rmtree names by its folder's descriptor."""
    return path if dir_fd is None else Path(path_of_descriptor(dir_fd)) / path


@contextmanager
def recorded_operations(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    """Carry out and record calls of the os module on files under `root`."""
    tape = Tape(root)
    real = {
        n: getattr(os, n)
        for n in (
            "open",
            "write",
            "fsync",
            "replace",
            "unlink",
            "rmdir",
            "mkdir",
            "ftruncate",
            "pwrite",
            "rename",
        )
    }

    def opened(path: Any, flags: int, *given: Any, **named: Any) -> int:
        fd: int = real["open"](path, flags, *given, **named)
        if flags & os.O_CREAT and not named:
            tape.created(path, "create")
            if flags & os.O_TRUNC:
                tape.sized(path, 0)
        return fd

    def write(fd: int, data: Any) -> int:
        path, at = path_of_descriptor(fd), os.lseek(fd, 0, os.SEEK_CUR)
        count: int = real["write"](fd, data)
        tape.wrote(path, at, bytes(data[:count]))
        return count

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        tape.wrote(path_of_descriptor(fd), offset, data)
        return int(real["pwrite"](fd, data, offset))

    def ftruncate(fd: int, size: int) -> None:
        real["ftruncate"](fd, size)
        tape.sized(path_of_descriptor(fd), size)

    def fsync(fd: int) -> None:
        tape.synced(path_of_descriptor(fd))

    def replace(source: Any, target: Any, **named: Any) -> None:
        real["replace"](source, target, **named)
        tape.renamed(source, target)

    def unlink(path: Any, **named: Any) -> None:
        actual = path_below_descriptor(path, named.get("dir_fd"))
        real["unlink"](path, **named)
        tape.gone(actual, "unlink")

    def rmdir(path: Any, **named: Any) -> None:
        actual = path_below_descriptor(path, named.get("dir_fd"))
        real["rmdir"](path, **named)
        tape.gone(actual, "rmdir")

    def mkdir(path: Any, *given: Any, **named: Any) -> None:
        real["mkdir"](path, *given, **named)
        tape.created(path, "mkdir")

    with monkeypatch.context() as patch:
        fakes = {
            "open": opened,
            "write": write,
            "pwrite": pwrite,
            "ftruncate": ftruncate,
            "fsync": fsync,
            "replace": replace,
            "rename": replace,
            "unlink": unlink,
            "rmdir": rmdir,
            "mkdir": mkdir,
        }
        for name, fake in fakes.items():
            patch.setattr(os, name, fake)
        yield tape


# -- faults below Python ---------------------------------------------------------------------------

INTERPOSE_SOURCE = Path(__file__).parents[1] / "faults" / "interpose.c"
INTERPOSE_BUILD = Path(__file__).parents[2] / "build" / "faults"
CALL_FATES = {"short": -1, "delay": -2}
FAULT_VARIABLE = "LOHAN_FAULT"


@dataclass(frozen=True)
class CallFault:
    """A fault at a call of libc, for a process that is started with `env`."""

    call: str
    at: int  # from 1
    kind: str  # an errno by name, or one of FATES
    engine: str = "auto"  # in place of what the run would choose
    every: bool = False  # and all calls after it

    def __str__(self) -> str:
        return f"{self.kind} at {self.call} {self.at}{' and after' if self.every else ''}"

    def env(self, under: Path, tally: Path) -> dict[str, str]:
        given = {**asdict(self), "under": str(under), "tally": str(tally)}
        return {FAULT_VARIABLE: json.dumps(given)}


def counted_calls(tally: Path) -> tuple[int, int]:
    """Return how many calls a process has made and how many have failed."""
    seen, fired = struct.unpack("ll", tally.read_bytes())
    return seen, fired


def c_compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def preload_environment() -> dict[str, str]:
    return {
        "LD_PRELOAD": " ".join(
            filter(None, [str(interpose_library()), os.environ.get("LD_PRELOAD")])
        )
    }


def interpose_library() -> Path:
    """Return the library that intercepts calls; build it once for each state of its source."""
    result = (
        INTERPOSE_BUILD
        / f"interpose-{hashlib.sha256(INTERPOSE_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    )
    if result.exists():
        return result
    INTERPOSE_BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=INTERPOSE_BUILD) as folder:
        built = Path(folder) / result.name
        options = ["-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-Wall"]
        command = [str(c_compiler()), *options, "-o", str(built), str(INTERPOSE_SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        built.replace(result)
    return result


def arm_call_fault() -> None:
    """Arm the fault of LOHAN_FAULT in this process (`Forge.start(before=...)`)."""
    given = json.loads(os.environ[FAULT_VARIABLE])
    kind = CALL_FATES.get(given["kind"]) or getattr(errno, given["kind"])
    armed = ctypes.CDLL(None).lohan_faults_arm
    armed.argtypes = [
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
    ]
    words = [given[name].encode() for name in ("call", "under", "tally")]
    assert armed(words[0], given["at"], given["every"], kind, words[1], words[2]) == 0
    if given["engine"] != "auto":
        from lohan.store import io_engine

        opened = io_engine.open_engine
        io_engine.open_engine = lambda kind: opened(given["engine"])  # type: ignore[assignment,misc]
