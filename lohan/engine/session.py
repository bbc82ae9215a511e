"""A model attached to its store: steps, durability, export."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.adapters import (
    MergedReader,
    base_names,
    base_of,
    export_adapter,
    is_adapted,
)
from lohan.checkpoint.export import SHARD_BYTES, export_folder
from lohan.checkpoint.hf_folder import (
    is_of_another_class,
    persistent_buffers,
    structure_of,
    weights_folder,
)
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import Saved
from lohan.checkpoint.store_io import folder_of, gathering_reader, store_reader
from lohan.device.base import CpuDevice, Device
from lohan.device.choose import Backend
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine.executor import Executor
from lohan.engine.head import SlicedHead
from lohan.errors import LohanError, StoreError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan
from lohan.model.state import MODES, stored_model
from lohan.planner.planner import PlanOptions
from lohan.store.admin import rewind
from lohan.store.store import Counters, Store
from lohan.util.system import return_freed_memory


@dataclass(frozen=True)
class PlanContext:
    """What a plan is made for."""

    blocks: Blocks
    options: PlanOptions
    workload: BatchWorkload | None
    host_bytes: int
    profile: Profile | None = None  # of the machine, where it was known
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # its memory's, if it has one of its own
    process_group: ProcessGroup = ALONE  # the ranks that share the state
    backend: Backend | None = None  # by which blocks are compiled
    check: bool = False  # compare first calls with plain ones

    def workload_for(self, plan: Plan) -> BatchWorkload | None:
        """The batch in the tiles of a plan."""
        return None if self.workload is None else self.workload.in_tiles(plan.tiles)

    @property
    def pieces(self) -> Blocks:
        """What of every group is a rank's."""
        return self.process_group.ranks.shards(self.blocks)


Running = tuple[Executor, SlicedHead | None]


