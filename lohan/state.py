"""What a group's state looks like on SSD: modes, regions and chunks.

Per group two regions. `w/KEY` holds the compute weights, `s/KEY` the optimizer state; both are cut
into the same chunks of parameters. A frozen group has weights only, in a fixed region: one copy
for all generations. Inside a state chunk of n parameters lie n-long arrays, one after the other:

    fp32: m, v                 (the fp32 weights are the master)
    bf16: m, v, remainder      (weights << 16, plus the remainder, is the fp32 master)
    fp16: master, m, v
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from lohan.layout import Group, TensorSpec

if TYPE_CHECKING:
    from lohan.storage.extents import Region

FLOAT, HALF = 4, 2
ITEM_BYTES = {"float32": FLOAT, "bfloat16": HALF, "float16": HALF, "int16": HALF}


@dataclass(frozen=True)
class Mode:
    """How one parameter is kept: its compute dtype and the arrays of its optimizer state. Dtypes
    go by torch's names."""

    name: str
    dtype: str
    arrays: tuple[tuple[str, str], ...]

    @property
    def weight_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        return sum(ITEM_BYTES[dtype] for _, dtype in self.arrays)


_M, _V = ("m", "float32"), ("v", "float32")
MODES = {
    "fp32": Mode("fp32", "float32", (_M, _V)),
    "bf16": Mode("bf16", "bfloat16", (_M, _V, ("remainder", "int16"))),
    "fp16": Mode("fp16", "float16", (("master", "float32"), _M, _V)),
}


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a group's flat buffer, and the tensors that overlap them."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one tensor, lying at `at` inside the chunk."""

    tensor: int
    start: int
    stop: int
    at: int


def weight_key(group: Group) -> str:
    return f"w/{group.key}"


def state_key(group: Group) -> str:
    return f"s/{group.key}"


def gradient_key(group: Group) -> str:
    return f"g/{group.key}"


@lru_cache(maxsize=4096)
def chunks(group: Group, chunk_params: int) -> tuple[Chunk, ...]:
    cuts = []
    for index, start in enumerate(range(0, group.numel, chunk_params)):
        stop = min(start + chunk_params, group.numel)
        pieces = tuple(
            piece
            for number, tensor in enumerate(group.tensors)
            if (piece := _overlap(number, tensor, start, stop)) is not None
        )
        cuts.append(Chunk(index, start, stop, pieces))
    return tuple(cuts)


def _overlap(number: int, tensor: TensorSpec, start: int, stop: int) -> Piece | None:
    low, high = max(start, tensor.offset), min(stop, tensor.offset + tensor.numel)
    if low >= high:
        return None
    return Piece(number, low - tensor.offset, high - tensor.offset, low - start)


def regions(
    groups: tuple[Group, ...], *, mode: Mode, chunk_params: int, gradients: bool = False
) -> list[Region]:
    """All weights first, then all state: each kind of read walks one contiguous range. With
    `gradients`, scratch room for gradients that have to wait for their update."""
    from lohan.storage.extents import Region  # with numpy, which a plan needs not

    sizes = {g.key: [c.stop - c.start for c in chunks(g, chunk_params)] for g in groups}
    weights = [
        Region(weight_key(g), tuple(n * mode.weight_bytes for n in sizes[g.key]), fixed=g.frozen)
        for g in groups
    ]
    trained = [g for g in groups if not g.frozen]
    state = [
        Region(state_key(g), tuple(n * mode.state_bytes for n in sizes[g.key])) for g in trained
    ]
    if not gradients:
        return weights + state
    held = [
        Region(gradient_key(g), tuple(n * FLOAT for n in sizes[g.key]), scratch=True)
        for g in trained
    ]
    return weights + state + held
