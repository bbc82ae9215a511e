"""Atomic replacement of a folder by an export, and atomic addition of files to a folder.

An export is written to a hidden folder next to the target, synced, and renamed. The folder that it
replaces is renamed first and removed last; if the process dies in between, the next export puts it
back. A journal next to the target identifies both folders by inode, so an unrelated folder of the
same name is not touched. A lock file next to the target admits one process at a time. Every export
contains a mark with the id of its run and a record of the files written. A run replaces a folder on
its own only if the mark shows that this run has written it.

`save_pretrained` adds its files to a folder that may hold anything else, so that folder is not
replaced as a whole; see "Adding files to a folder" below.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lohan.errors import BudgetError, ModelError, StorageIOError
from lohan.store.files import StoreLock, remove_empty
from lohan.util.files import checked, load_json, sync_folder, sync_path, write_atomic
from lohan.util.units import MiB, counted, format_bytes

MARK = ".lohan-exported"
EXPORTED = "export"  # the run id in the mark of an export that the user requested
PARTIAL, REPLACED, JOURNAL = "lohan-partial", "lohan-replaced", "lohan-journal"
LOCK = "lohan-lock"
DIGESTED = 16 * MiB  # Larger files are identified by size and time instead of a digest.


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
    recorded = _marked(target) or {}
    if changed_files := [
        name for name, what in _files(target).items() if recorded.get(name) != what
    ]:
        raise ModelError(
            f"{target}: holds {changed_files[0]!r}, which no export wrote or which has "
            "changed since, so it is not overwritten; move it away, or give another --out"
        )


def target_check(target: Path, *, overwrite: bool, mark: str | None) -> Callable[[], None]:
    """Return a function that raises an error if the target must not be replaced.

    If `mark` is the id of a run, the target may hold only what this run has exported. Otherwise,
    `overwrite` permits its replacement.
    """
    if mark is not None:
        return partial(check_own, target, mark)
    return partial(check_target, target, overwrite=overwrite)


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
    """Yield a new folder that replaces the target at the end, or is removed on any error.

    A target that is a symbolic link remains one. `check` raises if the target must not be replaced.
    It is called again at the end, because writing takes a long time.
    """
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
                write_mark(folder, mark or EXPORTED)
                for path in sorted(folder.rglob("*")):  # Another sync of a file is cheap.
                    sync_folder(path) if path.is_dir() else sync_path(path)
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


def export_digest(target: Path, run: str) -> str | None:
    """Return a digest that identifies this run's export in a folder.

    Return None if the folder holds no export of this run, or if a file has changed since then.
    """
    files = _marked(target, run)
    if files is None or _files(target) != files:
        return None
    return hashlib.sha256((target / MARK).read_bytes()).hexdigest()


def check_own(target: Path, run: str) -> None:
    """Raise ConfigError unless a folder is empty or holds only what this run has exported."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if not os.path.lexists(target):
        return
    why, recorded = "is not an export of this run", _marked(target, run)
    if recorded is not None:
        foreign_files = [
            name for name, what in _files(target).items() if recorded.get(name) != what
        ]
        if not foreign_files:
            return
        why = f"holds {foreign_files[0]!r}, which this run did not write or which has changed"
    raise ModelError(
        f"{target} {why}, and the run exports its model there; move it away, or set export = false "
        "under [output] and use `lohan export` later"
    )


def _marked(folder: Path, run: str | None = None, mark: str = MARK) -> dict[str, str] | None:
    """Return the fingerprint of each file that a folder's mark records, or None without a mark.

    If `run` is given, a mark with another run id counts as none. `mark` is the mark's file name.
    """
    with suppress(OSError, ValueError):  # BadJson and WrongType are ValueErrors
        body = checked(load_json(folder / mark), dict[str, Any], mark)
        if run is None or body.get("run") == run:
            files: dict[str, str] = checked(body.get("files"), dict[str, str], "files")
            return files
    return None


def _files(folder: Path) -> dict[str, str]:
    """Map the path of every file in a folder, except the mark, to its fingerprint."""
    contents = {}
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):
            path = Path(parent) / name
            contents[str(path.relative_to(folder))] = _held_by(path)
    contents.pop(MARK, None)
    return contents


def _held_by(path: Path) -> str:
    """Return a fingerprint of a file's content.

    Large files, that is weights, are identified by size and modification time instead of being
    read.
    """
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
    """Hold the target's lock, which the kernel releases if the process dies."""
    file = _hidden(target, LOCK)
    lock = StoreLock([target.parent], name=file.name)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def _note(target: Path, partial: Path, replaced: Path | None = None) -> None:
    """Write the journal, which lists the folders that a later export may recover or remove.

    `partial` is the folder that is being written, and `replaced` the folder that it replaces, if
    any.
    """
    body = {PARTIAL: partial.stat().st_ino, REPLACED: replaced.stat().st_ino if replaced else 0}
    write_atomic(_hidden(target, JOURNAL), (json.dumps(body) + "\n").encode())


def _recover_leftovers(target: Path) -> None:
    """Clean up after an export whose process was killed.

    A folder that was renamed but not yet replaced is put back; other leftovers are removed. A
    folder that has one of these names but does not match the journal is refused.
    """
    journal, recorded = _hidden(target, JOURNAL), {PARTIAL: 0, REPLACED: 0}
    with suppress(OSError, ValueError):
        recorded |= checked(load_json(journal), dict[str, int], JOURNAL)
    for what in (REPLACED, PARTIAL):
        path = _hidden(target, what)
        if not os.path.lexists(path):
            continue
        with suppress(OSError):
            path.rmdir()  # succeeds if an export died before it wrote its journal
            continue
        if path.is_symlink() or path.stat().st_ino != recorded[what]:
            raise ModelError(
                f"{path}: was not written by an export to {target} and was left "
                "unchanged; move it away, or give another --out"
            )
        if what == REPLACED and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)
    if journal.exists():
        _forget(target)


