"""Frozen weights packed into fewer bits: which formats there are, and how large a tensor gets.

A packed tensor lies in its group's flat buffer as so many elements of the type that the model
computes in; its bytes are codes, then scales in fp32, each padded to 64 bytes:

    nf4   two codes to a byte, the first in the high half, each one of 16 quantiles of a normal
          distribution; a scale for 64 values in turn, the largest of them
    int8  a byte for a value, and a scale for each row: its largest value over 127
    fp8   float8 e4m3, and a scale for each block of 128 x 128: its largest value over 448

Everything that counts bytes counts these. Who computes with the weights dequantises them first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from lohan.model.layout import GROUP_ALIGN, TENSOR_ALIGN, Blocks, Group, TensorSpec
from lohan.optim import PACKINGS
from lohan.util.units import PAGE, align_up

FORMATS = PACKINGS
NF4_BLOCK, FP8_BLOCK = 64, 128
PADDING = 64  # bytes: codes and scales begin on such a border
SCALE_BYTES = 4
PIECE = 2**21  # values that are dequantised at a time
WORK_BYTES = 6  # that it takes for each of them, besides the result
DEQUANTISED = "dequantised weights"  # of one call, as a line of a ledger


def code_bytes(packing: str, shape: Sequence[int]) -> int:
    return -(-prod(shape) // 2) if packing == "nf4" else prod(shape)


def scale_count(packing: str, shape: Sequence[int]) -> int:
    if packing == "nf4":
        return -(-prod(shape) // NF4_BLOCK)
    if packing == "int8":
        return prod(shape[:-1])
    rows, columns = -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK)
    return prod(shape[:-2]) * rows * columns


def packed_bytes(packing: str, shape: Sequence[int]) -> int:
    scales = SCALE_BYTES * scale_count(packing, shape)
    return align_up(code_bytes(packing, shape), PADDING) + align_up(scales, PADDING)


def packed_numel(packing: str, shape: Sequence[int], weight_bytes: int) -> int:
    """Elements of the compute type that a packed tensor takes."""
    return packed_bytes(packing, shape) // weight_bytes


def with_packed(blocks: Blocks, names: Collection[str], packing: str, weight_bytes: int) -> Blocks:
    """The same cut with these tensors packed."""
    groups = tuple(
        _lay_out_packed(group, names, packing, weight_bytes)
        if any(tensor.name in names for tensor in group.tensors)
        else group
        for group in blocks.groups
    )
    return replace(blocks, groups=groups)


def _lay_out_packed(group: Group, names: Collection[str], packing: str, weight_bytes: int) -> Group:
    offset, specs = 0, list[TensorSpec]()
    for tensor in group.tensors:
        if tensor.name in names:
            numel = packed_numel(packing, tensor.shape, weight_bytes)
            tensor = replace(tensor, numel=numel, packing=packing)
        specs.append(replace(tensor, offset=offset))
        offset = align_up(offset + tensor.numel, TENSOR_ALIGN)
    return Group(group.key, tuple(specs), align_up(offset, GROUP_ALIGN))


def dequantised_bytes(blocks: Blocks, weight_bytes: int) -> int:
    """Memory of the packed weights of one call while it computes with them."""
    sites = [[blocks.by_key[key].dequantised for key in site.groups] for site in blocks.sites]
    return align_up(max(map(sum, sites), default=0) * weight_bytes, PAGE)


def dequantising_bytes(blocks: Blocks) -> int:
    """Memory that it takes to make them."""
    sizes = (tensor.parameters for _, tensor in blocks.tensors() if tensor.packing)
    return align_up(WORK_BYTES * min(PIECE, max(sizes, default=0)), PAGE)
