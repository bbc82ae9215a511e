"""Simulated power cuts: file operations are recorded, and any prefix of them is replayed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lohan.store.io_engine import Buffer
from lohan.util.units import PAGE

Kind = Literal["mkdir", "create", "rename", "unlink", "rmdir", "write", "size", "sync", "mark"]
Journal = Literal["ordered", "per inode"]
NAMES = ("mkdir", "create", "rename", "unlink", "rmdir")


@dataclass(frozen=True)
class Op:
    """`inode`: number of the file or directory. Of names: `path`, and `target` of a rename."""

    kind: Kind
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

    def apply_name(self, op: Op) -> bool:
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
    def __init__(self, root: Path) -> None:
        self.root, self.ops = root, list[Op]()
        self._inodes: dict[str, int] = {".": 0}
        self._next = 1

    def mark(self, note: Any) -> None:
        """Record what is promised from here on."""
        self.ops.append(Op("mark", -1, note=note))

    def key(self, path: str | os.PathLike[str]) -> str | None:
        try:
            actual = Path(path).absolute().relative_to(self.root)
        except ValueError:
            return None
        return str(actual)

    def created(self, path: Any, kind: Kind) -> None:
        key = self.key(path)
        if key is not None and key not in self._inodes:
            self._inodes[key] = self._next
            self.ops.append(Op(kind, self._next, path=key))
            self._next += 1

    def gone(self, path: Any, kind: Kind) -> None:
        key = self.key(path)
        if key is not None:
            self.ops.append(Op(kind, self._inodes.pop(key), path=key))

    def renamed(self, path: Any, target: Any) -> None:
        old, new = self.key(path), self.key(target)
        if old is None or new is None:
            return
        inode = self._inodes[old]
        self.ops.append(Op("rename", inode, path=old, target=new))
        for name in [n for n in self._inodes if n == old or n.startswith(old + "/")]:
            self._inodes[new + name[len(old) :]] = self._inodes.pop(name)

    def wrote(self, path: Any, offset: int, data: bytes) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(Op("write", self._inodes[key], offset=offset, data=data))

    def sized(self, path: Any, size: int) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(Op("size", self._inodes[key], offset=size))

    def synced(self, path: Any) -> None:
        key = self.key(path)
        if key in self._inodes:
            self.ops.append(Op("sync", self._inodes[key], path=key))

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
        self, ops: list[Op], disk: Disk, journal: Journal, chance: random.Random
    ) -> None:
        if journal == "ordered":
            syncs = [number for number, op in enumerate(ops) if op.kind == "sync"]
            least = syncs[-1] if syncs else 0
            until = chance.randint(least, len(ops))
            for op in ops[:until]:
                if op.kind in NAMES:
                    assert disk.apply_name(op), op
            return
        for number, op in enumerate(ops):
            if op.kind in NAMES and (_is_synced(ops, number) or chance.random() < 0.5):
                disk.apply_name(op)


def _is_synced(ops: list[Op], number: int) -> bool:
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


def path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def whole(path: Any, dir_fd: int | None) -> Any:
    """shutil.rmtree names files by their folder's descriptor."""
    return path if dir_fd is None else Path(path_of(dir_fd)) / path


@contextmanager
def recording(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
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
        path, at = path_of(fd), os.lseek(fd, 0, os.SEEK_CUR)
        count: int = real["write"](fd, data)
        tape.wrote(path, at, bytes(data[:count]))
        return count

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        tape.wrote(path_of(fd), offset, data)
        return int(real["pwrite"](fd, data, offset))

    def ftruncate(fd: int, size: int) -> None:
        real["ftruncate"](fd, size)
        tape.sized(path_of(fd), size)

    def fsync(fd: int) -> None:
        tape.synced(path_of(fd))

    def replace(source: Any, target: Any, **named: Any) -> None:
        real["replace"](source, target, **named)
        tape.renamed(source, target)

    def unlink(path: Any, **named: Any) -> None:
        actual = whole(path, named.get("dir_fd"))
        real["unlink"](path, **named)
        tape.gone(actual, "unlink")

    def rmdir(path: Any, **named: Any) -> None:
        actual = whole(path, named.get("dir_fd"))
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
