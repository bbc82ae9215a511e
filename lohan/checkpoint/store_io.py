"""Parameters into a model's store and out of it, chunk by chunk: never the model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan.capture.blocks import dtype_of, split
from lohan.checkpoint.adapters import PREFIX, AdapterValues, base_names, base_of, is_adapted
from lohan.checkpoint.safetensors import TensorFolder
from lohan.checkpoint.sources import (
    FolderSource,
    ModuleSource,
    ParameterSource,
    Sources,
    checkpoint_map,
)
from lohan.checkpoint.train_state import TrainState
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.errors import ModelError, StoreError
from lohan.model.layout import Blocks, Group, Ranks, TensorSpec
from lohan.model.plan import Plan
from lohan.model.state import (
    EMA,
    MODES,
    Chunk,
    StateFormat,
    chunks,
    mode_with,
    regions,
    state_key,
    stored_kind,
    stored_mode,
    stored_model,
    weight_key,
)
from lohan.optim import StateKind
from lohan.store.engine import Engine, aligned_buffer
from lohan.store.extents import Region
from lohan.store.store import Store

# -- Parameters into the store and out of it, chunk by chunk: never the model in memory ------------


OnProgress = Callable[[int, int], None]  # parameters done, in all


def fill(
    store: Store, groups: Sequence[Group], source: ParameterSource, *, mode: StateFormat,
    chunk_params: int, meta: dict[str, Any], progress: OnProgress = lambda done, total: None,
) -> None:  # fmt: skip
    """Writes first weights of every group and zero moments of those that are trained, then commits
    generation 0."""
    biggest = min(chunk_params, max(group.numel for group in groups))
    values = aligned(biggest * 4).view(torch.float32)
    weights = aligned(biggest * mode.weight_bytes)
    state = aligned(mode.state_size(_largest_trained(groups, chunk_params)))
    done, total = 0, sum(group.numel for group in groups)
    for group in groups:
        for chunk in chunks(group, chunk_params):
            count = chunk.stop - chunk.start
            part = values[:count].zero_()
            for piece in chunk.pieces:
                spec = group.tensors[piece.tensor]
                part[piece.at : piece.at + piece.stop - piece.start] = source.read_flat(
                    spec.name, spec.begin + piece.start, spec.begin + piece.stop
                )
            w = weights[: count * mode.weight_bytes]
            tickets = []
            if group.frozen:
                w.view(dtype_of(mode)).copy_(part)
            else:
                s = state[: mode.state_size(count)].zero_()
                arrays = split(mode, s, count)
                _encode(part, w.view(dtype_of(mode)), arrays, mode)
                if EMA in arrays:
                    arrays[EMA].copy_(part)
                tickets.append(store.write(state_key(group), chunk.index, s.numpy()))
            tickets.append(store.write(weight_key(group), chunk.index, w.numpy()))
            for ticket in tickets:
                store.wait(ticket)
            done += count
            progress(done, total)
    store.commit(meta)


def _largest_trained(groups: Sequence[Group], chunk_params: int) -> int:
    return min(chunk_params, max(group.numel for group in groups if not group.frozen))


def _encode(
    values: torch.Tensor, weights: torch.Tensor, arrays: dict[str, torch.Tensor], mode: StateFormat
) -> None:
    if mode.name == "fp32":
        weights.copy_(values)
    elif mode.name == "bf16":
        _core.split_bf16(values, weights, arrays["remainder"])
    else:
        arrays["master"].copy_(values)
        weights.copy_(values)


class StoreReader:
    """Reads parameters of the committed generation by name, in pieces, for export. `ema`: their
    average, if they are trained."""

    def __init__(
        self, store: Store, groups: Sequence[Group], *, mode: StateFormat, chunk_params: int,
        ema: bool = False,
    ) -> None:  # fmt: skip
        if ema and not mode.kind.ema:
            raise StoreError(
                f"the store in {store.dirs[0]} holds no averaged weights; they are kept by a run "
                "that is started with --ema"
            )
        self._store, self._mode, self._ema = store, mode, ema
        self._where = {
            tensor.name: (group, index)
            for group in groups
            for index, tensor in enumerate(group.tensors)
        }
        self._chunks = {group.key: chunks(group, chunk_params) for group in groups}
        biggest = min(chunk_params, max(group.numel for group in groups))
        self._weights = aligned(biggest * mode.weight_bytes)
        self._state = aligned(mode.state_size(_largest_trained(groups, chunk_params)))
        self._loaded: tuple[str, int] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        group, index = self._where[name]
        return group.tensors[index].shape

    def names(self) -> list[str]:
        return list(self._where)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter as fp32: the master where it has one."""
        group, index = self._where[name]
        out = torch.empty(stop - start, dtype=torch.float32)
        for chunk in self._chunks[group.key]:
            for piece in chunk.pieces:
                low, high = max(start, piece.start), min(stop, piece.stop)
                if piece.tensor == index and low < high:
                    values = self._master(group, chunk)
                    at = piece.at + low - piece.start
                    out[low - start : high - start] = values[at : at + high - low]
        return out

    def _master(self, group: Group, chunk: Chunk) -> torch.Tensor:
        count, mode = chunk.stop - chunk.start, self._mode
        w = self._weights[: count * mode.weight_bytes]
        s = self._state[: mode.state_size(count)]
        # Of some the weights are all there is.
        alone = group.frozen or (mode.name == "fp32" and not self._ema)
        if self._loaded != (group.key, chunk.index):
            self._loaded = None
            tickets = [self._store.read(weight_key(group), chunk.index, w.numpy())]
            if not alone:
                tickets.append(self._store.read(state_key(group), chunk.index, s.numpy()))
            for ticket in tickets:
                self._store.wait(ticket)
            self._loaded = (group.key, chunk.index)
        if alone:
            return w.view(dtype_of(mode)).float()
        arrays = split(mode, s, count)
        if self._ema:
            return arrays[EMA]
        if mode.name == "fp16":
            return arrays["master"]
        values = aligned(count * 4).view(torch.float32)
        _core.join_bf16(w.view(torch.bfloat16), arrays["remainder"], values)
        return values


