"""Creating a store from a snapshot of the trained state and a model with the frozen weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.store_io import fill, groups_that_lose_bits
from lohan.device.ranks import ProcessGroup
from lohan.errors import StoreError
from lohan.model.layout import groups_from_json
from lohan.model.state import damaged, regions, stored, stored_state_format
from lohan.store.admin import rewind
from lohan.store.store import Store
from lohan.util.files import WrongType


def store_from_snapshot(
    snapshot: Path,
    dirs: Sequence[Path],
    read: ReadFlat,
    given_dtypes: Mapping[str, torch.dtype],
    *,
    process_group: ProcessGroup,
    meta: Mapping[str, Any],
) -> None:
    """Create a store in `dirs` with the state and metadata of a snapshot.

    `meta` overrides entries of the snapshot's metadata. A snapshot does not contain frozen weights:
    `read` reads them from the model, and `given_dtypes` maps the model's frozen parameters to their
    dtypes.
    """
    with Store.open(snapshot, verify="always", with_scratch=False) as source:
        held, generation = dict(source.meta), source.generation
        scratch = any(region.scratch for region in source.layout.regions)
    state_format, chunk_params = stored_state_format(held), stored(held, "chunk_params", int)
    try:
        groups = groups_from_json(held.get("layout"))
    except WrongType as error:
        raise damaged(str(error)) from None
    frozen = {spec.name for group in groups if group.frozen for spec in group.tensors}
    if missing := sorted(frozen - given_dtypes.keys()):
        raise StoreError(
            f"{snapshot}: {missing[0]} was not trained in that training, and this model has no "
            "frozen parameter of that name; resume with the model that it was trained with"
        )
    compute = dtype_of(state_format)
    wider = {name for name in frozen if compute not in (given_dtypes[name], torch.float32)}
    exact = process_group.broadcast_made(
        lambda: groups_that_lose_bits(read, groups, wider, state_format.name)
    )
    shards = tuple(map(process_group.ranks.shard, groups))
    layout = regions(
        shards, state_format=state_format, chunk_params=chunk_params, gradients=scratch, exact=exact
    )
    barrier = process_group.barrier if process_group.several else None
    with Store.create(dirs, layout, first_generation=generation, barrier=barrier) as store:
        fill(
            store,
            [group for group in shards if group.frozen],
            read,
            state_format=state_format,
            chunk_params=chunk_params,
            progress=lambda done, total: None,
            exact=exact,
        )
        rewind(store, snapshot, meta=meta)
