"""A model attached to its store: steps, commits, export, and new plans while it runs."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

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
from lohan.checkpoint.hf_folder import (
    SHARD_BYTES,
    export_folder,
    is_of_another_class,
    persistent_buffers,
    structure_of,
    weights_folder,
)
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import Saved
from lohan.checkpoint.store_io import folder_of, gathering_reader, overwrite, store_reader
from lohan.device.base import CpuDevice, Device
from lohan.device.choose import Backend
from lohan.device.out_of_memory import is_out_of_memory
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine.actions import MOST_ENDED
from lohan.engine.executor import Executor
from lohan.engine.head import SlicedHead
from lohan.errors import BudgetError, ConfigError, LohanError, StoreError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import CACHED_STATE, BatchWorkload, Plan, PlanOptions
from lohan.model.state import STATE_FORMATS, stored_model
from lohan.param_groups import META_KEY, changed_members
from lohan.planner.forecast import (
    Forecast,
    Simulator,
    profile_of_step,
    step_work,
)
from lohan.planner.memory import KEPT
from lohan.planner.planner import WORTH, PlanProblem, closed_form_plan, lower_hint, make_plan
from lohan.store.admin import rewind
from lohan.store.store import Counters, Store
from lohan.util.system import return_freed_memory
from lohan.util.trace import Span, busy_s
from lohan.util.units import counted, format_bytes


@dataclass(frozen=True)
class PlanContext:
    """What an attached model is planned for and runs on."""

    blocks: Blocks
    options: PlanOptions
    workload: BatchWorkload | None
    host_bytes: int
    profile: Profile | None = None  # of the machine, where it was known; not divided among ranks
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # its memory's, if it has one of its own
    process_group: ProcessGroup = ALONE  # the ranks that share the state
    backend: Backend | None = None  # by which blocks are compiled
    check: bool = False  # compare first calls with plain ones
    plan_is_given: bool = False  # by the caller, so that `replan` keeps it
    settings: ExitStack = field(default_factory=ExitStack)  # restores torch's when a session ends

    def forecast(self, profile: Profile, plan: Plan, *, clipped: bool = False) -> Forecast:
        """Forecast a step of a plan on a machine. The batch must be known."""
        assert self.workload is not None
        return Simulator(profile, self.shards, self.workload).forecast(plan, clipped=clipped)

    def problem(self, options: PlanOptions, *, profile: Profile | None) -> PlanProblem:
        """Return the problem of another plan of this rank."""
        return PlanProblem(
            self.shards,
            options,
            host_bytes=self.host_bytes,
            workload=self.workload,
            profile=profile,
            device_bytes=self.device_bytes,
        )

    def measured(self, spans: Sequence[Span], plan: Plan) -> Profile | None:
        """Return the machine as measured by a step of this plan on this rank."""
        assert self.workload is not None
        work = step_work(
            self.shards, self.workload, plan, has_own_memory=self.device.has_own_memory
        )
        return profile_of_step(
            spans,
            work,
            host_bytes=self.host_bytes,
            device=self.device.name,
            device_bytes=self.device_bytes or 0,
            unified=not self.device.has_own_memory and not self.device.computes_on_cores,
        )

    def workload_for(self, plan: Plan) -> BatchWorkload | None:
        """Return the batch in the tiles of a plan."""
        return None if self.workload is None else self.workload.in_tiles(plan.tiles)

    @property
    def shards(self) -> Blocks:
        """What of every group is a rank's."""
        return self.process_group.ranks.shards(self.blocks)


ExecutorAndHead = tuple[Executor, SlicedHead | None]


