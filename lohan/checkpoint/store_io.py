"""Reading and writing a model's store chunk by chunk, without holding the model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan.capture.blocks import dtype_of, split
from lohan.capture.placeholders import lacks_values, replace_parameters
from lohan.checkpoint.adapters import AdapterValues, base_names, base_of, copied_names, prefix_of
from lohan.checkpoint.packed import PackingSource, dequantised_range
from lohan.checkpoint.quantized import open_folder
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import (
    FolderSource,
    InitialValues,
    ModuleSource,
    checkpoint_map,
    element_ranges,
    initial_seed,
)
from lohan.checkpoint.train_state import TrainState
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.errors import ModelError, StoreError
from lohan.model.layout import Blocks, FlatGroup, RankInfo, TensorSpec
from lohan.model.plan import LOG, Plan
from lohan.model.state import (
    EMA,
    EXACT_ARRAYS,
    STATE_FORMATS,
    Chunk,
    StateFormat,
    StoredModel,
    chunks,
    exact_key,
    regions,
    state_format_of,
    state_key,
    stored_kind,
    stored_model,
    stored_state_format,
    weight_key,
)
from lohan.optim import StateKind
from lohan.schedule.placement import needs_norm
from lohan.store.extents import Region
from lohan.store.io_engine import IOEngine, aligned_buffer
from lohan.store.store import Store

# -- Filling a store and reading parameters from it ------------------------------------------------


OnProgress = Callable[[int, int], None]  # called with the number of parameters done and the total


def fill(
    store: Store,
    groups: Sequence[FlatGroup],
    read: ReadFlat,
    *,
    state_format: StateFormat,
    chunk_params: int,
    progress: OnProgress,
    weights_only: bool = False,
    exact: Collection[str] = (),
) -> None:
    """Write the initial weights and optimizer state of every group.

    The moments of trained groups are set to zero. For frozen groups in `exact`, the part of the
    values that rounding to the compute dtype removes is stored too. `read` returns the values of
    the parameters by name.
    """
    read = PackingSource(read, groups, dtype_of(state_format)).read_flat
    trained = [] if weights_only else [group for group in groups if not group.frozen]
    rounded = [group for group in groups if group.key in exact]
    values = aligned(_largest_chunk(trained + rounded, chunk_params) * 4).view(torch.float32)
    weights = aligned(_largest_chunk(groups, chunk_params) * state_format.weight_bytes)
    state = aligned(state_format.state_size(_largest_chunk(trained, chunk_params)))
    done, total = 0, sum(group.numel for group in groups)
    for group in groups:
        for chunk in chunks(group, chunk_params):
            count = chunk.stop - chunk.start
            w = weights[: count * state_format.weight_bytes]
            learns, splits = group in trained, group in rounded
            # Packed weights are copied bit for bit and never converted.
            in_fp32 = learns or splits
            part = (values[:count] if in_fp32 else w.view(dtype_of(state_format))).zero_()
            for own_range in chunk.ranges:
                spec = group.tensors[own_range.tensor]
                part[own_range.at : own_range.at + own_range.stop - own_range.start] = read(
                    spec.name, spec.begin + own_range.start, spec.begin + own_range.stop
                )
            tickets = []
            if splits:
                removed = _rounded_off(part, w, state_format)
                tickets.append(store.write(exact_key(group), chunk.index, removed.numpy()))
            if learns:
                s = state[: state_format.state_size(count)].zero_()
                arrays = split(state_format, s, count)
                if state_format.name == "bf16":
                    _core.split_bf16(part, w.view(torch.bfloat16), arrays["remainder"])
                else:
                    w.view(dtype_of(state_format)).copy_(part)
                for copied in {"master", EMA} & arrays.keys():
                    arrays[copied].copy_(part)
                tickets.append(store.write(state_key(group), chunk.index, s.numpy()))
            tickets.append(store.write(weight_key(group), chunk.index, w.numpy()))
            for ticket in tickets:
                store.wait(ticket)
            done += count
            progress(done, total)


def groups_that_lose_bits(
    read: ReadFlat, groups: Sequence[FlatGroup], names: Collection[str], dtype: str
) -> list[str]:
    """Return the keys of the frozen groups whose values the compute dtype cannot all represent.

    Only parameters in `names` are read, each up to the first value that would be rounded.
    """
    rounding = dtype_of(STATE_FORMATS[dtype])

    def loses_bits(spec: TensorSpec) -> bool:
        parts = (read(spec.name, a, b) for a, b in element_ranges(spec.numel, most=2**20))
        return any(not torch.equal(part.to(rounding).to(part.dtype), part) for part in parts)

    return [
        group.key
        for group in groups
        if group.frozen
        and not any(spec.packing for spec in group.tensors)
        and any(spec.name in names and loses_bits(spec) for spec in group.tensors)
    ]


def _rounded_off(
    values: torch.Tensor, weights: torch.Tensor, state_format: StateFormat
) -> torch.Tensor:
    """Round fp32 values into `weights`, and return what the rounding has removed.

    From both, `_exact_values` restores the fp32 values.
    """
    array = EXACT_ARRAYS[state_format.name]
    removed = aligned(array.size(len(values)))
    if state_format.name == "bf16":
        _core.split_bf16(values, weights.view(torch.bfloat16), removed.view(torch.int16))
    else:
        weights.view(dtype_of(state_format)).copy_(values)
        removed.view(torch.float32).copy_(values)
    return removed


def _exact_values(
    weights: torch.Tensor, removed: torch.Tensor, state_format: StateFormat
) -> torch.Tensor:
    """Return the fp32 values, given the rounded weights and what `_rounded_off` has removed."""
    if state_format.name == "fp16":
        return removed.view(torch.float32)
    values = aligned(2 * len(weights)).view(torch.float32)
    _core.join_bf16(weights.view(torch.bfloat16), removed.view(torch.int16), values)
    return values


def _largest_chunk(groups: Sequence[FlatGroup], chunk_params: int) -> int:
    return min(chunk_params, max((group.numel for group in groups), default=0))


class ShardReader:
    """A reader of the committed parameters of a store, which holds one rank's shards.

    If `ema` is true, the moving average of trained parameters is read instead of their values.
    """

    def __init__(self, store: Store, ranks: RankInfo, *, ema: bool = False) -> None:
        held = stored_model(store.meta, store.layout.regions)
        if ema and not held.state_format.kind.ema:
            raise StoreError(
                f"the store in {store.dirs[0]} holds no averaged weights; they are kept by a run "
                "that is started with --ema"
            )
        self._store, self._state_format, self._ema = store, held.state_format, ema
        self._exact = held.exact
        groups = tuple(map(ranks.shard, held.groups))
        self._where = {
            tensor.name: (group, index)
            for group in groups
            for index, tensor in enumerate(group.tensors)
        }
        self._chunks = {group.key: chunks(group, held.chunk_params) for group in groups}
        trained = [group for group in groups if not group.frozen]
        largest = _largest_chunk(groups, held.chunk_params)
        self._weights = aligned(largest * held.state_format.weight_bytes)
        largest = _largest_chunk(trained, held.chunk_params)
        state_bytes = held.state_format.state_size(largest)
        if self._exact:
            rounded = [group for group in groups if group.key in self._exact]
            largest = _largest_chunk(rounded, held.chunk_params)
            state_bytes = max(state_bytes, EXACT_ARRAYS[held.state_format.name].size(largest))
        # Holds the optimizer state of one chunk, or what was rounded off its weights.
        self._state = aligned(state_bytes)
        self._loaded: tuple[str, int] | None = None

    def overlap(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Return the range of a parameter's elements [start, stop) that is in this shard."""
        group, index = self._where[name]
        return _overlap(group.tensors[index], start, stop)

    def read_into(self, out: torch.Tensor, name: str, start: int) -> None:
        """Read elements of a parameter into `out`, beginning with element `start`.

        Elements of `out` that are not in this shard are left unchanged. Values are converted to the
        dtype of `out`, from the master copy if there is one. A packed parameter is read as the
        elements that the store holds.
        """
        group, index = self._where[name]
        start -= group.tensors[index].begin
        for chunk in self._chunks[group.key]:
            for own_range in chunk.ranges:
                low, high = max(start, own_range.start), min(start + len(out), own_range.stop)
                if own_range.tensor == index and low < high:
                    values = self._master(group, chunk)
                    at = own_range.at + low - own_range.start
                    out[low - start : high - start] = values[at : at + high - low]

    def _master(self, group: FlatGroup, chunk: Chunk) -> torch.Tensor:
        """Return the values of a chunk in the widest dtype that the store has them in."""
        count, fmt = chunk.stop - chunk.start, self._state_format
        w = self._weights[: count * fmt.weight_bytes]
        rounded = group.key in self._exact
        size = EXACT_ARRAYS[fmt.name].size(count) if rounded else fmt.state_size(count)
        s = self._state[:size]
        # Only the weights are stored, or only they are needed.
        alone = not rounded and (group.frozen or (fmt.name == "fp32" and not self._ema))
        if self._loaded != (group.key, chunk.index):
            self._loaded = None
            tickets = [self._store.read(weight_key(group), chunk.index, w.numpy())]
            if not alone:
                key = exact_key(group) if rounded else state_key(group)
                tickets.append(self._store.read(key, chunk.index, s.numpy()))
            for ticket in tickets:
                self._store.wait(ticket)
            self._loaded = (group.key, chunk.index)
        if alone:
            return w.view(dtype_of(fmt))
        if rounded:
            return _exact_values(w, s, fmt)
        arrays = split(fmt, s, count)
        if self._ema:
            return arrays[EMA]
        if fmt.name == "fp16":
            return arrays["master"]
        values = aligned(count * 4).view(torch.float32)
        _core.join_bf16(w.view(torch.bfloat16), arrays["remainder"], values)
        return values


