"""A folder that takes another's place: complete or not there at all.

All is written to a hidden folder next to the target, synced, then renamed. The folder that it
replaces is set aside first and removed last; after a crash in between it is put back. A journal
next to the target says which two folders these are, by their inodes: another folder at such a name
is not touched. One process at a time does this, by a lock file next to the target. The exports that
a run makes by itself carry a mark with the run's id and what was written: only such a folder is
replaced without being asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lohan.errors import BudgetError, ModelError, StorageIOError
from lohan.store.files import StoreLock
from lohan.util.atomic import sync_folder, write_atomic
from lohan.util.json_file import checked, load_json
from lohan.util.units import MiB, counted, format_bytes

MARK = ".lohan-exported"
PARTIAL, REPLACED, JOURNAL = "lohan-partial", "lohan-replaced", "lohan-journal"
LOCK = "lohan-lock"
DIGESTED = 16 * MiB  # files up to this size are known by their content, larger ones by their time
_EXPORTED = (
    r"(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template"
    r"|adapter_config|preprocessor_config|processor_config|.*\.index)\.json"
    r"|.*\.(safetensors|jinja|model)|merges\.txt|vocab\.txt"
)


def check_target(target: Path, *, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target}: is a file, not a folder; give another --out")
    content = [path.name for path in target.iterdir()] if target.is_dir() else []
    if not content:
        return
    files = counted(len(content), "file")
    if not overwrite:
        raise ModelError(
            f"{target}: exists and holds {files}; give another --out, or add --overwrite"
        )
    if "config.json" not in content and not any(n.endswith(".safetensors") for n in content):
        raise ModelError(
            f"{target}: holds {files} and no model, it is not overwritten; give another --out"
        )


def target_check(target: Path, *, overwrite: bool, mark: str | None) -> Callable[[], None]:
    """What must hold whenever the target is about to be replaced."""
    if mark is not None:
        return partial(check_own, target, mark)
    return partial(check_target, target, overwrite=overwrite)


def check_unmarked(target: Path) -> None:
    """Of a run of an earlier version, whose exports have no mark: refuses a folder that holds
    anything but what an export writes."""
    content = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    strange = [name for name in content if not re.fullmatch(_EXPORTED, name)]
    if strange or (os.path.lexists(target) and not target.is_dir()):
        what = f"holds {strange[0]!r}" if strange else "is a file"
        raise ModelError(
            f"{target} {what}, and the run exports its model there; move it away, or set "
            "export = false under [output] and use `lohan export` later"
        )


def check_space(target: Path, needed: int) -> None:
    existing = next(path for path in target.parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + 16 * MiB:
        raise BudgetError(
            f"{target}: the export needs {format_bytes(needed)}, {format_bytes(free)} free on "
            f"{existing}; free some space or give --out on another drive"
        )


@contextmanager
def replacing(
    target: Path, *, check: Callable[[], None], mark: str | None = None
) -> Iterator[Path]:
    """A fresh folder that takes the target's place at the end, or vanishes on any error. A target
    that is a symbolic link stays one. `check` raises if the target may not be replaced; it is asked
    again at the end, since writing takes long."""
    target = target.resolve()
    created = [path for path in target.parents if not path.exists()]
    folder, old = _hidden(target, PARTIAL), _hidden(target, REPLACED)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _recover_leftovers(target)
            check()
            try:
                folder.mkdir()
                _note(target, folder)
                yield folder
                if mark is not None:
                    write_mark(folder, mark)
                sync_folder(folder)
                check()
                if target.exists():
                    _note(target, folder, target)
                    target.rename(old)
                try:
                    folder.rename(target)
                except BaseException:
                    if old.exists():
                        old.rename(target)
                    raise
                sync_folder(target.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                if target.exists():
                    shutil.rmtree(old, ignore_errors=True)
                if not old.exists():
                    _forget(target)
    except BaseException as error:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise StorageIOError(
                f"{target}: export failed: {error.strerror} ({error.filename}); nothing was left "
                "behind, check space and permissions"
            ) from error
        raise


def write_mark(folder: Path, run: str) -> None:
    body = {"run": run, "files": _files(folder)}
    write_atomic(folder / MARK, (json.dumps(body, indent=1) + "\n").encode())


def check_own(target: Path, run: str) -> None:
    """Refuses a folder unless it is empty, or holds what this run has exported and nothing else."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if not os.path.lexists(target):
        return
    why, mark = "is not an export of this run", target / MARK
    with suppress(OSError, ValueError):  # BadJson and WrongType are such
        body = checked(load_json(mark), dict[str, Any], MARK)
        if body.get("run") == run:
            known = checked(body.get("files"), dict[str, str], "files")
            strange = [name for name, what in _files(target).items() if known.get(name) != what]
            if not strange:
                return
            why = f"holds {strange[0]!r}, which this run has not written or not like that"
    raise ModelError(
        f"{target} {why}, and the run exports its model there; move it away, or set export = false "
        "under [output] and use `lohan export` later"
    )


def _files(folder: Path) -> dict[str, str]:
    """What all files hold, by their path, without the mark."""
    found = {}
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*files, *links):
            path = Path(place) / name
            found[str(path.relative_to(folder))] = _held_by(path)
    found.pop(MARK, None)
    return found


def _held_by(path: Path) -> str:
    """Weights are not read again for this: a time tells whether someone has changed them."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return f"link to {path.readlink()}" if path.is_symlink() else "not a file"
    if status.st_size > DIGESTED:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _hidden(target: Path, what: str) -> Path:
    return target.parent / f".{target.name}.{what}"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """The holder is the only one at work on the target; the kernel frees it with a process."""
    file = _hidden(target, LOCK)
    lock = StoreLock([target.parent], name=file.name)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def _note(target: Path, partial: Path, replaced: Path | None = None) -> None:
    """Which folders of this export a later one may settle."""
    body = {PARTIAL: partial.stat().st_ino, REPLACED: replaced.stat().st_ino if replaced else 0}
    write_atomic(_hidden(target, JOURNAL), (json.dumps(body) + "\n").encode())


def _recover_leftovers(target: Path) -> None:
    """Of processes that were killed: a folder that was set aside and not yet replaced is put back,
    the rest goes. What is there by these names and is not of an export of ours is refused."""
    journal, known = _hidden(target, JOURNAL), {PARTIAL: 0, REPLACED: 0}
    with suppress(OSError, ValueError):
        known |= checked(load_json(journal), dict[str, int], JOURNAL)
    for what in (REPLACED, PARTIAL):
        path = _hidden(target, what)
        if not os.path.lexists(path):
            continue
        with suppress(OSError):
            path.rmdir()  # an empty one: of an export that died before its journal
            continue
        if path.is_symlink() or path.stat().st_ino != known[what]:
            raise ModelError(
                f"{path}: is there and is not known to be of an export to {target}, it is left as "
                "it is; move it away, or give another --out"
            )
        if what == REPLACED and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)
    if journal.exists():
        _forget(target)


def _forget(target: Path) -> None:
    """The journal goes when what it names is gone, also after a power cut."""
    sync_folder(target.parent)
    _hidden(target, JOURNAL).unlink(missing_ok=True)