class Session:
    """A model attached to its store. Close it (or use `with`) to let the store go."""

    def __init__(
        self,
        model: nn.Module,
        context: PlanContext,
        make_executor: Callable[[Plan], ExecutorAndHead],
        plan: Plan,
    ) -> None:
        return_freed_memory()
        self.model, self.context = model, context
        self._make_executor = make_executor  # makes the model run from the store by a plan
        self._executor: Executor | None = None
        self._head: SlicedHead | None = None
        self._finished: list[dict[str, Any]] = []  # under earlier plans, not yet taken
        self._closed = self._stopped = self._planless = False
        self._updates_in_backward = True
        self._replanner: Replanner | None = None  # of `replan`
        self._mean_over: int | None = None  # of the executor before, as the head's settings
        self._norm: float | None = None
        self._of_head: dict[str, Any] = {}
        self._start(plan)
        self.store = self.executor.store
        self._before = Counters(0, 0)  # of activations under earlier plans
        self._committed_step = self.step  # the last step known to be durable and whole

    def _start(self, plan: Plan) -> None:
        """Create executor and head for a plan, and apply the settings of the previous ones.

        The last norm is also kept.
        """
        self._executor, self._head = self._make_executor(plan)
        if self._mean_over is not None:
            self._executor.mean_over = self._mean_over
        self._executor.clipping.norm = self._norm
        self._executor.step_gradients.updates = self._updates_in_backward
        for name, value in self._of_head.items():
            setattr(self._head, name, value)
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
    def planless(self) -> bool:
        """A change of plan failed, and the old plan could not be taken up again."""
        return self._planless

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stopped(self) -> bool:
        """The model's modules have their own forward; the store may still be open."""
        return self._stopped

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Temporarily restore the model's modules, without anything that LoHan has installed."""
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
    def handing_over(self) -> Iterator[None]:
        """Another session takes the model over: this one ends, unless that fails."""
        plan = self.plan
        self.commit()
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
        """Return the memory ledger, tier by tier, as lines of text."""
        context = self.context
        return self.plan.describe(host_bytes=context.host_bytes, device_bytes=context.device_bytes)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the state."""
        return self.context.process_group

    @property
    def step(self) -> int:
        return self.executor.train_state.step

    @property
    def must_run_again(self) -> bool:
        """The last backward was that of a clipped step and did not count; see `attach`."""
        return self.executor.clipping.must_rerun

    @property
    def lost(self) -> bool:
        """Whether a step failed and could not be rolled back."""
        return self._executor is None or bool(self._executor.lost)

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of parameters that are in no group of their own."""
        return self.executor.groups.at(self.step).rates[0]

    def changed_groups(self) -> str:
        """Describe how parameter groups differ from those of the last committed step.

        Returns an empty string if they do not. Optimizer state belongs to each parameter,
        so such a change is allowed.
        """
        groups = self.executor.groups
        now = groups.to_json(groups.at(self.step))
        return changed_members(self.store.meta.get(META_KEY), now)

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
        self,
        out: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        source_folder: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        ema: bool = False,
    ) -> Path:
        """Write the weights of the last step as a Hugging Face folder.

        For a PEFT model, the adapter is written as a PEFT folder. With `ema`, the moving
        average of the weights is written, if one is kept. With several ranks, all of them
        call this, and the first writes.
        """
        source = source_folder or folder_of(self.model)
        return self.export_committed(
            out,
            source_folder=source,
            dtype=dtype,
            overwrite=overwrite,
            buffers=persistent_buffers(base_of(self.model)),
            ema=ema,
        )

    def export_committed(
        self, out: str | os.PathLike[str], *, ema: bool = False, **how: Any
    ) -> Path:
        """As `export_store`, of the last step."""
        self.commit()
        group, made = self.process_group, Path(out)
        with group.all_or_none(), gathering_reader(group, self.store, ema=ema) as read:
            if read is not None:
                made = export_store(self.store, out, model=self.model, read=read, **how)
        return made

    def take_finished(self) -> list[dict[str, Any]]:
        """Return the metadata of steps that have ended since the last call, oldest first.

        They are committed, or lie between two commits. If nobody takes them, only the last
        few are kept.
        """
        before, self._finished = self._finished, []
        if self._executor is None:
            return before
        finished = self._executor.runner.ended_metas
        return before + [finished.popleft() for _ in range(len(finished))]

    def flush(self) -> None:
        """Wait until every finished step is updated and, if every step commits, committed.

        A loop does not need this, because the next forward waits for what it uses.
        """
        self.executor.flush()

    def commit(self) -> None:
        """Flush, and make the last step durable. `export` and `close` call this method."""
        self.executor.commit()
        self._committed_step = self.step

    @property
    def accumulates(self) -> bool:
        """Whether backward is called inside `accumulate`."""
        return self.executor.collector.accumulated is not None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Make one step of several calls of `backward`.

        Gradients are summed inside, as in PyTorch, and the optimizer runs at the end.
        Weights are transferred once per call. One larger batch, divided into micro-batches,
        transfers them once in total and needs no memory for gradients.
        """
        with self.executor.accumulating():
            yield

    def follow(self, plan: Plan | Callable[[], Plan]) -> None:
        """Continue with another plan, after writing what is in memory to the store.

        Results stay the same, bit for bit, if micro-batch, head slices and chunks do. If
        the plan cannot be followed (for example, because an SSD is full), the old plan
        continues and the error is raised; with several ranks, all stop. A plan for other
        micro-batches must be given as a function, which is called when the model runs by
        itself and can be measured.
        """
        old = self.plan
        self.commit()
        moved, store = self.counters, self.store.counters
        self._before = Counters(
            moved.bytes_read - store.bytes_read, moved.bytes_written - store.bytes_written
        )
        self._finished = self.take_finished()[-MOST_ENDED:]
        self._planless = True
        self._stop()
        self._executor = self._head = None
        gc.collect()  # modules and executor know each other: their memory, before the new plan's
        self.context.device.release_cached_memory()
        try:
            self._start(plan() if callable(plan) else plan)
        except BaseException as error:  # memory may have run out, or Ctrl-C come
            if self.process_group.several:  # Note [an error on one rank]: others may have begun
                self.process_group.abort()
                raise
            clear_frames(error.__traceback__)  # they hold what the new plan had allocated
            gc.collect()
            self.context.device.release_cached_memory()
            self._start(old)
            raise

    def replan(self) -> str | None:
        """Choose a better plan if the measured machine allows one. Call it after each step.

        The caller must have released the losses of earlier steps. After the third step, the
        session continues with a plan for the measured machine if that is faster. Results stay
        the same, bit for bit. Returns a description of what was measured and changed, or None.
        With several ranks, all of them call this.
        """
        if self._closed:
            raise StoreError("the session is closed, so there is no step to plan for")
        if self._replanner is None:
            self._replanner = Replanner(self)
        return self._replanner.after_own_step()

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, where it is taken (with `clip` or fp16)."""
        return self.executor.grad_norm

    @property
    def updates_in_backward(self) -> bool:
        """Whether `backward` makes a step.

        If False, backward leaves gradients in `.grad`, as in PyTorch, if they fit in
        memory, and updates nothing.
        """
        return self._updates_in_backward

    @updates_in_backward.setter
    def updates_in_backward(self, updates: bool) -> None:
        if updates == self._updates_in_backward:
            return
        if updates:
            for parameter in self.model.parameters():
                parameter.grad = None
        self._updates_in_backward = updates
        if self._executor is not None:
            self._executor.step_gradients.updates = updates
            self._executor.step_gradients.consumed = False

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's current values, by its name in the model.

        The values have the type in which the block computes.
        """
        with torch.no_grad():
            return self.model.get_parameter(name).clone()

    def write_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write values of parameters to the store, by their names there, and commit them.

        Optimizer state is not changed.
        """
        if self.process_group.several:
            raise ConfigError(
                f"{next(iter(values), 'a parameter')} cannot be written: its values are spread "
                f"over {self.process_group.world} ranks; load the weights before attach"
            )
        plan = self.plan
        self.commit()
        self._stop()
        try:
            overwrite(self.store, values)
        finally:
            self._start(plan)

    def rewind(self, target: str | os.PathLike[str]) -> None:
        """Return to a snapshot of this session's store: weights, optimizer state and step.

        Until this has succeeded, the store contains the current state.
        """
        plan = self.plan
        self.commit()
        self._stop()
        try:
            rewind(self.store, Path(target))
        finally:
            self._start(plan)
        self._committed_step = self.step

    def _stop(self) -> None:
        """Give the model's modules their own forward again.

        If this is interrupted, `close` calls it again.
        """
        self._stopped = True
        if self._head is not None:
            self._of_head = {name: getattr(self._head, name) for name in self._head.SETTINGS}
            self._head.remove()
        if self._executor is not None:
            self._mean_over = self._executor.mean_over
            self._norm = self._executor.clipping.norm
            self._executor.close()

    def close(self, *, flush: bool = True) -> None:
        """Release model and store.

        With `flush`, the last step is made durable first, unless a failed roll-back has
        left memory in a state that belongs to no step. If this is interrupted, it can be
        called again.
        """
        if self._closed:
            return
        if self.process_group.aborted:  # Note [an error on one rank]
            self._closed = True
            return
        with ExitStack() as ending:
            ending.callback(self.context.settings.close)
            ending.callback(self.store.close)
            ending.callback(self.context.device.close)
            ending.callback(self._stop)
            if flush and not self._stopped and not self.executor.lost:
                self.commit()
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        if self.process_group.several:  # Note [an error on one rank]
            self._closed = True
            self.process_group.abort()
            return
        try:
            self.close(flush=self._commits_after(error))
        except LohanError as second:
            error.add_note(f"closing the session failed too: {second}")

    def _commits_after(self, error: BaseException) -> bool:
        """Return whether `close` commits the steps that ended before an error.

        An error of the user's own code does not lose them. After Ctrl-C they are committed only
        if there may be many of them, that is, if commits are made by interval.
        """
        if self._stopped or self._executor is None:
            return False
        return isinstance(error, Exception) or self.plan.commits_by_interval


