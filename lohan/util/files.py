"""Small files: JSON from outside, checked, and files that are replaced as a whole.

JSON has a bounded size and depth, or is refused with one error that names the file.

Python's parser runs out of stack on deep nesting, and what it accepts may still be too deep for
those that copy or print the value. So the depth is bounded here, once, for all readers.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lohan.errors import ConfigError, LohanError, StorageIOError
from lohan.util.units import KiB, MiB, format_bytes

MAX_BYTES = 64 * MiB  # Python objects take some twenty times the room of their text
MAX_DEPTH = 64  # configs have 5 levels or so


class BadJson(ValueError):
    """What is wrong, without the name of the file."""


class NotJson(BadJson):
    """A text that is not JSON: what is wrong, and where."""

    def __init__(self, what: str, line: int, column: int) -> None:
        super().__init__(f"{what} at line {line}, column {column}")
        self.what, self.line, self.column = what, line, column


def parse_json(text: str | bytes) -> Any:
    """The value of a text; BadJson if there is none that can be used."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # of some of its messages the place is a part
        raise NotJson(what, error.lineno, error.colno) from None
    except UnicodeDecodeError as error:
        raise BadJson(f"not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise BadJson(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # a number with thousands of digits
        raise BadJson(str(error)) from None
    check_depth(value, MAX_DEPTH)
    return value


def load_json(file: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a file; BadJson or OSError if there is none that can be used."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise BadJson(f"{format_bytes(size)}, more than {format_bytes(max_bytes)}")
        data = stream.read(size)
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"))


def read_object(
    file: Path, *, kind: type[LohanError], remedy: str, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """As `load_json`, of a file that must hold an object; what is wrong becomes a `kind` that names
    the file and ends with `remedy`."""
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
    """What a value is, in the words of JSON; `other`: before the name of any other type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), other + type(value).__name__)


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Level by level: a recursive walk would be what it guards against."""
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


# -- Values from JSON checked against annotations, field by field ----------------------------------
#
# A dataclass in, a dataclass out.
#
# A checksum says that bytes are those that were written, not that the writer was LoHan. So every
# field that is read from a file has the type that its annotation says, or there is an error that
# names it. Numbers that are true or false are not numbers, and whole numbers fit into 64 bits.


LARGEST = 2**63 - 1

Made = TypeVar("Made")


class WrongType(ValueError):
    """Which field it is, what it is, and what it should be."""


JSON_KEY = "json key"


def json_key(key: str) -> dict[str, str]:
    """Metadata of a dataclass field that has another name in JSON, the one it had first."""
    return {JSON_KEY: key}


def _key_of(field: Field[Any]) -> str:
    return str(field.metadata.get(JSON_KEY, field.name))


def json_object(value: Any) -> dict[str, Any]:
    """A dataclass as an object, by the keys that its fields have in JSON."""
    return {_key_of(f): v for f, v in zip(fields(value), asdict(value).values(), strict=True)}


def from_json(cls: type[Made], data: object, *, name: str = "") -> Made:
    """A dataclass from an object with its fields; more than those are refused."""
    made: Made = checked(data, cls, name)
    return made


def checked(value: Any, wanted: Any, name: str) -> Any:
    """The value as an annotation has it (lists become tuples where it says so), or WrongType."""
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
    known = {_key_of(field): field for field in fields(cls) if field.init}
    for key in value:
        if key not in known:
            raise WrongType(f"{_dotted(name, str(key)[:80])} is not a known key")
    for key, field in known.items():
        if key not in value and field.default is MISSING and field.default_factory is MISSING:
            raise WrongType(f"{_dotted(name, key)} is missing")
    named = ((known[key].name, key, v) for key, v in value.items())
    return cls(**{own: checked(v, hints[own], _dotted(name, key)) for own, key, v in named})


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


# -- Names of files that come out of files ---------------------------------------------------------

NAME_MAX, PATH_MAX = 255, 4095  # bytes, on Linux


def usable_path(text: str) -> bool:
    """Whether the system takes a text as a path, be there a file or not."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    if not name or b"\0" in name or len(name) > PATH_MAX:
        return False
    return all(len(part) <= NAME_MAX for part in name.split(b"/"))


# -- Files replaced as a whole: after a crash the old bytes or the new ones are there --------------
#
# The new bytes go to a hidden file of a fixed name in the same folder, which is synced and renamed
# over the target; then the folder is synced. What a killed process left under that name goes first.
# A symbolic link at the hidden name is removed, never followed; one at the target is replaced.


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
