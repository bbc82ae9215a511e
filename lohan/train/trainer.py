"""A complete run: prepare, train, commit, stop cleanly, resume and export."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lohan.config import Config, TrainConfig
from lohan.data.cache import CACHE_FILES
from lohan.data.text import chosen_template
from lohan.device.ranks import ProcessGroup, in_turn, run_ranks
from lohan.engine.export import export_session
from lohan.engine.replanning import OomGuard, Replanner
from lohan.engine.session import Session
from lohan.errors import ConfigError, LohanError
from lohan.model.options import PlanOptions
from lohan.param_groups import META_KEY, changed_members
from lohan.planner.forecast import Forecast
from lohan.planner.planner import make_plan
from lohan.planner.wear import (
    ASSUMED_WEAR,
    Alternative,
    alternatives,
    drives_at,
    wear_lines,
    written_per_step,
)
from lohan.store.admin import snapshot, snapshot_generation
from lohan.train.changes import check_changes
from lohan.train.inputs import (
    Inputs,
    check_machine,
    check_settings,
    check_state_format,
    make_base,
    open_inputs,
    open_session,
)
from lohan.train.logs import Journal, Logger, Meter, NullJournal, check_loggers, open_loggers
from lohan.train.model_card import model_card
from lohan.train.periodic import PeriodicTasks, check_loss, check_norm
from lohan.train.run_folder import (
    Mark,
    RunFolder,
    append_row,
    check_exports,
    check_original,
    check_resumable,
    check_snapshots,
    check_vacant,
    claim_names,
    claim_new_names,
    export_mark,
    final_exports,
    finished_at,
    folder_lock,
    new_mark,
    note_finished,
    owner_only,
    repair_logs,
    reshard_stores,
    restore_last_snapshot,
    undo_start,
    users_umask,
    write_file,
)
from lohan.train.task import Share
from lohan.util.display import Display
from lohan.util.units import counted

STOPPING = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS = "lohan: stopped at once; resume goes on from the last committed step\n"
KILL_SIGNALS = 3  # This many signals end the process if the main thread has handled fewer than two.
UNLOGGED = "unlogged"  # manifest key: rows of committed steps, perhaps not logged yet
SUMMED_METRICS = ("ssd_read_bytes", "ssd_written_bytes")  # metrics that are summed over ranks


@dataclass(frozen=True)
class RunResult:
    """How a run ended: its committed steps and its planned steps.

    `stopped` is True if the run was interrupted.
    """

    step: int
    total: int
    stopped: bool
    exported: bool


@owner_only()
def train(config: Config, display: Display) -> RunResult:
    """Start a new run in `config.out`, and return how it ended. Every rank calls this function."""
    folder = RunFolder(config.out)
    with run_ranks() as group:
        check_settings(group, config)
        group.broadcast_made(lambda: check_vacant(folder, config))
        check_loggers(config.output.log)
        check_machine(config, group)
        session, inputs = begin(folder, config, display, group)
        return run(session, folder, config, inputs, display)


def begin(
    folder: RunFolder, config: Config, display: Display, group: ProcessGroup
) -> tuple[Session, Inputs]:
    """Claim the folder on the first rank, prepare the data, and create the stores.

    Return the session and the inputs of the run. If this fails, everything that was created is
    removed. With several ranks nothing is removed, because other ranks may still be using the
    folder.
    """
    mark = Mark(**group.broadcast_made(lambda: asdict(new_mark(folder.path))))
    claimed = False

    def make_ready(is_local_first: bool) -> Inputs:
        nonlocal claimed
        if group.ranks.first:
            check_vacant(folder, config)  # another process may have claimed the folder
        if is_local_first:
            folder.path.mkdir(parents=True, exist_ok=True)  # if machines do not share the folder
            claim_names(folder, config, mark, rank=group.ranks.rank)
            claimed = True
            if config.init is not None:
                make_base(config, folder.base)
        inputs = open_inputs(folder, config, display, resume=not group.ranks.first)
        # Write the config before the first commit, because a committed run must be resumable.
        if group.ranks.first or not folder.config_file.exists():
            write_file(folder.config_file, config.to_toml())
        return inputs

    with ExitStack() as claims:
        with group.all_or_none():
            if group.ranks.first:
                claims.enter_context(folder_lock(folder))
        try:
            inputs = in_turn(group, make_ready)
            torch.manual_seed(config.seed + group.ranks.rank)
            session = open_session(folder, config, inputs, display, resume=False, group=group)
        except BaseException:
            if claimed and not group.ranks.several:
                try:
                    undo_start(folder, config)
                # Only report this error, because the original one is raised.
                except (OSError, LohanError) as error:
                    display.note(f"warning: {folder.path} is not cleared: {error}; start it again")
            raise
    return session, inputs


@owner_only()
def resume(
    folder: RunFolder,
    display: Display,
    *,
    steps: int | None = None,
    keep_schedule: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> RunResult:
    """Continue a run from its last committed step, and return how it ended.

    Every rank calls this function. If `steps` differs from the planned number of steps, the
    learning-rate schedule is rescaled to `steps`, unless `keep_schedule` is set. `changes` maps the
    names of settings to values that replace those of the run from this step on.
    """
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    check_changes(changes)
    with run_ranks() as group:
        config = folder.config(changes)
        check_settings(group, config)
        check_loggers(config.output.log)
        same = steps is None or steps == config.train.steps
        if same and (ended := group.broadcast_made(lambda: finished_at(folder, config))):
            return show_finished(folder, config, *ended, display)
        check_machine(config, group)
        session, inputs, config = resume_session(
            folder,
            config,
            display,
            group,
            steps=steps,
            keep_schedule=keep_schedule,
            has_changes=bool(changes),
        )
        return run(session, folder, config, inputs, display)


def show_finished(
    folder: RunFolder, config: Config, step: int, total: int, display: Display
) -> RunResult:
    """Report a run that is finished at `step` of `total` steps, and return its result."""
    if step < total:
        further = f"early_stop under [eval] in {folder.config_file} lets it go on"
        display.note(f"the run has stopped early, at step {step} of {total}; {further}")
    else:
        display.note(f"the run is finished, at step {step} of {total}; --steps extends it")
    for what, out in final_exports(folder, config).items():
        display.note(f"{what}: {out}")
    return RunResult(step, total, stopped=False, exported=True)


def resume_session(
    folder: RunFolder,
    config: Config,
    display: Display,
    group: ProcessGroup,
    *,
    steps: int | None,
    keep_schedule: bool = False,
    has_changes: bool = False,
) -> tuple[Session, Inputs, Config]:
    """Open the store and the data of a run, and save changed settings in run.toml.

    Return the session, the inputs and the config of the continued run.
    """
    before = folder.config().train
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    moved = config.out != folder.path and folder.mark is not None

    def make_ready(is_local_first: bool) -> Inputs:
        if group.ranks.first:
            check_before_resume(folder, config, group, display)
        if is_local_first:
            if moved:
                current = replace(folder.config(), out=folder.path)
                write_file(folder.config_file, current.to_toml())
            claim_new_names(folder, config)
            if not (folder.data / CACHE_FILES[-1]).is_file():
                display.note(
                    f"warning: {folder.data} no longer holds the run's data; it is prepared "
                    "again from --data, and is the same only if the files there are unchanged"
                )
            reshard_stores(folder, config, group.ranks.world, display)
        return open_inputs(folder, config, display, resume=True)

    inputs = in_turn(group, make_ready)
    config = replace(config, out=folder.path) if moved else config
    planned = before.steps or inputs.train_examples.steps_for(before.epochs, before.batch)
    if keep_schedule:
        over = before.schedule_steps or planned
        config = replace(config, train=replace(config.train, schedule_steps=over))
    session = open_session(folder, config, inputs, display, resume=True, group=group)
    try:
        if steps is not None and steps < session.step:
            raise ConfigError(
                f"--steps {steps}: the run has done {counted(session.step, 'step')} already; give "
                "more than that"
            )
        if group.ranks.first:
            repair_run_logs(folder, session, inputs.total, display)
        # Ranks take turns, because machines may share the folder.
        if steps is not None or has_changes:

            def keep(is_local_first: bool) -> None:
                if is_local_first:
                    write_file(folder.config_file, config.to_toml())

            in_turn(group, keep)
        if session.step >= inputs.total:
            done = f"the run is at step {session.step} of {inputs.total} already"
            display.note(f"{done}; --steps extends it")
        else:
            display.note(f"resuming after step {session.step} of {inputs.total}")
            if changed := changed_groups(session):
                display.note(changed)
            if note := schedule_note(before, config.train, session.step, planned, inputs.total):
                display.note(note)
    except BaseException:
        session.close()
        raise
    return session, inputs, config


def changed_groups(session: Session) -> str:
    """Describe how parameter groups differ from those of the last committed step.

    Return an empty string if they do not differ. A change is allowed, because each parameter has
    its own optimizer state.
    """
    groups = session.executor.record.groups
    now = groups.to_json(groups.at(session.step))
    return changed_members(session.store.meta.get(META_KEY), now)


def repair_run_logs(folder: RunFolder, session: Session, total: int, display: Display) -> None:
    """Make the logs end with the last committed step."""
    meta = session.store.meta
    last = [*meta.get(UNLOGGED, []), *([meta["metrics"]] if "metrics" in meta else [])]
    repeated = repair_logs(folder, step=session.step, last=last)
    if repeated and session.step < total:
        display.note(
            f"{counted(repeated, 'step')} after step {session.step} were not committed and are "
            "repeated"
        )


def check_before_resume(
    folder: RunFolder, config: Config, group: ProcessGroup, display: Display
) -> None:
    """Check that a run can be resumed, and restore a store that was lost."""
    check_original(folder, config)
    check_snapshots(folder, config)
    if not group.ranks.several:
        restore_last_snapshot(folder, config, display)
    check_resumable(folder, config)
    check_state_format(folder, config)
    check_exports(folder, config)


def schedule_note(
    before: TrainConfig, now: TrainConfig, step: int, planned: int, total: int
) -> str:
    """Return a note on the learning rate, or "" if the rate and the number of steps stay the same.

    `before` and `planned` are the settings and steps of the run, `now` and `total` the new ones.
    """
    old, new = before.lr_at(step, planned), now.lr_at(step, total)
    if planned == total and old == new:
        return ""
    if now.schedule == "constant":
        return f"the learning rate stays at {new:.3g}"
    if now.schedule_steps is not None:
        end = now.lr_at(now.schedule_steps, total)
        return (
            f"the learning rate keeps its schedule over {counted(now.schedule_steps, 'step')}, and "
            f"is {end:.3g} after them"
        )
    return (
        f"the learning rate follows its {now.schedule} schedule over {counted(total, 'step')} "
        f"instead of {planned}: {new:.3g} in the next one instead of {old:.3g}; --keep-schedule "
        "keeps the old one"
    )


def run(
    session: Session, folder: RunFolder, config: Config, inputs: Inputs, display: Display
) -> RunResult:
    """Run the training loop, and return how the run ended.

    Each iteration is one step. Its commit may run during the next one.
    """
    total, group = inputs.total, session.process_group
    with session, stop_signals(display) as stop, ExitStack() as undo:
        show_start(session, config, display)
        instead = sparing_options(session)
        # The first rank made the plan; others do not know the cost of a micro-batch.
        if group.ranks.first:
            folders = folder.all_ssd_folders(config, group.ranks.world)
            show_wear(session, folders, total, instead, display)
        loggers = open_loggers(folder, config, step=session.step) if group.ranks.first else []
        for logger in loggers:
            undo.callback(logger.close)
        log = StepLog(session, folder, loggers)

        def stopping() -> bool:
            return group.any_rank(stop.requested)

        for examples in filter(None, (inputs.train_examples, inputs.held_out)):
            inputs.task.before_training(session, examples, config, display.advance)
        meter = Meter(session, session.executor.trace)
        periodic = PeriodicTasks(
            session,
            folder,
            config,
            inputs,
            meter=meter,
            display=display,
            loggers=loggers,
            stop=stopping,
            catch_up=log.catch_up,
        )
        guard, replanner = OomGuard(session, display.note), Replanner(session)
        journal = Journal(folder, session) if group.ranks.first else NullJournal()
        journal.began(total=total, instead=instead)
        periodic.run_due()
        keep_snapshot(session, folder, config, meter)
        stepped = False
        while session.step < total and not periodic.stopped and not stopping():
            take = partial(one_step, session, config, inputs, meter, log.pending)
            stop.step_began(session.step + 1)
            if not stepped:
                display.first_step(session.step + 1, total)
            row = guard.run(take)
            stepped = True
            stop.step_s = row["step_s"]
            display.step(row, total)
            journal.after_step(row, meter.spans)
            log.write()
            keep_snapshot(session, folder, config, meter)
            periodic.run_due()
            if session.step < total:
                replan(replanner, session, row, meter, display)
                journal.follow()
                log.write()
        log.catch_up()
        journal.ended()
        if config.output.trace and stepped:
            write_trace(session, folder.trace_of(group.ranks), display)
        ended = session.step >= total or periodic.stopped
        if ended and config.output.export:
            export(session, folder, config, display)
            if group.ranks.first:
                note_finished(folder, step=session.step, total=total)
    return RunResult(session.step, total, not ended, ended and config.output.export)


def show_start(session: Session, config: Config, display: Display) -> None:
    context = session.context
    lines = session.plan.describe(host_bytes=context.host_bytes, device_bytes=context.device_bytes)
    for line in lines:
        display.note(line)
    show_memory(session, display)
    show_commits(session, display)
    if not session.step:
        show_rate(config, display)


def one_step(
    session: Session,
    config: Config,
    inputs: Inputs,
    meter: Meter,
    pending: UnloggedRows | None = None,
) -> dict[str, Any]:
    """Run forward and backward of one batch and return its row of metrics.

    The manifest of the step contains this row, and the rows of earlier steps that might not have
    been logged yet when the step is committed.
    """
    executor, task = session.executor, inputs.task
    batch = inputs.train_examples.batch(session.step, config.train.batch)
    tokens = task.tokens(session.model, batch)
    row: dict[str, Any] = {"step": session.step + 1, "lr": session.lr, "tokens": tokens}
    share, device, state = Share(session, task), executor.device, executor.record.train_state
    before = device.random_state()
    reads_late = share.reads_late
    loss, read = share.loss(batch)
    row["loss"] = math.nan if reads_late else read()
    row |= {name: mean for name, (mean, _) in batch.get("stats", {}).items()}
    if not reads_late:
        check_loss(row["loss"], state)

    def metrics() -> dict[str, Any]:
        """Complete the row; called at the end of backward."""
        row["loss"] = read()
        check_loss(row["loss"], state)
        check_norm(session.grad_norm, state, executor.record.train_state)
        row.update(meter.row(tokens=tokens))
        gathered = session.process_group.all_gather_object(
            {name: row[name] for name in SUMMED_METRICS}
        )
        row.update({name: sum(other[name] for other in gathered) for name in SUMMED_METRICS})
        if session.grad_norm is not None:
            row["grad_norm"] = session.grad_norm
            row.update(executor.clipping.counts)
        if executor.record.train_state.skipped_steps > state.skipped_steps:
            row["skipped"] = True
        return {"metrics": row, UNLOGGED: [] if pending is None else pending.add(row)}

    executor.record.extra_meta = metrics
    loss.backward()  # type: ignore[no-untyped-call]
    if session.must_run_again:
        device.set_random_state(before)
        loss, read = share.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return row


def replan(
    replanner: Replanner, session: Session, row: dict[str, Any], meter: Meter, display: Display
) -> None:
    """Replan with the measured rates if it is time, and show what has changed.

    After some steps, the measured rates are more accurate than any profile.
    """
    commit = session.plan.commit
    changed = replanner.after_step(meter.spans, step_s=row["step_s"])
    if changed is not None:
        display.note(f"after step {session.step}: {changed}")
        show_memory(session, display)
        if session.plan.commit != commit:
            show_commits(session, display)


def show_rate(config: Config, display: Display) -> None:
    """Advise a higher learning rate if an adapter is trained with the default for full training."""
    if config.train.lora and config.train.lr == TrainConfig().lr:
        display.note(
            f"lr is {config.train.lr:g}, the default, which is usual for whole models; adapters "
            "usually take 1e-4 to 2e-4: --lr 1e-4"
        )


def show_commits(session: Session, display: Display) -> None:
    """Report how many steps a crash can lose, if not every step is committed."""
    plan = session.plan
    if plan.log_gradients:
        display.note(
            f"logs gradients: every step is committed by its gradients, and the full state is "
            f"written every {plan.commit}"
        )
    elif not plan.commit.every_step:
        display.note(
            f"commits every {plan.commit}, and before evaluations, snapshots and the end: a crash "
            "costs the steps since the last one, Ctrl-C none; --commit-every step commits each"
        )


def show_wear(
    session: Session,
    folders: Sequence[Path],
    total: int,
    instead: Sequence[Alternative],
    display: Display,
) -> None:
    """Report how much the remaining steps will wear the drives."""
    context, steps = session.context, total - session.step
    if context.workload is None or steps <= 0:
        return
    written = written_per_step(
        context.shards,
        context.workload,
        session.plan,
        has_own_memory=context.device.has_own_memory,
    )
    lines = wear_lines(drives_at(folders), written, steps=steps, instead=instead)
    for line in lines:
        display.note(line)
    if len(lines) > 1:
        display.note(f"wear is {ASSUMED_WEAR}, unless the drive's log has it")


def sparing_options(session: Session) -> list[Alternative]:
    """Return options that would write less, for a new run on a machine with a known profile.

    The options keep the micro-batch of the run, because measuring another one would require running
    the blocks, which the session is using.
    """
    context, profile = session.context, session.context.profile
    workload = context.workload
    if profile is None or workload is None or session.step or session.plan.world > 1:
        return []

    def planned(options: PlanOptions, host: int) -> Forecast:
        options = replace(options, head_tokens=session.plan.head_tokens)
        problem = replace(context.problem(options, profile=profile), host_bytes=host)
        forecast = make_plan(problem).forecast
        assert forecast is not None
        return forecast

    now = context.forecast(profile, session.plan)
    return list(alternatives(now, context.options, context.host_bytes, planned))


def show_memory(session: Session, display: Display) -> None:
    context = session.context
    budgets = {"host": context.host_bytes, "device": context.device_bytes or 0}
    display.memory({tier: session.plan.tier_bytes(tier) for tier in budgets}, budgets)


@dataclass
class UnloggedRows:
    """Rows of metrics of finished steps that are not yet in the run's metrics log.

    Two steps may be committed before the metrics of the first are written, so the manifest of the
    second also contains the row of the first.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Add the row of a step, and return the rows of earlier steps.

        Rows of the same step and of later steps are dropped, because these steps were rolled back.
        """
        self.rows = {step: old for step, old in self.rows.items() if step < row["step"]}
        earlier = list(self.rows.values())
        self.rows[row["step"]] = row
        return earlier

    def logged(self, step: int) -> None:
        self.rows = {other: row for other, row in self.rows.items() if other > step}


class StepLog:
    """The writer of the metrics of finished steps, to the run's log and to its loggers.

    A step may finish while the next one runs, and is then logged. If every step is committed, a
    step is on disk before it is logged.
    """

    def __init__(self, session: Session, folder: RunFolder, loggers: Sequence[Logger]) -> None:
        self._session, self._folder, self._loggers = session, folder, loggers
        self.pending = UnloggedRows()

    def write(self) -> None:
        for meta in self._session.take_finished():
            row = meta["metrics"]
            if self._session.process_group.ranks.first:
                append_row(self._folder.metrics_file, row)
                for logger in self._loggers:
                    logger.log(row)
            self.pending.logged(row["step"])

    def catch_up(self) -> None:
        # With a log, the gradients of the last step are on SSD when its updates have ended.
        if self._session.plan.log_gradients:
            self._session.flush()
        else:
            self._session.commit()
        self.write()


def write_trace(session: Session, file: Path, display: Display) -> None:
    """Write the trace; if that fails, print a warning and continue, because exports follow."""
    try:
        session.executor.trace.write(file)
    except OSError as error:
        display.note(
            f"{file}: the trace cannot be written: {error.strerror}; the run is complete, "
            "and `lohan resume` with more --steps writes another trace"
        )
        return
    display.note(f"trace of all lanes: {file}")


def export(session: Session, folder: RunFolder, config: Config, display: Display) -> None:
    """Write the final models of the run; the user's umask determines who can read them."""
    first = session.process_group.ranks.first
    for what, out in final_exports(folder, config).items():
        mark = export_mark(folder, config) if first else None
        with users_umask():
            export_session(
                session,
                out,
                source_folder=config.model,
                mark=mark,
                dtype=config.output.export_dtype,
                overwrite=True,
                ema=out == folder.ema,
                chat_template=chosen_template(config.train.chat_template),
                card=model_card(folder, config, step=session.step, averaged=out == folder.ema),
                progress=lambda done, all_: display.advance("exporting", done, all_),
            )
        display.note(f"{what}: {out}")


