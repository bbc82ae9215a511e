"""The run folder: its layout, its logs, and the stores that belong to it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from lohan.checkpoint.replacing import check_own, export_digest
from lohan.checkpoint.resharding import StoreSet, current_set, find_sets, reshard_to_world
from lohan.config import BASE, Config, load_config
from lohan.data.cache import CACHE_FILES
from lohan.errors import ConfigError, StorageIOError, StoreError
from lohan.model.layout import RankInfo, parse_store_name
from lohan.store.admin import find_snapshot, restore
from lohan.store.files import MANIFEST, StoreLock, remove_empty
from lohan.store.log import read_latest
from lohan.util.display import Display
from lohan.util.files import (
    BadJson,
    WrongType,
    checked,
    from_json,
    load_json,
    parse_json,
    sync_file,
    sync_folder,
    temporary_of,
    usable_path,
    write_all,
    write_atomic,
)
from lohan.util.settings import HOST, RANK

# -- Layout, ownership and logs --------------------------------------------------------------------
#
# RUN/.lohan-run      the mark of a run: its id, the name of its store, the names in the folder that
#                     belong to the run, and how the run ended; nothing else in the folder is ever
#                     removed or replaced
# RUN/run.toml        the resolved config
# RUN/metrics.jsonl   one object per committed step, and one per evaluation (with eval_loss)
# RUN/journal.jsonl   versions, plans, predictions and measured rates, for `lohan report`
# RUN/samples.jsonl   the answers to the sample prompts, one object per sampling
# RUN/data/           the tokenised training data
# RUN/eval-data/      the tokenised evaluation data
# RUN/store/          the training state, unless --ssd names other folders; with several ranks,
#                     RUN/store-rank0of2/ and so on
# RUN/model/          the fine-tuned model as a Hugging Face folder
# RUN/best/           the model of the best evaluation
# RUN/ema/            the model with averaged weights


MARK = ".lohan-run"
STORE, SNAPSHOTS = "store", "snapshots"
FORMAT, VERSION = "lohan-run", 1
# Steps after which rates are measured; the first steps with a plan run on demand.
WARM_UP_STEPS = 3
LONGEST_NAME = 100  # bytes of the folder's name that are repeated in the store's name


@dataclass(frozen=True)
class Finished:
    """How a run ended: step, planned steps, and digests of its settings and exports."""

    step: int
    total: int
    settings: str
    exports: dict[str, str | None]


@dataclass(frozen=True)
class Mark:
    """The mark that makes a folder a run folder.

    `store` is the name of its stores on other drives. `names` are the files and folders in the run
    folder that belong to the run, whether or not they exist.
    """

    id: str
    store: str
    names: tuple[str, ...] = ()
    finished: Finished | None = None
    spare: tuple[str, ...] = ()  # stores of a Trainer's output folder that may be removed

    def write(self, folder: Path) -> None:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("finished", "spare"):
            if not body[name]:
                del body[name]
        write_file(folder / MARK, json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def new_mark(folder: Path) -> Mark:
    """Return the mark of a new run, with a store name that no other run has."""
    identity = uuid4().hex[:12]
    name = folder.resolve().name.encode()[:LONGEST_NAME].decode(errors="ignore") or "run"
    return Mark(identity, f"lohan-{name}-{identity}")


def read_mark(folder: Path) -> Mark | None:
    """Return the mark of a folder, or None if it has none."""
    file = folder / MARK
    try:
        fields = checked(load_json(file), dict[str, Any], "it")
        if (header := (fields.pop("format"), fields.pop("version"))) != (FORMAT, VERSION):
            raise ValueError(f"format {header}")
        mark = from_json(Mark, fields)
        if not mark.store or not usable_path(mark.store) or "/" in mark.store:
            raise ValueError(f"store is {mark.store!r}")
        return mark
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageIOError(
            f"{file}: cannot be read: {error.strerror}; check its permissions"
        ) from None
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{file}: cannot be understood ({error}); it was altered or damaged, or is of another "
            "version of lohan; restore it"
        ) from None


@dataclass(frozen=True)
class _Inside:
    """An attribute that is the path of the file or folder `name` in the run folder."""

    name: str

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    config_file = _Inside("run.toml")
    metrics_file = _Inside("metrics.jsonl")
    journal = _Inside("journal.jsonl")
    samples_file = _Inside("samples.jsonl")
    trace = _Inside("trace.json")
    data = _Inside("data")
    eval_data = _Inside("eval-data")
    model = _Inside("model")
    ema = _Inside("ema")
    best = _Inside("best")

    @property
    def mark(self) -> Mark | None:
        return read_mark(self.path)

    def trace_of(self, ranks: RankInfo) -> Path:
        """Return the trace file of the rank that `ranks` describes. Each rank has its own file."""
        return self.trace if ranks.first else self.path / f"trace-rank{ranks.rank}.json"

    def config(self, changes: Mapping[str, Any] | None = None) -> Config:
        """Return the settings of the run; `changes` maps names of settings to new values."""
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder (no run.toml in it); give the folder that "
                "`lohan train --out` wrote"
            )
        loaded = load_config(self.config_file, overrides=changes)
        return loaded if loaded.init is None else replace(loaded, model=self.base)

    @property
    def base(self) -> Path:
        """The model folder that a run from random weights starts from."""
        return self.path / BASE

    def names(self, config: Config) -> set[str]:
        """Return the files and folders that a run with these settings creates in its folder."""
        output, names = config.output, {MARK}
        names |= {p.name for p in (self.config_file, self.metrics_file, self.journal, self.data)}
        if config.eval.data is not None:
            names.add(self.eval_data.name)
        if config.sample.prompts:
            names.add(self.samples_file.name)
        if config.init is not None:
            names.add(BASE)
        if output.trace:
            names.add(self.trace.name)
        if config.budget.snapshot_every and config.budget.snapshot_dir is None:
            names.add(SNAPSHOTS)
        if not config.budget.ssd:
            names.add(STORE)
        return names | set(output.log) | {path.name for path in self.exports(config)}

    def exports(self, config: Config) -> list[Path]:
        """Return the model folders that a run with these settings writes."""
        output, exports = config.output, []
        if output.export:
            exports.append(self.model)
        if output.export and config.train.ema:
            exports.append(self.ema)
        if output.export_best:
            exports.append(self.best)
        return exports

    def snapshots(self, config: Config, ranks: RankInfo | None = None) -> Path:
        name = (ranks or RankInfo()).store_name(self.tag(config))
        return (config.budget.snapshot_dir or self.path / SNAPSHOTS) / name

    def tag(self, config: Config) -> str:
        """Return the name that distinguishes this run's folders on a shared drive from others.

        A folder that no run has claimed yet has a provisional name, derived from its path.
        """
        mark = self.mark
        if mark is not None:
            return mark.store
        return f"lohan-{config.out.name}-{hashlib.sha256(bytes(config.out)).hexdigest()[:8]}"

    def ssd_folders(self, config: Config, rank: int = 0) -> list[Path]:
        """Return the directories over which the store of a rank is spread.

        In --ssd, {rank} stands for the number of the rank and {host} for the name of the machine.
        """
        if not config.budget.ssd:
            return [self.path]
        host = platform.node()
        paths = [str(one) for one in config.budget.ssd]
        return [Path(text.replace(RANK, str(rank)).replace(HOST, host)) for text in paths]

    def all_ssd_folders(self, config: Config, ranks: int) -> list[Path]:
        """Return the --ssd directories of all ranks that exist on this machine."""
        folders = dict.fromkeys(p for rank in range(ranks) for p in self.ssd_folders(config, rank))
        return list(filter(Path.is_dir, folders))

    def store_name(self, config: Config) -> str:
        """Return the name of the store's folder in each directory, for one rank."""
        return self.tag(config) if config.budget.ssd else STORE

    def store_dirs(self, config: Config, ranks: RankInfo | None = None) -> list[Path]:
        """Return the folders of a rank's store."""
        ranks = ranks or RankInfo()
        name = ranks.store_name(self.store_name(config))
        return [one / name for one in self.ssd_folders(config, ranks.rank)]


