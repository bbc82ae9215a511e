"""The records of a run: metrics, external loggers, and the journal for its report."""

from __future__ import annotations

import datetime
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from lohan import __version__
from lohan.config import Config
from lohan.engine.session import Session
from lohan.errors import ConfigError
from lohan.planner.forecast import Forecast
from lohan.planner.wear import Alternative
from lohan.store.transfers import Counters
from lohan.train.run_folder import WARM_UP_STEPS, RunFolder, append_row
from lohan.util.memory import rss_bytes, total_memory_bytes
from lohan.util.trace import Span, Trace, busy_s

# -- The journal for `lohan report`, in RUN/journal.jsonl ------------------------------------------
#
# start      versions and machine, whenever a process starts or resumes the run
# plan       a plan, the step from which it is followed, and its forecast if there is one
# measured   the rates of the lanes as a profile, after some steps with a plan and at the end, and
#            the forecast of the plan for this profile


PACKAGES = ("torch", "transformers", "numpy", "safetensors")


class Journal:
    """The journal of plans and measured rates for the report."""

    def __init__(self, folder: RunFolder, session: Session) -> None:
        self._folder, self._session = folder, session
        self._plan = session.plan
        self._profile = session.context.profile  # profile of the machine; None if it is not known
        self._origin = "the machine's profile"
        self._plan_steps = 0  # number of steps with the current plan
        self._last: tuple[Mapping[str, Any], Sequence[Span]] | None = None

    def began(self, *, total: int, instead: Sequence[Alternative] = ()) -> None:
        workload = self._session.context.workload
        shape = None if workload is None else {"batch": workload.batch, "seq": workload.seq}
        self._write(
            "start",
            time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            total=total,
            shape=shape,
            versions=versions(),
            machine=machine(),
            parameters=self._session.context.blocks.parameters,
            ranks=self._session.plan.world,
            instead=[asdict(other) for other in instead],
        )
        self._planned()

    def follow(self) -> None:
        """Record the plan if it has changed."""
        if self._session.plan != self._plan:
            self._planned()

    def _planned(self) -> None:
        session, predicted = self._session, None
        self._plan, self._plan_steps = session.plan, 0
        if self._profile is not None and session.context.workload is not None:
            predicted = figures(session.context.forecast(self._profile, session.plan))
        self._write(
            "plan",
            host_bytes=session.context.host_bytes,
            plan=session.plan.to_json(),
            predicted=predicted,
            origin=self._origin,
        )

    def after_step(self, row: Mapping[str, Any], spans: Sequence[Span]) -> None:
        self._plan_steps += 1
        self._last = (row, spans)
        if self._plan_steps == WARM_UP_STEPS:
            self._measured()

    def ended(self) -> None:
        if self._plan_steps > WARM_UP_STEPS:
            self._measured()

    def _measured(self) -> None:
        context = self._session.context
        if self._last is None or context.workload is None:
            return
        row, spans = self._last
        measured = context.measured(spans, self._session.plan)
        if measured is not None:
            self._profile, self._origin = measured, f"rates measured in step {row['step']}"
            predicted = figures(context.forecast(measured, self._session.plan))
            self._write("measured", profile=asdict(measured), predicted=predicted)

    def _write(self, event: str, **what: Any) -> None:
        append_row(self._folder.journal, {"event": event, "step": self._session.step, **what})


class NullJournal:
    """The journal of ranks other than the first, which records nothing."""

    def began(self, *, total: int, instead: Sequence[Alternative] = ()) -> None:
        pass

    def follow(self) -> None:
        pass

    def after_step(self, row: Mapping[str, Any], spans: Sequence[Span]) -> None:
        pass

    def ended(self) -> None:
        pass


def figures(forecast: Forecast) -> dict[str, Any]:
    return {
        "step_s": forecast.step_s,
        "lane_s": forecast.busy_s,
        "tokens": forecast.tokens,
        "written_bytes": forecast.written_bytes,
    }


def versions() -> dict[str, str]:
    installed = {"lohan": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, Any]:
    return {
        "node": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory_bytes(),
    }


