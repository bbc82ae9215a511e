"""A store with nothing but a model's weights, for a model that only runs forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lohan.capture.tensors import dtype_of
from lohan.checkpoint import progress as run_progress
from lohan.checkpoint.sources import ParameterSource
from lohan.checkpoint.store_io import Progress, aligned
from lohan.model.layout import Blocks
from lohan.model.state import MODES, chunks, weight_key
from lohan.store.extents import Region
from lohan.store.store import Store


def create_weights_store(
    source: ParameterSource, blocks: Blocks, mode: str, *, chunk_params: int, dirs: Sequence[Path],
    progress: Progress = lambda done, total: None,
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
        first = run_progress.Progress.start(mode).to_meta()
        layout = {"mode": mode, "chunk_params": chunk_params, "layout": blocks.to_json()}
        store.commit({**first, **layout})
    except BaseException:
        store.close()
        raise
    return store