def config_of(model: nn.Module | None) -> Any:
    """Return the object that can write config.json for a model, or None.

    This is a diffusers model itself, or the config of another model, which then names the class
    of the model as `save_pretrained` does.
    """
    if hasattr(model, "save_config"):
        return model
    config: Any = getattr(model, "config", None)
    if hasattr(model, "save_pretrained") and hasattr(config, "architectures"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
    return config


def export_store(
    store: Store | Sequence[Store],
    out: str | os.PathLike[str],
    *,
    source_folder: str | os.PathLike[str] | None,
    dtype: str | None = None,
    overwrite: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None,
    model: nn.Module | None = None,
    ema: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    read: ReadFlat | None = None,
    mark: str | None = None,
    chat_template: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Stream the committed weights of a store into a Hugging Face folder.

    `store` is one store, or the stores of all ranks. The layout is that of `save_pretrained`.
    `model` is needed only for the config if there is no source folder, and for an adapter, of
    which only the PEFT folder is written. `ema` selects the average of the weights. `read`
    provides the weights, if not the stores. `mark` is the id of the run that exports.
    `chat_template` is the template used in training, if it differs from that of the source
    folder.
    """
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
    torch_dtype = dtype_of(STATE_FORMATS[dtype or held.state_format.name])
    if adapter is not None:
        return export_adapter(
            adapter,
            out,
            shapes=shapes,
            read_flat=read_flat,
            dtype=torch_dtype,
            overwrite=overwrite,
            mark=mark,
        )
    if buffers is None:
        buffers = {} if model is None else persistent_buffers(model)
    return _export_weights(
        out,
        model=model,
        shapes=shapes,
        buffers=buffers,
        read_flat=read_flat,
        dtype=torch_dtype,
        source_folder=source_folder,
        overwrite=overwrite,
        mark=mark,
        chat_template=chat_template,
        max_shard_bytes=max_shard_bytes,
    )


def export_merged(
    model: nn.Module,
    read: ReadFlat,
    out: str | os.PathLike[str],
    *,
    dtype: str,
    source_folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    chat_template: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    mark: str | None = None,
) -> Path:
    """Stream the base of a PEFT model, with its adapters merged, into a Hugging Face folder.

    `read` provides all parameters by their names in the PEFT model.
    """
    merged, base = MergedReader(model, read), base_of(model)
    plain = base_names(base)
    buffers = {plain[name]: buffer for name, buffer in persistent_buffers(base).items()}
    return _export_weights(
        out,
        model=base,
        shapes=merged.shapes,
        buffers=buffers,
        read_flat=_with_progress(merged.read_flat, merged.shapes, progress),
        dtype=dtype_of(STATE_FORMATS[dtype]),
        source_folder=source_folder,
        overwrite=overwrite,
        chat_template=chat_template,
        max_shard_bytes=max_shard_bytes,
        mark=mark,
    )


def _export_weights(
    out: str | os.PathLike[str],
    *,
    model: nn.Module | None,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Mapping[str, torch.Tensor],
    source_folder: str | os.PathLike[str] | None,
    read_flat: ReadFlat,
    **how: Any,
) -> Path:
    if source_folder is not None:
        source_folder = weights_folder(Path(source_folder))
    same_class = source_folder is not None and not is_of_another_class(model, Path(source_folder))
    config = None if same_class else config_of(model)
    generation = getattr(model, "generation_config", None) if source_folder is None else None
    saved = Saved.of(model or structure_of(source_folder), shapes, buffers)
    return export_folder(
        out,
        tensors=saved.tensors,
        read_flat=saved.reading(read_flat),
        buffers=saved.buffers,
        source_folder=source_folder,
        config=config,
        generation_config=generation,
        **how,
    )


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


# -- Replanning: a run measures its steps, and plans again where a lane or memory is not as planned
#
# Only the plan changes. Micro-batch, head slices and chunks stay as they are, so the numbers are
# the same, bit for bit, whenever a run replans.


FIRST_LOOK = 3  # steps: the first runs on demand, the second is the first by a known order
TOLERANCE = 0.2  # between predicted and measured seconds of a lane
LEAST_SHARE = 0.1  # of a step, that a lane must be busy for to count
MOST_PLANS = 3


@dataclass(frozen=True)
class Decision:
    """After a step: why, the plan to follow, if any, and its gain in words."""

    why: str | None = None
    plan: Plan | None = None
    faster: str = ""

    def to_json(self) -> list[Any]:
        return [self.why, None if self.plan is None else self.plan.to_json(), self.faster]

    @classmethod
    def from_json(cls, data: list[Any]) -> Decision:
        why, plan, faster = data
        return cls(why, None if plan is None else Plan.from_json(plan), faster)


class Replanner:
    """Compares an early step of each plan with its forecast, and changes the plan if that pays.

    The step is the third or, if not every step commits, the fourth. The plan changes at most
    twice. With several ranks, all of them call this after the same steps; the first measures,
    plans and decides.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._since = 0  # steps with the current plan
        self._plans = 1
        context = session.context
        chosen = context.options.activations != "holistic"  # by the user
        able = context.workload is not None and session.plan.overlap
        self._done = chosen or context.plan_is_given or not able
        self._last_s = time.perf_counter()  # of `after_own_step`
        # The forecast of the plan, or None. Only the first rank has it, if it knows the machine.
        self._promised: Forecast | None = None
        if context.profile is not None and not self._done and session.process_group.ranks.first:
            self._promised = context.forecast(context.profile, session.plan)

    def after_step(self, spans: list[Span], *, step_s: float) -> str | None:
        """Describe what was measured and changed, or return None."""
        self._since += 1
        # The first two steps of a plan are committed in any case; some of the second's writes come
        # in the third, which is no step between two commits then.
        first_look = FIRST_LOOK + self._session.plan.commits_by_interval
        if self._done or self._since != first_look:
            return None
        found = self._decided(partial(self._look, spans, step_s=step_s))
        self._done = True  # unless another plan is followed
        if found.plan is None:
            return found.why
        said, followed = self._follow(found.plan, found.faster)
        if followed:
            self._done, self._since = False, 0
            self._plans += 1
        return f"{found.why}; {said}"

    def after_own_step(self) -> str | None:
        """As `after_step`, of what happened since the last call."""
        then_s, self._last_s = self._last_s, time.perf_counter()
        spans = self._session.executor.trace.take_step()
        return self.after_step(spans, step_s=self._last_s - then_s)

    def _look(self, spans: list[Span], *, step_s: float) -> Decision:
        """Measure the machine by one step, and return a better plan with its forecast, if any.

        Compute before the last forward and after the start of a call without gradients is
        ignored: it was an evaluation, a run of the step that did not count, or a call whose
        gradients are accumulated.
        """
        executor = self._session.executor
        began_s, stop_s = executor.forward_began_s, executor.inference_began_s
        spans = [s for s in spans if s.lane != "compute" or began_s <= s.start_s < stop_s]
        why = "measured the first steps"
        stays = Decision()
        if self._promised is not None:
            measured = busy_s(spans, float("-inf"), float("inf"))
            why = surprises(self._promised.busy_s, measured, step_s=step_s)
            stays = Decision(why=f"{why}; the plan stays as it is" if why else None)
        context, plan = self._session.context, self._session.plan
        found = context.measured(spans, plan) if why else None
        if found is None or self._plans >= MOST_PLANS:
            return stays
        other = self._better(found)
        if other is None:
            return stays
        now, then = (context.forecast(found, each) for each in (plan, other))
        if now.step_s < WORTH * then.step_s or other == plan:
            return stays
        self._promised = then
        return Decision(why, other, _faster(now, then))

    def _decided(self, decide: Callable[[], Decision]) -> Decision:
        """Return the decision of the first rank."""
        group = self._session.process_group
        try:
            return Decision.from_json(group.broadcast_made(lambda: decide().to_json()))
        except BaseException:
            group.abort()  # Note [an error on one rank]: others may wait in the collective
            raise

    def _follow(self, plan: Plan, faster: str) -> tuple[str, bool]:
        """Goes on by a plan; what it says, and whether it could."""
        old = self._session.plan
        try:
            self._session.follow(plan)
        except LohanError as error:
            if self._session.planless:
                raise
            return f"a new plan could not be followed, the old one goes on: {error}", False
        return f"a new plan should make steps {faster}: {_difference(old, plan)}", True

    def _better(self, measured: Profile) -> Plan | None:
        context, plan = self._session.context, self._session.plan
        options = replace(context.options.fixed_by(plan), world=plan.world)
        try:
            return make_plan(context.problem(options, profile=measured)).plan
        except BudgetError:
            return None


def _faster(now: Forecast, then: Forecast) -> str:
    return f"{now.step_s / then.step_s:.2f}x as fast"


def surprises(
    predicted: Mapping[str, float], measured: Mapping[str, float], *, step_s: float
) -> str:
    """Describe the lanes that were busy for much longer or shorter than predicted.

    A lane with little work is ignored.
    """
    lanes = [
        lane
        for lane, seconds in predicted.items()
        if abs(measured[lane] - seconds) > TOLERANCE * seconds
        and max(measured[lane], seconds) > LEAST_SHARE * step_s
    ]
    return "; ".join(
        f"{lane} was busy for {measured[lane]:.3g} s of a step, "
        f"{predicted[lane]:.3g} s were predicted"
        for lane in lanes
    )


def _difference(old: Plan, new: Plan) -> str:
    parts = []
    kept = {plan: plan.owner_bytes(KEPT) for plan in (old, new)}
    if kept[old] != kept[new]:
        parts.append(f"{format_bytes(kept[new])} of activations kept instead of recomputed")
    if len(old.spilled_sites) != len(new.spilled_sites):
        parts.append(f"those of {counted(len(new.spilled_sites), 'block')} on SSD")
    if len(old.deferred) != len(new.deferred):
        groups = counted(len(new.deferred), "group") if new.deferred else "no group"
        parts.append(f"{groups} updated in the next forward")
    cached = new.owner_bytes(CACHED_STATE)
    if cached != old.owner_bytes(CACHED_STATE):
        parts.append(f"{format_bytes(cached)} of optimizer state in memory")
    return ", ".join(parts) or "other buffers"


# -- A device that turns out smaller than planned: one more try with a smaller plan ----------------


LEFT = 3 / 4  # of the device's memory, for the second plan
YOUNG = 2  # steps of a plan: the second is the first that overlaps with the one before

Made = TypeVar("Made")


class OomGuard:
    """Runs the steps of a session, and reduces the plan if device memory runs out.

    Other programs may use the memory, or kernels may need more than was measured. This shows in
    the first steps, and the run then continues with a plan for less memory. A smaller
    micro-batch changes the rounding of results, so the change is reported, and made only once.
    """

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self._session, self._say = session, say
        self._plan: Plan | None = None
        self._drawn: dict[int, Any] = {}  # random states before the plan's first steps
        self._shrunk = False

    def run(self, step: Callable[[], Made]) -> Made:
        session, device = self._session, self._session.context.device
        if not device.has_own_memory:
            return step()
        if session.plan is not self._plan:
            self._plan, self._drawn = session.plan, {}
        if young := len(self._drawn) < YOUNG:
            self._drawn[session.step] = device.random_state()
        number = session.step + 1
        try:
            return step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
            if self._shrunk or not young or session.process_group.world > 1 or session.lost:
                raise BudgetError(_refusal(session, problem, number)) from None
        self._shrunk = True
        before, after = session.plan, _shrunk(session)
        self._say(
            f"the device ran out of memory in step {number} ({problem}); once more with a plan for "
            f"{format_bytes(session.context.device_bytes or 0)}: micro-batch {after} instead of "
            f"{before.micro_batch or 'all'}"
        )
        # Steps that were not committed are done again.
        device.set_random_state(self._drawn[session.step])
        self._plan = None
        return self.run(step)


def _shrunk(session: Session) -> str:
    context = session.context
    room = int((context.device_bytes or 0) * LEFT)
    if (used := session.plan.tier_bytes("device")) <= room:  # it would be the same plan
        room = int(used * LEFT)
    profile = None if context.profile is None else replace(context.profile, device_bytes=room)
    options = replace(context.options, chunk_params=session.plan.chunk_params)
    problem = context.problem(options, profile=profile)
    session.follow(lambda: closed_form_plan(replace(problem, device_bytes=room)))
    session.context = replace(context, device_bytes=room, profile=profile)
    tiles = f" in tiles of {session.plan.tiles} tokens" if session.plan.tiles else ""
    return f"{session.plan.micro_batch or 'all'}{tiles}"


def _refusal(session: Session, problem: str, number: int) -> str:
    context = session.context
    room = format_bytes(context.device_bytes or 0)
    lower = lower_hint(context.workload, context.options)
    return (
        f"device out of memory in step {number} with a plan for {room} ({problem}); end what else "
        f"uses the device, or lower --device-memory below {room}"
        f"{lower}; what was committed is safe: resume the run"
    )
