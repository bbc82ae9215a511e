"""The logs of run folders, checked row by row, and the state that a run is in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.checkpoint.resharding import current_set
from lohan.config import Config
from lohan.errors import ConfigError, LohanError
from lohan.model.plan import Plan
from lohan.planner.wear import Alternative
from lohan.store.files import lock_holder
from lohan.store.manifest import read_manifest
from lohan.train.run_folder import CLAIM, MARK, RunFolder, parse_rows, sets_of
from lohan.util.files import WrongType, checked

# -- Logs ------------------------------------------------------------------------------------------


MOST_SAMPLES = 40
STEADY_STEPS = 50  # Speed is computed from this many of the last steps.
RECENT_STEPS = 10  # The remaining time is estimated from this many steps.

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The settings of a run and the rows of its logs."""

    folder: RunFolder
    config: Config
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    def last(self, event: str) -> dict[str, Any]:
        """Return the latest journal entry of a kind, or an empty dictionary if there is none."""
        return next((row for row in reversed(self.journal) if row["event"] == event), {})

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The steps with the last plan, except the first two, which include warm-up."""
        began = max((row["step"] for row in self.journal if row["event"] != "measured"), default=0)
        rows = [row for row in self.steps if row["step"] > began]
        return (rows[2:] or rows or self.steps)[-STEADY_STEPS:]

    @property
    def written_bytes(self) -> int:
        return sum(int(row.get("ssd_written_bytes", 0)) for row in self.steps)

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def total(self) -> int:
        """The planned number of steps; 0 if the number is not known yet."""
        planned = self.last("start").get("total") or self.config.train.steps or 0
        return max(int(planned), self.step) if planned else 0

    @property
    def left_s(self) -> float | None:
        """The estimated seconds to the end of the run.

        The value is None before the first step, or if the number of steps is not known.
        """
        if not self.steps or not self.total:
            return None
        recent = [row["step_s"] for row in self.steps[-RECENT_STEPS:]]
        return float((self.total - self.step) * sum(recent) / len(recent))


class LogFile:
    """The rows of a growing log. Each read parses only what was appended since the last one."""

    def __init__(self, path: Path, check: Callable[[Row], None] = lambda row: None) -> None:
        self.path, self._check = path, check
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was read
        self._read, self._lines = 0, 0  # bytes and lines that were read
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, without a last line that is still being written."""
        with self._lock:
            try:
                with open(self.path, "rb") as file:
                    facts = os.fstat(file.fileno())
                    identity = facts.st_dev, facts.st_ino
                    if identity != self._identity or facts.st_size < self._read:
                        self._identity, self._rows = identity, []
                        self._read = self._lines = 0
                    file.seek(self._read)
                    data = file.read()
            except FileNotFoundError:
                self._identity, self._rows, self._read, self._lines = None, [], 0, 0
                return []
            whole = data[: data.rfind(b"\n") + 1]
            self._rows += self._parsed(whole)
            self._read += len(whole)
            self._lines += whole.count(b"\n")
            return [*self._rows, *self._parsed(data[len(whole) :])]

    def _parsed(self, data: bytes) -> list[dict[str, Any]]:
        rows = list(parse_rows(data, self.path, first=self._lines + 1))
        for row in rows:
            self._check(row)
        return rows


@dataclass
class Logs:
    """The log files of runs by path, so that polling a run reads only what is new."""

    files: dict[Path, LogFile] = field(default_factory=dict)

    def rows(self, path: Path, check: Callable[[Row, Path], None]) -> list[dict[str, Any]]:
        """Return the rows of a log; `check` raises ConfigError for a row with wrong fields."""
        file = self.files.get(path)
        if file is None:
            file = self.files[path] = LogFile(path, lambda row: check(row, path))
        return file.rows()


def read_record(folder: RunFolder, logs: Logs | None = None) -> RunRecord:
    """Check the rows of a run's logs and return its record. The run may have no steps yet."""
    logs = logs or Logs()
    config = folder.config()
    metrics = logs.rows(folder.metrics_file, _check_metrics)
    steps = [row for row in metrics if "eval_loss" not in row]
    evaluations = [row for row in metrics if "eval_loss" in row]
    journal = [row for row in logs.rows(folder.journal, _check_journal) if "event" in row]
    samples = logs.rows(folder.samples_file, _check_samples)[-MOST_SAMPLES:]
    return RunRecord(folder, config, steps, evaluations, samples, journal)


