"""Packed frozen weights: quantised when a store is created, dequantised when they are used.

lohan/model/state.py describes the formats. Values are computed in fp32 and then rounded to the
model's compute dtype, with the same operations on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from math import prod

import torch
from torch import nn

from lohan.checkpoint.safetensors import ReadFlat
from lohan.errors import ConfigError, ModelError
from lohan.model.layout import Blocks, FlatGroup, TensorSpec
from lohan.model.state import (
    DEQUANTISED_AT_ONCE,
    FORMATS,
    FP8_BLOCK,
    NF4_BLOCK,
    PADDING,
    code_bytes,
    packed_bytes,
    scale_count,
    with_packed,
)
from lohan.util.units import align_up

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Rounding boundaries: the midpoints between neighbouring levels.
_MIDDLES = ((torch.tensor(_NF4)[1:] + torch.tensor(_NF4)[:-1]) / 2).tolist()
_FP8_LARGEST = 448.0
_FP8 = torch.float8_e4m3fn


# -- Which weights are packed ----------------------------------------------------------------------


def pack_base(model: nn.Module, blocks: Blocks, packing: str, weight_bytes: int) -> Blocks:
    """Return the blocks of a model with the frozen weights of linear layers and experts packed.

    Only layers inside blocks are packed. Embeddings, the head, norms, biases and routers stay in
    the compute dtype.
    """
    if packing not in FORMATS:
        raise ConfigError(f"base is {packing!r}; choose {', '.join(FORMATS)}")
    names = {
        blocks.by_key[ref.group].tensors[ref.tensor].name
        for site in blocks.sites
        if not _alone(model.get_submodule(site.name))
        for ref in site.parameters
        if not blocks.by_key[ref.group].tensors[ref.tensor].trainable
        and _is_linear(model.get_submodule(ref.module), ref.attribute)
    }
    if not names:
        raise ConfigError(
            f"base = {packing!r}: {type(model).__name__} has no linear layer in a block that is "
            "frozen, and what is trained is not packed; train an adapter (--lora 16), or leave "
            "base out"
        )
    return with_packed(blocks, names, packing, weight_bytes)


def _alone(module: nn.Module) -> bool:
    """Return whether a site is a single layer (embedding or head), possibly with an adapter."""
    return hasattr(module, "base_layer") or next(module.children(), None) is None


def _is_linear(module: nn.Module, attribute: str) -> bool:
    parameter = module._parameters[attribute]
    assert parameter is not None
    if parameter.ndim == 3:
        return type(module).__name__.endswith("Experts")
    kinds = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # linear in GPT-2
    return kinds and parameter.ndim == 2 and attribute == "weight"


# -- Quantising ------------------------------------------------------------------------------------


class PackingSource:
    """A reader of parameters in the form in which the store holds them.

    A packed parameter is quantised from the values of the source and returned as elements of the
    compute dtype. Other parameters are passed through. At most one packed tensor is in memory.
    """

    def __init__(self, read: ReadFlat, groups: Iterable[FlatGroup], dtype: torch.dtype) -> None:
        self._read, self._dtype = read, dtype
        self._packed = {t.name: t for group in groups for t in group.tensors if t.packing}
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        spec = self._packed.get(name)
        if spec is None:
            return self._read(name, start, stop)
        if self._last[0] != name:
            self._last = name, torch.empty(0)
            self._last = name, quantise(spec, self._read).view(self._dtype)
        return self._last[1][start:stop]


def quantise(spec: TensorSpec, read: ReadFlat) -> torch.Tensor:
    """Read a tensor, quantise it, and return its packed bytes."""
    packing, shape = spec.packing, spec.shape
    packed = torch.zeros(packed_bytes(packing, shape), dtype=torch.uint8)
    codes, scales = _parts(packed, packing, shape)
    for start, stop in _spans(packing, shape):
        values = read(spec.name, start, stop).float()
        if not bool(torch.isfinite(values).all()):
            raise ModelError(
                f"{spec.name}: has values that are not finite, which {packing} cannot hold; train "
                "without a packed base, or get the checkpoint again"
            )
        block_scales = _scales_of(scales, packing, shape, start, stop)
        _QUANTISE[packing](values, shape[-1], codes, block_scales, start)
    return packed


def _nf4(
    values: torch.Tensor, columns: int, codes: torch.Tensor, scales: torch.Tensor, start: int
) -> None:
    count = len(values)
    blocks = values.new_zeros(len(scales), NF4_BLOCK)
    blocks.view(-1)[:count] = values
    torch.amax(blocks.abs(), 1, out=scales)
    blocks /= torch.where(scales > 0, scales, 1.0)[:, None]
    levels = torch.zeros(blocks.numel(), dtype=torch.uint8)
    for part, target in zip(_cached(blocks.view(-1)), _cached(levels), strict=True):
        for middle in _MIDDLES:  # more than twice as fast as torch.bucketize
            target.add_(part > middle)
    pairs = (levels[0::2] << 4) | levels[1::2]
    codes[start // 2 : start // 2 + -(-count // 2)] = pairs[: -(-count // 2)]


def _cached(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor in pieces that fit in a core's cache."""
    return torch.split(flat, 2**16)