def _forget(target: Path) -> None:
    """Remove the journal after the removal of the folders that it names is durable."""
    sync_folder(target.parent)
    _hidden(target, JOURNAL).unlink(missing_ok=True)


# -- Adding files to a folder ----------------------------------------------------------------------
#
# All files are first written to a hidden folder inside the target. Renaming this folder marks it as
# complete. Its files are then installed by this process or, if this process is killed, by the next
# one that saves there. Installation first moves the files to be replaced into a subfolder, starting
# with the file that a loader opens first, and then moves the new files to their places, ending with
# that file. In between, a loader finds no model, but never a mixture of two. A mark in the target
# records the saved files. Only files that still match this record are replaced.


SAVED = "save_pretrained"  # the run id in the mark of a save
SAVED_MARK = ".lohan-saved"  # differs from MARK, because the target may also be an export
NEW, COMPLETE = ".lohan-export", ".lohan-saving"
REPLACED_SUBFOLDER = ".replaced"  # the subfolder of COMPLETE that holds the replaced files
SAVING = ".lohan-saving.lock"
MODEL_CARD = "README.md"  # `joining` keeps an existing one
_WEIGHTS = re.compile(r"(\w+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def joining(target: Path) -> Iterator[Path]:
    """Yield the path of a new folder, and add its files to `target` after the `with` body.

    The body must create the folder, with a mark (`write_mark`) that has SAVED as its run id. If the
    body fails, no file is added.
    """
    created = [path for path in (target, *target.parents) if not path.exists()]
    partial, complete = target / NEW, target / COMPLETE
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock = StoreLock([target], name=SAVING)
        try:
            _install(target)
            yield partial
            if (target / MODEL_CARD).exists() and (partial / MODEL_CARD).exists():
                (partial / MODEL_CARD).unlink()
                write_mark(partial, SAVED)
            check_joinable(target, _files(partial))
            partial.rename(complete)
            sync_folder(target)
            _install(target)
        finally:
            if _marked(partial, SAVED) is not None:
                shutil.rmtree(partial)
            (target / SAVING).unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        raise StorageIOError(
            f"{target}: saving failed: {error.strerror} ({error.filename}); check space and "
            "permissions"
        ) from error
    finally:
        remove_empty(created[::-1])


def check_joinable(target: Path, new: Mapping[str, str], *, stems: Collection[str] = ()) -> None:
    """Refuse to replace files that do not match the record of an earlier save.

    Weights that the same loader would read are included: files with the stem of one of the new
    weight files or with one of `stems`.
    """
    recorded = _marked(target, SAVED, SAVED_MARK) or {}
    for name in sorted({*new, *_weights_in(target, {*stems, *_stems(new)})}):
        path = target / name
        if os.path.lexists(path) and _held_by(path) not in (recorded.get(name), new.get(name)):
            raise ModelError(
                f"{target} holds {name!r}, which LoHan did not save there or which has changed "
                "since; it was left unchanged; give another folder, or move it away"
            )


def _stems(names: Iterable[str]) -> set[str]:
    return {match[1] for name in names if (match := _WEIGHTS.fullmatch(name))}


def _weights_in(folder: Path, stems: Collection[str]) -> set[str]:
    matches = (_WEIGHTS.fullmatch(path.name) for path in folder.iterdir())
    return {weights[0] for weights in matches if weights and weights[1] in stems}


def _begins_loading(name: str) -> bool:
    """Return whether a loader opens this weight file first: the index, or the only weight file."""
    match = _WEIGHTS.fullmatch(name)
    return match is not None and (match[3] is not None or match[2] is None)


def _install(target: Path) -> None:
    """Install the files of a complete hidden folder, if there is one.

    On an error the previous files are put back. If that is interrupted too, the next process that
    saves there continues the installation.
    """
    complete = target / COMPLETE
    new = None if complete.is_symlink() else _marked(complete, SAVED)
    if new is None:
        if complete.is_dir() and not _files(complete):
            shutil.rmtree(complete)  # All of its files are installed.
        return
    check_joinable(target, new)
    waiting = [name for name in new if os.path.lexists(complete / name)]
    old = {name for name in waiting if os.path.lexists(target / name)}
    old |= _weights_in(target, _stems(new)) - new.keys()
    try:
        _move(
            sorted(old, key=lambda name: not _begins_loading(name)),
            target,
            complete / REPLACED_SUBFOLDER,
        )
        _move(sorted(waiting, key=_begins_loading), complete, target)
        write_atomic(target / SAVED_MARK, (complete / MARK).read_bytes())
    except BaseException:
        installed = [name for name in new if not os.path.lexists(complete / name)]
        before = list(_files(complete / REPLACED_SUBFOLDER))
        _move(sorted(installed, key=lambda name: not _begins_loading(name)), target, complete)
        _move(sorted(before, key=_begins_loading), complete / REPLACED_SUBFOLDER, target)
        shutil.rmtree(complete)
        raise
    if (complete / REPLACED_SUBFOLDER).exists():
        shutil.rmtree(complete / REPLACED_SUBFOLDER)
    shutil.rmtree(complete)


def _move(names: Sequence[str], source: Path, to: Path) -> None:
    """Move the files `names` from folder `source` to folder `to`, in the given order.

    The folders are synced between the move of the file that a loader opens first and the other
    moves, so this order also holds after a power failure.
    """
    for number, name in enumerate(names):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if number and _begins_loading(name) != _begins_loading(names[number - 1]):
            sync_folder(source)
            sync_folder(to)
        (source / name).rename(to / name)
