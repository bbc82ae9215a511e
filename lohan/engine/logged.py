"""Logged steps: gradients that are appended to the log of the store, and their replay.

Backward appends the gradients of every group (P), which commits the step (J). The next forward
reads the last full state of a chunk (Q) and the gradients logged since then (N), applies these
updates in one pass (U), and uses the weights. A step that commits a generation writes the result
(W) as the new full state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lohan.checkpoint.store_io import aligned
from lohan.engine.buffers import HostBuffer, HostPool, StepScalars, Update, replay_chunk
from lohan.engine.gradient_transport import pack_chunk, widest_dtype
from lohan.errors import ConfigError, StoreError
from lohan.model.layout import FlatGroup, RankInfo
from lohan.model.state import (
    FLOAT,
    TensorRange,
    chunks,
    damaged,
    state_key,
    stored,
    stored_model,
    weight_key,
)
from lohan.optim import OPTIMIZERS, Optimizer
from lohan.param_groups import GroupValues
from lohan.store.log import GradientLog, LogTicket
from lohan.store.store import Store
from lohan.util.files import WrongType, from_json
from lohan.util.units import PAGE, align_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LoggedGroup:
    """The logged gradients of a group in one step: their dtype and their tensors."""

    dtype: torch.dtype
    tensors: frozenset[int]  # the numbers of the tensors that have a gradient

    def nbytes(self, parameters: int) -> int:
        """Return the bytes that a chunk takes in the log: one page if there is no gradient."""
        return align_up(parameters * self.dtype.itemsize, PAGE) if self.tensors else PAGE


@dataclass(frozen=True)
class LoggedStep:
    """A step in the log: the numbers of its updates, and the segment of its gradients."""

    scalars: StepScalars
    segment: int
    groups: Mapping[str, LoggedGroup]

    def to_record(self) -> dict[str, Any]:
        """Return the record of the step in the log, from which `of_record` restores it."""
        scalars, values = self.scalars, self.scalars.groups
        return {
            "update": scalars.update,
            "grad_multiplier": scalars.grad_multiplier,
            "missed_updates": dict(scalars.missed_updates),
            "rates": list(values.rates),
            "optimizers": [_optimizer_to_json(optimizer) for optimizer in values.optimizers],
            "index": {name: number for name, number in values.index.items() if number},
            "gradients": {
                key: [NAMES[group.dtype], sorted(group.tensors)]
                for key, group in self.groups.items()
            },
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any], segment: int) -> LoggedStep:
        try:
            parsed = from_json(_Record, record)
            optimizers = tuple(map(_optimizer_of_json, parsed.optimizers))
            if (
                not len(optimizers)
                == len(parsed.rates)
                > max(parsed.index.values(), default=0)
                >= 0
            ):
                raise WrongType("its parameter groups do not fit together")
            groups = {
                key: LoggedGroup(DTYPES[dtype], frozenset(tensors))
                for key, (dtype, tensors) in parsed.gradients.items()
            }
        except (WrongType, ConfigError, KeyError, TypeError) as error:
            raise damaged(f"a logged step cannot be understood ({error})") from None
        scalars = StepScalars(
            groups=GroupValues(optimizers, parsed.rates, parsed.index),
            update=parsed.update,
            grad_multiplier=parsed.grad_multiplier,
            missed_updates=parsed.missed_updates,
        )
        return cls(scalars, segment, groups)


@dataclass(frozen=True)
class _Record:
    update: int
    grad_multiplier: float
    missed_updates: dict[str, int]
    rates: tuple[float, ...]
    optimizers: tuple[dict[str, Any], ...]
    index: dict[str, int]
    gradients: dict[str, tuple[str, tuple[int, ...]]]


def _optimizer_to_json(optimizer: Optimizer) -> dict[str, Any]:
    values = {f.name: getattr(optimizer, f.name) for f in fields(optimizer) if f.name != "lr"}
    return {"name": optimizer.name, **values}


def _optimizer_of_json(values: Mapping[str, Any]) -> Optimizer:
    arguments: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    kind: Callable[..., Optimizer] = OPTIMIZERS[arguments.pop("name")]
    return kind(lr=0.0, **arguments)


def log_regions(
    groups: Sequence[FlatGroup], chunk_params: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return, for each trained group, its key and the bytes to reserve per chunk of gradients."""
    return [
        (
            group.key,
            tuple(align_up((c.stop - c.start) * FLOAT, PAGE) for c in chunks(group, chunk_params)),
        )
        for group in groups
        if not group.frozen
    ]


