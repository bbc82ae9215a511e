"""What a group's state looks like on SSD: formats, regions and chunks.

Per group two regions. `w/KEY` holds the compute weights, `s/KEY` the optimizer state; both are cut
into the same chunks of parameters. A frozen group has weights only, in a fixed region: one copy
for all generations. Inside a state chunk lie arrays, one after the other, then zeros up to a whole
page. Of AdamW (of others, their moments instead of m and v):

    fp32: m, v                 (the fp32 weights are the master)
    bf16: m, v, remainder      (weights << 16, plus the remainder, is the fp32 master)
    fp16: master, m, v

Moments in int8 come with their scales: m, v, m_scale, v_scale. A moving average of the weights,
where there is one, comes last: ema.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from lohan.errors import StoreError
from lohan.model.layout import (
    GROUP_ALIGN,
    TENSOR_ALIGN,
    Blocks,
    FlatGroup,
    RankInfo,
    TensorSpec,
    groups_from_json,
)
from lohan.optim import DEFAULT_KIND, MOMENTS, OPTIMIZERS, PACKINGS, SCALED, Moment, StateKind
from lohan.util.files import WrongType, checked
from lohan.util.units import PAGE, align_up

if TYPE_CHECKING:
    from lohan.store.extents import Region


# -- Frozen weights packed into fewer bits: formats, and how large a tensor gets -------------------
#
# A packed tensor lies in its group's flat buffer as so many elements of the type that the model
# computes in; its bytes are codes, then scales in fp32, each padded to 64 bytes:
#
#     nf4   two codes to a byte, the first in the high half, each one of 16 quantiles of a normal
#           distribution; a scale for 64 values in turn, the largest of them
#     int8  a byte for a value, and a scale for each row: its largest value over 127
#     fp8   float8 e4m3, and a scale for each block of 128 x 128: its largest value over 448
#
# Everything that counts bytes counts these. Who computes with the weights dequantises them first.


FORMATS = PACKINGS
NF4_BLOCK, FP8_BLOCK = 64, 128
PADDING = 64  # bytes: codes and scales begin on such a border
SCALE_BYTES = 4
DEQUANTISED_AT_ONCE = 2**21  # values that are dequantised at a time
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


def _lay_out_packed(
    group: FlatGroup, names: Collection[str], packing: str, weight_bytes: int
) -> FlatGroup:
    offset, specs = 0, list[TensorSpec]()
    for tensor in group.tensors:
        if tensor.name in names:
            numel = packed_numel(packing, tensor.shape, weight_bytes)
            tensor = replace(tensor, numel=numel, packing=packing)
        specs.append(replace(tensor, offset=offset))
        offset = align_up(offset + tensor.numel, TENSOR_ALIGN)
    return FlatGroup(group.key, tuple(specs), align_up(offset, GROUP_ALIGN))


def dequantised_bytes(blocks: Blocks, weight_bytes: int) -> int:
    """Memory of the packed weights of one call while it computes with them."""
    sites = [[blocks.by_key[key].dequantised for key in site.groups] for site in blocks.sites]
    return align_up(max(map(sum, sites), default=0) * weight_bytes, PAGE)


def dequantising_bytes(blocks: Blocks) -> int:
    """Memory that it takes to make them."""
    sizes = (tensor.parameters for _, tensor in blocks.tensors() if tensor.packing)
    return align_up(WORK_BYTES * min(DEQUANTISED_AT_ONCE, max(sizes, default=0)), PAGE)


# -- What is stored for a group that learns --------------------------------------------------------


FLOAT, HALF = 4, 2
ITEM_BYTES = {
    "float32": FLOAT, "bfloat16": HALF, "float16": HALF, "int16": HALF, "int8": 1, "uint8": 1,
}  # fmt: skip
EMA = "ema"
ROUNDING_S = {"fp32": 0.0, "bf16": 0.45e-9, "int8": 1.0e-9}  # per moment, measured with AVX2


@dataclass(frozen=True)
class StateArray:
    """An array of a chunk's state. `per` parameters share an element; dtypes go by torch's
    names."""

    name: str
    dtype: str
    per: int = 1

    def size(self, parameters: int) -> int:
        return -(-parameters // self.per) * ITEM_BYTES[self.dtype]


class ChunkBytes(dict[int, int]):
    """Bytes of a state chunk by its parameters, each found once: planning asks very often."""

    def __init__(self, arrays: tuple[StateArray, ...]) -> None:
        super().__init__()
        self._arrays = arrays

    def __missing__(self, parameters: int) -> int:
        self[parameters] = align_up(sum(array.size(parameters) for array in self._arrays), PAGE)
        return self[parameters]


@dataclass(frozen=True)
class StateFormat:
    """How one parameter is kept: its compute dtype and the arrays of its optimizer state."""

    name: str
    dtype: str
    arrays: tuple[StateArray, ...]
    kind: StateKind = DEFAULT_KIND

    @property
    def weight_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> float:
        """Per parameter, but for the rounding to pages."""
        return sum(ITEM_BYTES[array.dtype] / array.per for array in self.arrays)

    @cached_property
    def _chunk_bytes(self) -> ChunkBytes:
        return ChunkBytes(self.arrays)

    def state_size(self, parameters: int) -> int:
        """Bytes of a state chunk."""
        return self._chunk_bytes[parameters]

    def state_total(self, parameters: int, chunk_params: int) -> int:
        """Bytes of the state of a group that is cut into chunks."""
        whole, rest = divmod(parameters, chunk_params)
        return whole * self.state_size(chunk_params) + self.state_size(rest)

    @property
    def update_cost(self) -> float:
        """Time of an update, as a multiple of AdamW's with fp32 moments, where memory limits it: by
        the bytes of weights, gradient and state."""
        usual = STATE_FORMATS[self.name]
        return self._touched / usual._touched

    @property
    def rounding_s(self) -> float:
        """Of one core for a parameter: what limits the update where that takes longer."""
        return ROUNDING_S[self.kind.moments] * len(self.kind.moment_specs)

    @property
    def _touched(self) -> float:
        return 2 * (self.weight_bytes + self.state_bytes) + self.weight_bytes


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@lru_cache
def state_format_of(name: str, kind: StateKind) -> StateFormat:
    """Parameters that compute in a type, and the state that an optimizer keeps of them."""
    before = (StateArray("master", "float32"),) if name == "fp16" else ()
    after = (StateArray("remainder", "int16"),) if name == "bf16" else ()
    moments = tuple(StateArray(m.name, _stored_as(m, kind)) for m in kind.moment_specs)
    scales: tuple[StateArray, ...] = ()
    if kind.moments == "int8":
        scales = tuple(StateArray(scale_of(m), "float32", SCALED) for m in kind.moment_specs)
    average = (StateArray(EMA, "float32"),) if kind.ema else ()
    return StateFormat(name, _DTYPES[name], (*before, *moments, *scales, *after, *average), kind)


def _stored_as(moment: Moment, kind: StateKind) -> str:
    code = "int8" if moment.signed else "uint8"
    return {"fp32": "float32", "bf16": "bfloat16", "int8": code}[kind.moments]


def scale_of(moment: Moment) -> str:
    """The array of its scales, where it has any."""
    return f"{moment.name}_scale"


def stored_kind(meta: Mapping[str, Any]) -> StateKind:
    """What the optimizer keeps in a store, by its manifest."""
    kind: StateKind = stored(meta, "kind", StateKind, {})
    if kind.optimizer not in OPTIMIZERS or kind.moments not in MOMENTS:
        raise damaged(f"kind is {kind.optimizer[:40]!r} with moments {kind.moments[:40]!r}")
    return kind


def stored_state_format(meta: Mapping[str, Any]) -> StateFormat:
    name: str = stored(meta, "mode", str)
    if name not in _DTYPES:
        raise damaged(f"mode is {name[:40]!r}, wants one of {', '.join(_DTYPES)}")
    return state_format_of(name, stored_kind(meta))


def stored(meta: Mapping[str, Any], key: str, kind: Any, default: Any = None) -> Any:
    """What a manifest says under a key, with the type that it must have."""
    try:
        return checked(meta.get(key, default), kind, key)
    except WrongType as error:
        raise damaged(str(error)) from None


def damaged(what: str) -> StoreError:
    return StoreError(
        f"the store's manifest cannot be used for a model: {what}; it was altered or damaged, or "
        "another program wrote it; restore the store from a snapshot or start the run again"
    )


# By dtype, with what is usual.
STATE_FORMATS = {name: state_format_of(name, DEFAULT_KIND) for name in _DTYPES}


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a group's flat buffer, and the tensors that overlap them."""

    index: int
    start: int
    stop: int
    ranges: tuple[TensorRange, ...]


