"""A whole run: prepare, train, commit, stop cleanly, resume, export."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lohan.api import Budget, attach, load
from lohan.config import Config
from lohan.data import Dataset, open_dataset, prepare
from lohan.display import Display
from lohan.errors import ConfigError, StoreError
from lohan.lr import lr_at
from lohan.meter import Meter
from lohan.model_files.folder import load_config
from lohan.optim import AdamW
from lohan.plan import Kept, plan_from_file
from lohan.profile import Profile
from lohan.profiling.command import cache_file, cached_profile
from lohan.replanning import Replanner
from lohan.run import RunFolder, append_metrics, settle_metrics
from lohan.session import Session, export_store
from lohan.storage.admin import describe, remove
from lohan.storage.files import IDENTITY, MANIFEST, write_durably
from lohan.storage.snapshot import find_snapshot, restore, snapshot
from lohan.units import align_up


@dataclass(frozen=True)
class Outcome:
    """How a run ended: committed steps of the planned ones, and why it stopped early."""

    step: int
    total: int
    stopped: bool
    exported: bool


def train(config: Config, display: Display) -> Outcome:
    """A new run in `config.out`."""
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    created = not folder.path.exists()
    try:
        dataset, total = open_data(folder, config, display)
        folder.path.mkdir(parents=True, exist_ok=True)
        # Before the first commit: what is committed can be resumed.
        write_durably(folder.config_file, config.to_toml().encode())
        torch.manual_seed(config.seed)
        session = open_session(folder, config, dataset, total, display, resume=False)
    except BaseException:
        clear(folder, config, whole=created)
        raise
    return run(session, folder, config, dataset, total, display)


def resume(folder: RunFolder, display: Display, *, steps: int | None = None) -> Outcome:
    """Continues a run from its last committed step."""
    config = folder.config()
    check_begun(folder, config)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    dataset, total = open_data(folder, config, display, resume=True)
    if config.budget.durability == "checkpoint":
        bring_back(folder, config, display)
    session = open_session(folder, config, dataset, total, display, resume=True)
    settle_metrics(folder, step=session.step, last=session.store.meta.get("metrics"))
    if steps is not None:
        write_durably(folder.config_file, config.to_toml().encode())
    if session.step >= total:
        display.note(f"the run is at step {session.step} of {total} already; --steps extends it")
    else:
        display.note(f"resuming after step {session.step} of {total}")
    return run(session, folder, config, dataset, total, display)


def run(
    session: Session, folder: RunFolder, config: Config, dataset: Dataset, total: int,
    display: Display,
) -> Outcome:  # fmt: skip
    """The loop: every pass is one committed step."""
    with session, stop_signals() as stop:
        for line in session.plan.describe(host_bytes=session.host_bytes):
            display.note(line)
        meter = Meter(session, session.executor.trace)
        replanner = Replanner(session)
        while session.step < total and not stop.asked:
            row = one_step(session, config, dataset, meter)
            display.step(row, total)
            log_committed(session, folder)
            keep_snapshot(session, folder, config, meter)
            if session.step < total:
                plan_anew(replanner, session, folder, row, meter, display)
        session.settle()
        log_committed(session, folder)
        if config.output.trace:
            session.executor.trace.write(folder.trace)
            display.note(f"trace of all lanes: {folder.trace}")
        outcome = Outcome(session.step, total, stop.asked, False)
        if session.step >= total and config.output.export:
            export(session, folder, config, display)
            outcome = replace(outcome, exported=True)
    return outcome


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
    replanner: Replanner, session: Session, folder: RunFolder, row: dict[str, Any], meter: Meter,
    display: Display,
) -> None:  # fmt: skip
    """After some steps a run knows its machine better than any profile."""
    moved = row["ssd_read_bytes"] + row["ssd_written_bytes"]
    changed = replanner.after_step(meter.spans, moved_bytes=moved, step_s=row["step_s"])
    if changed is not None:
        display.note(f"after step {session.step}: {changed}")
        log_committed(session, folder)


def log_committed(session: Session, folder: RunFolder) -> None:
    """A step enters the log when it is durable, which may be during the next one."""
    for meta in session.take_committed():
        append_metrics(folder, meta["metrics"])


# -- opening --------------------------------------------------------------------------------------


def open_data(
    folder: RunFolder, config: Config, display: Display, *, resume: bool = False
) -> tuple[Dataset, int]:
    """The tokenised data and the number of steps; a resumed run keeps the data it began with."""
    text = load_config(config.model).get_text_config()
    ready = open_dataset(folder.data, seed=config.seed) if resume else None
    dataset = ready or prepare(
        config.data, model_dir=config.model, cache_dir=folder.data, seq=config.train.seq,
        seed=config.seed, vocab_size=getattr(text, "vocab_size", None),
        progress=lambda done, all_: display.advance("tokenising", done, all_),
    )  # fmt: skip
    summary = dataset.summary
    note = f"{summary.examples:,} examples, {summary.tokens:,} tokens, {summary.trained_tokens:,} "
    note += "with loss"
    if summary.cut or summary.dropped:
        note += f"; {summary.cut:,} cut to {config.train.seq} tokens, {summary.dropped:,} dropped"
    if summary.skipped_turns:
        note += f"; {summary.skipped_turns:,} assistant turns without loss (chat template)"
    display.note(note)
    total = config.train.steps or dataset.steps_for(config.train.epochs, config.train.batch)
    return dataset, total


def open_session(
    folder: RunFolder, config: Config, dataset: Dataset, total: int, display: Display, *,
    resume: bool,
) -> Session:  # fmt: skip
    train = config.train
    model = load(config.model, dtype=train.dtype or "fp32").train()
    longest = min(train.seq, align_up(dataset.summary.longest, 8))
    shape = torch.empty((train.batch, longest), dtype=torch.long, device="meta")
    places, name = folder.store_place(config)
    warmup = train.warmup_steps(total)

    def lr(step: int) -> float:
        return lr_at(
            step, total_steps=total, peak_lr=train.lr, schedule=train.schedule,
            warmup_steps=warmup, min_lr_ratio=train.min_lr_ratio,
        )  # fmt: skip

    return attach(
        model,
        optimizer=AdamW(
            lr=lr, betas=(train.beta1, train.beta2), eps=train.eps,
            weight_decay=train.weight_decay,
        ),
        budget=Budget(host=config.budget.host, ssd=places, durability=config.budget.durability),
        batch={"input_ids": shape}, micro_batch=train.micro_batch, resume=resume,
        overlap=train.overlap, grad_offload=train.grad_offload, clip=train.clip,
        trace=config.output.trace, store_name=name, activations=kept_by(train.activations),
        profile=known_profile(places),
        progress=lambda done, all_: display.advance("loading", done, all_),
    )  # fmt: skip


def known_profile(places: Sequence[Path]) -> Profile | None:
    """What `lohan profile` found for these drives, if it was asked."""
    here = [place for place in places if place.is_dir()]
    file = cache_file(here) if len(here) == len(places) else None
    return cached_profile(here) if file is not None and file.is_file() else None


def kept_by(wish: str) -> str | Kept:
    """The wish, or what the plan file says that it names."""
    if not wish.endswith(".json"):
        return wish
    try:
        return plan_from_file(Path(wish)).kept
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"[train] activations: {wish} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None


def check_vacant(folder: RunFolder, config: Config) -> None:
    """Refuses a folder that holds a run; clears away a start that died before its first commit."""
    dirs = folder.store_dirs(config)
    started = folder.config_file.exists()
    if started:
        dirs = folder.store_dirs(folder.config())
    if (dirs[0] / MANIFEST).exists() or (started and folder.metrics_file.exists()):
        raise ConfigError(
            f"{folder.path} holds a run already; continue it with `lohan resume {folder.path}`, "
            "or give another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; give a folder as --out")
    remove_store(dirs)
    remove_store(folder.store_dirs(config))


def check_begun(folder: RunFolder, config: Config) -> None:
    primary = folder.store_dirs(config)[0]
    if (primary / IDENTITY).exists() and not (primary / MANIFEST).exists():
        raise StoreError(
            f"the run in {folder.path} died while its model was being loaded; start it again with "
            "the same `lohan train` command"
        )


def remove_store(dirs: list[Path]) -> None:
    if (dirs[0] / IDENTITY).exists():
        remove(dirs)


def clear(folder: RunFolder, config: Config, *, whole: bool) -> None:
    """Takes back what a failed start has made."""
    remove_store(folder.store_dirs(config))
    if whole:
        shutil.rmtree(folder.path, ignore_errors=True)
    else:
        shutil.rmtree(folder.data, ignore_errors=True)
        folder.config_file.unlink(missing_ok=True)


# -- ending ---------------------------------------------------------------------------------------


def export(session: Session, folder: RunFolder, config: Config, display: Display) -> None:
    export_store(
        session.store, folder.model, source_folder=config.model,
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


def bring_back(folder: RunFolder, config: Config, display: Display) -> None:
    """A store written in place that died in a step is put back from its last snapshot."""
    dirs = folder.store_dirs(config)
    if describe(dirs)["state"] != "not clean":
        return
    place = folder.snapshots(config)
    try:
        find_snapshot(place)
    except StoreError:
        raise StoreError(
            f"the run in {folder.path} was written in place (durability = checkpoint) and died in "
            f"a step, and there is no snapshot at {place}; start it again, with durability = step "
            "or with snapshot_every"
        ) from None
    display.note(f"the last process died in a step; going back to the snapshot in {place}")
    restore(place, dirs).close()


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