class LoggedGradients:
    """The log of a running session, and the staging buffers of its transfers.

    The entries change when actions of the ssd lane are submitted, in the order of the lane: J adds
    a step, and a C that commits a generation drops all of them. Every N therefore reads the steps
    that its chunk lacks, no matter which actions have completed.
    """

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        groups: Sequence[FlatGroup],
        *,
        buffers: int,
        chunk_params: int,
        most_steps: int,
    ) -> None:
        self._groups, self._most_steps = groups, most_steps
        self._chunks = [chunks(group, chunk_params) for group in groups]
        largest = min(chunk_params, max(group.numel for group in groups if not group.frozen))
        self._part = align_up(largest * FLOAT, PAGE)
        self._buffers = [
            pool.allocate("gradient staging", most_steps * self._part) for _ in range(buffers)
        ]
        store.start_log(log_regions(groups, chunk_params), segments=most_steps + 1)
        assert store.log is not None
        self.log: GradientLog = store.log
        self._store = store
        # The gradients that the current backward has appended, by the key of their group.
        self._appended: dict[str, LoggedGroup] = {}
        # Metadata and scalars of steps to commit, and whether ended steps commit a generation. The
        # caller appends to both, and the ssd lane consumes them in order.
        self._closed: deque[tuple[dict[str, Any], StepScalars]] = deque()
        self._ends: deque[bool] = deque()
        # Steps whose J was submitted but has not committed them yet, with their metadata.
        self._to_commit: deque[tuple[dict[str, Any], LoggedStep]] = deque()
        self._live: list[LoggedStep] = []  # steps after the state that Q reads, oldest first
        self._by_segment: dict[int, LoggedStep] = {}
        # The steps whose gradients are in each staging buffer, by number of the buffer.
        self._staged: dict[int, list[LoggedStep]] = {}

    # -- the ssd lane -----------------------------------------------------------------------------

    def append(
        self, number: int, chunk: int, buffer: int, grads: Mapping[int, torch.Tensor]
    ) -> LogTicket:
        """Pack one chunk of a group's gradients in their widest dtype, and submit its write."""
        dtype = widest_dtype(grads)
        group = self._groups[number]
        logged = self._appended[group.key] = LoggedGroup(dtype, frozenset(grads))
        cut = self._chunks[number][chunk]
        data = self._buffers[buffer].part(0, logged.nbytes(cut.stop - cut.start))
        pack_chunk(data.tensor(dtype), cut, grads)
        return self.log.append(group.key, chunk, data.bytes)

    def close_step(self, meta: dict[str, Any], scalars: StepScalars, *, commits: bool) -> None:
        """Record the step whose J and C will be scheduled next."""
        self._closed.append((meta, scalars))
        self._ends.append(commits)

    def submit_commit(self) -> None:
        meta, scalars = self._closed.popleft()
        step = LoggedStep(scalars, self.log.open_segment, self._appended)
        self._appended = {}
        self._live.append(step)
        self._by_segment[step.segment] = step
        self._to_commit.append((meta, step))
        if len(self._live) > self._most_steps:
            raise StoreError(
                f"{len(self._live)} steps are logged, but the log is for {self._most_steps}"
            )

    def commit(self) -> None:
        meta, step = self._to_commit.popleft()
        self._store.commit_logged(meta, step.to_record())

    def submit_end(self) -> None:
        if self._ends.popleft():
            self._live = []

    def read(
        self, number: int, chunk: int, buffer: int, *, last_only: bool = False
    ) -> Iterator[LogTicket]:
        """Submit reads of a chunk's gradients in the steps of the log, and yield their handles.

        These are the gradients of every logged step since the last full state or, with
        `last_only`, of the last step only. A step in which the group has no gradient needs no read.
        """
        group, cut = self._groups[number], self._chunks[number][chunk]
        self._staged[buffer] = steps = self._live[-1:] if last_only else list(self._live)
        for place, step in enumerate(steps):
            logged = step.groups[group.key]
            if logged.tensors:
                start = place * self._part
                data = self._buffers[buffer].part(
                    start, start + logged.nbytes(cut.stop - cut.start)
                )
                yield self.log.read(step.segment, group.key, chunk, data.bytes)

    # -- the optimizer lane -----------------------------------------------------------------------

    def updates(self, number: int, buffer: int) -> list[Update]:
        """Return the updates of a chunk by the steps whose gradients are in a staging buffer."""
        key = self._groups[number].key
        return [
            Update(
                step.scalars,
                _gradients_in(
                    self._buffers[buffer].part(place * self._part, (place + 1) * self._part),
                    step.groups[key],
                ),
            )
            for place, step in enumerate(self._staged[buffer])
        ]

    # -- while the lanes are idle -----------------------------------------------------------------

    def folded(self) -> None:
        """Drop all logged steps, because the committed generation includes them."""
        self._live = []

    def reset(self) -> None:
        """After an error, discard all steps that are not committed."""
        self._closed.clear()
        self._ends.clear()
        self._to_commit.clear()
        self._appended, self._staged = {}, {}
        self._live = [self._by_segment[entry.segment] for entry in self.log.entries]