@dataclass(frozen=True)
class TensorRange:
    """Elements [start, stop) of one tensor, lying at `at` inside the chunk."""

    tensor: int
    start: int
    stop: int
    at: int


def weight_key(group: FlatGroup) -> str:
    return f"w/{group.key}"


def state_key(group: FlatGroup) -> str:
    return f"s/{group.key}"


def gradient_key(group: FlatGroup) -> str:
    return f"g/{group.key}"


@lru_cache(maxsize=4096)
def chunks(group: FlatGroup, chunk_params: int) -> tuple[Chunk, ...]:
    cuts = []
    for index, start in enumerate(range(0, group.numel, chunk_params)):
        stop = min(start + chunk_params, group.numel)
        ranges = tuple(
            found
            for number, tensor in enumerate(group.tensors)
            if (found := _overlap(number, tensor, start, stop)) is not None
        )
        cuts.append(Chunk(index, start, stop, ranges))
    return tuple(cuts)


def _overlap(number: int, tensor: TensorSpec, start: int, stop: int) -> TensorRange | None:
    low, high = max(start, tensor.offset), min(stop, tensor.offset + tensor.numel)
    if low >= high:
        return None
    return TensorRange(number, low - tensor.offset, high - tensor.offset, low - start)


def regions(
    groups: tuple[FlatGroup, ...],
    *,
    state_format: StateFormat,
    chunk_params: int,
    gradients: bool = False,
) -> list[Region]:
    """All weights first, then all state: each kind of read walks one contiguous range. With
    `gradients`, scratch room for gradients that have to wait for their update."""
    from lohan.store.extents import Region  # with numpy, which a plan needs not

    sizes = {g.key: [c.stop - c.start for c in chunks(g, chunk_params)] for g in groups}
    width = state_format.weight_bytes
    weights = [
        Region(weight_key(g), tuple(n * width for n in sizes[g.key]), fixed=g.frozen)
        for g in groups
    ]
    trained = [g for g in groups if not g.frozen]
    state_size = state_format.state_size
    state = [Region(state_key(g), tuple(state_size(n) for n in sizes[g.key])) for g in trained]
    if not gradients:
        return weights + state
    held = [
        Region(gradient_key(g), tuple(n * FLOAT for n in sizes[g.key]), scratch=True)
        for g in trained
    ]
    return weights + state + held


