"""Quantized checkpoints, dequantised range by range while they are read.

`open_folder` presents the tensors of a model folder with the names, shapes and values that they
have without quantization. For each range of a tensor, only the packed values and scales of that
range are read where the format allows it. The values equal those of transformers' own
dequantisation.

* fp8: `X` in float8 and `X_scale_inv`, with one scale per block of weight_block_size or one per
  tensor.
* mxfp4: `X_blocks`, two 4-bit values per byte, and `X_scales`, one power of two per 32 values.
* bitsandbytes, 8 bits: `X.weight` in int8 and `X.SCB`, the largest absolute value of each row. 4
  bits: `X`, two values per byte, with `X.absmax`, `X.quant_map` and
  `X.quant_state.bitsandbytes__nf4`.
* compressed-tensors: `X.weight` in int8 or float8, or `X.weight_packed` with 2, 4 or 8 bits per
  value in 32-bit words and `X.weight_shape`. `X.weight_scale` has one scale per tensor, row, group
  of values in a row, or block. `X.weight_zero_point` is optional.
* gptq and awq: `X.qweight`, the transposed matrix (inputs first) with 2, 4 or 8 bits per value in
  32-bit words. `X.scales` and `X.qzeros` have one entry for each pair of a group of inputs and an
  output. In gptq, `X.g_idx` is the group of each input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lohan.checkpoint.gguf_folder import GgufFolder
from lohan.checkpoint.safetensors import ReadFlat, TensorFolder, has_weights
from lohan.errors import ModelError
from lohan.util.files import (
    BadJson,
    WrongType,
    checked,
    from_json,
    parse_json,
    read_object,
)

_PIECE_ELEMENTS = 2**20  # number of elements that are dequantised at a time
_KEYS = ("quantization_config", "compression_config")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Dequantised(Protocol):
    """A tensor of a quantized checkpoint in dequantised form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors in the file that this tensor is computed from."""
        ...

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        """Return elements [start, stop) of the flattened tensor in float32."""
        ...


# -- The folder ------------------------------------------------------------------------------------


def quantization_of(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization settings of a config.json, or None if there are none.

    They may be in the config itself or in its text_config.
    """
    for node in (raw, raw.get("text_config")):
        for key in _KEYS:
            entry = node.get(key) if isinstance(node, dict) else None
            if entry is not None:
                return entry if isinstance(entry, dict) else {}
    return None


def without_quantization(raw: dict[str, Any]) -> None:
    """Remove the quantization settings from a config.json at every nesting level."""
    for key in _KEYS:
        raw.pop(key, None)
    for value in raw.values():
        if isinstance(value, dict):
            without_quantization(value)


