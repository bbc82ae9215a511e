"""Model folders with llama.cpp GGUF weights, dequantised range by range.

The folder must hold the config.json and tokenizer of the model that the GGUF file was made from.
Tensor names and values equal those that transformers computes. Rows are read and dequantised on
demand.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lohan.checkpoint.safetensors import TensorFolder
from lohan.errors import ModelError, StorageIOError, first_line

_MINUS_ONE = ("gemma2", "gemma3")  # architectures whose norm weights GGUF stores with 1 added
_ORDERED = ("llama",)  # architectures whose query and key rows are permuted in GGUF
_PIECE_BYTES = 2**22


@dataclass(frozen=True)
class _Entry:
    """A tensor of a GGUF file: rows of `row_bytes` bytes each, starting at byte `offset`.

    `order` lists the file's row numbers in the order of the model, or is None if both orders are
    the same. `added` is a constant that the file has added to every value.
    """

    file: Path
    kind: Any
    shape: tuple[int, ...]
    offset: int
    row_bytes: int
    order: np.ndarray[Any, Any] | None
    added: float

    @property
    def columns(self) -> int:
        return self.shape[-1]


def _bounded_reader(gguf: Any) -> Any:
    """Return a GGUFReader class that rejects arrays longer than the file.

    The gguf package's own reader loops over as many values as an array header announces, even if
    the file does not contain them.
    """

    class Bounded(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, at: int, kind: int) -> Any:
            if kind == gguf.GGUFValueType.ARRAY:
                announced = int(self._get(at + 4, np.uint64)[0])
                if announced > len(self.data):
                    raise ValueError(f"{announced:,} values announced, {len(self.data):,} bytes")
            return super()._get_field_parts(at, kind)

    return Bounded


class GgufFolder(TensorFolder):
    """The tensors of a model folder whose weights are one GGUF file or the parts of one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._assembled = Path(path), {}
        self._files = sorted(self.path.glob("*.gguf"))
        if len(self._files) > 1 and not all("-of-" in file.name for file in self._files):
            raise ModelError(
                f"{path}: holds {len(self._files)} GGUF files, and it is unclear which "
                "one to use; leave one, or the parts of one"
            )
        try:
            import gguf
        except ImportError:
            raise ModelError(
                f"{path}: the weights are in GGUF, which needs the package gguf, and that is not "
                "installed; pip install gguf"
            ) from None
        self._gguf = gguf
        self._tensors: dict[str, _Entry] = {}
        self._kind = ""
        for file in self._files:
            try:
                reader = _bounded_reader(gguf)(file)
            except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
                raise ModelError(
                    f"{file}: cannot be read as GGUF ({first_line(error)}); download it again"
                ) from None
            self._take(file, reader)

    def _take(self, file: Path, reader: Any) -> None:
        from transformers import modeling_gguf_pytorch_utils

        utils: Any = modeling_gguf_pytorch_utils
        processors: dict[str, Any] = utils.TENSOR_PROCESSORS
        architecture = utils.read_field(reader, "general.architecture")  # only in the first part
        self._kind = kind = str(architecture[0]) if architecture else self._kind
        if kind in processors and kind not in (*_ORDERED, *_MINUS_ONE):
            raise ModelError(
                f"{file}: is GGUF of architecture {kind!r:.40}, whose tensors "
                "LoHan cannot read piece by piece; give the checkpoint it was made from"
            )
        model = self._structure()
        derived = model.config.get_text_config().to_dict()
        processor = processors.get(kind, utils.TensorProcessor)(config=derived)
        try:
            names = utils.get_gguf_hf_weights_map(model, processor, model_type=kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{file}: is GGUF of architecture {kind!r:.40}, which the package gguf does "
                f"not know ({first_line(error)}); give the checkpoint it was made from"
            ) from None
        for tensor in reader.tensors:
            if tensor.name not in names:
                continue
            shape = tuple(int(size) for size in reversed(tensor.shape))
            rows = math.prod(shape[:-1])
            order = None
            if kind in _ORDERED:
                lines = np.arange(shape[0])
                try:
                    values = processor.process(weights=lines.copy(), name=tensor.name).weights
                except ValueError:
                    raise ModelError(
                        f"{file}: tensor {tensor.name[:200]} has shape {list(shape)}, which the "
                        "heads in config.json do not divide; the two are of different models"
                    ) from None
                order = None if np.array_equal(values, lines) else values
            self._tensors[names[tensor.name]] = _Entry(
                file,
                tensor.tensor_type,
                shape,
                int(tensor.data_offset),
                int(tensor.n_bytes) // max(rows, 1),
                order,
                1.0 if kind in _MINUS_ONE and "norm.weight" in tensor.name else 0.0,
            )

    def _structure(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        build: Any = AutoModelForCausalLM.from_config
        config = AutoConfig.from_pretrained(str(self.path), local_files_only=True)
        with torch.device("meta"):
            return build(config, trust_remote_code=False)

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._assembled:
            return self._assembled[name].shape
        return self._one(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._assembled:
            return self._assembled[name].read(start, stop, self.read_flat)
        entry = self._one(name)
        if not 0 <= start <= stop <= math.prod(entry.shape):
            raise ValueError(f"{name}: range {start}..{stop} outside 0..{math.prod(entry.shape)}")
        if entry.order is not None and len(entry.shape) == 1:  # a bias: one row, permuted
            return self._rows(entry, name, 0, 1)[0][torch.from_numpy(entry.order)[start:stop]]
        columns, values = entry.columns, torch.empty(stop - start)
        step = max(1, _PIECE_BYTES // max(entry.row_bytes, 1))
        last = math.ceil(stop / columns) if columns else 0
        for first in range(start // columns if columns else 0, last, step):
            end = min(first + step, last)
            rows = self._ordered(entry, name, first, end).view(-1)
            low, high = max(start, first * columns), min(stop, end * columns)
            values[low - start : high - start] = rows[
                low - first * columns : high - first * columns
            ]
        return values - entry.added if entry.added else values

    def _ordered(self, entry: _Entry, name: str, first: int, last: int) -> torch.Tensor:
        if entry.order is None:
            return self._rows(entry, name, first, last)
        wanted = torch.from_numpy(entry.order[first:last])
        low, high = int(wanted.min()), int(wanted.max()) + 1
        return self._rows(entry, name, low, high)[wanted - low]

    def _rows(self, entry: _Entry, name: str, first: int, last: int) -> torch.Tensor:
        """Return the rows [first, last) of a tensor in file order, dequantised to fp32."""
        size, at = (last - first) * entry.row_bytes, entry.offset + first * entry.row_bytes
        try:
            with open(entry.file, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, at)
        except OSError as error:
            raise StorageIOError(
                f"{entry.file}: tensor {name}: reading {size:,} bytes at {at:,} failed: "
                f"{error.strerror}; check the drive"
            ) from error
        if len(data) != size:
            raise ModelError(
                f"{entry.file}: tensor {name}: the file ends at byte {at + len(data):,}, "
                f"{at + size:,} expected; download it again"
            )
        packed = np.frombuffer(data, dtype=np.uint8).reshape(last - first, entry.row_bytes)
        try:
            values = self._gguf.dequantize(packed, entry.kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{entry.file}: tensor {name} is {entry.kind.name}, which the package gguf cannot "
                f"dequantise ({first_line(error)}); give the checkpoint it was made from"
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(last - first, -1)

    def _one(self, name: str) -> _Entry:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(
                f"{self.path}: no tensor {name} among {len(self._tensors)}; the folder belongs to "
                "another model"
            ) from None