class Session:
    """A model attached to its store. Close it (or use `with`) to let the store go."""

    def __init__(
        self, model: nn.Module, context: PlanContext, run: Callable[[Plan], Running], plan: Plan
    ) -> None:
        return_freed_memory()
        self.model, self.context = model, context
        self._run = run  # makes the model run from the store by a plan
        self._executor: Executor | None = None
        self._head: SlicedHead | None = None
        self._finished: list[dict[str, Any]] = []  # under earlier plans, not yet taken
        self._closed = self._stopped = self._planless = False
        self._start(plan)
        self.store = self.executor.store
        self._before = Counters(0, 0)  # of activations under earlier plans
        self._settled = self.step  # the last step known to be durable and whole

    def _start(self, plan: Plan) -> None:
        self._executor, self._head = self._run(plan)
        self._stopped = self._planless = False

    @property
    def executor(self) -> Executor:
        if self._executor is None or self._planless:
            raise StoreError(
                "the session has no plan: a change of plan failed, and the old one could not be "
                "taken up again; close the session and resume from the last step"
            )
        return self._executor

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stopped(self) -> bool:
        """The model's modules have their own forward; the store may still be open."""
        return self._stopped

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """The model's modules as they were given: nothing of LoHan's is in them."""
        calls = [*(self._executor.wrapped_sites if self._executor is not None else ())]
        modules: list[tuple[nn.Module, Any]] = [(call.module, call) for call in calls]
        if self._head is not None:
            modules.append((self._head.model, self._head))
        with ExitStack() as undo:
            if self._executor is not None:
                undo.enter_context(self._executor.without_hooks())
            for module, forward in modules:
                if vars(module).get("forward") is forward:
                    del module.forward
                    undo.callback(setattr, module, "forward", forward)
            yield

    @contextmanager
    def making_way(self) -> Iterator[None]:
        """Another session takes the model over: this one ends, unless that fails."""
        plan = self.plan
        self.settle()
        self._stop()
        try:
            yield
        except BaseException:
            self._start(plan)
            raise
        self.close(flush=False)

    @property
    def host_bytes(self) -> int:
        """The budget that the plan was made for."""
        return self.context.host_bytes

    def describe_plan(self) -> list[str]:
        """The ledger, tier by tier."""
        context = self.context
        return self.plan.describe(host_bytes=context.host_bytes, device_bytes=context.device_bytes)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the state; `team` is its old name."""
        return self.context.process_group

    team = process_group

    @property
    def step(self) -> int:
        return self.executor.train_state.step

    @property
    def must_run_again(self) -> bool:
        """The last backward was that of a clipped step and did not count; see `attach`."""
        return self.executor.speculation.must_run_again

    @property
    def lost(self) -> bool:
        """Whether a step failed and could not be rolled back."""
        return self._executor is None or bool(self._executor.lost)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.executor.optimizer.lr_at(self.step)

    @property
    def head(self) -> SlicedHead | None:
        """Where there is one, a call with labels gives a loss and no logits."""
        return self._head

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    @property
    def counters(self) -> Counters:
        """Bytes to and from SSD since the session began, activations included."""
        activation_spill = self.executor.runner.activation_spill
        own = [self._before, self.store.counters]
        own += [activation_spill.counters] if activation_spill is not None else []
        return Counters(sum(c.bytes_read for c in own), sum(c.bytes_written for c in own))

    def export(
        self, out: str | os.PathLike[str], *, dtype: str | None = None,
        source_folder: str | os.PathLike[str] | None = None, overwrite: bool = False,
        ema: bool = False,
    ) -> Path:  # fmt: skip
        """Writes the weights of the last step as a Hugging Face folder, or the adapter of a PEFT
        model as a PEFT folder. `ema`: their moving average instead, where one is kept. Of several
        ranks all call it, and the first writes."""
        source = source_folder or folder_of(self.model)
        return self.export_committed(
            out, source_folder=source, dtype=dtype, overwrite=overwrite,
            buffers=persistent_buffers(base_of(self.model)), ema=ema,
        )  # fmt: skip

    def export_committed(
        self, out: str | os.PathLike[str], *, ema: bool = False, **how: Any
    ) -> Path:
        """As `export_store`, of the last step."""
        self.settle()
        group, made = self.process_group, Path(out)
        with group.all_or_none(), gathering_reader(group, self.store, ema=ema) as read:
            if read is not None:
                made = export_store(self.store, out, model=self.model, read=read, **how)
        return made

    def take_finished(self) -> list[dict[str, Any]]:
        """What the manifests of steps carry that have ended, oldest first: committed ones or, where
        not every step is, also those between two commits."""
        before, self._finished = self._finished, []
        if self._executor is None:
            return before
        finished = self._executor.runner.finished
        return before + [finished.popleft() for _ in range(len(finished))]

    def flush(self) -> None:
        """Waits until every finished step is updated and, where every step is, committed. A loop
        need not: the next forward waits for what it uses."""
        self.executor.flush()

    def settle(self) -> None:
        """`flush`, and makes the last step durable where steps are not by themselves. `export` and
        `close` do it."""
        self.executor.commit()
        if self.store.durability == "checkpoint" and self._settled != self.step:
            self.executor.runner.write_back_pinned()
            self.store.commit(clean=True)
        self._settled = self.step

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One step over several calls of `backward`: gradients add up inside, as in PyTorch, and
        the optimizer runs at the end. Weights move once for each call; one larger batch, cut into
        micro-batches, moves them once in all and needs no room for gradients."""
        with self.executor.accumulating():
            yield

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
        self._finished = self.take_finished()
        self._planless = True
        self._stop()
        self._executor = self._head = None
        gc.collect()  # modules and executor know each other: their memory, before the new plan's
        self.context.device.release_cached_memory()
        try:
            self._start(plan() if callable(plan) else plan)
        except BaseException as error:  # memory may have run out, or Ctrl-C come
            clear_frames(error.__traceback__)  # they hold what the new plan had allocated
            gc.collect()
            self.context.device.release_cached_memory()
            self._start(old)
            raise

    def rewind(self, target: str | os.PathLike[str]) -> None:
        """Weights, optimizer state and step are again those of a snapshot of this session's store.
        Until it has succeeded, those of now are in it."""
        plan = self.plan
        self.settle()
        self._stop()
        try:
            rewind(self.store, Path(target))
        finally:
            self._start(plan)
        self._settled = self.step

    def _stop(self) -> None:
        """The model's modules have their own forward again. If it is interrupted, `close` calls it
        again."""
        self._stopped = True
        if self._head is not None:
            self._head.remove()
        if self._executor is not None:
            self._executor.close()

    def close(self, *, flush: bool = True) -> None:
        """Lets model and store go. With `flush`, the last step is made durable first, unless a
        failed roll-back has left weights in memory that belong to no step. If it is interrupted,
        it can be called again."""
        if self._closed:
            return
        process_group = self.process_group  # Note [an error on one rank]
        if process_group.several and (process_group.aborted or not flush):
            self._closed = True
            process_group.abort()
            return
        with ExitStack() as ending:
            ending.callback(self.store.close)
            ending.callback(self.context.device.close)
            ending.callback(self._stop)
            if flush and not self._stopped and not self.executor.lost:
                self.settle()
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(flush=self._settles_after(error))
        except LohanError as second:
            error.add_note(f"closing the session failed too: {second}")

    def _settles_after(self, error: BaseException) -> bool:
        """An error of the user's own code does not cost the steps before it, which may not be
        committed yet. Who interrupts the process does not wait for them, unless they are many, or
        the store would be left in the middle of a step: with durability "checkpoint" it is, until
        it is settled."""
        if self.process_group.several or self._stopped or self._executor is None:
            return False
        if self.store.durability == "checkpoint":
            return self._executor.between_steps
        return isinstance(error, Exception) or self.plan.commits_by_interval


