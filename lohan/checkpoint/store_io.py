"""Parameters into the store and out of it, chunk by chunk: never the model in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lohan import _core
from lohan.capture.tensors import dtype_of, split
from lohan.checkpoint.sources import ParameterSource
from lohan.errors import StoreError
from lohan.model.layout import Group
from lohan.model.state import EMA, Chunk, Mode, chunks, state_key, weight_key
from lohan.store.engine import aligned_buffer
from lohan.store.store import Store

Progress = Callable[[int, int], None]  # parameters done, in all


def fill(
    store: Store, groups: Sequence[Group], source: ParameterSource, *, mode: Mode,
    chunk_params: int, meta: dict[str, Any], progress: Progress = lambda done, total: None,
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
    values: torch.Tensor, weights: torch.Tensor, arrays: dict[str, torch.Tensor], mode: Mode
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
        self, store: Store, groups: Sequence[Group], *, mode: Mode, chunk_params: int,
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