def aligned(size: int) -> torch.Tensor:
    return torch.from_numpy(aligned_buffer(size))


def store_reader(*stores: Store, ema: bool = False) -> ReadFlat:
    """Return a reader of the committed parameters by name or, with `ema`, of their moving average.

    `stores` is the store of a run, or the stores of all its ranks in rank order.
    """
    every = zip(stores, RankInfo(world=len(stores)).all(), strict=True)
    shards = [ShardReader(store, ranks, ema=ema) for store, ranks in every]

    def read(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=dtype)
        for shard in shards:
            shard.read_into(out, name, start)
        return out

    return _dequantising(read, stored_model(stores[0].meta, stores[0].layout.regions))


def _dequantising(read: Callable[..., torch.Tensor], held: StoredModel) -> ReadFlat:
    """Return a reader of fp32 values, which dequantises packed tensors.

    `held` is the model in the store. `read` reads the elements that the store holds, in any dtype.

    At most one packed tensor is in memory.
    """
    packed = {t.name: t for group in held.groups for t in group.tensors if t.packing}
    last: tuple[str, torch.Tensor] = "", torch.empty(0)

    def values(name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal last
        spec = packed.get(name)
        if spec is None:
            return read(name, start, stop, torch.float32)
        if last[0] != name:
            last = "", torch.empty(0)
            last = name, read(name, 0, spec.numel, dtype_of(held.state_format))
        return dequantised_range(last[1], spec.packing, spec.shape, start, stop)

    return values


@contextmanager
def gathering_reader(
    process_group: ProcessGroup, store: Store, *, ema: bool = False
) -> Iterator[ReadFlat | None]:
    """Yield a reader on rank 0 that gathers parameters from the open stores of all ranks.

    The ranks may be on different machines. On all other ranks, this sends the ranges that rank 0
    requests until rank 0 is done, and then yields None.
    """
    reader = ShardReader(store, process_group.ranks, ema=ema)
    if not process_group.ranks.first:
        while (request := process_group.all_gather_object(None)[0]) is not None:
            *span, dtype = request
            low, high = reader.overlap(*span)
            if low < high:
                piece = torch.empty(high - low, dtype=getattr(torch, dtype))
                reader.read_into(piece, request[0], low)
                process_group.send_to_first(piece.view(torch.uint8))
        yield None
        return
    held = stored_model(store.meta, store.layout.regions)
    others = {
        rank: {spec.name: spec for group in held.groups for spec in ranks.shard(group).tensors}
        for rank, ranks in enumerate(process_group.ranks.all())
        if rank
    }

    def read(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        process_group.all_gather_object([name, start, stop, str(dtype).removeprefix("torch.")])
        out = torch.empty(stop - start, dtype=dtype)
        reader.read_into(out, name, start)
        for rank, specs in others.items():
            low, high = _overlap(specs[name], start, stop)
            if low < high:
                process_group.receive(out[low - start : high - start].view(torch.uint8), rank)
        return out

    try:
        yield _dequantising(read, held)
    finally:
        process_group.all_gather_object(None)


def _overlap(spec: TensorSpec, start: int, stop: int) -> tuple[int, int]:
    return max(start, spec.begin), min(stop, spec.begin + spec.numel)


# -- The store of a model: creating it, checking it, and moving the model to the meta device -------


def create_store(
    read: ReadFlat,
    blocks: Blocks,
    plan: Plan,
    *,
    dirs: Sequence[Path],
    engine: str | IOEngine,
    meta: Mapping[str, Any],
    progress: OnProgress,
    process_group: ProcessGroup = ALONE,
    exact: Collection[str] = (),
) -> Store:
    """Return a store in which the initial weights of a model, or of a rank's shard, are committed.

    `exact` has the keys of the frozen groups for which the part removed by rounding is stored.
    `read` returns the initial values by name.
    """
    state_format = state_format_of(plan.dtype, plan.kind)
    ranks = process_group.ranks
    shards = ranks.shards(blocks).groups
    layout = regions(
        shards,
        state_format=state_format,
        chunk_params=plan.chunk_params,
        gradients=needs_norm(plan),
        exact=exact,
    )
    barrier = process_group.barrier if ranks.several else None
    logged = sum(entry.bytes for entry in plan.ledger if entry.owner == LOG)
    store = Store.create(dirs, layout, engine=engine, barrier=barrier, reserved_bytes=logged)
    try:
        first = {
            **meta,
            **TrainState.start(plan.dtype).to_meta(),
            "mode": plan.dtype,
            "kind": asdict(plan.kind),
            "chunk_params": plan.chunk_params,
            "layout": blocks.to_json(),
            **({"rank": ranks.rank, "world": ranks.world} if ranks.several else {}),
        }
        fill(
            store,
            shards,
            read,
            state_format=state_format,
            chunk_params=plan.chunk_params,
            progress=progress,
            exact=exact,
        )
        store.commit(first)
    except BaseException:
        store.close()
        raise
    return store


def overwrite(store: Store, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the values of parameters, by name, and commit; optimizer state is kept.

    Frozen parameters cannot be replaced: values that differ from those of the store are refused.
    """
    held = stored_model(store.meta, store.layout.regions)
    _check_frozen(store, held, values)
    fmt = held.state_format
    for group in held.groups:
        if group.frozen:
            continue
        for chunk in chunks(group, held.chunk_params):
            count = chunk.stop - chunk.start
            weights, state = aligned(count * fmt.weight_bytes), aligned(fmt.state_size(count))
            for key, flat in ((weight_key(group), weights), (state_key(group), state)):
                store.wait(store.read(key, chunk.index, flat.numpy()))
            arrays = split(fmt, state, count)
            for own_range in chunk.ranges:
                spec = group.tensors[own_range.tensor]
                if spec.name not in values:
                    continue
                span = slice(own_range.at, own_range.at + own_range.stop - own_range.start)
                new = values[spec.name].reshape(-1)[own_range.start : own_range.stop]
                new = new.detach().to("cpu", torch.float32).contiguous()
                chunk_values = weights.view(dtype_of(fmt))[span]
                if fmt.name == "bf16":
                    _core.split_bf16(new, chunk_values, arrays["remainder"][span])
                else:
                    chunk_values.copy_(new)
                if "master" in arrays:
                    arrays["master"][span] = new
            tickets = [
                store.write(key, chunk.index, flat.numpy())
                for key, flat in ((weight_key(group), weights), (state_key(group), state))
            ]
            store.wait_all(tickets)
    store.commit(clean=True)


def _check_frozen(store: Store, held: StoredModel, values: Mapping[str, torch.Tensor]) -> None:
    frozen = {t.name: t for group in held.groups if group.frozen for t in group.tensors}
    read = store_reader(store)
    for name, tensor in values.items():
        if name not in frozen:
            continue
        flat, dtype = tensor.reshape(-1), dtype_of(held.state_format)
        for start, stop in element_ranges(flat.numel()):
            before = read(name, start, stop).to(dtype)
            if not torch.equal(before, flat[start:stop].to("cpu", dtype)):
                raise ModelError(
                    f"{name} is frozen, so its values in the store cannot change, and other values "
                    "would be loaded into it; load them before the model is attached or the "
                    "Trainer is made"
                )


def check_same(store: Store, blocks: Blocks, dtype: str, kind: StateKind | None = None) -> None:
    """Check that the store was created for this model, dtype and, if `kind` is given, optimizer."""
    if store.meta.get("layout") != json.loads(json.dumps(blocks.to_json())):
        raise StoreError(
            f"the store in {store.dirs[0]} holds another model than {blocks.parameters:,} "
            "parameters cut this way; resume with the model and options it was made with"
        )
    stored_name = stored_state_format(store.meta).name
    if stored_name != dtype:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {stored_name}, the model is {dtype}; load "
            f"it with dtype={stored_name!r}"
        )
    stored = stored_kind(store.meta)
    if kind is not None and kind != stored:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {stored}, this run is for {kind}; resume "
            f"it with optimizer={stored.call} (of a Trainer: its optim and moments), or make a new "
            "store"
        )


def source_of(model: nn.Module) -> ReadFlat:
    """Return a reader of the initial values of a model's parameters.

    Parameters on the meta device are read from the model's folder, or drawn if the folder has no
    weights. All other parameters are read from memory. Adapters on the meta device get initial
    values.
    """
    if not any(lacks_values(parameter) for parameter in model.parameters()):
        return ModuleSource(model).read_flat
    base, prefix = base_of(model), prefix_of(model)
    folder = folder_of(base)
    if folder is None:
        raise ModelError(
            f"{type(base).__name__} is on the meta device and names no folder to take its weights "
            "from; build it with lohan.load(FOLDER)"
        )
    seed = initial_seed(folder)
    if seed is not None:
        return InitialValues(model, seed).read_flat
    tensors, held = open_folder(folder), base.state_dict(keep_vars=True)
    # Parameters in memory keep their values, such as a new head on a body from a folder.
    names = {
        name: plain
        for name, plain in base_names(base).items()
        if not isinstance(held[name], nn.Parameter) or lacks_values(held[name])
    }
    parameters = checkpoint_map(base, tensors, names).parameters
    copied = {name: plain for name, plain in copied_names(base).items() if lacks_values(held[name])}
    pairs = {**names, **copied}.items()
    stored = {prefix + name: parameters[plain] for name, plain in pairs if plain in parameters}
    by_name = dict.fromkeys(stored, FolderSource(tensors, stored).read_flat)
    if not prefix:  # A checkpoint may omit parameters that are computed.
        absent = [name for name in names if name not in stored]
        by_name |= dict.fromkeys(absent, InitialValues(base, 0).read_flat)
    added = {name: lacks_values(p) for name, p in model.named_parameters() if name not in by_name}
    if any(added.values()):
        by_name |= dict.fromkeys(added, AdapterValues(model).read_flat)
    in_memory = [name for name, meta in added.items() if not meta]
    by_name |= dict.fromkeys(in_memory, ModuleSource(model, in_memory).read_flat)
    return lambda name, start, stop: by_name[name](name, start, stop)


def folder_of(model: nn.Module) -> Path | None:
    """Return the model folder that a model's config names, or None if it does not exist."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", "") or getattr(config, "_name_or_path", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def to_meta(model: nn.Module) -> None:
    """Replace parameters by meta tensors of the same shape, since the store holds their values."""
    held = [p for p in model.parameters() if not lacks_values(p)]
    replace_parameters(
        model, {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in held}
    )


# -- A store with only the weights, for a model that only runs forward -----------------------------


def create_weights_store(
    read: ReadFlat,
    blocks: Blocks,
    dtype: str,
    *,
    chunk_params: int,
    dirs: Sequence[Path],
    progress: OnProgress = lambda done, total: None,
) -> Store:
    """Return a store with a model's weights in the compute dtype, rounded as in transformers.

    `read` returns the values by name.
    """
    state_format, groups = STATE_FORMATS[dtype], blocks.groups
    sizes = {
        weight_key(group): [c.stop - c.start for c in chunks(group, chunk_params)]
        for group in groups
    }
    layout = [
        Region(key, tuple(n * state_format.weight_bytes for n in counts))
        for key, counts in sizes.items()
    ]
    store = Store.create(dirs, layout, durability="checkpoint")
    try:
        fill(
            store,
            groups,
            read,
            state_format=state_format,
            chunk_params=chunk_params,
            progress=progress,
            weights_only=True,
        )
        first = TrainState.start(dtype).to_meta()
        store.commit(
            {**first, "mode": dtype, "chunk_params": chunk_params, "layout": blocks.to_json()}
        )
    except BaseException:
        store.close()
        raise
    return store
