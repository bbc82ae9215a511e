"""Safetensors files written as a stream: shards and headers are fixed first, then come the bytes.

Every shard is synced and dropped from the page cache as it grows, so that memory stays flat inside
a cgroup; the index is written last, when there is more than one shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lohan.checkpoint.safetensors import DTYPES, FileTensor, index_file, single_file
from lohan.errors import StorageIOError
from lohan.util.atomic import sync_folder
from lohan.util.units import MiB, align_up, format_bytes

_SYNC_EVERY_BYTES = 64 * MiB
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def shard_tensors(
    tensors: Iterable[FileTensor], *, max_shard_bytes: int, stem: str = "model"
) -> dict[str, list[FileTensor]]:
    """File name -> tensors in the given order; one above the limit gets a shard of its own."""
    shards: list[list[FileTensor]] = [[]]
    used = 0
    for spec in tensors:
        if shards[-1] and used + spec.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    if len(shards) == 1:
        return {single_file(stem): shards[0]}
    return {
        f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, start=1)
    }


def encode_header(tensors: Iterable[FileTensor]) -> tuple[bytes, dict[str, int]]:
    """Header bytes, and where each tensor's bytes begin in the file.

    Wider dtypes come first, as the format's own writer orders them, so that each tensor is aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for spec in sorted(tensors, key=lambda s: -s.dtype.itemsize):
        begins[spec.name] = position
        position += spec.nbytes
        header[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[spec.name], position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align_up(len(text), 8))
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


class _Shard:
    """One file being written: positioned writes, synced and dropped from the page cache."""

    def __init__(self, file: Path, tensors: list[FileTensor]) -> None:
        self.file = file
        self.pending = sum(spec.nbytes for spec in tensors)
        self._head, self.offsets = encode_header(tensors)
        self._fd: int | None = None
        self._unsynced = 0

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._write_all(data, offset)
            self.pending -= len(data)
            self._unsynced += len(data)
            if self._unsynced >= _SYNC_EVERY_BYTES:
                self._sync()
        except OSError as error:
            raise StorageIOError(
                f"{self.file}: writing {len(data):,} bytes at {offset:,} failed: {error.strerror}; "
                f"{format_bytes(self.pending)} were still to come, free that much space"
            ) from error

    def finish(self) -> None:
        try:
            self._write_all(memoryview(b""), 0)
            self._sync()
        except OSError as error:
            raise StorageIOError(
                f"{self.file}: sync failed: {error.strerror}; check the drive"
            ) from error
        self.abort()

    def abort(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write_all(self, data: memoryview, offset: int) -> None:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self.file, flags, 0o644)
            self._write_all(memoryview(self._head), 0)
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def _sync(self) -> None:
        assert self._fd is not None
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0


class ShardedWriter:
    """Writes tensors given in pieces; all names, dtypes and shapes are known from the start.

    Tensors may come in any order, the pieces of one tensor from its beginning to its end.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tensors: Iterable[FileTensor],
        max_shard_bytes: int = 5 * 10**9,
        stem: str = "model",
    ) -> None:
        self.folder, self._stem = Path(folder), stem
        specs = list(tensors)
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("two tensors have the same name")
        self._files = shard_tensors(specs, max_shard_bytes=max_shard_bytes, stem=stem)
        shards = {name: _Shard(self.folder / name, specs) for name, specs in self._files.items()}
        self._shard_of = {
            s.name: shards[file] for file, specs in self._files.items() for s in specs
        }
        self._shards = list(shards.values())
        self._written = dict.fromkeys(self._specs, 0)

    def write(self, name: str, piece: torch.Tensor) -> None:
        """The next elements of a tensor, flattened, in the dtype announced for it."""
        spec, done = self._specs[name], self._written[name]
        if piece.dtype != spec.dtype or done + piece.numel() > spec.numel:
            raise ValueError(
                f"{name}: {piece.numel()} elements of {piece.dtype} after {done} of {spec.numel} "
                f"of {spec.dtype}"
            )
        if not piece.numel():
            return
        flat = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        shard = self._shard_of[name]
        shard.write(data, shard.offsets[name] + done * spec.dtype.itemsize)
        self._written[name] = done + piece.numel()
        if not shard.pending:
            shard.finish()

    def close(self) -> None:
        """Check that every element arrived, then make the files and the index durable."""
        short = [n for n, spec in self._specs.items() if self._written[n] != spec.numel]
        if short:
            first = self._specs[short[0]]
            raise ValueError(
                f"{len(short)} tensors incomplete, first {first.name}: "
                f"{self._written[first.name]} of {first.numel} elements"
            )
        for shard in self._shards:
            if not shard.file.exists():  # only tensors without elements
                shard.finish()
        if len(self._files) > 1:
            self._write_index()
        sync_folder(self.folder)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in self._specs.values())},
            "weight_map": {s.name: file for file, specs in self._files.items() for s in specs},
        }
        write_synced(self.folder / index_file(self._stem), json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Close and remove what was written so far."""
        for shard in self._shards:
            shard.abort()
            shard.file.unlink(missing_ok=True)

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


def write_synced(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
