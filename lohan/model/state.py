"""The state of a group on SSD: formats, regions and chunks.

Each group has two regions, `w/KEY` with the compute weights and `s/KEY` with the optimizer state.
Both are cut into the same chunks of parameters. A frozen group has weights only, in a fixed region
with one copy for all generations. If its weights were given in a wider type than the compute type,
a second fixed region `x/KEY` holds what rounding removed: the remainder (bf16) or the master
(fp16), as below. It is read when weights are saved, never by a step.

A state chunk contains arrays, one after the other, and zeros up to a whole page. For AdamW (other
optimizers have their moments instead of m and v):

    fp32: m, v                 (the fp32 weights are the master)
    bf16: m, v, remainder      (weights << 16, plus the remainder, is the fp32 master)
    fp16: master, m, v

Moments in int8 are followed by their scales: m, v, m_scale, v_scale. A moving average of the
weights, if there is one, comes last: ema.
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
from lohan.optim import (
    DEFAULT_KIND,
    MOMENTS,
    OPTIMIZERS,
    PACKINGS,
    PARAMETERS_PER_SCALE,
    Moment,
    StateKind,
)
from lohan.util.files import WrongType, checked
from lohan.util.units import PAGE, align_up

if TYPE_CHECKING:
    from lohan.store.extents import Region


# -- Frozen weights packed into fewer bits: formats and sizes --------------------------------------
#
# A packed tensor occupies elements of the compute type in its group's flat buffer. Its bytes are
# codes, followed by fp32 scales, each padded to 64 bytes:
#
#     nf4   two codes per byte, the first in the high half; each code is one of 16 quantiles of a
#           normal distribution; one scale per 64 consecutive values, their largest magnitude
#     int8  one byte per value; one scale per row, its largest magnitude / 127
#     fp8   float8 e4m3; one scale per block of 128 x 128, its largest magnitude / 448
#
# All byte counts are those of packed tensors. Weights are dequantised before they are used.


FORMATS = PACKINGS
NF4_BLOCK, FP8_BLOCK = 64, 128
PADDING = 64  # In bytes: codes and scales are aligned to this.
SCALE_BYTES = 4
DEQUANTISED_AT_ONCE = 2**21  # Values that are dequantised at a time.
WORK_BYTES = 6  # Temporary bytes per value, besides the result.
DEQUANTISED = "dequantised weights"  # The ledger entry for the weights of one call.


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
    """Return the number of elements of the compute type that a packed tensor occupies.

    `packing` is the format, and `weight_bytes` the size of an element.
    """
    return packed_bytes(packing, shape) // weight_bytes


def with_packed(blocks: Blocks, names: Collection[str], packing: str, weight_bytes: int) -> Blocks:
    """Return the blocks with the tensors `names` packed in the format `packing`."""
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
    """Return the largest number of bytes that one call needs for its dequantised weights."""
    sites = [[blocks.by_key[key].dequantised for key in site.groups] for site in blocks.sites]
    return align_up(max(map(sum, sites), default=0) * weight_bytes, PAGE)


def dequantising_bytes(blocks: Blocks) -> int:
    """Return the bytes of temporary memory that dequantisation needs."""
    sizes = (tensor.parameters for _, tensor in blocks.tensors() if tensor.packing)
    return align_up(WORK_BYTES * min(DEQUANTISED_AT_ONCE, max(sizes, default=0)), PAGE)


# -- The stored state of a trained group -----------------------------------------------------------


FLOAT, HALF = 4, 2
ITEM_BYTES = {
    "float32": FLOAT,
    "bfloat16": HALF,
    "float16": HALF,
    "int16": HALF,
    "int8": 1,
    "uint8": 1,
}
EMA = "ema"
# Seconds per moment, measured with AVX2.
ROUNDING_S = {"fp32": 0.0, "bf16": 0.45e-9, "int8": 1.0e-9}


@dataclass(frozen=True)
class StateArray:
    """An array in the state of a chunk.

    `per` parameters share one element. Dtypes have torch's names.
    """

    name: str
    dtype: str
    per: int = 1

    def size(self, parameters: int) -> int:
        return -(-parameters // self.per) * ITEM_BYTES[self.dtype]


class ChunkBytes(dict[int, int]):
    """A map from the number of parameters of a state chunk to its bytes.

    Each size is computed once, because planning needs the same sizes very often.
    """

    def __init__(self, arrays: tuple[StateArray, ...]) -> None:
        super().__init__()
        self._arrays = arrays

    def __missing__(self, parameters: int) -> int:
        self[parameters] = align_up(sum(array.size(parameters) for array in self._arrays), PAGE)
        return self[parameters]


@dataclass(frozen=True)
class StateFormat:
    """The storage format of a parameter: compute dtype and arrays of its optimizer state."""

    name: str
    dtype: str
    arrays: tuple[StateArray, ...]
    kind: StateKind = DEFAULT_KIND

    @property
    def weight_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> float:
        """The bytes of optimizer state per parameter, without the rounding to pages."""
        return sum(ITEM_BYTES[array.dtype] / array.per for array in self.arrays)

    @cached_property
    def _chunk_bytes(self) -> ChunkBytes:
        return ChunkBytes(self.arrays)

    def state_size(self, parameters: int) -> int:
        """Return the bytes of a state chunk."""
        return self._chunk_bytes[parameters]

    def state_total(self, parameters: int, chunk_params: int) -> int:
        """Return the bytes of the state of a group that is cut into chunks."""
        whole, rest = divmod(parameters, chunk_params)
        return whole * self.state_size(chunk_params) + self.state_size(rest)

    @property
    def update_cost(self) -> float:
        """The time of an update relative to AdamW with fp32 moments, if memory bandwidth limits it.

        It is the ratio of the bytes of weights, gradient and state that are read and written.
        """
        default_format = STATE_FORMATS[self.name]
        return self._touched / default_format._touched

    @property
    def rounding_s(self) -> float:
        """The seconds of one core to round the moments of a parameter.

        This limits the update if it takes longer than the memory accesses.
        """
        return ROUNDING_S[self.kind.moments] * len(self.kind.moment_specs)

    @property
    def _touched(self) -> float:
        return 2 * (self.weight_bytes + self.state_bytes) + self.weight_bytes


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@lru_cache
def state_format_of(name: str, kind: StateKind) -> StateFormat:
    """Return the format for parameters of a compute type and the state of an optimizer."""
    before = (StateArray("master", "float32"),) if name == "fp16" else ()
    after = (StateArray("remainder", "int16"),) if name == "bf16" else ()
    moments = tuple(StateArray(m.name, _stored_as(m, kind)) for m in kind.moment_specs)
    scales: tuple[StateArray, ...] = ()
    if kind.moments == "int8":
        scales = tuple(
            StateArray(scale_of(m), "float32", PARAMETERS_PER_SCALE) for m in kind.moment_specs
        )
    average = (StateArray(EMA, "float32"),) if kind.ema else ()
    return StateFormat(name, _DTYPES[name], (*before, *moments, *scales, *after, *average), kind)


def _stored_as(moment: Moment, kind: StateKind) -> str:
    code = "int8" if moment.signed else "uint8"
    return {"fp32": "float32", "bf16": "bfloat16", "int8": code}[kind.moments]


def scale_of(moment: Moment) -> str:
    """Return the name of the array that holds the scales of a moment."""
    return f"{moment.name}_scale"


def stored_kind(meta: Mapping[str, Any]) -> StateKind:
    """Return the kind of optimizer state that a store holds, according to its manifest."""
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
    """Return the value of a key in a manifest, or `default` if the manifest has no such key.

    Raise StoreError if the value does not have the type `kind`.
    """
    try:
        return checked(meta.get(key, default), kind, key)
    except WrongType as error:
        raise damaged(str(error)) from None


def damaged(what: str) -> StoreError:
    return StoreError(
        f"the store's manifest cannot be used for a model: {what}; it was altered or damaged, or "
        "another program wrote it; restore the store from a snapshot or start the run again"
    )


# The formats of the default optimizer, by dtype.
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
    """Elements [start, stop) of one tensor, located at `at` inside the chunk."""

    tensor: int
    start: int
    stop: int
    at: int


def weight_key(group: FlatGroup) -> str:
    return f"w/{group.key}"


def state_key(group: FlatGroup) -> str:
    return f"s/{group.key}"


def exact_key(group: FlatGroup) -> str:
    """Return the key of the region that holds what rounding removed from a frozen group."""
    return f"x/{group.key}"


# The array that, together with the rounded weights, restores the fp32 values. fp32 weights are not
# rounded.
EXACT_ARRAYS = {"bf16": StateArray("remainder", "int16"), "fp16": StateArray("master", "float32")}


def gradient_key(group: FlatGroup) -> str:
    return f"g/{group.key}"


@lru_cache(maxsize=4096)
def chunks(group: FlatGroup, chunk_params: int) -> tuple[Chunk, ...]:
    cuts = []
    for index, start in enumerate(range(0, group.numel, chunk_params)):
        stop = min(start + chunk_params, group.numel)
        ranges = tuple(
            overlap
            for number, tensor in enumerate(group.tensors)
            if (overlap := _overlap(number, tensor, start, stop)) is not None
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
    exact: Collection[str] = (),
) -> list[Region]:
    """Return the regions of a store: all weights first, then all state.

    With this order, each kind of read covers one contiguous range. With `gradients`, scratch
    regions are added for gradients that have to wait for their update. `exact` has the keys of the
    frozen groups whose rounded-off part is kept.
    """
    # Imported here because it needs numpy, which planning does not.
    from lohan.store.extents import Region

    sizes = {g.key: [c.stop - c.start for c in chunks(g, chunk_params)] for g in groups}
    width = state_format.weight_bytes
    weights = [
        Region(weight_key(g), tuple(n * width for n in sizes[g.key]), fixed=g.frozen)
        for g in groups
    ]
    trained = [g for g in groups if not g.frozen]
    state_size = state_format.state_size
    state = [Region(state_key(g), tuple(state_size(n) for n in sizes[g.key])) for g in trained]
    if exact:
        size = EXACT_ARRAYS[state_format.name].size
        state += [
            Region(exact_key(g), tuple(size(n) for n in sizes[g.key]), fixed=True)
            for g in groups
            if g.key in exact
        ]
    if not gradients:
        return weights + state
    held = [
        Region(gradient_key(g), tuple(n * FLOAT for n in sizes[g.key]), scratch=True)
        for g in trained
    ]
    return weights + state + held


@dataclass(frozen=True)
class StoredModel:
    """The model in a store, according to its manifest.

    The groups are those of the whole model, even in the store of one of several ranks.
    """

    state_format: StateFormat
    chunk_params: int
    groups: tuple[FlatGroup, ...]
    # Keys of the frozen groups whose rounded-off part is kept.
    exact: frozenset[str] = frozenset()


def stored_model(meta: Mapping[str, Any], held: Sequence[Region]) -> StoredModel:
    """Return the model that the metadata of a manifest describes.

    `held` are the regions of the store. An error is raised unless these contain every chunk of the
    model in the expected size.
    """
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
        supported = tensor.packing in FORMATS and len(tensor.shape) >= 2 and not tensor.trainable
        size = packed_numel(tensor.packing, tensor.shape, width) if supported else -1
        if tensor.numel != size:
            raise damaged(
                f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} is packed as "
                f"{tensor.packing[:40]!r} in {tensor.numel} elements"
            )
    shards = tuple(map(ranks.shard, groups))
    by_key = {region.key: region for region in held}
    # The number of chunks is checked first, because a wrong `chunk_params` could ask for any number
    # of them.
    for group in shards:
        weight_region = by_key.get(weight_key(group))
        count = -(-group.numel // chunk_params)
        if weight_region is None or len(weight_region.chunks) != count:
            have = "no region" if weight_region is None else f"{len(weight_region.chunks)} chunks"
            raise damaged(f"group {group.key!r} needs {count} chunks, the store has {have} for it")
    exact = frozenset(g.key for g in shards if g.frozen and exact_key(g) in by_key)
    if exact and state_format.name not in EXACT_ARRAYS:
        raise damaged(f"{state_format.name} weights of {min(exact)!r} are said to be rounded")
    for region in regions(
        shards, state_format=state_format, chunk_params=chunk_params, exact=exact
    ):
        if by_key.get(region.key) != region:
            raise damaged(f"region {region.key!r} has other sizes in the store")
    return StoredModel(state_format, chunk_params, groups, exact)