def aligned(size: int) -> torch.Tensor:
    return torch.from_numpy(aligned_buffer(size))


# -- Parameters of a run whose state lies in several stores, one per rank --------------------------


class ShardReader:
    """Reads parameters of the committed generation by name, in pieces, from whichever stores have
    them. `stores` are those of all ranks, in their order."""

    def __init__(self, stores: Sequence[Store], *, ema: bool = False) -> None:
        held = stored_model(stores[0].meta, stores[0].regions)
        self._groups = held.groups
        ranks = Ranks(world=len(stores)).all()
        self._parts = [
            (_specs(shards), StoreReader(
                store, shards, mode=held.mode, chunk_params=held.chunk_params, ema=ema
            ))
            for store, own in zip(stores, ranks, strict=True)
            for shards in (tuple(map(own.shard, self._groups)),)
        ]  # fmt: skip
        self._shapes = {t.name: t.shape for group in self._groups for t in group.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def names(self) -> list[str]:
        return list(self._shapes)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter as fp32: the master where it has one."""
        out = torch.empty(stop - start, dtype=torch.float32)
        for specs, reader in self._parts:
            begin = specs[name].begin
            low, high = max(start, begin), min(stop, begin + specs[name].numel)
            if low < high:
                piece = reader.read_flat(name, low - begin, high - begin)
                out[low - start : high - start] = piece
        return out


def _specs(shards: Sequence[Group]) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for group in shards for tensor in group.tensors}


# -- Parameters of a run while its ranks have their stores open: the first asks, all answer --------
#
# Each rank reads from its own store alone, so it does not matter on which machine that is.


class TeamReader:
    """The first rank's side; the others are in `serve` until it is closed. `own` reads this rank's
    pieces of `groups`."""

    def __init__(
        self, process_group: ProcessGroup, groups: Sequence[Group], own: StoreReader
    ) -> None:
        self._process_group, self._own = process_group, own
        self._pieces = [_rank_specs(ranks, groups) for ranks in process_group.ranks.all()]

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter as fp32: the master where it has one."""
        self._process_group.all_gather_object([name, start, stop])
        out = torch.empty(stop - start, dtype=torch.float32)
        for rank, specs in enumerate(self._pieces):
            low, high = _overlap(specs[name], start, stop)
            if low < high and rank == self._process_group.rank:
                begin = specs[name].begin
                out[low - start : high - start] = self._own.read_flat(
                    name, low - begin, high - begin
                )
            elif low < high:
                self._process_group.receive(out[low - start : high - start], rank)
        return out

    def __enter__(self) -> TeamReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process_group.all_gather_object(None)


def serve(process_group: ProcessGroup, groups: Sequence[Group], own: StoreReader) -> None:
    """Sends the first rank what it asks for, until it asks no more."""
    specs = _rank_specs(process_group.ranks, groups)
    while (asked := process_group.all_gather_object(None)[0]) is not None:
        name, start, stop = asked
        low, high = _overlap(specs[name], start, stop)
        if low < high:
            begin = specs[name].begin
            process_group.send_to_first(own.read_flat(name, low - begin, high - begin).contiguous())


def _rank_specs(ranks: Ranks, groups: Sequence[Group]) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for group in groups for tensor in ranks.shard(group).tensors}


def _overlap(spec: TensorSpec, start: int, stop: int) -> tuple[int, int]:
    return max(start, spec.begin), min(stop, spec.begin + spec.numel)


# -- The store of a model --------------------------------------------------------------------------
#
# Made from its weights, checked against it, and the model without them.


