"""Parameters of a run whose state lies in several stores, one per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lohan.checkpoint.store_io import StoreReader
from lohan.model.layout import Group, TensorSpec
from lohan.model.shards import Ranks
from lohan.model.state import stored_model
from lohan.store.store import Store


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