def read_run(folder: RunFolder) -> RunRecord:
    """Return the record of a run; raise ConfigError if it has no steps yet."""
    run = read_record(folder)
    if not run.steps:
        raise ConfigError(
            f"{folder.path}: no step is in its log yet (metrics.jsonl); report again after the "
            "first one"
        )
    return run


Number = int | float
_STEP: dict[str, Any] = {
    "loss": Number,
    "step_s": float,
    "rss_bytes": float,
    "tokens_per_s": float,
    "busy": dict[str, float],
    "grad_norm": Number | None,
    "lr": Number | None,
    "ssd_read_bytes": int,
    "ssd_written_bytes": int,
    "reward_accuracy": Number,
}
_EVALUATION: dict[str, Any] = {"eval_loss": Number}
_SAMPLES: dict[str, Any] = {"samples": list[dict[str, str]]}
_MAY_LACK = {
    "busy",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "reward_accuracy",
    "samples",
    "versions",
    "machine",
    "instead",
}
_PREDICTED = dict[str, Any] | None
_EVENTS: dict[str, dict[str, Any]] = {
    "start": {
        "total": int,
        "shape": dict[str, int] | None,
        "versions": dict[str, str],
        "machine": dict[str, str | int],
        "parameters": int | None,
        "ranks": int | None,
        "instead": list[Alternative],
    },
    "plan": {"host_bytes": int, "plan": Plan, "predicted": _PREDICTED, "origin": str | None},
    "measured": {"profile": dict[str, Any], "predicted": _PREDICTED},
}
_FIGURES: dict[str, Any] = {
    "step_s": float,
    "lane_s": dict[str, float],
    "tokens": Number,
    "written_bytes": Number,
}


def _check_metrics(row: Row, file: Path) -> None:
    _check_row(row, _EVALUATION if "eval_loss" in row else _STEP, file)


def _check_samples(row: Row, file: Path) -> None:
    _check_row(row, _SAMPLES, file)


def _check_journal(row: Row, file: Path) -> None:
    if "event" in row:
        _check_row(row, {"event": str, **_EVENTS.get(str(row["event"]), {})}, file)


def _check_row(row: Row, kinds: Mapping[str, Any], file: Path) -> None:
    """Check that a row has the fields that the page shows, with the right types.

    NaN is allowed only in fields of type `Number`, such as the loss.
    """
    try:
        for key, kind in kinds.items():
            value = row.get(key)
            if key in _MAY_LACK and key not in row:
                continue
            if kind != Number or not isinstance(value, float):
                checked(value, kind, key)
        if "step_s" in kinds and row["step_s"] <= 0:
            raise WrongType(f"step_s is {row['step_s']}, wants a time")
        machine = checked(row.get("machine") or {}, dict[str, Any], "machine")
        checked(machine.get("memory_bytes", 0), int, "machine.memory_bytes")
        predicted = checked(row.get("predicted") or {}, dict[str, Any], "predicted")
        for key, kind in _FIGURES.items() if predicted else ():
            checked(predicted.get(key), kind, f"predicted.{key}")
    except WrongType as error:
        raise ConfigError(
            f"{file}, step {row['step']}: {error}; remove that line of the log"
        ) from None


