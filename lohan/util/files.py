"""JSON from outside: of a bounded size and depth, or one error that names the file.

Python's parser runs out of stack on deep nesting, and what it accepts may still be too deep for
those that copy or print the value. So the depth is bounded here, once, for all readers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lohan.errors import LohanError
from lohan.util.units import MiB, format_bytes

MAX_BYTES = 64 * MiB  # Python objects take some twenty times the room of their text
MAX_DEPTH = 64  # configs have 5 levels or so


class BadJson(ValueError):
    """What is wrong, without the name of the file."""


class NotJson(BadJson):
    """A text that is not JSON: what is wrong, and where."""

    def __init__(self, what: str, line: int, column: int) -> None:
        super().__init__(f"{what} at line {line}, column {column}")
        self.what, self.line, self.column = what, line, column


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a text; BadJson if there is none that can be used."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotJson(error.msg, error.lineno, error.colno) from None
    except UnicodeDecodeError as error:
        raise BadJson(f"not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise BadJson(f"nested more than {max_depth} levels deep") from None
    except ValueError as error:  # a number with thousands of digits
        raise BadJson(str(error)) from None
    check_depth(value, max_depth)
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
    known = {field.name: field for field in fields(cls) if field.init}
    for key in value:
        if key not in known:
            raise WrongType(f"{_dotted(name, str(key)[:80])} is not a known key")
    for key, field in known.items():
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