def keep_snapshot(session: Session, folder: RunFolder, config: Config, meter: Meter) -> None:
    """Take a snapshot of the last step if one is due and does not exist yet.

    A process may have died between a step and its snapshot, so this is called on resume too.
    """
    every = config.budget.snapshot_every
    if not every or not session.step or session.step % every:
        return
    session.commit()
    target = folder.snapshots(config, session.process_group.ranks)
    if snapshot_generation(target) != session.store.generation:
        with meter.aside():
            snapshot(session.store, target)


@dataclass
class _Stop:
    requested: bool = False  # set by the first signal
    received: int = 0  # number of signals received
    handled: int = 0  # number of signals the main thread has handled
    step: int = 0  # number of the current step
    step_s: float | None = None  # duration of the last step
    began_s: float = 0.0

    def step_began(self, number: int) -> None:
        self.step, self.began_s = number, time.monotonic()

    def answer(self) -> str:
        """Return the message that acknowledges a first Ctrl-C."""
        if not self.step:
            return "stopping before the first step; again to give up"
        remaining = "" if self.step_s is None else self.step_s - (time.monotonic() - self.began_s)
        about = f", about {max(remaining, 1.0):.0f} s" if isinstance(remaining, float) else ""
        return f"finishing step {self.step}{about}; again to give it up"


