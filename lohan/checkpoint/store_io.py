"""Parameters into a model's store and out of it, chunk by chunk: never the model in memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lohan import _core
from lohan.capture.blocks import dtype_of, lacks_values, replace_parameters, split
from lohan.checkpoint.adapters import AdapterValues, base_names, base_of, copied_names, prefix_of
from lohan.checkpoint.packed import PackingSource, dequantised_range
from lohan.checkpoint.quantized import open_folder
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import (
    FolderSource,
    InitialValues,
    ModuleSource,
    checkpoint_map,
    initial_seed,
)
from lohan.device.base import Device
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.errors import ModelError, StoreError, first_line
from lohan.model.layout import Blocks, FlatGroup, RankInfo, TensorSpec
from lohan.model.plan import Plan
from lohan.model.state import (
    EMA,
    STATE_FORMATS,
    Chunk,
    StateFormat,
    StoredModel,
    chunks,
    damaged,
    regions,
    state_format_of,
    state_key,
    stored,
    stored_kind,
    stored_model,
    stored_state_format,
    weight_key,
)
from lohan.optim import StateKind
from lohan.store.extents import Region
from lohan.store.io_engine import IOEngine, aligned_buffer
from lohan.store.store import Store
from lohan.util.files import json_key, json_object
from lohan.util.units import MiB, format_bytes

# -- What every manifest has of a run: step counters, loss scale, random state, changed buffers ----

GROWTH_INTERVAL = 2000  # clean updates before the fp16 loss scale doubles, as in PyTorch
LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-14


@dataclass(frozen=True)
class TrainState:
    """`step` counts batches seen, `updates` the ones that changed the weights."""

    step: int = 0
    updates: int = 0
    skipped_steps: int = field(default=0, metadata=json_key("skipped"))  # after an overflow
    loss_scale: float = 1.0
    clean_updates: int = 0
    # By parameter: it had no gradient.
    missed_updates: Mapping[str, int] = field(default_factory=dict, metadata=json_key("missed"))

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainState:
        found: TrainState = stored(meta, "progress", cls)
        counts = (found.step, found.updates, found.skipped_steps, found.clean_updates)
        if min(counts) < 0 or not SMALLEST_SCALE <= found.loss_scale <= LARGEST_SCALE:
            raise damaged(f"progress is {found}")
        return found

    @classmethod
    def start(cls, dtype: str) -> TrainState:
        return cls(loss_scale=65536.0 if dtype == "fp16" else 1.0)

    def updated(self, *, scaled: bool, absent: Sequence[str]) -> TrainState:
        scale, clean = self.loss_scale, self.clean_updates + 1
        if scaled and clean == GROWTH_INTERVAL:
            scale, clean = min(scale * 2, LARGEST_SCALE), 0
        missed = dict(self.missed_updates)
        missed |= {name: missed.get(name, 0) + 1 for name in absent}
        return replace(
            self, step=self.step + 1, updates=self.updates + 1, loss_scale=scale,
            clean_updates=clean, missed_updates=missed,
        )  # fmt: skip

    def overflowed(self) -> TrainState:
        return replace(
            self, step=self.step + 1, skipped_steps=self.skipped_steps + 1, clean_updates=0,
            loss_scale=max(self.loss_scale / 2, SMALLEST_SCALE),
        )  # fmt: skip

    def to_meta(self, random_state: Any = None) -> dict[str, Any]:
        """With the random state, so that dropout after a resume continues the same stream. That of
        an accelerator comes behind the host's."""
        states = random_state if isinstance(random_state, tuple) else (torch.get_rng_state(),)
        texts = [base64.b64encode(state.numpy().tobytes()).decode() for state in states]
        return {"progress": json_object(self), "rng": ",".join(texts)}


def restore_rng(meta: Mapping[str, Any], device: Device) -> None:
    """Goes on with what was drawn last, as far as it was drawn on a device of this kind."""
    texts = stored(meta, "rng", str).split(",")
    try:
        raw = [np.frombuffer(base64.b64decode(text), np.uint8).copy() for text in texts]
        states = [torch.from_numpy(state) for state in raw]
        torch.set_rng_state(states[0])
    except (ValueError, RuntimeError) as error:
        raise damaged(f"rng is not a random state of torch ({first_line(error)})") from None
    now = device.random_state()
    if isinstance(now, tuple) and len(states) == len(now):
        device.set_random_state(tuple(states))


