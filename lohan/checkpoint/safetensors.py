"""Streaming readers and writers of safetensors files."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lohan.errors import ModelError, StorageIOError
from lohan.util.files import (
    BadJson,
    WrongType,
    checked,
    from_json,
    load_json,
    parse_json,
    sync_file,
    sync_folder,
    usable_path,
    write_new,
)
from lohan.util.units import MiB, align_up, format_bytes

# -- Tensors assembled from ranges of other tensors ------------------------------------------------
#
# The assembled tensor is never in memory as a whole.


ReadFlat = Callable[[str, int, int], torch.Tensor]  # name, start, stop -> flattened elements


@dataclass(frozen=True)
class Run:
    """The elements [start, start + count) of a flattened tensor."""

    tensor: str
    start: int
    count: int


@dataclass(frozen=True)
class Assembly:
    """A tensor whose flattened elements are the concatenation of `runs`."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    _begins: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        begins, at = [], 0
        for run in self.runs:
            begins.append(at)
            at += run.count
        assert at == torch.Size(self.shape).numel(), (at, self.shape)
        object.__setattr__(self, "_begins", begins)

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(run.tensor for run in self.runs))

    def read(self, start: int, stop: int, read_flat: ReadFlat) -> torch.Tensor:
        parts = []
        number = max(0, bisect_right(self._begins, start) - 1)
        while start < stop:
            run, begin = self.runs[number], self._begins[number]
            end = min(stop, begin + run.count)
            first = run.start + start - begin
            parts.append(read_flat(run.tensor, first, first + end - start))
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)


def runs_of(rows: torch.Tensor, width: int, sources: Sequence[tuple[str, int]]) -> tuple[Run, ...]:
    """Convert row numbers into contiguous runs.

    A row has `width` elements. Rows are numbered consecutively through all `sources`, which are
    pairs of a name and a number of rows.
    """
    flat = rows.reshape(-1).to(torch.int64)
    ends = torch.tensor([count for _, count in sources]).cumsum(0)
    owner = torch.bucketize(flat, ends, right=True)
    breaks = (flat[1:] != flat[:-1] + 1) | (owner[1:] != owner[:-1])
    firsts = [0, *(breaks.nonzero().squeeze(1) + 1).tolist()] if len(flat) else []
    runs = []
    for first, last in zip(firsts, [*firsts[1:], len(flat)], strict=False):
        source = int(owner[first])
        begin = int(flat[first]) - (int(ends[source - 1]) if source else 0)
        runs.append(Run(sources[source][0], begin * width, (last - first) * width))
    return tuple(runs)


# -- Reading safetensors files in ranges of any size -----------------------------------------------
#
# A file starts with 8 bytes of little-endian header length and that many bytes of JSON (name ->
# dtype, shape, data_offsets relative to the end of the header). The tensors follow without gaps.
# Files are read with pread into a new buffer instead of mmap, because mapped pages count as memory
# of the process. The pages read are dropped from the page cache, so memory use stays constant
# inside a cgroup too.


# Names of weight files without suffix: of transformers, and of diffusers.
STEMS = ("model", "diffusion_pytorch_model")

_MAX_HEADER_BYTES = 100_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # requires torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


@dataclass(frozen=True)
class FileTensor:
    """The name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and the byte offset at which its data begins in a file."""

    spec: FileTensor
    file: Path
    offset: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a safetensors file by name, after checking the header.

    The offsets in the header must fit the size of the file.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _broken(
                    file, f"header of {length:,} bytes announced in a file of {size:,} bytes"
                )
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file}: cannot read: {error.strerror}; check the path") from error
    try:
        header = parse_json(text)
    except BadJson as error:
        what = f"header of {length:,} bytes is not the expected JSON ({error})"
        raise _broken(file, what) from None
    if not isinstance(header, dict):
        raise _broken(file, f"header of {length:,} bytes is not the expected JSON: not an object")
    items = {name: item for name, item in header.items() if name != "__metadata__"}
    entries = {name: _entry(file, name, item, 8 + length) for name, item in items.items()}
    _check_layout(file, entries, data_start=8 + length, size=size)
    return entries


