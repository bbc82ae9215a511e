"""JSON from outside: of a bounded size and depth, or one error that names the file.

Python's parser runs out of stack on deep nesting, and what it accepts may still be too deep for
those that copy or print the value. So the depth is bounded here, once, for all readers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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
    _check_depth(value, max_depth)
    return value


def load_json(file: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a file; BadJson or OSError if there is none that can be used."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise BadJson(f"{format_bytes(size)}, more than {format_bytes(max_bytes)}")
        data = stream.read(size)
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"))


def read_json(
    file: Path, *, kind: type[LohanError], remedy: str, max_bytes: int = MAX_BYTES
) -> Any:
    """As `load_json`; what is wrong becomes a `kind` that names the file and ends with `remedy`."""
    try:
        return load_json(file, max_bytes=max_bytes)
    except OSError as error:
        raise kind(f"{file}: cannot be read: {error.strerror or error}; {remedy}") from None
    except BadJson as error:
        raise kind(f"{file}: not readable as JSON: {error}; {remedy}") from None


def read_object(
    file: Path, *, kind: type[LohanError], remedy: str, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """As `read_json`, of a file that must hold an object."""
    value = read_json(file, kind=kind, remedy=remedy, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise kind(f"{file}: holds {type(value).__name__}, not an object; {remedy}")
    return value


def json_type(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _check_depth(value: Any, most: int) -> None:
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