# -- Buffers that a model changes while it trains --------------------------------------------------
#
# Statistics of BatchNorm, vectors of spectral norm, counters: those that belong to the checkpoint
# are committed with each step, so a resumed run has them too.


LIMIT = 4 * MiB  # what a manifest can carry
KEY = "buffers"


class ChangedBuffers:
    """Those of a whole model that have changed since the run began and belong to its state. Once
    committed, a buffer stays among them: each commit replaces all that came before."""

    def __init__(self, model: nn.Module, committed: Mapping[str, Any]) -> None:
        self._model = model
        self._known = frozenset(committed.get(KEY, {}))
        self._first = {
            name: (id(tensor), tensor._version) for name, tensor in _persistent(model).items()
        }
        self._at_first = _versions(model)
        self._counting = {  # they count no versions
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            for key in module._buffers
        }

    @property
    def unchanged(self) -> bool:
        """No buffer, of the checkpoint or not, has changed since the run began: a step that is run
        again finds what it found."""
        return not self._known and not self._counting and _versions(self._model) == self._at_first

    def to_meta(self) -> dict[str, Any]:
        changed = {
            name: tensor
            for name, tensor in _persistent(self._model).items()
            if name in self._known
            or name in self._counting
            or self._first.get(name) != (id(tensor), tensor._version)
        }
        size = sum(tensor.numel() * tensor.itemsize for tensor in changed.values())
        if size > LIMIT:
            raise ModelError(
                f"{type(self._model).__name__} changes {len(changed)} buffers of "
                f"{format_bytes(size)} in training, first {next(iter(changed))}; "
                f"{format_bytes(LIMIT)} can be committed with a step: freeze them (eval mode of "
                "their module) or make them parameters"
            )
        return {KEY: {name: _encode(tensor) for name, tensor in changed.items()}} if changed else {}


def restore_buffers(model: nn.Module, meta: Mapping[str, Any]) -> None:
    """The values that were committed with the last step."""
    there = _persistent(model)
    kind = dict[str, tuple[str, tuple[int, ...], str]]
    for name, found in stored(meta, KEY, kind, {}).items():
        if name in there:
            try:
                value = _decode(*found)
            except (ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise damaged(f"buffer {name}: {str(error).splitlines()[0]}") from None
            if value.shape != there[name].shape:
                raise damaged(
                    f"buffer {name} is {list(value.shape)}, not {list(there[name].shape)}"
                )
            with torch.no_grad():
                there[name].copy_(value)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in model.buffers()]


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _encode(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    text = base64.b64encode(flat.numpy().tobytes()).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]


def _decode(dtype: str, shape: tuple[int, ...], text: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)


# -- Parameters into the store and out of it, chunk by chunk: never the model in memory ------------


OnProgress = Callable[[int, int], None]  # parameters done, in all


def fill(
    store: Store,
    groups: Sequence[FlatGroup],
    read: ReadFlat,
    *,
    state_format: StateFormat,
    chunk_params: int,
    progress: OnProgress,
    weights_only: bool = False,
) -> None:  # fmt: skip
    """Writes first weights of every group, and zero moments of those that are trained."""
    read = PackingSource(read, groups, dtype_of(state_format)).read_flat
    trained = [] if weights_only else [group for group in groups if not group.frozen]
    values = aligned(_largest_chunk(trained, chunk_params) * 4).view(torch.float32)
    weights = aligned(_largest_chunk(groups, chunk_params) * state_format.weight_bytes)
    state = aligned(state_format.state_size(_largest_chunk(trained, chunk_params)))
    done, total = 0, sum(group.numel for group in groups)
    for group in groups:
        for chunk in chunks(group, chunk_params):
            count = chunk.stop - chunk.start
            w = weights[: count * state_format.weight_bytes]
            learns = group in trained
            # Of what is packed every bit counts: it is not taken for numbers on its way.
            part = (values[:count] if learns else w.view(dtype_of(state_format))).zero_()
            for own_range in chunk.ranges:
                spec = group.tensors[own_range.tensor]
                part[own_range.at : own_range.at + own_range.stop - own_range.start] = read(
                    spec.name, spec.begin + own_range.start, spec.begin + own_range.stop
                )
            tickets = []
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