@dataclass(frozen=True)
class _Item:
    """The description of a tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_KEYS = ("dtype", "shape", "data_offsets")


def _entry(file: Path, name: str, item: object, data_start: int) -> TensorEntry:
    fields = {key: item[key] for key in _KEYS if key in item} if isinstance(item, dict) else item
    try:
        entry = from_json(_Item, fields)
        if entry.data_offsets[0] < 0 or any(size < 0 for size in entry.shape):
            raise WrongType("a number is negative")
    except WrongType as error:
        what = f"tensor {name[:200]} has no usable shape and data_offsets ({error})"
        raise _broken(file, what) from None
    if entry.dtype not in DTYPES:
        raise ModelError(
            f"{file}: tensor {name} has dtype {entry.dtype[:40]!r}, known are {', '.join(DTYPES)}; "
            "convert the checkpoint to one of them"
        )
    begin, end = entry.data_offsets
    spec = FileTensor(name, DTYPES[entry.dtype], entry.shape)
    if end - begin != spec.nbytes:
        raise _broken(
            file,
            f"tensor {name} of shape {list(spec.shape)} needs {spec.nbytes:,} bytes, "
            f"its offsets [{begin:,}, {end:,}] hold {end - begin:,}",
        )
    return TensorEntry(spec, file, data_start + begin)


def _check_layout(
    file: Path, entries: Mapping[str, TensorEntry], *, data_start: int, size: int
) -> None:
    position, previous = data_start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.spec.nbytes)):
        end = entry.offset + entry.spec.nbytes
        if end > size:
            raise _broken(
                file,
                f"tensor {entry.spec.name} ends at byte {end:,}, the file at {size:,}",
            )
        if entry.offset != position:
            verb = "overlaps" if entry.offset < position else "leaves a gap after"
            raise _broken(
                file,
                f"tensor {entry.spec.name} at byte {entry.offset:,} {verb} {previous}, "
                f"which ends at {position:,}",
            )
        position, previous = end, entry.spec.name
    if position != size:
        raise _broken(file, f"tensors end at byte {position:,}, the file at {size:,}")


def _broken(file: Path, what: str) -> ModelError:
    return ModelError(
        f"{file}: {what}; the file is truncated or damaged, copy or download it again"
    )


def single_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    names = [name(stem) for stem in STEMS for name in (single_file, index_file)]
    return any((folder / name).is_file() for name in names)


def refuse_gguf(path: Path) -> None:
    """Raise an error if the path is a GGUF file or a folder that holds one."""
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        raise ModelError(
            f"{path}: the weights are in GGUF, without the config.json that they are for; give a "
            "folder that holds the file and config.json and tokenizer of the model that it was "
            "made from"
        )


def folder_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a folder's single weight file, or of the shards in its index."""
    for stem in STEMS:
        if (folder / single_file(stem)).is_file():
            return read_header(folder / single_file(stem))
        if (folder / index_file(stem)).is_file():
            return _indexed_entries(folder, folder / index_file(stem))
    if any(folder.glob("*pytorch_model*.bin")):
        raise ModelError(
            f"{folder}: weights are in pytorch_model.bin only, a pickle that cannot be streamed; "
            "convert once on a machine where the model fits: AutoModelForCausalLM"
            ".from_pretrained(DIR, dtype='auto').save_pretrained(NEW_DIR)"
        )
    refuse_gguf(folder)
    raise ModelError(
        f"{folder}: holds neither {single_file('model')} nor {index_file('model')}; "
        "give a folder with safetensors weights"
    )