_user_umask: int | None = None  # the umask before `owner_only`, while inside it


@contextmanager
def owner_only() -> Iterator[None]:
    """Give nobody but the owner access to files and folders created in the `with` body."""
    global _user_umask
    before, outer = os.umask(0o077), _user_umask
    _user_umask = before if outer is None else outer
    try:
        yield
    finally:
        os.umask(before)
        _user_umask = outer


@contextmanager
def users_umask() -> Iterator[None]:
    """Create files and folders in the `with` body with the user's umask, even in `owner_only`."""
    if _user_umask is None:
        yield
        return
    before = os.umask(_user_umask)
    try:
        yield
    finally:
        os.umask(before)


def write_file(file: Path, text: str) -> None:
    """Replace a file of the run folder atomically; it is durable on return."""
    try:
        write_atomic(file, text.encode())
    except OSError as error:
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> StorageIOError:
    quoted = shlex.quote(str(file.parent))
    return StorageIOError(
        f"{file}: cannot be written to: {error.strerror}; free some space, then "
        f"`lohan resume {quoted}`"
    )


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Append a line to a log; it is durable on return.

    If a crash truncated the last line, terminate it first.
    """
    line = json.dumps(row).encode() + b"\n"
    try:
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.lseek(fd, 0, os.SEEK_END)
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            write_all(fd, line)
            sync_file(fd, file)
        finally:
            os.close(fd)
        if not size:
            sync_folder(file.parent)
    except OSError as error:
        raise _unwritable(file, error) from None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a log and check that each has a step.

    Skip lines that a crash truncated; complete lines may follow them.
    """
    if file.exists():
        yield from parse_rows(file.read_bytes(), file)