def _largest_chunk(groups: Sequence[FlatGroup], chunk_params: int) -> int:
    return min(chunk_params, max((group.numel for group in groups), default=0))


class ShardReader:
    """Reads what a rank has of the committed generation's parameters: all of them, or its shards.
    `ema`: their average, if they are trained."""

    def __init__(self, store: Store, ranks: RankInfo, *, ema: bool = False) -> None:
        held = stored_model(store.meta, store.regions)
        if ema and not held.state_format.kind.ema:
            raise StoreError(
                f"the store in {store.dirs[0]} holds no averaged weights; they are kept by a run "
                "that is started with --ema"
            )
        self._store, self._state_format, self._ema = store, held.state_format, ema
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
        self._state = aligned(held.state_format.state_size(largest))
        self._loaded: tuple[str, int] | None = None

    def overlap(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Which of a parameter's elements [start, stop) are here."""
        group, index = self._where[name]
        return _overlap(group.tensors[index], start, stop)

    def read_into(self, out: torch.Tensor, name: str, start: int) -> None:
        """A parameter's elements from `start` on, as far as they are here, in the type of `out`: of
        the master where it has one, and of a packed one those that it takes in the store."""
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
        count, fmt = chunk.stop - chunk.start, self._state_format
        w = self._weights[: count * fmt.weight_bytes]
        s = self._state[: fmt.state_size(count)]
        # Of some the weights are all there is.
        alone = group.frozen or (fmt.name == "fp32" and not self._ema)
        if self._loaded != (group.key, chunk.index):
            self._loaded = None
            tickets = [self._store.read(weight_key(group), chunk.index, w.numpy())]
            if not alone:
                tickets.append(self._store.read(state_key(group), chunk.index, s.numpy()))
            for ticket in tickets:
                self._store.wait(ticket)
            self._loaded = (group.key, chunk.index)
        if alone:
            return w.view(dtype_of(fmt))
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
    """Reads parameters of the committed generation by name, or their average, from a run's store or
    from those of all its ranks, in their order."""
    every = zip(stores, RankInfo(world=len(stores)).all(), strict=True)
    shards = [ShardReader(store, ranks, ema=ema) for store, ranks in every]

    def read(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=dtype)
        for shard in shards:
            shard.read_into(out, name, start)
        return out

    return _dequantising(read, stored_model(stores[0].meta, stores[0].regions))


def _dequantising(read: Callable[..., torch.Tensor], held: StoredModel) -> ReadFlat:
    """Reads values in fp32, by what reads the elements of a store in any type. One packed tensor is
    in memory."""
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
    """The same while the ranks of a run have their stores open, on whichever machines. The first
    rank gets the reader; the others send what it asks for until it is done, and get None."""
    own = ShardReader(store, process_group.ranks, ema=ema)
    if not process_group.ranks.first:
        while (asked := process_group.all_gather_object(None)[0]) is not None:
            *span, dtype = asked
            low, high = own.overlap(*span)
            if low < high:
                piece = torch.empty(high - low, dtype=getattr(torch, dtype))
                own.read_into(piece, asked[0], low)
                process_group.send_to_first(piece.view(torch.uint8))
        yield None
        return
    held = stored_model(store.meta, store.regions)
    others = {
        rank: {spec.name: spec for group in held.groups for spec in ranks.shard(group).tensors}
        for rank, ranks in enumerate(process_group.ranks.all())
        if rank
    }

    def read(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        process_group.all_gather_object([name, start, stop, str(dtype).removeprefix("torch.")])
        out = torch.empty(stop - start, dtype=dtype)
        own.read_into(out, name, start)
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


# -- The store of a model --------------------------------------------------------------------------
#
# Made from its weights, checked against it, and the model without them.


def create_store(
    read: ReadFlat, blocks: Blocks, plan: Plan, *, dirs: Sequence[Path],
    durability: str, engine: str | IOEngine, meta: Mapping[str, Any], progress: OnProgress,
    process_group: ProcessGroup = ALONE,
) -> Store:  # fmt: skip
    """A store with a model's first weights, or a rank's shard of them, committed."""
    state_format = state_format_of(plan.dtype, plan.kind)
    ranks = process_group.ranks
    own = ranks.shards(blocks).groups
    layout = regions(
        own,
        state_format=state_format,
        chunk_params=plan.chunk_params,
        gradients=plan.needs_all_gradients,
    )
    barrier = process_group.barrier if ranks.several else None
    store = Store.create(dirs, layout, durability=durability, engine=engine, barrier=barrier)
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
            store, own, read, state_format=state_format, chunk_params=plan.chunk_params,
            progress=progress,
        )  # fmt: skip
        store.commit(first)
    except BaseException:
        store.close()
        raise
    return store


def check_same(store: Store, blocks: Blocks, dtype: str, kind: StateKind | None = None) -> None:
    """Whether the store was made for this model and, if it is to be trained, optimizer."""
    if store.meta.get("layout") != json.loads(json.dumps(blocks.to_json())):
        raise StoreError(
            f"the store in {store.dirs[0]} holds another model than {blocks.parameters:,} "
            "parameters cut this way; resume with the model and options it was made with"
        )
    made = stored_state_format(store.meta).name
    if made != dtype:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {made}, the model is {dtype}; load it with "
            f"dtype={made!r}"
        )
    stored = stored_kind(store.meta)
    if kind is not None and kind != stored:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {stored}, this run is for {kind}; resume "
            f"it with optimizer={stored.call} (of a Trainer: its optim and moments), or make a new "
            "store"
        )