@dataclass(frozen=True)
class StoredModel:
    """What a store holds, by its manifest: the whole model's groups, also of one rank's store."""

    state_format: StateFormat
    chunk_params: int
    groups: tuple[FlatGroup, ...]


def stored_model(meta: Mapping[str, Any], held: Sequence[Region]) -> StoredModel:
    """Read from a manifest and compared with the regions that the store has, so that
    every chunk is found, of the size that is expected."""
    state_format, chunk_params = stored_state_format(meta), stored(meta, "chunk_params", int)
    ranks = RankInfo(stored(meta, "rank", int, 0), stored(meta, "world", int, 1))
    if chunk_params < 1 or not 0 <= ranks.rank < ranks.world:
        raise damaged(f"chunk_params is {chunk_params}, it is rank {ranks.rank} of {ranks.world}")
    try:
        groups = groups_from_json(meta.get("layout"))
    except WrongType as error:
        raise damaged(str(error)) from None
    width = state_format.weight_bytes
    for tensor in (tensor for group in groups for tensor in group.tensors if tensor.packing):
        known = tensor.packing in FORMATS and len(tensor.shape) >= 2 and not tensor.trainable
        size = packed_numel(tensor.packing, tensor.shape, width) if known else -1
        if tensor.numel != size:
            raise damaged(
                f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} is packed as "
                f"{tensor.packing[:40]!r} in {tensor.numel} elements"
            )
    own = tuple(map(ranks.shard, groups))
    there = {region.key: region for region in held}
    for group in own:  # counted first: a wrong number could ask for any number of chunks
        found = there.get(weight_key(group))
        count = -(-group.numel // chunk_params)
        if found is None or len(found.chunks) != count:
            have = "no region" if found is None else f"{len(found.chunks)} chunks"
            raise damaged(f"group {group.key!r} needs {count} chunks, the store has {have} for it")
    for region in regions(own, state_format=state_format, chunk_params=chunk_params):
        if there.get(region.key) != region:
            raise damaged(f"region {region.key!r} has other sizes in the store")
    return StoredModel(state_format, chunk_params, groups)