def config_of(model: nn.Module | None) -> Any:
    """What can write a config.json: a model's config, or a model of diffusers itself."""
    return model if hasattr(model, "save_config") else getattr(model, "config", None)


def export_store(
    store: Store | Sequence[Store], out: str | os.PathLike[str], *,
    source_folder: str | os.PathLike[str] | None, dtype: str | None = None, overwrite: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None, model: nn.Module | None = None,
    ema: bool = False, progress: Callable[[int, int], None] = lambda done, total: None,
    read: ReadFlat | None = None, mark: str | None = None, chat_template: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Streams the committed weights of a store, or of the stores of all ranks, into a Hugging Face
    folder, as `save_pretrained` lays them out. It needs no `model`, but for the config where there
    is no source folder, and for an adapter: of a PEFT model the folder holds that alone. `ema`: the
    average of the weights instead. `read` has the weights, if not the stores. `mark` is the id of
    the run whose own export this is, `chat_template` what it was trained with, if not the source
    folder's."""
    stores = (store,) if isinstance(store, Store) else tuple(store)
    held = stored_model(stores[0].meta, stores[0].regions)
    source = read or store_reader(*stores, ema=ema)
    adapter = model if model is not None and is_adapted(model) else None
    shapes = {
        tensor.name: tensor.shape
        for group in held.groups
        if adapter is None or not group.frozen
        for tensor in group.tensors
    }
    read_flat = _with_progress(source, shapes, progress)
    kind = dtype_of(MODES[dtype or held.mode.name])
    if adapter is not None:
        return export_adapter(
            adapter, out, shapes=shapes, read_flat=read_flat, dtype=kind, overwrite=overwrite,
            mark=mark,
        )  # fmt: skip
    if buffers is None:
        buffers = {} if model is None else persistent_buffers(model)
    return _export_weights(
        out, model=model, shapes=shapes, buffers=buffers, read_flat=read_flat, dtype=kind,
        source_folder=source_folder, overwrite=overwrite, mark=mark, chat_template=chat_template,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def export_merged(
    model: nn.Module, read: ReadFlat, out: str | os.PathLike[str], *, dtype: str,
    source_folder: str | os.PathLike[str] | None = None, overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    chat_template: str | None = None, max_shard_bytes: int = SHARD_BYTES, mark: str | None = None,
) -> Path:  # fmt: skip
    """Streams the base of a PEFT model with what its adapters add into a Hugging Face folder.
    `read` has all parameters by their names in the PEFT model."""
    merged, base = MergedReader(model, read), base_of(model)
    plain = base_names(base)
    buffers = {plain[name]: buffer for name, buffer in persistent_buffers(base).items()}
    return _export_weights(
        out, model=base, shapes=merged.shapes, buffers=buffers,
        read_flat=_with_progress(merged.read_flat, merged.shapes, progress),
        dtype=dtype_of(MODES[dtype]), source_folder=source_folder, overwrite=overwrite,
        chat_template=chat_template, max_shard_bytes=max_shard_bytes, mark=mark,
    )  # fmt: skip


def _export_weights(
    out: str | os.PathLike[str], *, model: nn.Module | None, shapes: Mapping[str, tuple[int, ...]],
    buffers: Mapping[str, torch.Tensor], source_folder: str | os.PathLike[str] | None,
    read_flat: ReadFlat, **how: Any,
) -> Path:  # fmt: skip
    if source_folder is not None:
        source_folder = weights_folder(Path(source_folder))
    same_class = source_folder is not None and not is_of_another_class(model, Path(source_folder))
    config = None if same_class else config_of(model)
    generation = getattr(model, "generation_config", None) if source_folder is None else None
    saved = Saved.of(model or structure_of(source_folder), shapes, buffers)
    return export_folder(
        out, tensors=saved.tensors, read_flat=saved.reading(read_flat), buffers=saved.buffers,
        source_folder=source_folder, config=config, generation_config=generation, **how,
    )  # fmt: skip


def _with_progress(
    read: ReadFlat, shapes: Mapping[str, tuple[int, ...]], progress: Callable[[int, int], None]
) -> ReadFlat:
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    done = 0

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal done
        piece = read(name, start, stop)
        done += stop - start
        progress(done, total)
        return piece

    return read_flat
