"""A model attached to its store: steps, durability, export."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.device.base import CpuDevice, Device
from lohan.errors import LohanError
from lohan.layout import Blocks, groups_from_json
from lohan.model_files import checkpoint
from lohan.model_files.adapters import base_of, export_adapter, is_adapted
from lohan.model_files.conversion import Saved
from lohan.model_files.export import export_folder
from lohan.model_files.folder import persistent_buffers, structure_of
from lohan.model_files.model_store import folder_of
from lohan.plan import Plan
from lohan.planning.demand import Load
from lohan.planning.planner import Wishes
from lohan.profile import Profile
from lohan.runtime.executor import Executor
from lohan.runtime.head import SlicedHead
from lohan.state import MODES
from lohan.storage.store import Counters, Store
from lohan.tensors import dtype_of


@dataclass(frozen=True)
class Demand:
    """What a plan is made for."""

    blocks: Blocks
    wishes: Wishes
    load: Load | None
    host_bytes: int
    profile: Profile | None = None  # of the machine, where it was known
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # its memory's, if it has one of its own


Running = tuple[Executor, SlicedHead | None]


class Session:
    """A model attached to its store. Close it (or use `with`) to let the store go."""

    def __init__(
        self, model: nn.Module, demand: Demand, run: Callable[[Plan], Running], plan: Plan
    ) -> None:
        self.model, self.demand = model, demand
        self._run = run  # makes the model run from the store by a plan
        self.executor, self._head = run(plan)
        self._closed = False
        self._before = Counters(0, 0)  # of activations under earlier plans
        self._settled = self.step  # the last step known to be durable and whole

    @property
    def host_bytes(self) -> int:
        """The budget that the plan was made for."""
        return self.demand.host_bytes

    def describe_plan(self) -> list[str]:
        """The ledger, tier by tier."""
        demand = self.demand
        return self.plan.describe(host_bytes=demand.host_bytes, device_bytes=demand.device_bytes)

    @property
    def step(self) -> int:
        return self.executor.progress.step

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.executor.adamw.lr_at(self.step)

    @property
    def head(self) -> SlicedHead | None:
        """Where there is one, a call with labels gives a loss and no logits."""
        return self._head

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    @property
    def store(self) -> Store:
        return self.executor.store

    @property
    def counters(self) -> Counters:
        """Bytes to and from SSD since the session began, activations included."""
        acts = self.executor.work.acts
        own = [self._before, self.store.counters]
        own += [acts.counters] if acts is not None else []
        return Counters(sum(c.bytes_read for c in own), sum(c.bytes_written for c in own))

    def export(
        self, out: str | os.PathLike[str], *, dtype: str | None = None,
        source_folder: str | os.PathLike[str] | None = None, overwrite: bool = False,
    ) -> Path:  # fmt: skip
        """Writes the weights of the last step as a Hugging Face folder, or the adapter of a PEFT
        model as a PEFT folder."""
        self.settle()
        source = source_folder or folder_of(self.model)
        return export_store(
            self.store, out, source_folder=source, dtype=dtype, overwrite=overwrite,
            buffers=persistent_buffers(base_of(self.model)), model=self.model,
        )  # fmt: skip

    def take_committed(self) -> list[dict[str, Any]]:
        """What the manifests of newly committed steps carry, oldest first."""
        committed = self.executor.work.committed
        return [committed.popleft() for _ in range(len(committed))]

    def flush(self) -> None:
        """Waits until every finished step is updated and committed. A loop need not: the next
        forward waits for what it uses."""
        self.executor.flush()

    def settle(self) -> None:
        """`flush`, and makes the last step durable where steps are not by themselves. `export` and
        `close` do it."""
        self.flush()
        if self.store.durability == "checkpoint" and self._settled != self.step:
            self.executor.parts.write_pinned()
            self.store.commit(clean=True)
        self._settled = self.step

    def follow(self, plan: Plan | Callable[[], Plan]) -> None:
        """Goes on by another plan: what is in memory is brought to the store and taken up again.
        The numbers stay the same, bit for bit. If it cannot be followed (no room on SSD, say), the
        old one goes on, and the error comes through. A plan for other micro-batches is made by a
        function, when the model runs by itself and can be measured."""
        old = self.plan
        self.settle()
        moved, store = self.counters, self.store.counters
        self._before = Counters(
            moved.bytes_read - store.bytes_read, moved.bytes_written - store.bytes_written
        )
        self._stop()
        committed = self.take_committed()
        del self.executor, self._head
        gc.collect()  # modules and executor know each other: their memory, before the new plan's
        try:
            self.executor, self._head = self._run(plan() if callable(plan) else plan)
        except LohanError:
            self.executor, self._head = self._run(old)
            raise
        finally:
            self.executor.work.committed.extend(committed)

    def _stop(self) -> None:
        if self._head is not None:
            self._head.remove()
        self.executor.close()

    def close(self, *, flush: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if flush:
                self.settle()
        finally:
            store = self.store
            self._stop()
            self.demand.device.close()
            store.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(flush=kind is None)


def reader_of(store: Store) -> checkpoint.StoreReader:
    """Reads parameters of a store by name; needs no model."""
    return checkpoint.StoreReader(
        store, groups_from_json(store.meta["layout"]), mode=MODES[store.meta["mode"]],
        chunk_params=store.meta["chunk_params"],
    )  # fmt: skip


def export_store(
    store: Store, out: str | os.PathLike[str], *, source_folder: str | os.PathLike[str] | None,
    dtype: str | None = None, overwrite: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None, model: nn.Module | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:  # fmt: skip
    """Streams the committed weights of a store into a Hugging Face folder, as `save_pretrained`
    lays them out. It needs no `model`, but for the config where there is no source folder, and for
    an adapter: of a PEFT model the folder holds that alone."""
    groups, reader = groups_from_json(store.meta["layout"]), reader_of(store)
    adapter = model if model is not None and is_adapted(model) else None
    shapes = {
        tensor.name: tensor.shape
        for group in groups
        if adapter is None or not group.frozen
        for tensor in group.tensors
    }
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    done = 0

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal done
        piece = reader.read_flat(name, start, stop)
        done += stop - start
        progress(done, total)
        return piece

    kind = dtype_of(MODES[dtype or store.meta["mode"]])
    if adapter is not None:
        return export_adapter(
            adapter, out, shapes=shapes, read_flat=read_flat, dtype=kind, overwrite=overwrite
        )
    config = None if source_folder else getattr(model, "config", None)
    saved = Saved.of(model or structure_of(source_folder), shapes, buffers or {})
    return export_folder(
        out, tensors=saved.tensors, read_flat=saved.reading(read_flat), dtype=kind,
        source_folder=source_folder, config=config, buffers=saved.buffers, overwrite=overwrite,
    )  # fmt: skip
