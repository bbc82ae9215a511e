"""Small files: checked JSON from untrusted files, and atomic replacement of files.

The size and depth of JSON are bounded, and a violation is reported as one error that names the
file. Python's parser exhausts the stack on deep nesting, and a value that it accepts may still be
too deep for code that copies or prints it. The depth is therefore checked here, once, for all
readers.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lohan.errors import ConfigError, LohanError, StorageIOError
from lohan.util.units import KiB, MiB, format_bytes

MAX_BYTES = 64 * MiB  # Python objects take about twenty times the space of their text.
MAX_DEPTH = 64  # Typical configs have about 5 levels.


class BadJson(ValueError):
    """Raised if JSON cannot be used; the message does not name the file."""


class NotJson(BadJson):
    """Raised if a text is not JSON, with the reason and the position."""

    def __init__(self, what: str, line: int, column: int) -> None:
        super().__init__(f"{what} at line {line}, column {column}")
        self.what, self.column = what, column


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or raise BadJson."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # Some messages end in "at", followed by the position.
        raise NotJson(what, error.lineno, error.colno) from None
    except UnicodeDecodeError as error:
        raise BadJson(f"not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise BadJson(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # For example a number with thousands of digits.
        raise BadJson(str(error)) from None
    check_depth(value, MAX_DEPTH)
    return value


def load_json(file: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value in a JSON file, or raise BadJson or OSError."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise BadJson(f"{format_bytes(size)}, more than {format_bytes(max_bytes)}")
        data = stream.read(size)
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"))


def read_object(
    file: Path, *, kind: type[LohanError], remedy: str, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Any problem is raised as an error of type `kind` that names the file and ends with `remedy`.
    """
    try:
        value = load_json(file, max_bytes=max_bytes)
    except OSError as error:
        raise kind(f"{file}: cannot be read: {error.strerror or error}; {remedy}") from None
    except BadJson as error:
        raise kind(f"{file}: not readable as JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise kind(f"{file}: holds {type(value).__name__}, not an object; {remedy}")
    return value


def json_type(value: object, *, other: str = "") -> str:
    """Return the type of a value in terms of JSON.

    For any other type, return its Python name, preceded by `other`.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), other + type(value).__name__)


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Raise BadJson if a value is nested more than `most` levels deep.

    The walk goes level by level, because a recursive one could itself exhaust the stack.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > most:
            raise BadJson(f"nested more than {most} levels deep")
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]


# -- Values from JSON, checked against annotations field by field ----------------------------------
#
# A checksum proves that bytes are those that were written, not that LoHan wrote them. Every field
# read from a file is therefore checked against its annotation, and an error names the field.
# Booleans are not accepted as numbers, and integers must fit into 64 bits.


LARGEST = 2**63 - 1

Made = TypeVar("Made")


class WrongType(ValueError):
    """Raised if a field has the wrong type; the message names the field, its value and the type."""


def from_json(cls: type[Made], data: object, *, name: str = "") -> Made:
    """Create a dataclass from an object with its fields; unknown fields raise WrongType."""
    value: Made = checked(data, cls, name)
    return value


def checked(value: Any, wanted: Any, name: str) -> Any:
    """Return a value converted to the annotation `wanted`, or raise WrongType.

    `name` is the name of the value in the message. Lists become tuples if the annotation is a
    tuple.
    """
    origin, parts = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(value, parts, name)
    if origin is tuple:
        return _tuple(value, parts, name)
    if origin in (list, Sequence):
        return [checked(item, parts[0], f"{name}[{at}]") for at, item in _items(value, name)]
    if origin in (dict, Mapping):
        _check(isinstance(value, dict), value, "an object", name)
        return {key: checked(item, parts[1], _dotted(name, key)) for key, item in value.items()}
    if is_dataclass(wanted):
        return _dataclass(value, wanted, name)
    return _scalar(value, wanted, name)


def _scalar(value: Any, wanted: Any, name: str) -> Any:
    if wanted is NoneType:
        _check(value is None, value, "null", name)
    elif wanted is bool:
        _check(isinstance(value, bool), value, "true or false", name)
    elif wanted is int:
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
        _check(whole, value, "a whole number of 64 bits", name)
    elif wanted is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _check(number and abs(value) <= LARGEST, value, "a finite number", name)
        return float(value)
    elif wanted is str:
        _check(isinstance(value, str), value, "text", name)
    else:
        raise TypeError(f"{name}: {wanted} is not a type that JSON has")
    return value


def _one_of(value: Any, kinds: Sequence[Any], name: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return checked(value, kind, name)
        except WrongType as problem:
            problems.append(problem)
    raise problems[0]


def _tuple(value: Any, parts: Sequence[Any], name: str) -> tuple[Any, ...]:
    items = _items(value, name)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(checked(item, parts[0], f"{name}[{at}]") for at, item in items)
    _check(len(items) == len(parts), value, f"a list of {len(parts)}", name)
    return tuple(
        checked(item, part, f"{name}[{at}]") for (at, item), part in zip(items, parts, strict=True)
    )


def _items(value: Any, name: str) -> list[tuple[int, Any]]:
    _check(isinstance(value, (list, tuple)), value, "a list", name)
    return list(enumerate(value))


def _dataclass(value: Any, cls: Any, name: str) -> Any:
    _check(isinstance(value, dict), value, "an object", name)
    hints = _hints(cls)
    declared = {field.name: field for field in fields(cls) if field.init}
    for key in value:
        if key not in declared:
            raise WrongType(f"{_dotted(name, str(key)[:80])} is not a known key")
    for key, field in declared.items():
        if key not in value and field.default is MISSING and field.default_factory is MISSING:
            raise WrongType(f"{_dotted(name, key)} is missing")
    return cls(**{key: checked(v, hints[key], _dotted(name, key)) for key, v in value.items()})


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _check(right: bool, value: Any, wanted: str, name: str) -> None:
    if not right:
        raise WrongType(f"{name or 'the whole'} is {_shown(value)}, wants {wanted}")


def _shown(value: Any) -> str:
    if isinstance(value, (bool, NoneType, list, dict)):
        return json_type(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


# -- File names that are read from files -----------------------------------------------------------

NAME_MAX, PATH_MAX = 255, 4095  # In bytes, on Linux.


def usable_path(text: str) -> bool:
    """Return whether the system accepts a text as a path, whether or not the file exists."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    if not name or b"\0" in name or len(name) > PATH_MAX:
        return False
    return all(len(part) <= NAME_MAX for part in name.split(b"/"))


# -- Atomic replacement: after a crash a file has either all old or all new bytes ------------------
#
# The new bytes are written to a hidden file with a fixed name in the same folder. The file is
# synced and renamed over the target, and then the folder is synced. A file that a killed process
# left at the hidden name is removed first. A symbolic link at the hidden name is removed, never
# followed; one at the target is replaced.


SUFFIX = ".lohan-tmp"


def write_atomic(
    path: Path, data: bytes, *, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Replace a file atomically and durably.

    Raise OSError if writing or renaming fails, in which case the old file is unchanged, or if the
    folder cannot be synced, in which case the new file is in place but might not survive a crash.
    Raise StorageIOError if a sync does not return in time. `mode` is restricted by the umask.
    """
    temporary = temporary or temporary_of(path)
    try:
        write_new(temporary, data, mode=mode)
        temporary.replace(path)
    except StorageIOError:  # If the drive hangs, removing the file would hang as well.
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a new file; its bytes are durable when this returns, but its name is not."""
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
    """Create a file, open it for writing and return its descriptor.

    An existing file at the path, such as one left by a killed process, is removed first. A symbolic
    link is removed as well, and not followed.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


# -- Syncs with a deadline ------------------------------------------------------------------------
#
# If a drive hangs, a sync blocks forever and no signal interrupts it. It therefore runs on a thread
# of its own, and the caller stops waiting at the deadline. The thread ends with the process.


VARIABLE = "LOHAN_SYNC_TIMEOUT"  # Environment variable with the deadline in seconds.
DEFAULT_S = 600.0  # A drive that writes back a cache of many GiB may take minutes.


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
    """Run `call`, and re-raise its error. Raise StorageIOError if the call takes too long."""
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
            f"{path}: a sync has not returned after {limit_s:g} s, so it is unknown what the"
            f" drive has; check it (dmesg, iostat), or give it longer with {VARIABLE} (seconds)"
        )
    if raised:
        raise raised[0]


def sync_file(fd: int, path: Path) -> None:
    sync_in_time(lambda: os.fsync(fd), path)


def sync_path(path: Path) -> None:
    """Sync a file that has been closed."""
    with path.open("rb") as file:
        sync_file(file.fileno(), path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(fd, folder)
    finally:
        os.close(fd)


# -- Output files that an option names -------------------------------------------------------------


_LOOKED_AT = 64 * KiB  # Bytes searched for the mark at the beginning and at the end of a file.


@dataclass(frozen=True)
class OutputFile:
    """An output file that an option names.

    An existing file is replaced only if LoHan has written it, which is recognised by `mark`. A
    symbolic link is kept, and the file that it points to is replaced.
    """

    path: Path
    remedy: str  # The next move if it cannot be written, such as "choose another -o".
    what: str  # The kind of file, such as "a report".
    # A part of every file of this kind, near its beginning or its end.
    mark: bytes

    def check(self) -> Path:
        """Return the path with links resolved; raise ConfigError if it must not be written.

        Call this at the beginning of a command whose work takes time.
        """
        target = Path(os.path.realpath(self.path))
        if not target.parent.is_dir():
            raise ConfigError(f"{self.path}: no such folder; create it or {self.remedy}")
        try:
            foreign = target.is_dir() or (target.is_file() and not self._is_ours(target))
        except OSError as error:
            raise self._unwritable(error) from None
        if foreign:
            raise ConfigError(
                f"{self.path}: exists and is not {self.what} that lohan has written, so it "
                f"was left unchanged; {self.remedy}"
            )
        return target

    def write(self, data: bytes) -> None:
        target = self.check()
        try:
            if target.exists() and not target.is_file():  # For example a pipe or a terminal.
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