def source_of(model: nn.Module) -> ReadFlat:
    """What is on the meta device comes from the model's folder, all else from memory. Adapters that
    are not there start from first values."""
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
    # What is in memory counts as it is there: a new head over the body of a folder.
    names = {
        name: plain
        for name, plain in base_names(base).items()
        if not isinstance(held[name], nn.Parameter) or lacks_values(held[name])
    }
    found = checkpoint_map(base, tensors, names).parameters
    copied = {name: plain for name, plain in copied_names(base).items() if lacks_values(held[name])}
    own = {**names, **copied}.items()
    stored = {prefix + name: found[plain] for name, plain in own if plain in found}
    by_name = dict.fromkeys(stored, FolderSource(tensors, stored).read_flat)
    if not prefix:  # what a checkpoint does without
        absent = [name for name in names if name not in stored]
        by_name |= dict.fromkeys(absent, InitialValues(base, 0).read_flat)
    added = {name: lacks_values(p) for name, p in model.named_parameters() if name not in by_name}
    if any(added.values()):
        by_name |= dict.fromkeys(added, AdapterValues(model).read_flat)
    in_memory = [name for name, meta in added.items() if not meta]
    by_name |= dict.fromkeys(in_memory, ModuleSource(model, in_memory).read_flat)
    return lambda name, start, stop: by_name[name](name, start, stop)


def folder_of(model: nn.Module) -> Path | None:
    """The Hugging Face folder that a model names as its origin, if it is there."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", "") or getattr(config, "_name_or_path", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def to_meta(model: nn.Module) -> None:
    """The store owns the weights now: the module keeps only their shapes."""
    held = [p for p in model.parameters() if not lacks_values(p)]
    replace_parameters(
        model, {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in held}
    )


# -- A store with nothing but a model's weights, for a model that only runs forward ----------------


def create_weights_store(
    read: ReadFlat, blocks: Blocks, dtype: str, *, chunk_params: int, dirs: Sequence[Path],
    progress: OnProgress = lambda done, total: None,
) -> Store:  # fmt: skip
    """The weights in the type that compute uses, rounded as transformers rounds them."""
    made, groups = STATE_FORMATS[dtype], blocks.groups
    sizes = {
        weight_key(group): [c.stop - c.start for c in chunks(group, chunk_params)]
        for group in groups
    }
    layout = [
        Region(key, tuple(n * made.weight_bytes for n in counts)) for key, counts in sizes.items()
    ]
    store = Store.create(dirs, layout, durability="checkpoint")
    try:
        fill(
            store, groups, read, state_format=made, chunk_params=chunk_params, progress=progress,
            weights_only=True,
        )  # fmt: skip
        first = TrainState.start(dtype).to_meta()
        store.commit(
            {**first, "mode": dtype, "chunk_params": chunk_params, "layout": blocks.to_json()}
        )
    except BaseException:
        store.close()
        raise
    return store
