"""Files that are replaced as a whole: after a crash the old bytes or the new ones are there.

The new bytes go to a hidden file of a fixed name in the same folder, which is synced and renamed
over the target; then the folder is synced. What a killed process left under that name goes first.
A symbolic link at the hidden name is removed, never followed; one at the target is replaced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import ConfigError, StorageIOError
from lohan.util.units import KiB

SUFFIX = ".lohan-tmp"


def write_atomic(
    path: Path, data: bytes, *, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Raises OSError, and then leaves the old file as it was, or StorageIOError if a sync does not
    come back. `mode` is narrowed by the umask."""
    temporary = temporary or temporary_of(path)
    try:
        write_new(temporary, data, mode=mode)
        temporary.replace(path)
    except StorageIOError:  # a drive that hangs would keep another call as well
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """The bytes are durable when it returns, the name is not."""
    fd = create(path, mode=mode)
    try:
        write_all(fd, data)
        sync_file(fd, path)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def create(path: Path, *, mode: int = 0o666) -> int:
    """Opens a new file, for writing. What a killed process left at its name goes first; a link that
    someone has put there goes too, and is not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


# -- Syncs with a deadline ------------------------------------------------------------------------
#
# A drive that hangs keeps such a call for ever, and no signal ends it. So it runs on a thread of
# its own, and the caller stops waiting when the deadline passes; the thread ends with the process.


VARIABLE = "LOHAN_SYNC_TIMEOUT"  # seconds
DEFAULT_S = 600.0  # a drive that writes back a cache of many GiB may take minutes


def sync_timeout_s() -> float:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"{VARIABLE}={text} is no number of seconds above 0; set one, or unset it"
        )
    return seconds


def sync_in_time(call: Callable[[], None], path: str | Path) -> None:
    """Calls it and passes on what it raises; StorageIOError if it has not come back in time."""
    limit_s = sync_timeout_s()
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="lohan-sync", daemon=True).start()
    if not done.wait(limit_s):
        raise StorageIOError(
            f"{path}: a sync has not come back after {limit_s:g} s, so nothing is known of what the"
            f" drive has; check it (dmesg, iostat), or give it longer with {VARIABLE} (seconds)"
        )
    if raised:
        raise raised[0]


def sync_file(fd: int, path: Path) -> None:
    sync_in_time(lambda: os.fsync(fd), path)


def sync_path(path: Path) -> None:
    """Of a file that has been closed."""
    with path.open("rb") as file:
        sync_file(file.fileno(), path)


def sync_folder(folder: Path) -> None:
    """Makes the names in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(fd, folder)
    finally:
        os.close(fd)


# -- Files that an option names -------------------------------------------------------------------


_LOOKED_AT = 64 * KiB  # at the beginning and at the end of a file


@dataclass(frozen=True)
class OutputFile:
    """A file that an option names. What is there already is replaced only if LoHan has written it,
    which is known by `mark`; a link there stays, and what it leads to is the file."""

    path: Path
    remedy: str  # if it cannot be written, such as "choose another -o"
    what: str  # such as "a report"
    mark: bytes  # part of every file of the kind, near its beginning or its end

    def check(self) -> Path:
        """The file behind links; refused if it may not be written. For the beginning of a command
        whose work takes time."""
        target = Path(os.path.realpath(self.path))
        if not target.parent.is_dir():
            raise ConfigError(f"{self.path}: no such folder; create it or {self.remedy}")
        try:
            foreign = target.is_dir() or (target.is_file() and not self._is_ours(target))
        except OSError as error:
            raise self._unwritable(error) from None
        if foreign:
            raise ConfigError(
                f"{self.path}: is there and is not {self.what} that lohan has written, it is left "
                f"as it is; {self.remedy}"
            )
        return target

    def write(self, data: bytes) -> None:
        target = self.check()
        try:
            if target.exists() and not target.is_file():  # a pipe or a terminal
                target.write_bytes(data)
            else:
                write_atomic(target, data)
        except OSError as error:
            raise self._unwritable(error) from None

    def _is_ours(self, target: Path) -> bool:
        with target.open("rb") as file:
            begin = file.read(_LOOKED_AT)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOOKED_AT))
            return not begin or self.mark in begin or self.mark in file.read(_LOOKED_AT)

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.path}: cannot be written: {error.strerror}; {self.remedy}")
