"""The store of a model: made from its weights, checked against it, and the model without them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from lohan.checkpoint import store_io
from lohan.checkpoint.adapters import PREFIX, AdapterValues, base_names, base_of, is_adapted
from lohan.checkpoint.progress import Progress
from lohan.checkpoint.safetensors import TensorFolder
from lohan.checkpoint.sources import (
    FolderSource,
    ModuleSource,
    ParameterSource,
    Sources,
    checkpoint_map,
)
from lohan.device.ranks import Team
from lohan.errors import ModelError, StoreError
from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.model.shards import Ranks
from lohan.model.state import mode_with, regions, stored_kind, stored_mode
from lohan.optim import StateKind
from lohan.store.engine import Engine
from lohan.store.store import Store


def create_store(
    source: ParameterSource, blocks: Blocks, plan: Plan, *, dirs: Sequence[Path],
    durability: str, engine: str | Engine, meta: Mapping[str, Any], progress: store_io.Progress,
    team: Team | None = None,
) -> Store:  # fmt: skip
    """A store with a model's first weights, or a rank's piece of them, committed."""
    mode = mode_with(plan.mode, plan.kind)
    ranks = Ranks() if team is None else team.ranks
    own = ranks.shards(blocks).groups
    layout = regions(own, mode=mode, chunk_params=plan.chunk_params, gradients=plan.holds_all)
    meet = None if team is None else team.meet
    store = Store.create(dirs, layout, durability=durability, engine=engine, meet=meet)
    try:
        first = {
            **meta,
            **Progress.start(plan.mode).to_meta(),
            "mode": plan.mode,
            "kind": asdict(plan.kind),
            "chunk_params": plan.chunk_params,
            "layout": blocks.to_json(),
            **({"rank": ranks.rank, "world": ranks.world} if ranks.several else {}),
        }
        store_io.fill(
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
    taken from memory if they are there, otherwise they begin anew."""
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