def check_quantization(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse a quantization method that LoHan cannot dequantise."""
    settings = quantization_of(raw)
    if settings is None or str(settings.get("quant_method")) in METHODS:
        return
    method = str(settings.get("quant_method") or "by a method that it does not name")[:60]
    raise ModelError(
        f"{path}: config.json says the weights are quantized ({method}), LoHan dequantises "
        f"{', '.join(METHODS)}; give the unquantized checkpoint that this one was made from"
    )


def open_folder(path: str | os.PathLike[str]) -> TensorFolder:
    """Return the tensors of a model folder, dequantised if config.json declares quantization."""
    folder = Path(path)
    file = folder / "config.json"
    raw = read_object(file, kind=ModelError, remedy="download it again") if file.is_file() else {}
    check_quantization(raw, folder)
    settings = quantization_of(raw)
    if settings is not None:
        return QuantizedFolder(folder, settings)
    if not has_weights(folder) and any(folder.glob("*.gguf")):
        return GgufFolder(folder)
    plain = TensorFolder(folder)
    for name in plain.names():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in plain:
            raise ModelError(
                f"{folder}: {name} says that the weights are quantized, config.json has no "
                "quantization_config; download config.json again"
            )
    return plain


class QuantizedFolder(TensorFolder):
    """The tensors of a quantized checkpoint, dequantised when they are read."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._dequantised = dict(METHODS[settings["quant_method"]](TensorFolder(path), settings))
        self._parts = {part for tensor in self._dequantised.values() for part in tensor.parts}

    def names(self) -> list[str]:
        plain = [name for name in super().names() if name not in self._parts]
        return plain + list(self._dequantised)

    def __contains__(self, name: str) -> bool:
        return name in self._dequantised or (super().__contains__(name) and name not in self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        dequantised = self._dequantised.get(name)
        return super().shape(name) if dequantised is None else dequantised.shape

    def dtype(self, name: str) -> torch.dtype:
        if name in self._assembled:
            name = self._assembled[name].sources[0]
        return torch.float32 if name in self._dequantised else super().dtype(name)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        dequantised = self._dequantised.get(name)
        if dequantised is None:
            return super().read_flat(name, start, stop)
        if not 0 <= start <= stop <= math.prod(dequantised.shape):
            raise ValueError(
                f"{name}: range {start}..{stop} outside 0..{math.prod(dequantised.shape)}"
            )
        values, packed = torch.empty(stop - start), super().read_flat
        for at in range(start, stop, _PIECE_ELEMENTS):
            end = min(at + _PIECE_ELEMENTS, stop)
            values[at - start : end - start] = dequantised.read(at, end, packed)
        return values


def _misfit(folder: TensorFolder, name: str, scales: str, blocks: str) -> ModelError:
    return ModelError(
        f"{folder.path}: tensor {name} has shape {list(folder.shape(name))}, its scales {scales} "
        f"{list(folder.shape(scales))}, which {blocks}; config.json and weights are of different "
        "checkpoints, download both again"
    )


# -- FP8 -------------------------------------------------------------------------------------------


_SCALE = "_scale_inv"
# Scales of quantized activations. They are ignored, because LoHan does not quantize activations.
_ACTIVATIONS = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class BlockScaled:
    """Matrices [..., rows, columns] with one scale per block; edge blocks may be smaller."""

    name: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    ignored: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.scales, *self.ignored)

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        (rows, columns), (block_rows, block_columns) = self.shape[-2:], self.block
        grid_rows, grid_columns = math.ceil(rows / block_rows), math.ceil(columns / block_columns)
        # Row numbers count through all matrices. Whole rows are read.
        first, last = start // columns, math.ceil(stop / columns)
        row = torch.arange(first, last)
        scale_row = row // rows * grid_rows + row % rows // block_rows
        low, high = int(scale_row[0]), int(scale_row[-1]) + 1
        grid = packed(self.scales, low * grid_columns, high * grid_columns)
        wide = grid.float()
        wide = (wide - 127.0).exp2() if grid.dtype == torch.uint8 else wide  # biased exponents
        scales = wide.view(-1, grid_columns)[scale_row - low]
        values = packed(self.name, first * columns, last * columns).float().view(-1, columns)
        for number, part in enumerate(torch.split(values, block_columns, dim=1)):
            part.mul_(scales[:, number, None])
        return values.view(-1)[start - first * columns : stop - first * columns]


def _fp8(folder: TensorFolder, settings: Mapping[str, Any]) -> Iterator[tuple[str, Dequantised]]:
    size = settings.get("weight_block_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        raise ModelError(
            f"{folder.path}: config.json says weight_block_size {size!r:.60}, two numbers above 0 "
            "are needed; download it again"
        )
    for name in folder.names():
        if folder.dtype(name) not in _FP8 or name.endswith(_SCALE):
            continue
        scales, stem = name + _SCALE, name.rpartition(".")[0]
        if scales not in folder:
            raise ModelError(
                f"{folder.path}: tensor {name} is {folder.dtype(name)} and has no {scales}; the "
                "download is not complete, fetch it again"
            )
        shape, grid = folder.shape(name), folder.shape(scales)
        ignored = tuple(n for n in (f"{stem}.{one}" for one in _ACTIVATIONS) if n in folder)
        if len(shape) < 2:
            raise _misfit(folder, name, scales, "are for matrices")
        block = _block(shape, grid, size)
        if block is None:
            raise _misfit(folder, name, scales, f"are not one for each block of {size or shape}")
        yield name, BlockScaled(name, scales, shape, block, ignored)


def _block(
    shape: tuple[int, ...], grid: tuple[int, ...], size: list[int] | None
) -> tuple[int, int] | None:
    """Return the size of the block that shares one scale, or None if the scales do not fit.

    This is the config's block size if it fits the number of scales, else equal parts of the matrix.
    """
    matrices, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    if math.prod(grid) == matrices and (size is None or len(grid) < 2):
        return max(rows, 1), max(columns, 1)
    if len(grid) != len(shape) or grid[:-2] != shape[:-2]:
        return None
    down, right = grid[-2:]
    if size is not None and (math.ceil(rows / size[0]), math.ceil(columns / size[1])) == (
        down,
        right,
    ):
        return size[0], size[1]
    if not down or not right or rows % down or columns % right:
        return None
    return rows // down, columns // right


# -- MXFP4 -----------------------------------------------------------------------------------------


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32  # number of values that share a scale; they take 16 bytes


@dataclass
class Transposed4Bit:
    """Experts [expert, column, row], which the file holds packed as [expert, row, column].

    A range of columns is spread over all rows of the file. An expert is therefore read as a whole,
    in packed form, and kept until another expert is read.
    """

    blocks: str
    scales: str
    shape: tuple[int, ...]
    _expert: tuple[int, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.blocks, self.scales)

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        _, columns, rows = self.shape
        parts = []
        while start < stop:
            expert, inside = divmod(start, columns * rows)
            end = min(stop - start + inside, columns * rows)
            first, last = inside // rows, math.ceil(end / rows)
            values = self._columns(expert, first, last, packed)  # row, column
            flat = values.t().reshape(-1)
            parts.append(flat[inside - first * rows : end - first * rows])
            start += end - inside
        return torch.cat(parts)

    def _columns(self, expert: int, first: int, last: int, packed: ReadFlat) -> torch.Tensor:
        _, columns, rows = self.shape
        groups = columns // _GROUP
        if self._expert is None or self._expert[0] != expert:
            self._expert = None
            count = rows * groups
            blocks = packed(self.blocks, expert * count * 16, (expert + 1) * count * 16)
            scales = packed(self.scales, expert * count, (expert + 1) * count)
            self._expert = expert, blocks.view(rows, groups, 16), scales.view(rows, groups, 1)
        _, blocks, scales = self._expert
        low, high = first // _GROUP, math.ceil(last / _GROUP)
        pairs = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)])
        values = pairs[blocks[:, low:high].int()].view(rows, high - low, _GROUP)
        torch.ldexp(values, scales[:, low:high].int() - 127, out=values)
        return values.view(rows, -1)[:, first - low * _GROUP : last - low * _GROUP]