# -- State -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """The state of a run, the process that holds it, and what can be done with it.

    `process` is 0 if the run is locked by a process whose id is not known, and None if no process
    has it open.
    """

    name: str  # starting, running, ending, finished, stopped, crashed or failed
    words: str
    process: int | None = None
    resumable: bool = False
    exportable: bool = False

    @property
    def active(self) -> bool:
        return self.process is not None


def state_of(run: RunRecord) -> RunState:
    """Return the state of a run, from its locks, its mark and its store.

    A run is "crashed" if its store was not closed properly, which costs at most the steps since the
    last commit. It has "failed" if it has no store and therefore cannot continue.
    """
    folder, config = run.folder, run.config
    claimed = lock_holder(folder.path, name=CLAIM)
    if claimed is not None:
        return RunState("starting", "prepares its data and its store", claimed)
    sets = sets_of(folder, config)
    primaries = [path for stores in sets for path in stores.primaries if path.exists()]
    for path in primaries:
        holder = lock_holder(path)
        if holder is not None:
            words = "training" if run.steps else "runs its first step"
            return RunState("running", words, holder)
    store, mark = current_set(sets), folder.mark
    step = None if store is None else store.step()
    has_store = {"resumable": store is not None, "exportable": store is not None}
    finished = mark.finished if mark is not None else None
    if finished is not None and step in (None, finished.step):
        early = "" if finished.step >= finished.total else ", stopped early by its evaluations"
        return RunState("finished", f"all steps are done{early}", **has_store)
    if store is None:
        return RunState("failed", "it has no store, so it cannot continue")
    if run.total and (step or 0) >= run.total:
        return RunState("finished", "all steps are done", **has_store)
    manifests = [read_manifest(path) for path in store.primaries]
    if all(manifest is not None and manifest.clean for manifest in manifests):
        return RunState("stopped", f"after step {step}; it can be resumed", **has_store)
    words = f"not closed properly; it can be resumed from step {step}, the last committed one"
    return RunState("crashed", words, **has_store)


# -- Runs below a folder ---------------------------------------------------------------------------


MOST_FOLDERS = 20_000  # maximum number of folders that are searched
MOST_LEVELS = 6  # levels below the root
# Folders that are not searched for runs: parts of a run or of an environment.
SKIPPED = {"store", "snapshots", "data", "eval-data", "model", "ema", "best", "base"}
SKIPPED |= {"node_modules", "__pycache__", "site-packages"}


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run folders in and below a folder, without following links."""
    level, searched = [root], 0
    for _ in range(MOST_LEVELS + 1):
        below: list[Path] = []
        for directory in level:
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except OSError:
                continue
            searched += 1
            if searched > MOST_FOLDERS:
                return
            is_run = any(entry.name == "run.toml" and entry.is_file() for entry in entries)
            if is_run:
                yield directory
            for entry in entries:
                hidden = entry.name.startswith(".") or (is_run and entry.name in SKIPPED)
                if not hidden and entry.is_dir(follow_symlinks=False):
                    below.append(Path(entry.path))
        level = below


def summary(run: RunRecord, state: RunState) -> dict[str, Any]:
    """Return one row of the list of runs."""
    plan, last = run.last("plan"), run.steps[-1] if run.steps else {}
    host = sum(e["bytes"] for e in plan["plan"]["ledger"] if e["tier"] == "host") if plan else None
    return {
        "model": run.config.model.name,
        "state": state.name,
        "words": state.words,
        "step": run.step,
        "total": run.total,
        "loss": last.get("loss"),
        "tokens_per_s": last.get("tokens_per_s"),
        "left_s": run.left_s if state.active else None,
        "rss_bytes": last.get("rss_bytes"),
        "planned_bytes": host,
        "host_bytes": plan["host_bytes"] if plan else None,
        "began": run.last("start").get("time", ""),
        "losses": thinned([row["loss"] for row in run.steps], 60),
    }


def thinned(values: list[Any], most: int) -> list[float]:
    """Return at most `most` numbers: means of neighbouring numbers, without NaN."""
    numbers = [float(value) for value in values if value == value]
    size = -(-len(numbers) // most) or 1
    groups = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return [sum(group) / len(group) for group in groups]


def list_runs(
    root: Path, logs: Logs, state: Callable[[RunRecord], RunState] = state_of
) -> list[dict[str, Any]]:
    """Return the runs below a folder, running ones first, then the latest ones.

    A run whose files cannot be read is listed with the reason.
    """
    rows: list[dict[str, Any]] = []
    for path in find_runs(root):
        folder, name = RunFolder(path), str(path.relative_to(root))
        if (path / MARK).exists() or folder.metrics_file.exists():
            try:
                run = read_record(folder, logs)
                rows.append({"name": name, **summary(run, state(run))})
            except (LohanError, OSError) as error:
                rows.append({"name": name, "state": "unreadable", "words": str(error)})
    rows.sort(key=lambda row: row.get("began", ""), reverse=True)
    return sorted(rows, key=lambda row: row["state"] not in ("running", "starting", "ending"))