def _int8(
    values: torch.Tensor, columns: int, codes: torch.Tensor, scales: torch.Tensor, start: int
) -> None:
    rows = values.view(-1, columns)
    scales.copy_(rows.abs().amax(1) / 127)
    rounded = torch.round(rows / torch.where(scales > 0, scales, 1.0)[:, None])
    codes[start : start + len(values)].view(torch.int8).copy_(rounded.clamp_(-127, 127).view(-1))


def _fp8(
    values: torch.Tensor, columns: int, codes: torch.Tensor, scales: torch.Tensor, start: int
) -> None:
    rows = values.view(-1, columns)
    grid = scales.view(-1, -(-columns // FP8_BLOCK))
    for number, band in enumerate(torch.split(rows, FP8_BLOCK)):
        for column, block in enumerate(torch.split(band, FP8_BLOCK, 1)):
            grid[number, column] = block.abs().max() / _FP8_LARGEST
    scaled = rows / _by_row(torch.where(grid > 0, grid, 1.0), len(rows), columns)
    codes[start : start + len(values)] = scaled.to(_FP8).view(torch.uint8).view(-1)


_QUANTISE = {"nf4": _nf4, "int8": _int8, "fp8": _fp8}


# -- Dequantising ----------------------------------------------------------------------------------


def dequantise(
    packed: torch.Tensor, packing: str, shape: tuple[int, ...], out: torch.Tensor
) -> None:
    """Dequantise a packed tensor into the flat tensor `out`.

    `packed` holds the tensor's bytes, viewed as uint8 or as elements of the compute dtype.
    """
    codes, scales = _parts(packed.view(torch.uint8), packing, shape)
    for start, stop in _spans(packing, shape):
        block_scales = _scales_of(scales, packing, shape, start, stop)
        _values(packing, shape[-1], codes, block_scales, start, stop, out[start:stop])


def dequantised_range(
    packed: torch.Tensor, packing: str, shape: tuple[int, ...], start: int, stop: int
) -> torch.Tensor:
    """Return values [start, stop) of a packed tensor in fp32."""
    codes, scales = _parts(packed.view(torch.uint8), packing, shape)
    values = torch.empty(stop - start)
    for first, last in _spans(packing, shape, 2**18):
        low, high = max(first, start), min(last, stop)
        if low < high:
            piece = torch.empty(last - first)
            row_scales = _scales_of(scales, packing, shape, first, last)
            _values(packing, shape[-1], codes, row_scales, first, last, piece)
            values[low - start : high - start] = piece[low - first : high - first]
    return values


def _values(
    packing: str,
    columns: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    start: int,
    stop: int,
    out: torch.Tensor,
) -> None:
    """Dequantise values [start, stop) into `out`.

    `codes` are those of the whole tensor, `scales` only those of the range.
    """
    count = stop - start
    values = out if out.dtype == torch.float32 else out.new_empty(count, dtype=torch.float32)
    if packing == "nf4":
        code_pairs = codes[start // 2 : -(-stop // 2)].int()
        if count % NF4_BLOCK:  # The last block of the tensor is incomplete.
            values = out.new_empty(len(scales) * NF4_BLOCK, dtype=torch.float32)
        pairs = values.view(torch.int64)  # One element holds two fp32 values.
        torch.index_select(_nf4_pairs(out.device), 0, code_pairs, out=pairs[: len(code_pairs)])
        values.view(-1, NF4_BLOCK).mul_(scales[:, None])
        values = values[:count]
    elif packing == "int8":
        values.copy_(codes[start:stop].view(torch.int8))
        values.view(-1, columns).mul_(scales[:, None])
    else:
        torch.index_select(_fp8_values(out.device), 0, codes[start:stop].int(), out=values)
        rows = values.view(-1, columns)
        grid = scales.view(-1, -(-columns // FP8_BLOCK))
        rows.mul_(_by_row(grid, len(rows), columns))
    if values.data_ptr() != out.data_ptr():
        out.copy_(values)


def _by_row(grid: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scale of each value, given the grid of the scales of fp8 blocks."""
    wide = grid.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return wide.repeat_interleave(FP8_BLOCK, 0)[:rows]


@cache
def _nf4_pairs(torch_device: torch.device) -> torch.Tensor:
    pairs = [(_NF4[byte >> 4], _NF4[byte & 15]) for byte in range(256)]
    return torch.tensor(pairs).view(torch.int64).view(-1).to(torch_device)


@cache
def _fp8_values(torch_device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(_FP8).float().to(torch_device)


# -- Positions of codes and scales -----------------------------------------------------------------


def _parts(
    packed: torch.Tensor, packing: str, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the codes and the scales in the bytes of a packed tensor."""
    codes = code_bytes(packing, shape)
    at, count = align_up(codes, PADDING), scale_count(packing, shape)
    return packed[:codes], packed[at : at + 4 * count].view(torch.float32)


def _spans(
    packing: str, shape: tuple[int, ...], count: int = DEQUANTISED_AT_ONCE
) -> Iterator[tuple[int, int]]:
    """Yield ranges of about `count` values, cut so that no two ranges share a scale."""
    total = prod(shape)
    if packing == "fp8":  # A block never extends over two matrices.
        whole = shape[-2] * shape[-1]
        step = max(1, count // (FP8_BLOCK * shape[-1])) * FP8_BLOCK * shape[-1]
        for first in range(0, total, max(whole, 1)):
            for start in range(first, first + whole, step):
                yield start, min(start + step, first + whole)
        return
    unit = NF4_BLOCK if packing == "nf4" else shape[-1]
    step = max(1, count // max(unit, 1)) * unit
    for start in range(0, total, max(step, 1)):
        yield start, min(start + step, total)


def _scales_of(
    scales: torch.Tensor, packing: str, shape: tuple[int, ...], start: int, stop: int
) -> torch.Tensor:
    if packing == "nf4":
        return scales[start // NF4_BLOCK : -(-stop // NF4_BLOCK)]
    rows, columns = shape[-2:]
    if packing == "int8":
        return scales[start // columns : stop // columns]
    wide, high = -(-columns // FP8_BLOCK), -(-rows // FP8_BLOCK)
    matrix, inside = divmod(start, rows * columns)
    first = matrix * high + inside // columns // FP8_BLOCK
    return scales[first * wide : (first + -(-(stop - start) // columns // FP8_BLOCK)) * wide]