def _indexed_entries(folder: Path, index: Path) -> dict[str, TensorEntry]:
    try:
        raw = checked(load_json(index), dict[str, Any], "")
        weight_map: dict[str, str] = checked(raw.get("weight_map"), dict[str, str], "weight_map")
    except (OSError, BadJson, WrongType) as error:
        raise ModelError(
            f"{index}: cannot be read as an index with a weight_map: {error}; download it again"
        ) from None
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _check_inside(index, shard)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{index}: names {len(shards)} shards, {len(missing)} of them missing, first "
            f"{missing[0]}; finish the download of {folder}"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelError(
                f"{index}: places tensor {name} in {shard}, whose {len(headers[shard])} tensors "
                "do not include it; index and shards are of different downloads, fetch both again"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _check_inside(index: Path, name: str) -> None:
    """Refuse a shard name in an index that is not the path of a file inside the folder."""
    if not usable_path(name):
        raise ModelError(
            f"{index}: names the shard {name[:60]!r}, {len(name)} characters, which no file can be "
            "called; download it again"
        )
    shard = Path(name)
    if shard.is_absolute() or ".." in shard.parts:
        raise ModelError(
            f"{index}: names the shard {shard}, which is outside the model folder; do not use this "
            "folder unless you know why, and then put the file into it"
        )


class TensorFolder:
    """The tensors of a model folder, read in element ranges; no file stays open or mapped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._entries = folder_entries(self.path)
        self._assembled: dict[str, Assembly] = {}

    def assemble(self, name: str, assembly: Assembly) -> str:
        """Add a tensor that is assembled from others, and return the name to read it by."""
        name = f"{name} (assembled)"
        self._assembled[name] = assembly
        return name

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._assembled:
            return self._assembled[name].shape
        return self._entry(name).spec.shape

    def dtype(self, name: str) -> torch.dtype:
        if name in self._assembled:
            name = self._assembled[name].sources[0]
        return self._entry(name).spec.dtype

    def read(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self.read_flat(name, 0, math.prod(shape)).view(shape)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor, in the dtype of the file."""
        if name in self._assembled:
            return self._assembled[name].read(start, stop, self.read_flat)
        entry = self._entry(name)
        if not 0 <= start <= stop <= entry.spec.numel:
            raise ValueError(f"{name}: range {start}..{stop} outside 0..{entry.spec.numel}")
        piece = torch.empty(stop - start, dtype=entry.spec.dtype)
        if stop > start:
            _pread(entry, piece, entry.offset + start * entry.spec.dtype.itemsize)
        return piece

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(
                f"{self.path}: no tensor {name} among {len(self._entries)}; "
                "the folder belongs to another model"
            ) from None


def _pread(entry: TensorEntry, piece: torch.Tensor, offset: int) -> None:
    view = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        fd = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise _broken(
                        entry.file,
                        f"tensor {entry.spec.name}: file ends at byte {offset + done:,}, "
                        f"{offset + len(view):,} expected",
                    )
                done += count
            first = offset // _PAGE * _PAGE
            pages = align_up(offset + len(view), _PAGE) - first
            os.posix_fadvise(fd, first, pages, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageIOError(
            f"{entry.file}: tensor {entry.spec.name}: reading {len(view):,} bytes at {offset:,} "
            f"failed: {error.strerror}; check the drive"
        ) from error


# -- Writing safetensors files in pieces -----------------------------------------------------------
#
# The division into shards and all headers are determined before any data is written. Every shard is
# synced and dropped from the page cache as it grows, so memory use stays constant inside a cgroup.
# If there is more than one shard, an index is written last.


_SYNC_EVERY_BYTES = 64 * MiB
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def shard_tensors(
    tensors: Iterable[FileTensor], *, max_shard_bytes: int, stem: str = "model"
) -> dict[str, list[FileTensor]]:
    """Map file names to tensors, keeping the given order.

    A tensor that is larger than `max_shard_bytes` gets a shard of its own.
    """
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
    """Return the header bytes and the byte offset of each tensor in the file.

    Wider dtypes come first, as in the format's reference writer, so that each tensor is aligned.
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
    """A file that is being written at explicit offsets, synced and dropped from the page cache."""

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
        sync_file(self._fd, self.file)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0


class ShardedWriter:
    """A writer of tensors in pieces, whose names, dtypes and shapes are known in advance.

    Tensors may be written in any order, but the pieces of one tensor must be in order.
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
        """Write the next elements of a tensor, in the dtype declared for it."""
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
        """Check that every element was written, then make the files and the index durable."""
        short = [n for n, spec in self._specs.items() if self._written[n] != spec.numel]
        if short:
            first = self._specs[short[0]]
            raise ValueError(
                f"{len(short)} tensors incomplete, first {first.name}: "
                f"{self._written[first.name]} of {first.numel} elements"
            )
        for shard in self._shards:
            if not shard.file.exists():  # All of its tensors are empty.
                shard.finish()
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in self._specs.values())},
                "weight_map": {s.name: file for file, specs in self._files.items() for s in specs},
            }
            text = json.dumps(index, indent=2) + "\n"
            write_new(self.folder / index_file(self._stem), text.encode())
        sync_folder(self.folder)

    def abort(self) -> None:
        """Close and remove the files written so far."""
        for shard in self._shards:
            shard.abort()
            shard.file.unlink(missing_ok=True)

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise
