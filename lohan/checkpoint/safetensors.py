"""Safetensors files read as a stream, in pieces of any size.

A file is 8 bytes of little-endian header length, that many bytes of JSON (name -> dtype, shape,
data_offsets relative to the end of the header), then the tensors without gaps. Reads go through
pread into a fresh buffer, not through mmap: mapped pages would count as process memory. Pages read
are dropped from the page cache, so that memory stays flat inside a cgroup too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lohan.checkpoint.assembly import Assembly
from lohan.errors import ModelError, StorageIOError
from lohan.util.json_file import BadJson, load_json, parse_json
from lohan.util.paths import usable_path
from lohan.util.typed import WrongType, checked, from_json
from lohan.util.units import align_up

STEMS = ("model", "diffusion_pytorch_model")  # of weight files: transformers', diffusers'

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


@dataclass(frozen=True)
class FileTensor:
    """What a tensor is called and how large it is, without its values."""

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
    """A tensor and the place in a file where its bytes begin."""

    spec: FileTensor
    file: Path
    offset: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, its header checked against the file's size."""
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
    """A tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_KEYS = ("dtype", "shape", "data_offsets")


def _entry(file: Path, name: str, item: object, data_start: int) -> TensorEntry:
    known = {key: item[key] for key in _KEYS if key in item} if isinstance(item, dict) else item
    try:
        found = from_json(_Item, known)
        if found.data_offsets[0] < 0 or any(size < 0 for size in found.shape):
            raise WrongType("a number is negative")
    except WrongType as error:
        what = f"tensor {name[:200]} has no usable shape and data_offsets ({error})"
        raise _broken(file, what) from None
    if found.dtype not in DTYPES:
        raise ModelError(
            f"{file}: tensor {name} has dtype {found.dtype[:40]!r}, known are {', '.join(DTYPES)}; "
            "convert the checkpoint to one of them"
        )
    begin, end = found.data_offsets
    spec = FileTensor(name, DTYPES[found.dtype], found.shape)
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
    return ModelError(f"{file}: {what}; the file is truncated or damaged, copy or download it anew")


def single_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    names = [name(stem) for stem in STEMS for name in (single_file, index_file)]
    return any((folder / name).is_file() for name in names)


def folder_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of model.safetensors, or of the shards that the index names."""
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
            f"{index}: cannot be read as an index with a weight_map: {error}; download it anew"
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
                "do not include it; index and shards are of different downloads, fetch both anew"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _check_inside(index: Path, name: str) -> None:
    """A name in an index is a file of the folder, nothing else."""
    if not usable_path(name):
        raise ModelError(
            f"{index}: names the shard {name[:60]!r}, {len(name)} characters, which no file can be "
            "called; download it anew"
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
        """Adds a tensor that is put together from those of the folder; returns its name here."""
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
        spec = self._entry(name).spec
        return self.read_flat(name, 0, spec.numel).view(spec.shape)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of the flattened tensor, in the dtype of the file."""
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
            _drop_pages(fd, offset, offset + len(view))
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageIOError(
            f"{entry.file}: tensor {entry.spec.name}: reading {len(view):,} bytes at {offset:,} "
            f"failed: {error.strerror}; check the drive"
        ) from error


def _drop_pages(fd: int, start: int, stop: int) -> None:
    first = start // _PAGE * _PAGE
    os.posix_fadvise(fd, first, align_up(stop, _PAGE) - first, os.POSIX_FADV_DONTNEED)