def create_store(
    source: ParameterSource, blocks: Blocks, plan: Plan, *, dirs: Sequence[Path],
    durability: str, engine: str | Engine, meta: Mapping[str, Any], progress: OnProgress,
    process_group: ProcessGroup = ALONE,
) -> Store:  # fmt: skip
    """A store with a model's first weights, or a rank's piece of them, committed."""
    mode = mode_with(plan.mode, plan.kind)
    ranks = process_group.ranks
    own = ranks.shards(blocks).groups
    layout = regions(own, mode=mode, chunk_params=plan.chunk_params, gradients=plan.holds_all)
    barrier = process_group.barrier if ranks.several else None
    store = Store.create(dirs, layout, durability=durability, engine=engine, barrier=barrier)
    try:
        first = {
            **meta,
            **TrainState.start(plan.mode).to_meta(),
            "mode": plan.mode,
            "kind": asdict(plan.kind),
            "chunk_params": plan.chunk_params,
            "layout": blocks.to_json(),
            **({"rank": ranks.rank, "world": ranks.world} if ranks.several else {}),
        }
        fill(
            store, own, source, mode=mode, chunk_params=plan.chunk_params, meta=first,
            progress=progress,
        )  # fmt: skip
    except BaseException:
        store.close()
        raise
    return store


def check_same(store: Store, blocks: Blocks, mode: str, kind: StateKind | None = None) -> None:
    """Whether the store was made for this model and, if it is to be trained, optimizer."""
    if store.meta.get("layout") != json.loads(json.dumps(blocks.to_json())):
        raise StoreError(
            f"the store in {store.dirs[0]} holds another model than {blocks.parameters:,} "
            "parameters cut this way; resume with the model and options it was made with"
        )
    made = stored_mode(store.meta).name
    if made != mode:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {made}, the model is {mode}; load it with "
            f"dtype={made!r}"
        )
    stored = stored_kind(store.meta)
    if kind is not None and kind != stored:
        raise StoreError(
            f"the store in {store.dirs[0]} was made for {stored}, this run is for {kind}; resume "
            f"it with optimizer={stored.call} (of a Trainer: its optim and moments), or make a new "
            "store"
        )


def source_of(model: nn.Module) -> ParameterSource:
    """A model on the meta device comes from its folder, any other from memory. Adapters on it are
    taken from memory if they are there, otherwise they start from first values."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return ModuleSource(model)
    base, prefix = base_of(model), PREFIX if is_adapted(model) else ""
    stored = _folder_source(base, prefix)
    by_name: dict[str, ParameterSource] = dict.fromkeys(stored.names(), stored)
    added = {name: p.is_meta for name, p in model.named_parameters() if name not in by_name}
    in_memory = ModuleSource(model, [name for name, meta in added.items() if not meta])
    if any(added.values()):
        by_name |= dict.fromkeys(added, AdapterValues(model))
    by_name |= {name: in_memory for name, meta in added.items() if not meta}
    return Sources(by_name)


def _folder_source(base: nn.Module, prefix: str) -> FolderSource:
    """Values of a base model; `prefix` comes before its names."""
    folder = folder_of(base)
    if folder is None:
        raise ModelError(
            f"{type(base).__name__} is on the meta device and names no folder to take its weights "
            "from; build it with lohan.load(FOLDER)"
        )
    tensors, names = TensorFolder(folder), base_names(base)
    found = checkpoint_map(base, tensors, names).parameters
    return FolderSource(
        tensors, {prefix + name: found[plain] for name, plain in names.items() if plain in found}
    )


def folder_of(model: nn.Module) -> Path | None:
    """The Hugging Face folder that a model names as its origin, if it is there."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", "") or getattr(config, "_name_or_path", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def to_meta(model: nn.Module) -> None:
    """The store owns the weights now: the module keeps only their shapes."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]


# -- A store with nothing but a model's weights, for a model that only runs forward ----------------


def create_weights_store(
    source: ParameterSource, blocks: Blocks, mode: str, *, chunk_params: int, dirs: Sequence[Path],
    progress: OnProgress = lambda done, total: None,
) -> Store:  # fmt: skip
    """The weights in the type that compute uses, rounded as transformers rounds them."""
    dtype, width = dtype_of(MODES[mode]), MODES[mode].weight_bytes
    cuts = {group.key: chunks(group, chunk_params) for group in blocks.groups}
    regions = [
        Region(weight_key(g), tuple((c.stop - c.start) * width for c in cuts[g.key]))
        for g in blocks.groups
    ]
    store = Store.create(dirs, regions, durability="checkpoint")
    try:
        biggest = min(chunk_params, max(group.numel for group in blocks.groups))
        buffer = aligned(biggest * width)
        done, total = 0, sum(group.numel for group in blocks.groups)
        for group in blocks.groups:
            for chunk in cuts[group.key]:
                count = chunk.stop - chunk.start
                part = buffer[: count * width].zero_()
                for piece in chunk.pieces:
                    name = group.tensors[piece.tensor].name
                    values = source.read_flat(name, piece.start, piece.stop)
                    part.view(dtype)[piece.at : piece.at + piece.stop - piece.start] = values
                store.wait(store.write(weight_key(group), chunk.index, part.numpy()))
                done += count
                progress(done, total)
        first = TrainState.start(mode).to_meta()
        layout = {"mode": mode, "chunk_params": chunk_params, "layout": blocks.to_json()}
        store.commit({**first, **layout})
    except BaseException:
        store.close()
        raise
    return store
