"""The run folder: what lies where, whose it is, and its logs.

RUN/.lohan-run      the mark of a run: its id, its store's name, and the names in the folder that
                    are the run's own; nothing else in it is ever removed or replaced
RUN/run.toml        the resolved config
RUN/metrics.jsonl   one object per committed step, and one per evaluation (with eval_loss)
RUN/journal.jsonl   versions, plans and what was predicted and measured, for `lohan report`
RUN/samples.jsonl   what the model said to the sample prompts, one object each time
RUN/data/           the tokenised data; RUN/eval-data/ that of evaluation
RUN/store/          the training state, unless --ssd names other places; of several ranks
                    RUN/store-rank0of2/ and so on
RUN/model/          the fine-tuned Hugging Face folder; RUN/best/ that of the best evaluation,
                    RUN/ema/ that of the averaged weights
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from lohan.config import Config, load_config
from lohan.config_parse import HOST, RANK
from lohan.errors import ConfigError, StorageIOError
from lohan.model.shards import Ranks, parse_store_name
from lohan.util.atomic import write_atomic
from lohan.util.json_file import BadJson, parse_json
from lohan.util.typed import WrongType, checked

MARK = ".lohan-run"
STORE, SNAPSHOTS = "store", "snapshots"
FORMAT, VERSION = "lohan-run", 1
LONGEST_NAME = 100  # bytes of a folder's name that its store's name repeats


@dataclass(frozen=True)
class Mark:
    """What makes a folder a run's: `store` names its stores on other drives, `names` are the files
    and folders in it that are the run's own, there or not."""

    id: str
    store: str
    names: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_file(folder / MARK, json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def new_mark(folder: Path) -> Mark:
    """Of a new run: no other run, however its folder is called, has this name for its store."""
    own = uuid4().hex[:12]
    name = folder.resolve().name.encode()[:LONGEST_NAME].decode(errors="ignore") or "run"
    return Mark(own, f"lohan-{name}-{own}")


def read_mark(folder: Path) -> Mark | None:
    """None: the folder is not marked."""
    file = folder / MARK
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise ValueError(f"format {fields['format']} {fields['version']}")
        store = str(fields["store"])
        if not store or "/" in store:
            raise ValueError(f"store is {store!r}")
        return Mark(str(fields["id"]), store, tuple(map(str, fields["names"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageIOError(
            f"{file}: cannot be read: {error.strerror}; check its permissions"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: cannot be understood ({error}); it was altered or damaged, or is of another "
            "version of lohan; restore it"
        ) from None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def mark(self) -> Mark | None:
        return read_mark(self.path)

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def trace_of(self, ranks: Ranks) -> Path:
        """Every rank writes down its own lanes."""
        return self.trace if ranks.first else self.path / f"trace-rank{ranks.rank}.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def eval_data(self) -> Path:
        return self.path / "eval-data"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def ema(self) -> Path:
        return self.path / "ema"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def config(self) -> Config:
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder (no run.toml in it); give the folder that "
                "`lohan train --out` wrote"
            )
        return load_config(self.config_file)

    def names(self, config: Config) -> set[str]:
        """Files and folders that a run with these settings makes in its folder."""
        output, found = config.output, {MARK}
        found |= {p.name for p in (self.config_file, self.metrics_file, self.journal, self.data)}
        if config.eval.data is not None:
            found.add(self.eval_data.name)
        if config.sample.prompts:
            found.add(self.samples_file.name)
        if output.trace:
            found.add(self.trace.name)
        if config.budget.snapshot_every and config.budget.snapshot_dir is None:
            found.add(SNAPSHOTS)
        if not config.budget.ssd:
            found.add(STORE)
        return found | set(output.log) | {path.name for path in self.exports(config)}

    def exports(self, config: Config) -> list[Path]:
        """Folders of models that a run with these settings writes."""
        output, found = config.output, []
        if output.export:
            found.append(self.model)
        if output.export and config.train.ema:
            found.append(self.ema)
        if output.export_best:
            found.append(self.best)
        return found

    def snapshots(self, config: Config, ranks: Ranks | None = None) -> Path:
        name = (ranks or Ranks()).store_name(self.tag(config))
        return (config.budget.snapshot_dir or self.path / SNAPSHOTS) / name

    def tag(self, config: Config) -> str:
        """The name that tells this run's folders on a shared drive from those of others."""
        mark = self.mark
        return self._tag_by_path(config) if mark is None else mark.store

    def _tag_by_path(self, config: Config) -> str:
        """Of a run without a mark, as earlier versions made them: by the path that it was started
        with. Its settings have that path; the folder may have moved since."""
        paths = (config.out, self.path, self.path.resolve())
        tags = [f"lohan-{p.name}-{hashlib.sha256(bytes(p)).hexdigest()[:8]}" for p in paths]
        places = [place for place in self.places(config) if config.budget.ssd and place.is_dir()]
        there = {parse_store_name(p.name)[0] for place in places for p in place.iterdir()}
        return next((tag for tag in tags if tag in there), tags[0])

    def places(self, config: Config, rank: int = 0) -> list[Path]:
        """Directories that the store of a rank is spread over. In --ssd, {rank} stands for its
        number and {host} for the name of the machine."""
        if not config.budget.ssd:
            return [self.path]
        names = {RANK: str(rank), HOST: platform.node()}
        return [_filled_in(place, names) for place in config.budget.ssd]

    def store_name(self, config: Config) -> str:
        """The folder of the store in each of them, of a run with one rank."""
        return self.tag(config) if config.budget.ssd else STORE

    def store_dirs(self, config: Config, ranks: Ranks | None = None) -> list[Path]:
        """Where a rank has its store."""
        ranks = ranks or Ranks()
        name = ranks.store_name(self.store_name(config))
        return [place / name for place in self.places(config, ranks.rank)]


def _filled_in(place: Path, names: Mapping[str, str]) -> Path:
    text = str(place)
    for name, value in names.items():
        text = text.replace(name, value)
    return Path(text)


@contextmanager
def owner_only() -> Iterator[None]:
    """Files and folders that are made meanwhile can be read by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_file(file: Path, text: str) -> None:
    """A file of the run folder, replaced as a whole and durable when it returns."""
    try:
        write_atomic(file, text.encode())
    except OSError as error:
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> StorageIOError:
    again = shlex.quote(str(file.parent))
    return StorageIOError(
        f"{file}: cannot be written to: {error.strerror}; free some space, then "
        f"`lohan resume {again}`"
    )


def append_row(file: Path, row: dict[str, Any]) -> None:
    """One more line of a log, durable when it returns. A line that a crash has cut is ended
    first."""
    line = json.dumps(row).encode() + b"\n"
    try:
        with file.open("ab+") as log:
            size = log.seek(0, os.SEEK_END)
            if size and os.pread(log.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            log.write(line)
            log.flush()
            os.fsync(log.fileno())
    except OSError as error:
        raise _unwritable(file, error) from None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only, each with a step: a crash may have cut one, and others follow it."""
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        try:
            row = parse_json(line)
        except BadJson:
            continue
        try:
            checked(row, dict[str, Any], "it")
            if checked(row.get("step"), int, "step") < 0:
                raise WrongType("step is negative")
        except WrongType as error:
            raise ConfigError(
                f"{file}, line {number}: not a row of a run's log: {error}; remove that line"
            ) from None
        yield row


def step_rows(folder: RunFolder) -> list[dict[str, Any]]:
    rows = read_rows(folder.metrics_file)
    return [row for row in rows if "step" in row and "eval_loss" not in row]


def eval_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder.metrics_file) if "step" in row and "eval_loss" in row]


def settle_logs(folder: RunFolder, *, step: int, last: Sequence[dict[str, Any]]) -> None:
    """After a crash: the logs hold each committed step and its evaluation once and nothing else.

    The manifest carries the `last` rows, since a crash can come between commits and log.
    """
    steps = {row["step"]: row for row in step_rows(folder)}
    for row in last:
        steps.setdefault(row["step"], row)
    evaluations = {row["step"]: row for row in eval_rows(folder)}
    rows = sorted([*steps.values(), *evaluations.values()], key=lambda row: row["step"])
    _rewrite(folder.metrics_file, [row for row in rows if row["step"] <= step])
    if folder.samples_file.exists():
        samples = {row["step"]: row for row in read_rows(folder.samples_file) if "step" in row}
        _rewrite(folder.samples_file, [row for row in samples.values() if row["step"] <= step])


def _rewrite(file: Path, rows: list[dict[str, Any]]) -> None:
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows))