def parse_rows(data: bytes, file: Path, *, first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the rows in `data`, a part of a log that begins with line number `first`."""
    for number, line in enumerate(data.split(b"\n"), first):
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
    return [row for row in read_rows(folder.metrics_file) if "eval_loss" not in row]


def eval_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder.metrics_file) if "eval_loss" in row]


def repair_logs(folder: RunFolder, *, step: int, last: Sequence[dict[str, Any]]) -> int:
    """Repair the logs after a crash, and return how many uncommitted steps they contained.

    Afterwards the logs contain each step up to `step`, the last committed one, and its evaluation
    exactly once. `last` are the rows in the latest manifest, which may be missing from the log:
    a crash can occur after a commit and before the committed rows are logged.
    """
    steps = {row["step"]: row for row in step_rows(folder)}
    for row in last:
        steps.setdefault(row["step"], row)
    evaluations = {row["step"]: row for row in eval_rows(folder)}
    rows = sorted([*steps.values(), *evaluations.values()], key=lambda row: row["step"])
    _rewrite(folder.metrics_file, [row for row in rows if row["step"] <= step])
    if folder.samples_file.exists():
        samples = {row["step"]: row for row in read_rows(folder.samples_file)}
        _rewrite(folder.samples_file, [row for row in samples.values() if row["step"] <= step])
    return sum(number > step for number in steps)


def _rewrite(file: Path, rows: list[dict[str, Any]]) -> None:
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows))


# -- Claiming, resuming and clearing a run folder --------------------------------------------------
#
# A new run claims its folder by writing a mark (`Mark`), and only if the names that it will use are
# free. From then on these names belong to the run, and nothing else is removed or replaced.


CLAIM = f"{MARK}.lock"


def sets_of(folder: RunFolder, config: Config, *, rank: int = 0) -> list[StoreSet]:
    """Return the run's stores on this machine, complete or not.

    The search begins in the directories of `rank`'s own store.
    """
    return find_sets(partial(folder.ssd_folders, config), folder.store_name(config), seen_by=rank)


def stores_of(folder: RunFolder, config: Config) -> StoreSet:
    """Return the complete set of stores with the highest step that all ranks have committed.

    Raise StoreError if there is none.
    """
    sets = sets_of(folder, config)
    stores = current_set(sets)
    if stores is not None:
        return stores
    check_resumable(folder, config)
    part = sets[0]
    places = ", ".join(f"rank {rank} at {part.dirs[rank][0]}" for rank in part.missing())
    raise StoreError(
        f"the run in {folder.path} has {part.describe()}; not on this machine: {places}; mount "
        "the drives, or bring the stores here"
    )


def check_vacant(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if the folder contains a run, or a name that the run would use."""
    if os.path.lexists(folder.path) and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; give a folder as --out")
    mark, previous = folder.mark, _config_of(folder)
    sets = [] if mark is None and previous is None else sets_of(folder, previous or config)
    begun = any((path / MANIFEST).exists() for stores in sets for path in stores.primaries)
    if begun:
        raise ConfigError(
            f"{folder.path} holds a run already; continue it with "
            f"`lohan resume {shlex.quote(str(folder.path))}`, or give another --out"
        )
    if (
        previous is not None
        and folder.metrics_file.exists()
        and (mark is not None or folder.journal.exists())
    ):
        raise ConfigError(_without_store(folder, previous))
    check_names(folder, config)
    check_exports(folder, config)
    check_snapshots(folder, config)


def check_snapshots(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if snapshots and store would have the same path."""
    snapshots = folder.snapshots(config).resolve()
    if snapshots in [path.resolve() for path in folder.store_dirs(config)]:
        raise ConfigError(
            f"snapshot_dir {snapshots.parent} is where --ssd has the run's store; give a folder of "
            "its own for snapshots, on another drive if there is one"
        )


def _config_of(folder: RunFolder) -> Config | None:
    """Return the settings in run.toml, or None if no run has written it."""
    if not folder.config_file.is_file():
        return None
    try:
        return folder.config()
    except ConfigError:
        if folder.mark is not None:
            raise
        return None


def check_names(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if a file that is not part of the run has a name that the run would use."""
    wanted, mark = folder.names(config), folder.mark
    created = set(mark.names) if mark is not None else set()
    present = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
    # The stores of all ranks count as one name, and so do their traces.
    names = {
        n: re.sub(r"trace-rank\d+\.json", "trace.json", parse_store_name(n)[0]) for n in present
    }
    conflicts = sorted(name for name in present if names[name] in wanted - created)
    if conflicts:
        remedy = "" if mark is not None else ", or remove it if an earlier start has left it"
        raise ConfigError(
            f"{folder.path} holds {conflicts[0]!r}, which does not belong to this run, and a "
            f"run writes a file or folder of that name; give another --out, or move it away{remedy}"
        )


def inputs_of(config: Config) -> list[tuple[str, Path]]:
    """Return the files and folders that the run reads, each with the option that named it."""
    inputs = [("--model", config.model), ("--init", config.init), ("--tokenizer", config.tokenizer)]
    inputs += [("--data", source.path) for source in config.data]
    inputs += [("--eval-data", config.eval.data)]
    return [(option, path) for option, path in inputs if path is not None]


def check_exports(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if an export would replace anything but the run's own folders."""
    budget, mark = config.budget, folder.mark
    ranks = range(max(1, budget.gpus)) if budget.ssd else ()
    needed = inputs_of(config)
    needed += [("--ssd", path) for rank in ranks for path in folder.ssd_folders(config, rank)]
    needed += [("snapshot_dir", budget.snapshot_dir)] if budget.snapshot_dir is not None else []
    for target in folder.exports(config):
        real = target.resolve()
        for option, path in needed:
            resolved = path.resolve()
            if real == resolved or real in resolved.parents:
                raise ConfigError(
                    f"{option} {path} lies in {target}, where the run would export its model; "
                    "give another --out, or set export = false under [output]"
                )
        check_own(target, "" if mark is None else mark.id)


def check_export_to(folder: RunFolder, config: Config, out: Path) -> None:
    """Raise ConfigError if the export folder `out` contains the run or anything it depends on."""
    needed = [("the run", folder.path), *inputs_of(config)]
    needed += [("its store", path) for path in folder.store_dirs(config)]
    needed += [("its snapshot", folder.snapshots(config))]
    real = out.resolve()
    for what, path in needed:
        resolved = path.resolve()
        if real == resolved or real in resolved.parents:
            raise ConfigError(f"--out {out} holds {what} ({path}); give another --out")


def export_mark(folder: RunFolder, config: Config) -> str | None:
    """Check the run's export folders and return the id that they are marked with."""
    check_exports(folder, config)
    return None if folder.mark is None else folder.mark.id


def final_exports(folder: RunFolder, config: Config) -> dict[str, Path]:
    """Return the folders that a run exports at its end, each with the name of its content."""
    lora, wanted = bool(config.train.lora), {}
    if config.output.export:
        wanted["adapter" if lora else "fine-tuned model"] = folder.model
        if config.train.ema:
            wanted["averaged adapter" if lora else "averaged weights"] = folder.ema
    return wanted


def note_finished(folder: RunFolder, *, step: int, total: int) -> None:
    """Record in the mark that the run has made its final exports after `step` of `total` steps."""
    config, mark = folder.config(), folder.mark
    if mark is not None:
        ended = Finished(step, total, _settings_digest(config), _digests(folder, config, mark))
        replace(mark, finished=ended).write(folder.path)


def finished_at(folder: RunFolder, config: Config) -> tuple[int, int] | None:
    """Return the final step and the planned steps of a run, or None if the run is not finished.

    A run counts as finished if its store is at the final step, its exports are intact, and its
    settings have not changed.
    """
    mark = folder.mark
    if mark is None or (ended := mark.finished) is None or not final_exports(folder, config):
        return None
    finished = Finished(
        ended.step, ended.total, _settings_digest(config), _digests(folder, config, mark)
    )
    if finished != ended or None in finished.exports.values():
        return None
    store = current_set(sets_of(folder, config))
    return (ended.step, ended.total) if store and store.step() == ended.step else None


def _digests(folder: RunFolder, config: Config, mark: Mark) -> dict[str, str | None]:
    targets = final_exports(folder, config).values()
    return {target.name: export_digest(target, mark.id) for target in targets}


def _settings_digest(config: Config) -> str:
    """Return a digest of the settings that does not depend on the run's folder."""
    return hashlib.sha256(replace(config, out=Path("/")).to_toml().encode()).hexdigest()


def check_original(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if the folder is a copy of a run with stores or snapshots elsewhere.

    The original run uses the same stores and snapshots.
    """
    first, budget = RunFolder(config.out), config.budget
    if not (budget.ssd or budget.snapshot_dir) or not first.config_file.is_file():
        return
    if first.path.samefile(folder.path) or first.tag(config) != folder.tag(config):
        return
    raise ConfigError(
        f"{folder.path} is a copy of the run in {first.path}, and both use one store; continue "
        f"that one with `lohan resume {shlex.quote(str(first.path))}`, or move it away"
    )


@contextmanager
def folder_lock(folder: RunFolder) -> Iterator[None]:
    """Create the folder and lock it, so that only one process at a time starts a run in it.

    The lock is held until the store itself is locked. Created folders that are empty at the end are
    removed.
    """
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        with users_umask():  # The user's umask applies, because exported models may be shared.
            folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot be made: {error.strerror}; give another --out"
        ) from error
    try:
        lock = StoreLock([folder.path], name=CLAIM)
        try:
            yield
        finally:
            (folder.path / CLAIM).unlink(missing_ok=True)
            lock.release()
    finally:
        remove_empty(created[::-1])


def claim_names(folder: RunFolder, config: Config, mark: Mark, *, rank: int = 0) -> None:
    """Write the mark that makes this a folder of the run, with the names that the run will create.

    Raise a ConfigError if a file that is not part of the run has such a name. Stores left by a run
    that ended before its first commit are removed. The first rank of every machine calls this.
    """
    before = folder.mark
    if before is not None and before.id == mark.id:
        return  # another machine that shares the folder has claimed it
    check_names(folder, config)
    if before is not None:
        _remove_stores(folder, _config_of(folder) or config, rank=rank)
    names = folder.names(config) | set(before.names if before is not None else ())
    replace(mark, names=tuple(sorted(names))).write(folder.path)


def claim_new_names(folder: RunFolder, config: Config) -> None:
    """Claim the names that a resumed run with changed settings uses for the first time."""
    mark = folder.mark
    if mark is None:
        return
    check_names(folder, config)
    names = tuple(sorted({*mark.names, *folder.names(config)}))
    if names != mark.names:
        replace(mark, names=names).write(folder.path)


def _remove_stores(folder: RunFolder, config: Config, *, rank: int = 0) -> None:
    """Remove stores without a committed step; raise StoreError if a store has one."""
    for stores in sets_of(folder, config, rank=rank):
        for path in stores.primaries:
            manifest = read_latest(path)
            if manifest is not None and manifest.meta.get("progress", {}).get("step"):
                raise StoreError(f"{path} holds a run already; give another --out")
        stores.remove()


def check_resumable(folder: RunFolder, config: Config) -> None:
    """Raise StoreError if the run has no store, or no step that all ranks have committed."""
    sets = sets_of(folder, config)
    if not sets:
        raise StoreError(_without_store(folder, config))
    if any(not stores.missing() for stores in sets) and current_set(sets) is None:
        raise StoreError(
            f"the run in {folder.path} died while its model was being loaded; start it again with "
            "the same `lohan train` command"
        )


def _without_store(folder: RunFolder, config: Config) -> str:
    """Return a message about a run without its store: what remains, and what to do."""
    mount = "mount its drive if it is elsewhere, or " if config.budget.ssd else ""
    message = f"the run in {folder.path} has no store at {folder.store_dirs(config)[0]}"
    if not folder.metrics_file.exists():
        return f"{message}; {mount}start it again with the same `lohan train` command"
    parts = {
        "the exported model": folder.model,
        "the best one": folder.best,
        "the averaged one": folder.ema,
    }
    remaining = ", ".join(["its log", *(what for what, path in parts.items() if path.exists())])
    return (
        f"{message}, so it can neither go on nor be exported; what is left: {remaining}; "
        f"{mount}train again with `lohan train --config {shlex.quote(str(folder.config_file))} "
        "--out DIR`"
    )


def reshard_stores(folder: RunFolder, config: Config, world: int, display: Display) -> None:
    """Reshard the run's stores to `world` ranks, before the run resumes."""
    from lohan.engine.logged import fold_log  # imported here because it imports torch

    reshard_to_world(
        partial(folder.ssd_folders, config),
        folder.store_name(config),
        world,
        note=display.note,
        progress=lambda done, total: display.advance("resharding", done, total),
        fold=fold_log,
    )


def undo_start(folder: RunFolder, config: Config) -> None:
    """Remove everything that a run created in the folder it claimed, after it failed to start."""
    _remove_stores(folder, config)
    mark = folder.mark
    for data in (folder.data, folder.eval_data):
        if mark is not None and data.name in mark.names:
            _remove_data(data)
    if config.init is not None:
        from lohan.train.inputs import remove_base  # imported here because it imports torch

        remove_base(folder.base)
    folder.config_file.unlink(missing_ok=True)
    temporary_of(folder.config_file).unlink(missing_ok=True)
    # If a failing drive prevents a part of the removal, the mark stays. The remaining files
    # then still belong to the run, and the next run that claims the folder removes them.
    names = set() if mark is None else {*mark.names} - {MARK}
    created = (*folder.store_dirs(config), *(folder.path / name for name in names))
    if not any(path.exists() for path in created):
        (folder.path / MARK).unlink(missing_ok=True)


def _remove_data(path: Path) -> None:
    """Remove the files that preparing data writes, and their folder if it is then empty."""
    try:
        meta = checked(load_json(path / "meta.json"), dict[str, Any], "it")
        fields = checked(meta.get("fields", {}), dict[str, Any], "fields")
    except (OSError, ValueError):
        fields = {}
    files = [name for name in fields if "/" not in name]
    names = [*CACHE_FILES, *(f"{name}.{end}" for name in files for end in ("bin", "npy"))]
    for name in (*names, *(f"{name}.part" for name in names)):
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def lost_with_snapshot(folder: RunFolder, config: Config) -> bool:
    """Return whether the store is missing from the run folder and a snapshot of it exists.

    A store on another drive does not count as lost, because the drive might not be mounted.
    """
    if config.budget.ssd or sets_of(folder, config):
        return False
    try:
        find_snapshot(folder.snapshots(config))
    except StoreError:
        return False
    return True


def restore_last_snapshot(folder: RunFolder, config: Config, display: Display) -> None:
    """Restore the store of a run from its last snapshot if the store was lost."""
    if not lost_with_snapshot(folder, config):
        return
    dirs, snapshots = folder.store_dirs(config), folder.snapshots(config)
    display.note(f"the store in {dirs[0]} is missing; restoring the snapshot in {snapshots}")
    restore(snapshots, dirs, durability="step").close()
