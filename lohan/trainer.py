"""A whole run: prepare, train, commit, stop cleanly, resume, export."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lohan.between import Between
from lohan.config import Config
from lohan.data import Dataset
from lohan.display import Display
from lohan.errors import ConfigError
from lohan.journal import Journal
from lohan.loggers import Logger, check_loggers, open_loggers
from lohan.meter import Meter
from lohan.replanning import Replanner
from lohan.run import RunFolder, append_row, owner_only, settle_logs
from lohan.session import Session, export_store
from lohan.shrinking import first_step
from lohan.starting import (
    Inputs,
    bring_back,
    check_begun,
    check_vacant,
    claimed,
    clear,
    clear_leftovers,
    open_inputs,
    open_session,
)
from lohan.storage.files import write_durably
from lohan.storage.snapshot import snapshot


@dataclass(frozen=True)
class Outcome:
    """How a run ended: committed steps of the planned ones, and why it stopped early."""

    step: int
    total: int
    stopped: bool
    exported: bool


@owner_only()
def train(config: Config, display: Display) -> Outcome:
    """A new run in `config.out`."""
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    check_loggers(config.output.log)
    with claimed(folder) as created:
        check_vacant(folder, config)  # another process may have been quicker
        clear_leftovers(folder, config)
        try:
            inputs = open_inputs(folder, config, display)
            # Before the first commit: what is committed can be resumed.
            write_durably(folder.config_file, config.to_toml().encode())
            torch.manual_seed(config.seed)
            session = open_session(folder, config, inputs, display, resume=False)
        except BaseException:
            clear(folder, config, whole=created)
            raise
    return run(session, folder, config, inputs, display)


@owner_only()
def resume(folder: RunFolder, display: Display, *, steps: int | None = None) -> Outcome:
    """Continues a run from its last committed step."""
    config = folder.config()
    check_begun(folder, config)
    check_loggers(config.output.log)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    inputs = open_inputs(folder, config, display, resume=True)
    if config.budget.durability == "checkpoint":
        bring_back(folder, config, display)
    session = open_session(folder, config, inputs, display, resume=True)
    if steps is not None and steps < session.step:
        session.close()
        raise ConfigError(
            f"--steps {steps}: the run has done {session.step} steps already; give more than that"
        )
    settle_logs(folder, step=session.step, last=session.store.meta.get("metrics"))
    if steps is not None:
        write_durably(folder.config_file, config.to_toml().encode())
    if session.step >= inputs.total:
        done = f"the run is at step {session.step} of {inputs.total} already"
        display.note(f"{done}; --steps extends it")
    else:
        display.note(f"resuming after step {session.step} of {inputs.total}")
    return run(session, folder, config, inputs, display)


def run(
    session: Session, folder: RunFolder, config: Config, inputs: Inputs, display: Display
) -> Outcome:
    """The loop: every pass is one committed step."""
    total = inputs.total
    with session, stop_signals() as stop, ExitStack() as undo:
        for line in session.describe_plan():
            display.note(line)
        show_memory(session, display)
        loggers = open_loggers(folder, config, step=session.step)
        for logger in loggers:
            undo.callback(logger.close)

        def catch_up() -> None:
            session.flush()
            log_committed(session, folder, loggers)

        meter = Meter(session, session.executor.trace)
        between = Between(
            session, folder, config, inputs, meter=meter, display=display, loggers=loggers,
            stop=lambda: stop.asked, catch_up=catch_up,
        )  # fmt: skip
        replanner, journal = Replanner(session), Journal(folder, session)
        journal.began(total=total)
        between.visit()
        stepped = False
        while session.step < total and not stop.asked and not between.stopped:
            take = partial(one_step, session, config, inputs.train, meter)
            row = take() if stepped else first_step(session, take, display.note)
            stepped = True
            display.step(row, total)
            journal.after_step(row, meter.spans)
            log_committed(session, folder, loggers)
            keep_snapshot(session, folder, config, meter)
            between.visit()
            if session.step < total:
                plan_anew(replanner, session, row, meter, display)
                journal.follow()
                log_committed(session, folder, loggers)
        session.settle()
        log_committed(session, folder, loggers)
        journal.ended()
        if config.output.trace and stepped:
            session.executor.trace.write(folder.trace)
            display.note(f"trace of all lanes: {folder.trace}")
        ended = session.step >= total or between.stopped
        if ended and config.output.export:
            export(session, folder, config, display)
    return Outcome(session.step, total, not ended, ended and config.output.export)


def one_step(session: Session, config: Config, dataset: Dataset, meter: Meter) -> dict[str, Any]:
    """Forward and backward of one batch; its row of metrics goes into its manifest."""
    executor = session.executor
    batch = dataset.batch(session.step, config.train.batch)
    tokens = int(batch["input_ids"].numel())
    row: dict[str, Any] = {"step": session.step + 1, "lr": session.lr, "tokens": tokens}
    loss = session.model(**batch).loss
    row["loss"] = loss.item()
    skipped = executor.progress.skipped

    def metrics() -> dict[str, Any]:
        """Called when backward has ended."""
        row.update(meter.row(tokens=tokens))
        if executor.grad_norm is not None:
            row["grad_norm"] = executor.grad_norm
        if executor.progress.skipped > skipped:
            row["skipped"] = True
        return {"metrics": row}

    executor.extra_meta = metrics
    loss.backward()
    return row


def plan_anew(
    replanner: Replanner, session: Session, row: dict[str, Any], meter: Meter, display: Display
) -> None:
    """After some steps a run knows its machine better than any profile."""
    moved = row["ssd_read_bytes"] + row["ssd_written_bytes"]
    changed = replanner.after_step(meter.spans, moved_bytes=moved, step_s=row["step_s"])
    if changed is not None:
        display.note(f"after step {session.step}: {changed}")
        show_memory(session, display)


def show_memory(session: Session, display: Display) -> None:
    demand = session.demand
    budgets = {"host": demand.host_bytes, "device": demand.device_bytes or 0}
    display.memory({tier: session.plan.tier_bytes(tier) for tier in budgets}, budgets)


def log_committed(session: Session, folder: RunFolder, loggers: Sequence[Logger]) -> None:
    """A step enters the log when it is durable, which may be during the next one."""
    for meta in session.take_committed():
        append_row(folder.metrics_file, meta["metrics"])
        for logger in loggers:
            logger.log(meta["metrics"])


def export(session: Session, folder: RunFolder, config: Config, display: Display) -> None:
    export_store(
        session.store, folder.model, source_folder=config.model, model=session.model,
        dtype=config.output.export_dtype, overwrite=True,
        progress=lambda done, all_: display.advance("exporting", done, all_),
    )  # fmt: skip
    display.note(f"fine-tuned model: {folder.model}")


def keep_snapshot(session: Session, folder: RunFolder, config: Config, meter: Meter) -> None:
    every = config.budget.snapshot_every
    if every and session.step % every == 0:
        session.settle()
        with meter.aside():
            snapshot(session.store, folder.snapshots(config))


@dataclass
class _Stop:
    asked: bool = False


@contextmanager
def stop_signals() -> Iterator[_Stop]:
    """The first Ctrl-C (or SIGTERM) lets the step finish; the second gives the step up."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
        yield stop
    finally:
        for stopped, handler in before.items():
            signal.signal(stopped, handler)