# -- Metrics for external trackers, in addition to the run's own log -------------------------------


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics of a step or of an evaluation."""

    def close(self) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a logger is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: the package {name} is not installed; pip install 'lohan[{name}]', "
                f"or leave --log {name} out"
            )


def open_loggers(folder: RunFolder, config: Config, *, step: int) -> list[Logger]:
    """Open the configured loggers.

    The loggers will receive the rows of all steps after `step`. They may have received some of
    these rows before.
    """
    check_loggers(config.output.log)
    return [_LOGGERS[name](folder, config, step) for name in config.output.log]


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row, named by chart group: train/loss, busy/ssd."""
    for key, value in row.items():
        if key == "busy":
            yield from ((f"busy/{lane}", float(share)) for lane, share in value.items())
        elif key != "step" and isinstance(value, (int, float)):
            name = key.removeprefix("eval_")
            yield f"{'eval' if name != key else 'train'}/{name}", float(value)


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            log_dir=str(folder.path / "tensorboard"), purge_step=step + 1
        )

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder; W&B's settings (WANDB_PROJECT, WANDB_MODE) apply."""

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        import tomllib

        import wandb

        self._run: Any = wandb.init(
            dir=str(folder.path),
            name=folder.path.name,
            id=folder.tag(config),
            resume="allow",
            config=tomllib.loads(config.to_toml()),
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One Trackio run per run folder; Trackio's settings (TRACKIO_DIR, TRACKIO_SPACE_ID) apply.

    TRACKIO_PROJECT names the project; the default is "lohan". Trackio has no way to replace a row,
    so steps that a resumed run repeats are logged once, with their first values.
    """

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        import tomllib

        import trackio

        with redirect_stdout(sys.stderr):  # Trackio prints, but stdout may be read by a program
            self._run: Any = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "lohan"),
                name=folder.tag(config),
                resume="allow",
                config=tomllib.loads(config.to_toml()),
                auto_log_cpu=False,
                auto_log_gpu=False,
                embed=False,
            )
        # Trackio restores the next step of a resumed run, but has no public name for that step.
        self._last_step = int(getattr(self._run, "_next_step", 0)) - 1

    def log(self, row: Mapping[str, Any]) -> None:
        # The evaluation of a step is logged after the step. It may be missing if the run crashed.
        first = self._last_step if "eval_loss" in row else self._last_step + 1
        if row["step"] >= first:
            self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class MLflow:
    """One MLflow run per run folder, in RUN/mlflow/mlflow.db or in MLFLOW_TRACKING_URI.

    MLFLOW_EXPERIMENT_NAME names the experiment; the default is "lohan". Steps that a resumed run
    repeats are logged once, with their first values.
    """

    _TAG = "lohan.run"  # holds the tag of the run folder, by which a resumed run is found

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):  # both log the creation of every table
            logging.getLogger(name).setLevel(logging.WARNING)
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            file = folder.path / "mlflow" / "mlflow.db"
            file.parent.mkdir(exist_ok=True)
            uri = f"sqlite:///{file}"
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        tag, name = folder.tag(config), os.environ.get("MLFLOW_EXPERIMENT_NAME", "lohan")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        same = f"tags.`{self._TAG}` = '{tag}'"
        earlier = self._client.search_runs([number], filter_string=same, max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {self._TAG: tag}
            run = self._client.create_run(number, run_name=folder.path.name, tags=tags)
            self._id = run.info.run_id
            for key, value in _flat(config):
                self._client.log_param(self._id, key, value)
        self._last_step = {
            group: max((m.step for m in self._history(f"{group}/loss")), default=0)
            for group in ("train", "eval")
        }

    def _history(self, name: str) -> list[Any]:
        entries: list[Any] = self._client.get_metric_history(self._id, name)
        return entries

    def log(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        step = row["step"]
        if step > self._last_step["eval" if "eval_loss" in row else "train"]:
            now = int(time.time() * 1000)
            metrics = [Metric(name, value, now, step) for name, value in scalars(row)]
            self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run by their dotted names, as text that MLflow accepts."""
    import tomllib

    for key, value in tomllib.loads(config.to_toml()).items():
        for inner, entry in value.items() if isinstance(value, dict) else ((None, value),):
            yield key if inner is None else f"{key}.{inner}", str(entry)[:MLFLOW_PARAM_CHARS]


MLFLOW_PARAM_CHARS = 6000  # MLflow refuses longer values


_LOGGERS: dict[str, Callable[[RunFolder, Config, int], Logger]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


# -- Time, bytes and busy lanes of steps -----------------------------------------------------------
#
# A row of metrics covers the time from the end of the previous row to its own end.
#
# Work that a step leaves running, or that runs after its row is made (updates without overlap, a
# flush), counts in the next row. Nothing is lost or counted twice.


class HasCounters(Protocol):
    """An object that counts transferred bytes, such as a store or a session."""

    @property
    def counters(self) -> Counters: ...


class Meter:
    """A measurement of time, transferred bytes and busy lanes, which begins at its creation."""

    def __init__(self, moved: HasCounters, trace: Trace) -> None:
        self._moved, self._trace = moved, trace
        self._start_s, self._counters_before = time.perf_counter(), moved.counters
        self._aside_s, self._aside_read = 0.0, 0
        self.spans: list[Span] = []  # spans of the last row
        # Spans of the next row that were taken from the trace before work that `aside` excludes.
        self._spans: list[Span] = []
        trace.take_step()

    def row(self, *, tokens: int) -> dict[str, Any]:
        """Return the measurements since the last row."""
        stop, after = time.perf_counter(), self._moved.counters
        self.spans, self._spans = [*self._spans, *self._trace.take_step()], []
        busy = busy_s(self.spans, self._start_s, stop)
        step_s = stop - self._start_s - self._aside_s
        row = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "rss_bytes": rss_bytes(),
            "ssd_read_bytes": after.bytes_read
            - self._counters_before.bytes_read
            - self._aside_read,
            "ssd_written_bytes": after.bytes_written - self._counters_before.bytes_written,
            "busy": {lane: round(s / step_s, 4) for lane, s in busy.items() if s},
            "binding": max(busy, key=lambda lane: busy[lane]),
        }
        self._start_s, self._counters_before = stop, after
        self._aside_s, self._aside_read = 0.0, 0
        return row

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude work that is not part of a step, such as a snapshot or an evaluation.

        The lanes must be idle when the context is entered and left, which is not checked. Spans and
        bytes read in between are excluded, whatever step they belong to.
        """
        start, before = time.perf_counter(), self._moved.counters.bytes_read
        self._spans += self._trace.take_step()
        yield
        self._trace.take_step()
        self._aside_s += time.perf_counter() - start
        self._aside_read += self._moved.counters.bytes_read - before