def _gradients_in(
    data: HostBuffer, logged: LoggedGroup
) -> Callable[[TensorRange], torch.Tensor | None]:
    """Return a function from a tensor range to its gradient in `data`, None if there is none."""
    flat = data.tensor(logged.dtype)

    def grad_of(own_range: TensorRange) -> torch.Tensor | None:
        if own_range.tensor not in logged.tensors:
            return None
        return flat[own_range.at : own_range.at + own_range.stop - own_range.start]

    return grad_of


def fold_log(store: Store, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Write the state after all logged steps as a new generation; return the number of steps.

    The store must have been opened to replay its log. Memory is needed for one chunk: its weights,
    its state, and one gradient for each step.
    """
    log = store.log
    if log is None or not log.live:
        return 0
    meta, held = store.meta, stored_model(store.meta, store.layout.regions)
    steps = [LoggedStep.of_record(entry.record, entry.segment) for entry in log.entries]
    ranks = RankInfo(stored(meta, "rank", int, 0), stored(meta, "world", int, 1))
    trained = [ranks.shard(group) for group in held.groups if not group.frozen]
    for step in steps:
        if step.groups.keys() != {group.key for group in trained}:
            raise damaged("a logged step has other groups than the store")
    state_format, width = held.state_format, held.state_format.weight_bytes
    done, total = 0, sum(group.numel for group in trained)
    for group in trained:
        for chunk in chunks(group, held.chunk_params):
            count = chunk.stop - chunk.start
            weights, state = aligned(count * width), aligned(state_format.state_size(count))
            store.wait_all(
                [
                    store.read(weight_key(group), chunk.index, weights.numpy()),
                    store.read(state_key(group), chunk.index, state.numpy()),
                ]
            )
            updates = []
            for step in steps:
                logged = step.groups[group.key]
                data = HostBuffer("logged gradients", aligned(logged.nbytes(count)).numpy())
                log.wait(log.read(step.segment, group.key, chunk.index, data.bytes))
                updates.append(Update(step.scalars, _gradients_in(data, logged)))
            checksums = replay_chunk(
                group,
                chunk,
                weights=weights.view(DTYPES[state_format.name]),
                state=state,
                updates=updates,
                state_format=state_format,
            )
            store.wait_all(
                [
                    store.write(
                        weight_key(group), chunk.index, weights.numpy(), crc=checksums.weights
                    ),
                    store.write(state_key(group), chunk.index, state.numpy(), crc=checksums.state),
                ]
            )
            done += count
            progress(done, total)
    store.commit(meta)
    return len(steps)