def _mxfp4(folder: TensorFolder, settings: Mapping[str, Any]) -> Iterator[tuple[str, Dequantised]]:
    for blocks in folder.names():
        name = blocks.removesuffix("_blocks")
        if name == blocks or folder.dtype(blocks) != torch.uint8:
            continue
        scales, shape = f"{name}_scales", folder.shape(blocks)
        if scales not in folder:
            raise ModelError(
                f"{folder.path}: tensor {blocks} has no {scales}; the download is not complete, "
                "fetch it again"
            )
        if len(shape) != 4 or shape[-1] * 2 != _GROUP or folder.shape(scales) != shape[:-1]:
            raise _misfit(folder, blocks, scales, "are not one for each 32 values of a row")
        experts, rows, groups, _ = shape
        yield name, Transposed4Bit(blocks, scales, (experts, groups * _GROUP, rows))


# -- bitsandbytes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowScaled:
    """An int8 matrix with each row's largest absolute value, which the code 127 represents."""

    name: str
    largest: str
    shape: tuple[int, ...]
    ignored: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.largest, *self.ignored)

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        columns = self.shape[1]
        first, last = start // columns, math.ceil(stop / columns)
        values = packed(self.name, first * columns, last * columns).float().view(-1, columns)
        values.mul_(packed(self.largest, first, last).float()[:, None]).mul_(_INT8)
        return values.view(-1)[start - first * columns : stop - first * columns]


@dataclass(frozen=True)
class Blockwise4Bit:
    """A tensor of 4-bit codes, two per byte with the first in the high half.

    Each code is an index into a table of 16 values. Every `block` consecutive values share a scale.
    If `nested` is not 0, the scales are quantized too: each is an index into a table of 256 values,
    every `nested` consecutive scales share an outer scale, and `offset` is added. Values are
    rounded to `dtype`, the dtype that the tensor had before quantization.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    dtype: torch.dtype
    nested: int
    offset: float
    state: str

    @property
    def parts(self) -> tuple[str, ...]:
        endings = ["absmax", "quant_map"]
        endings += ["nested_absmax", "nested_quant_map"] if self.nested else []
        return (self.name, self.state, *(f"{self.name}.{ending}" for ending in endings))

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        low = start // 2
        nibbles = packed(self.name, low, (stop + 1) // 2)
        codes = torch.stack([nibbles >> 4, nibbles & 15], dim=1).view(-1)
        codes = codes[start - 2 * low : stop - 2 * low].int()
        first, last = start // self.block, math.ceil(stop / self.block)
        scales = self._scales(first, last, packed)
        values = packed(f"{self.name}.quant_map", 0, 16)[codes]
        values.mul_(scales[torch.arange(start, stop) // self.block - first])
        return values.to(self.dtype).float()

    def _scales(self, first: int, last: int, packed: ReadFlat) -> torch.Tensor:
        scales = packed(f"{self.name}.absmax", first, last)
        if not self.nested:
            return scales.float()
        begin, end = first // self.nested, math.ceil(last / self.nested)
        outer = packed(f"{self.name}.nested_absmax", begin, end)
        table = packed(f"{self.name}.nested_quant_map", 0, 256)
        return table[scales.int()] * outer[torch.arange(first, last) // self.nested - begin] + (
            self.offset
        )


_INT8 = 7.874015748031496e-3  # 1 / 127
_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class _State:
    """The quantization state of a 4-bit weight, which bitsandbytes stores as JSON in a tensor."""

    shape: tuple[int, ...]
    blocksize: int
    dtype: str
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def _bitsandbytes(
    folder: TensorFolder, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Dequantised]]:
    for name in folder.names():
        stem = name.removesuffix(".weight")
        if f"{stem}.SCB" in folder and folder.dtype(name) == torch.int8 and name != stem:
            shape, ignored = folder.shape(name), f"{stem}.weight_format"
            if len(shape) != 2 or folder.shape(f"{stem}.SCB") != shape[:1]:
                raise _misfit(folder, name, f"{stem}.SCB", "are not one for each row")
            yield name, RowScaled(name, f"{stem}.SCB", shape, (ignored,) * (ignored in folder))
        elif _STATE in name:
            weight = name.partition(_STATE)[0]
            yield weight, _blockwise(folder, weight, name)


def _blockwise(folder: TensorFolder, name: str, state: str) -> Blockwise4Bit:
    try:
        raw = checked(parse_json(bytes(folder.read(state).tolist())), dict[str, Any], "")
        fields = {key: raw[key] for key in _State.__dataclass_fields__ if key in raw}
        quant_state = from_json(_State, fields)
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[
            quant_state.dtype
        ]
        if quant_state.blocksize < 1 or quant_state.nested_blocksize < 0:
            raise WrongType("a block has no values")
    except (BadJson, WrongType, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder.path}: tensor {state} does not say how {name} is quantized ({error}); "
            "download it again"
        ) from None
    tensor = Blockwise4Bit(
        name,
        quant_state.shape,
        quant_state.blocksize,
        dtype,
        quant_state.nested_blocksize,
        quant_state.nested_offset,
        state,
    )
    numel = math.prod(tensor.shape)
    blocks = math.ceil(numel / tensor.block)
    counts = {name: (numel + 1) // 2, f"{name}.absmax": blocks, f"{name}.quant_map": 16}
    if tensor.nested:
        counts[f"{name}.nested_absmax"] = math.ceil(blocks / tensor.nested)
        counts[f"{name}.nested_quant_map"] = 256
    packed = (name, f"{name}.absmax") if tensor.nested else (name,)
    for part, count in counts.items():
        actual = f"{list(folder.shape(part))} {folder.dtype(part)}" if part in folder else "missing"
        wanted = torch.uint8 if part in packed else torch.float32
        if actual == "missing" or (math.prod(folder.shape(part)), folder.dtype(part)) != (
            count,
            wanted,
        ):
            raise ModelError(
                f"{folder.path}: tensor {part} is {actual}, {name} of {list(tensor.shape)} needs "
                f"{count:,} elements of {wanted}; give the unquantized checkpoint, or download "
                "this one again"
            )
    return tensor


# -- compressed-tensors ----------------------------------------------------------------------------


_COMPRESSED = (
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "dense",
)
_OF_ACTIVATIONS = tuple(
    f"{what}_{ending}"
    for what in ("input", "output")
    for ending in ("scale", "zero_point", "global_scale")
)


@dataclass(frozen=True)
class Compressed:
    """A matrix of codes with one scale and, if asymmetric, one zero point per block.

    `bits` is the size of a code if codes are packed into 32-bit words, or 0 if each code is an
    element of its own. Codes are packed along rows, zero points along columns. Values are rounded
    to the dtype of the scales.
    """

    name: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    bits: int = 0
    zeros: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.scales, *((self.zeros,) if self.zeros else ()), *self.ignored)

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        columns, (block_rows, block_columns) = self.shape[1], self.block
        first, last = start // columns, math.ceil(stop / columns)  # Whole rows are read.
        values = self._codes(first, last, packed)
        low, high, wide = first // block_rows, (last - 1) // block_rows + 1, self._wide
        blocks = torch.arange(first, last) // block_rows - low
        grid = packed(self.scales, low * wide, high * wide).view(-1, wide)
        scales, zeros = grid.float()[blocks], self._zeros(low, high, packed)
        for number, part in enumerate(torch.split(values, block_columns, dim=1)):
            if zeros is not None:
                part.sub_(zeros[blocks, number, None])
            part.mul_(scales[:, number, None])
        flat = values.view(-1)[start - first * columns : stop - first * columns]
        return flat.to(grid.dtype).float()

    @property
    def _wide(self) -> int:
        return math.ceil(self.shape[1] / self.block[1])

    def _codes(self, first: int, last: int, packed: ReadFlat) -> torch.Tensor:
        columns = self.shape[1]
        if not self.bits:
            return packed(self.name, first * columns, last * columns).float().view(-1, columns)
        wide = math.ceil(columns * self.bits / 32)
        words = packed(self.name, first * wide, last * wide).view(-1, wide)
        return _unpacked(words, self.bits, 0, columns)

    def _zeros(self, low: int, high: int, packed: ReadFlat) -> torch.Tensor | None:
        if not self.zeros:
            return None
        wide = self._wide
        if not self.bits:
            return packed(self.zeros, low * wide, high * wide).float().view(-1, wide)
        first, last = low * self.bits // 32, math.ceil(high * self.bits / 32)
        words = packed(self.zeros, first * wide, last * wide).view(-1, wide)
        begin = low - first * 32 // self.bits
        return _unpacked(words.t(), self.bits, begin, begin + high - low).t()


def _unpacked(words: torch.Tensor, bits: int, start: int, stop: int) -> torch.Tensor:
    """Return codes [start, stop) of every row, signed; the lowest bits of a word come first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: torch.Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return codes.reshape(len(words), -1)[:, start:stop].float() - float(1 << (bits - 1))


def _compressed_tensors(
    folder: TensorFolder, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Dequantised]]:
    groups = settings.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    sparsity = settings.get("sparsity_config")
    named = [
        entry.get("format") for entry in (settings, *groups, sparsity) if isinstance(entry, dict)
    ]
    for what in filter(None, (*named, settings.get("transform_config") and "transforms")):
        if what not in _COMPRESSED:
            raise ModelError(
                f"{folder.path}: config.json says compressed-tensors with {what!r:.60}, LoHan "
                f"takes {', '.join(_COMPRESSED)}; give the unquantized checkpoint"
            )
    blocks = [
        g["weights"].get("block_structure") for g in groups if isinstance(g.get("weights"), dict)
    ]
    size = next((b for b in blocks if isinstance(b, list) and len(b) == 2 and min(b) > 0), None)
    for scales in folder.names():
        stem = scales.removesuffix(".weight_scale")
        if stem == scales:
            continue
        name, packed = f"{stem}.weight", f"{stem}.weight_packed"
        ignored = tuple(n for n in (f"{stem}.{one}" for one in _OF_ACTIVATIONS) if n in folder)
        zeros, bits = f"{stem}.weight_zero_point", 0
        if f"{stem}.weight_g_idx" in folder:
            raise ModelError(
                f"{folder.path}: {stem}.weight_g_idx orders its groups by activations, which LoHan "
                "does not follow; give the unquantized checkpoint"
            )
        source = packed if packed in folder else name
        if source not in folder:
            raise ModelError(
                f"{folder.path}: tensor {scales} has no {name}; the download is not complete, "
                "fetch it again"
            )
        shape = folder.shape(source)
        if source == packed:
            shape, bits = _packed_shape(folder, stem)
            ignored += (f"{stem}.weight_shape",)
        if len(shape) != 2 or 0 in shape:
            raise _misfit(folder, source, scales, "are for matrices")
        grid = folder.shape(scales)
        block = _block(shape, grid, size if len(grid) == 2 and grid[0] != shape[0] else None)
        if block is None:
            raise _misfit(folder, source, scales, "are not one for equal parts of its rows")
        zero_points = zeros if zeros in folder else ""
        down = math.ceil(shape[0] / block[0])
        wanted = (math.ceil(down * bits / 32) if bits else down) * math.ceil(shape[1] / block[1])
        if zero_points and math.prod(folder.shape(zero_points)) != wanted:
            raise _misfit(folder, zero_points, scales, f"need {wanted} elements of it")
        yield name, Compressed(source, scales, shape, block, bits, zero_points, ignored)


def _packed_shape(folder: TensorFolder, stem: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of a packed matrix and the number of bits per value."""
    shape_name, packed = f"{stem}.weight_shape", folder.shape(f"{stem}.weight_packed")
    shape = tuple(map(int, folder.read(shape_name).tolist())) if shape_name in folder else ()
    fits = len(shape) == 2 and len(packed) == 2 and shape[0] == packed[0] and shape[1] > 0
    for bits in (2, 4, 8):
        if fits and math.ceil(shape[1] * bits / 32) == packed[1]:
            return shape, bits
    raise ModelError(
        f"{folder.path}: tensor {stem}.weight_packed has shape {list(packed)}, which is not 2, 4 "
        f"or 8 bits for each value of {list(shape)}; give the unquantized checkpoint"
    )


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in the word of each of eight consecutive outputs


@dataclass(frozen=True)
class InputGroups:
    """A matrix in which groups of inputs share scales and zero points.

    The file stores the matrix with inputs first, but ranges are read with outputs first. The packed
    words of one matrix are therefore kept until another matrix is read. Values are rounded to the
    dtype of the scales.
    """

    stem: str
    shape: tuple[int, ...]  # outputs, inputs
    bits: int
    group: int  # inputs per group; if `ordered`, it only gives the number of groups
    add: int  # added to stored zero points, because some formats store them minus one
    by_output: bool  # a word packs neighbouring outputs (AWQ) instead of neighbouring inputs (GPTQ)
    ordered: bool  # whether the file lists the group of each input in g_idx
    kept: dict[str, torch.Tensor] = field(compare=False, repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        endings = ("qweight", "qzeros", "scales", *(("g_idx",) if self.ordered else ()))
        return tuple(f"{self.stem}.{ending}" for ending in endings)

    def read(self, start: int, stop: int, packed: ReadFlat) -> torch.Tensor:
        outputs, inputs = self.shape
        first, last = start // inputs, math.ceil(stop / inputs)  # Whole rows are read.
        each = 32 // self.bits
        low, high = first // each, math.ceil(last / each)  # in words along the outputs
        inside = slice(first - low * each, last - low * each)
        groups, zeros, scales = self._groups(packed)
        words = self._read_whole("qweight", inputs * outputs // each, packed)
        if self.by_output:
            codes = self._values(words.view(inputs, -1)[:, low:high])[:, inside]
        else:
            codes = self._values(words.view(-1, outputs)[:, first:last].t()).t()
        zero = (self._values(zeros[:, low:high])[:, inside] + self.add) & (2**self.bits - 1)
        scale = scales[:, first:last].float()
        values: torch.Tensor = (codes - zero[groups]).float().mul_(scale[groups]).t().reshape(-1)
        return values[start - first * inputs : stop - first * inputs].to(scales.dtype).float()

    def _groups(self, packed: ReadFlat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each input's group, and the packed zero points and scales of all groups."""
        outputs, inputs = self.shape
        count = math.ceil(inputs / self.group)
        groups = torch.arange(inputs) // self.group
        if self.ordered:
            groups = self._read_whole("g_idx", inputs, packed).long()
        zeros = self._read_whole("qzeros", count * outputs * self.bits // 32, packed)
        return (
            groups,
            zeros.view(count, -1),
            self._read_whole("scales", count * outputs, packed).view(count, -1),
        )

    def _values(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack words along each row, in the order of the matrix."""
        each = 32 // self.bits
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes: torch.Tensor = (words[:, :, None] >> shifts) & (2**self.bits - 1)
        if self.by_output:
            codes = codes[:, :, list(_AWQ_ORDER[:each])]
        return codes.reshape(len(words), -1)

    def _read_whole(self, ending: str, count: int, packed: ReadFlat) -> torch.Tensor:
        name = f"{self.stem}.{ending}"
        tensor = self.kept.get(name)
        if tensor is None:
            if not any(key.startswith(f"{self.stem}.") for key in self.kept):
                self.kept.clear()
            tensor = self.kept[name] = packed(name, 0, count)
        return tensor


def _input_groups(
    folder: TensorFolder, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Dequantised]]:
    awq, bits = settings["quant_method"] == "awq", settings.get("bits", 0)
    form = settings.get("version" if awq else "checkpoint_format") or ("gemm" if awq else "gptq")
    methods, sizes = (("gemm",), (4,)) if awq else (("gptq", "gptq_v2"), (2, 4, 8))
    if str(form).lower() not in methods or bits not in sizes:
        raise ModelError(
            f"{folder.path}: config.json says {settings['quant_method']} with {bits} bits as "
            f"{form!r}, LoHan takes {' and '.join(map(str, sizes))} bits as "
            f"{' and '.join(methods)}; give the unquantized checkpoint"
        )
    kept: dict[str, torch.Tensor] = {}
    for name in folder.names():
        stem = name.removesuffix(".qweight")
        if name.endswith(".scales") and f"{name.removesuffix('.scales')}.qweight" not in folder:
            raise ModelError(
                f"{folder.path}: {name} scales activations, which the plain model does not; give "
                "the unquantized checkpoint"
            )
        if stem == name:
            continue
        zeros, scales, order = (f"{stem}.{ending}" for ending in ("qzeros", "scales", "g_idx"))
        for part in (zeros, scales):
            if part not in folder:
                raise ModelError(
                    f"{folder.path}: tensor {name} has no {part}; the download is not complete, "
                    "fetch it again"
                )
        (down, across), each = folder.shape(name), 32 // bits
        outputs, inputs = (across * each, down) if awq else (across, down * each)
        group = settings.get("group_size", -1)
        group = inputs if not isinstance(group, int) or group <= 0 else group
        count = math.ceil(inputs / group)
        if folder.shape(scales) != (count, outputs):
            raise _misfit(folder, name, scales, f"are not one for each of {count} groups")
        if folder.shape(zeros) != (count, outputs // each):
            raise _misfit(folder, name, zeros, f"are not one for each of {count} groups")
        ordered = not awq and order in folder
        if ordered and folder.shape(order) != (inputs,):
            raise _misfit(folder, name, order, f"are not one for each of {inputs} inputs")
        less = not awq and str(form).lower() == "gptq"
        yield (
            f"{stem}.weight",
            InputGroups(stem, (outputs, inputs), bits, group, int(less), awq, ordered, kept),
        )


METHODS: dict[
    str, Callable[[TensorFolder, Mapping[str, Any]], Iterator[tuple[str, Dequantised]]]
] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "gptq": _input_groups,
    "awq": _input_groups,
}
