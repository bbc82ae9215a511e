"""How settings are read and written: a parser for each kind of value, TOML in and out, and what to
say about a key that does not exist."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.util.units import GiB, MiB, parse_bytes

# A parser takes the raw value, the key as the user knows it and the folder that relative paths
# start from; it returns the value or raises ConfigError.
Parser = Callable[[Any, str, Path], Any]

PROMPT_SUFFIXES = (".txt", ".jsonl", ".json")
RANK, HOST = "{rank}", "{host}"  # in the name of a drive's folder


def wrong(name: str, value: object, wants: str) -> ConfigError:
    shown = json.dumps(value, default=str) if not isinstance(value, float) else repr(value)
    kind = {str: "text ", bool: "", int: "", float: "", dict: "a table ", list: "a list "}
    return ConfigError(f"{name}: got {kind.get(type(value), '')}{shown}, wants {wants}")


def whole(least: int) -> Parser:
    def parse(value: Any, name: str, base: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise wrong(name, value, f"a whole number of at least {least}")
        return value

    return parse


def real(wants: str, accepts: Callable[[float], bool]) -> Parser:
    def parse(value: Any, name: str, base: Path) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(name, value, wants)
        if not abs(value) < 2.0**1000 or not accepts(value):
            raise wrong(name, value, wants)
        return float(value)

    return parse


def choice(options: tuple[str, ...]) -> Parser:
    def parse(value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or value not in options:
            raise wrong(name, value, "one of " + ", ".join(options))
        return value

    return parse


def choices(options: tuple[str, ...]) -> Parser:
    """Some of the options; a single one may stand without a list."""
    one = choice(options)

    def parse(value: Any, name: str, base: Path) -> tuple[str, ...]:
        entries = value if isinstance(value, (list, tuple)) else [value]
        return tuple(dict.fromkeys(one(entry, name, base) for entry in entries))

    return parse


def flag(value: Any, name: str, base: Path) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def one_path(value: Any, name: str, base: Path) -> Path:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise wrong(name, value, "a path")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "a path whose name is valid UTF-8") from None
    try:
        return base / Path(text).expanduser()
    except RuntimeError:
        raise wrong(name, value, "a path; there is no such home folder") from None


def drives(value: Any, name: str, base: Path) -> tuple[Path, ...]:
    """Folders, one per drive, each with names that every rank fills in for itself."""
    entries = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(entries, (list, tuple)):
        raise wrong(name, value, "a list of folders")
    paths = tuple(one_path(entry, name, base) for entry in entries)
    if len(set(paths)) < len(paths):
        raise wrong(name, value, "each folder once")
    for entry in map(str, entries):
        for found in re.findall(r"\{[^{}]*\}", entry):
            if found not in (RANK, HOST):
                raise wrong(
                    name, entry,
                    f"{RANK} or {HOST} where something is to be filled in, not {found}",
                )  # fmt: skip
    return paths


def names(value: Any, name: str, base: Path) -> tuple[str, ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise wrong(name, value, "a name, or a list of names")
    return tuple(entries)


def prompts(value: Any, name: str, base: Path) -> tuple[str, ...]:
    """Texts and files of texts; what ends like a file must be one."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise wrong(name, value, "a text, or a file with one prompt per line")
    return tuple(_prompt(entry, name, base) for entry in entries)


def _prompt(entry: str, name: str, base: Path) -> str:
    if not entry.endswith(PROMPT_SUFFIXES) or "\n" in entry:
        return entry
    path = one_path(entry, name, base)
    if not path.is_file():
        raise wrong(name, entry, f"a text, or a file that exists; there is no {path}")
    return str(path)


def byte_size(value: Any, name: str, base: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong(name, value, "a byte size such as 8GiB")
    return parse_bytes(value, name=name)


def byte_rate(value: Any, name: str, base: Path) -> float:
    """Bytes a second."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return float(byte_size(text, name, base))


def warmup_length(value: Any, name: str, base: Path) -> int | float:
    wants = "a number of steps, or a share of them between 0 and 1"
    number = real(wants, lambda x: 0 <= x < 2**53)(value, name, base)
    if number >= 1 and number != int(number):
        raise wrong(name, value, wants)
    return number if 0 < number < 1 else int(number)


def assignment(text: str) -> tuple[str, Any]:
    """`train.lr=2e-5` as key and value; the value as in a TOML file, or else plain text."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: no value; write it as KEY=VALUE, such as train.lr=2e-5")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def setting(default: Any, parse: Parser, metavar: str, help: str) -> Any:
    """A dataclass field with all that is known of it; MISSING as default makes it required."""
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help})


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field as documentation needs it."""

    section: str
    key: str
    metavar: str
    help: str
    default: Any
    required: bool
    parse: Parser

    @property
    def dotted(self) -> str:
        """The name that overrides use, such as train.lr."""
        return f"{self.section}.{self.key}" if self.section else self.key


Sections = Mapping[str, Mapping[str, FieldInfo]]  # section -> key -> field; "" is the top


def unknown_key(key: str, section: str, sections: Sections) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    if not section and key in sections:
        first = next(iter(sections[key]))
        return ConfigError(f"{key}: a section; name one of its keys, such as {key}.{first}")
    written = f"[{section}] {key}" if section else key
    here = [*sections.get(section, {}), *(() if section else filter(None, sections))]
    for other, known in sections.items():
        if key in known:
            where = f"under [{other}]" if other else "at the top, above the first [section]"
            return ConfigError(f"{written}: unknown key; {key} goes {where}")
    near = difflib.get_close_matches(key.lower().replace("-", "_"), here, n=1)
    if near:
        return ConfigError(f"{written}: unknown key; did you mean {near[0]}?")
    close = {
        other: f"[{place}] {other}"
        for place, known in sections.items()
        if place not in ("", section)
        for other in known
    }
    far = difflib.get_close_matches(key.lower().replace("-", "_"), close, n=1)
    if far:
        return ConfigError(f"{written}: unknown key; did you mean {close[far[0]]}?")
    return ConfigError(f"{written}: unknown key; the keys here are {', '.join(here)}")


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; check --config") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check --config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; correct that place") from None


def toml_value(value: Any, *, size: bool = False) -> str:
    if size:
        for unit, suffix in ((GiB, "GiB"), (MiB, "MiB")):
            if value % unit == 0:
                return f'"{value // unit}{suffix}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


ACTIVATIONS = (
    "holistic", "recompute", "inputs", "all", "static", "capuchin", "checkmate", "g10",
)  # fmt: skip


def activations(value: Any, name: str, base: Path) -> str:
    """One of the ways, or a plan file."""
    if isinstance(value, str) and value in ACTIVATIONS:
        return value
    if isinstance(value, str) and value.endswith(".json"):
        return str(one_path(value, name, base))
    raise wrong(name, value, f"one of {', '.join(ACTIVATIONS)}, or a plan file (.json)")