@contextmanager
def stop_signals(display: Display) -> Iterator[_Stop]:
    """Handle Ctrl-C and SIGTERM.

    The first signal lets the step finish and prints a message; the second aborts the step. While
    backward runs on an accelerator's thread, Python handles signals only after backward has ended,
    and handles several signals as one. During that time the third signal ends the process;
    committed steps are safe.
    """
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        stop.handled = max(stop.handled + 1, stop.received)
        if stop.handled > 1:
            raise KeyboardInterrupt
        stop.requested = True
        display.note(stop.answer())

    before: dict[int, Callable[..., Any] | int | None] = {}
    with _counting_signals(stop):
        try:
            for number in STOPPING:
                before[number] = signal.signal(number, ask)
            yield stop
        finally:
            for stopped, handler in before.items():
                signal.signal(stopped, handler)


@contextmanager
def _counting_signals(stop: _Stop) -> Iterator[None]:
    """Count signals in a thread as they arrive, even while the main thread waits."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    previous = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)

    def listen() -> None:
        while number := os.read(read_fd, 1):
            stop.received += number[0] in STOPPING
            if stop.received >= KILL_SIGNALS and stop.handled < 2:
                with suppress(OSError):
                    os.write(2, LAST_WORDS.encode())
                os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=listen, name="lohan-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(write_fd)
        thread.join()
        os.close(read_fd)
