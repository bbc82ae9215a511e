"""Kinds of settings: parsers, TOML input and output, and errors for unknown keys.

A parser takes the raw value, the key as the user knows it, and the folder that relative paths start
from. It returns the parsed value or raises ConfigError.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.util.hub import cached_folder
from lohan.util.units import GiB, MiB, log_steps, parse_bytes, parse_interval

Parser = Callable[[Any, str, Path], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of value: its parser, its name in help, and its type on the command line."""

    metavar: str
    typed: Any
    parse: Parser
    # JSON Schema of the values that a TOML file may have. It may accept more than the parser does.
    schema: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __call__(self, value: Any, name: str, base: Path) -> Any:
        return self.parse(value, name, base)


def kind(metavar: str, typed: Any, **schema: Any) -> Callable[[Parser], Kind]:
    """Return a decorator that turns a parser into a kind; `schema` describes its values."""
    return partial(Kind, metavar, typed, schema=schema)


def some_of(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a schema that accepts one item or a list of items."""
    return [dict(item), {"type": "array", "items": dict(item)}]


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}


PROMPT_SUFFIXES = (".txt", ".jsonl", ".json")
RANK, HOST = "{rank}", "{host}"  # Placeholders in the name of a drive's folder.


def wrong(name: str, value: object, expected: str) -> ConfigError:
    shown = json.dumps(value, default=str) if not isinstance(value, float) else repr(value)
    kind = {str: "text ", bool: "", int: "", float: "", dict: "a table ", list: "a list "}
    return ConfigError(f"{name}: got {kind.get(type(value), '')}{shown}, wants {expected}")


def whole(least: int) -> Kind:
    @kind("N", int, type="integer", minimum=least)
    def parse(value: Any, name: str, base: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise wrong(name, value, f"a whole number of at least {least}")
        return value

    return parse


def real(expected: str, accepts: Callable[[float], bool]) -> Kind:
    @kind("X", float, type="number")
    def parse(value: Any, name: str, base: Path) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(name, value, expected)
        if not abs(value) < 2.0**1000 or not accepts(value):
            raise wrong(name, value, expected)
        return float(value)

    return parse


def choice(options: tuple[str, ...]) -> Kind:
    @kind("|".join(options), str, enum=list(options))
    def parse(value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or value not in options:
            raise wrong(name, value, "one of " + ", ".join(options))
        return value

    return parse


# The names of devices. An accelerator also has other names, among them those of torch's backends,
# and may have a number: cuda:1.
DEVICES = ("auto", "cpu", "accelerator", "emulated", "emulated-unified")
BACKENDS = ("cuda", "xpu", "mps", "npu")
_ACCELERATORS = "|".join(("accelerator", "gpu", *BACKENDS))
_DEVICE = re.compile(rf"{'|'.join(DEVICES)}|({_ACCELERATORS})(:\d+)?")
_SHOWN_DEVICES = (*DEVICES, "cuda", "cuda:N")


@kind("|".join(_SHOWN_DEVICES), str, type="string", pattern=f"^({_DEVICE.pattern})$")
def device_name(value: Any, name: str, base: Path) -> str:
    if not isinstance(value, str) or _DEVICE.fullmatch(value) is None:
        raise wrong(name, value, "one of " + ", ".join(_SHOWN_DEVICES))
    return value


def choices(options: tuple[str, ...]) -> Kind:
    """Return a kind that accepts one option, or a list of some of the options."""
    one = choice(options)

    @kind("|".join(options), list[str], anyOf=some_of({"enum": list(options)}))
    def parse(value: Any, name: str, base: Path) -> tuple[str, ...]:
        entries = value if isinstance(value, (list, tuple)) else [value]
        return tuple(dict.fromkeys(one(entry, name, base) for entry in entries))

    return parse


@kind("true|false", bool, type="boolean")
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


def model_path(value: Any, name: str, base: Path) -> Path:
    """Return a model folder, or the cached folder of a model named as on the hub."""
    path = one_path(value, name, base)
    return path if path.exists() else cached_folder(str(value)) or path


folder, file = Kind("DIR", Path, one_path, TEXT), Kind("FILE", Path, one_path, TEXT)
model_folder = Kind("DIR|ORG/NAME", Path, model_path, TEXT)


@kind("DIR", list[Path], anyOf=some_of(TEXT))
def drives(value: Any, name: str, base: Path) -> tuple[Path, ...]:
    """Parse folders, one per drive, whose names may have placeholders that each rank fills in."""
    entries = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(entries, (list, tuple)):
        raise wrong(name, value, "a list of folders")
    paths = tuple(one_path(entry, name, base) for entry in entries)
    if len(set(paths)) < len(paths):
        raise wrong(name, value, "each folder once")
    for entry in map(str, entries):
        for placeholder in re.findall(r"\{[^{}]*\}", entry):
            if placeholder not in (RANK, HOST):
                raise wrong(
                    name,
                    entry,
                    f"{RANK} or {HOST} where something is to be filled in, not {placeholder}",
                )
    return paths


@dataclass(frozen=True)
class Source:
    """A data file and its share of every batch, relative to the weights of the other files.

    Without a weight, all examples of all files are equally frequent.
    """

    path: Path
    weight: float | None = None

    def __str__(self) -> str:
        return str(self.path) if self.weight is None else f"{self.path}:{self.weight:g}"


@kind("FILE[:WEIGHT]", list[str], anyOf=some_of(TEXT))
def sources(value: Any, name: str, base: Path) -> tuple[Source, ...]:
    """Parse data files; raise ConfigError if only some of them have a weight."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    parsed = tuple(_source(entry, name, base) for entry in entries)
    unweighted = next((source for source in parsed if source.weight is None), None)
    if unweighted is not None and any(source.weight is not None for source in parsed):
        raise ConfigError(
            f"{name}: {unweighted.path} has no weight and other files have; give all of them one "
            f"({unweighted.path}:1), or none"
        )
    if not parsed:
        raise wrong(name, value, "a file, or a list of files")
    return parsed


def _source(entry: Any, name: str, base: Path) -> Source:
    """Parse a data file with an optional weight.

    If the whole text is an existing path, it is a file name, even if it ends like a weight.
    """
    path = one_path(entry, name, base)
    before, colon, weight = str(entry).rpartition(":")
    if not colon or path.exists():
        return Source(path)
    try:
        share = float(weight)
    except ValueError:
        return Source(path)
    if not 0 < share < 2.0**64:
        raise wrong(name, entry, f"a weight above 0, not {weight}")
    return Source(one_path(before, name, base), share)


@kind("NAME|FILE", str, **TEXT)
def template(value: Any, name: str, base: Path) -> str:
    """Parse the name of a chat template, or the path of a file."""
    if not isinstance(value, str) or not value.strip():
        raise wrong(name, value, "the name of a chat template, or a file")
    path = one_path(value, name, base)
    return str(path) if path.is_file() else value


@kind("NAME", list[str], anyOf=some_of(TEXT))
def names(value: Any, name: str, base: Path) -> tuple[str, ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise wrong(name, value, "a name, or a list of names")
    return tuple(entries)


@kind("FILE|TEXT", list[str], anyOf=some_of(TEXT))
def prompts(value: Any, name: str, base: Path) -> tuple[str, ...]:
    """Parse prompts and files of prompts; an entry with a file suffix must be an existing file."""
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


@kind("SIZE", str, type=["string", "number"])
def byte_size(value: Any, name: str, base: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong(name, value, "a byte size such as 8GiB")
    return parse_bytes(value, name=name)


@kind("RATE", str, type=["string", "number"])
def byte_rate(value: Any, name: str, base: Path) -> float:
    """Parse a rate in bytes per second."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return float(byte_size(text, name, base))


@kind("step|N|TIME|auto", str, type=["string", "integer"])
def interval(value: Any, name: str, base: Path) -> str:
    parse_interval(value, name=name)
    return str(value)


@kind("auto|off|N", str, type=["string", "integer"])
def logged_steps(value: Any, name: str, base: Path) -> str:
    log_steps(value)
    return str(value)


@kind("N|X", float, type="number", minimum=0)
def warmup_length(value: Any, name: str, base: Path) -> int | float:
    expected = "a number of steps, or a share of them between 0 and 1"
    number = real(expected, lambda x: 0 <= x < 2**53)(value, name, base)
    if number >= 1 and number != int(number):
        raise wrong(name, value, expected)
    return number if 0 < number < 1 else int(number)


@kind(
    "auto|off|N",
    str,
    anyOf=[
        {"enum": ["auto", "off"]},
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": "^[0-9]+$"},
    ],
)
def tile_tokens(value: Any, name: str, base: Path) -> int | str:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("auto", "off") or (type(value) is int and 0 < value < 2**63):
        tokens: int | str = value
        return tokens
    raise wrong(name, value, "auto, off, or a number of tokens of at least 1")


def assignment(text: str) -> tuple[str, Any]:
    """Split an assignment such as `train.lr=2e-5` into key and value.

    The value is parsed as in a TOML file; if that fails, it is plain text.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: no value; write it as KEY=VALUE, such as train.lr=2e-5")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def setting(default: Any, kind: Kind, help: str, *, metavar: str | None = None) -> Any:
    """Return a dataclass field with its kind and help text.

    If `default` is MISSING, the setting is required.
    """
    named = kind if metavar is None else replace(kind, metavar=metavar)
    return field(default=default, metadata={"kind": named, "help": help})


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """The description of one setting, for help and documentation."""

    section: str
    key: str
    kind: Kind
    help: str
    default: Any
    required: bool

    @property
    def dotted(self) -> str:
        """The name that overrides use, such as train.lr."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def help_without_default(self) -> str:
        """The help text without its last sentence, if that sentence names the default."""
        return self.help.partition(" Default: ")[0]

    @property
    def help_with_default(self) -> str:
        """The help text for the command line, which ends with the default if there is one."""
        if self.default is None or self.default is False or self.default == ():
            return self.help
        if self.default is True:
            return f"{self.help} On by default."
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{self.help} Default: {shown}."

    @property
    def option(self) -> str:
        """The name on the command line.

        It includes the section if the key alone would be ambiguous.
        """
        prefix = f"{self.section}-" if self.section in ("eval", "sample") else ""
        return f"--{'' if self.key == 'early_stop' else prefix}{self.key.replace('_', '-')}"


# Maps section and key to the field; the section "" is the top level.
Sections = Mapping[str, Mapping[str, FieldInfo]]


# Names in other trainers for settings that LoHan has.
OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "per_device_train_batch_size": "batch",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_length": "seq",
    "max_seq_length": "seq",
    "sequence_len": "seq",
    "cutoff_len": "seq",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "max_grad_norm": "clip",
    "gradient_clipping": "clip",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "output_dir": "out",
    "optim": "optimizer",
    "model_name_or_path": "model",
    "base_model": "model",
    "lora_r": "lora",
    "sample_packing": "pack",
    "packing": "pack",
    "durability": "commit_every",
}


def unknown_key(key: str, section: str, sections: Sections) -> ConfigError:
    """Return the error for a key that does not exist, with the nearest existing key.

    `section` and `sections` are the section of the key and the keys of all sections.
    """
    if not section and key in sections:
        first = next(iter(sections[key]))
        return ConfigError(f"{key}: a section; name one of its keys, such as {key}.{first}")
    written = f"[{section}] {key}" if section else key
    candidates = [*sections.get(section, {}), *(() if section else filter(None, sections))]
    for other, keys in sections.items():
        if key in keys:
            section_name = f"under [{other}]" if other else "at the top, above the first [section]"
            return ConfigError(f"{written}: unknown key; {key} goes {section_name}")
    plain = key.lower().replace("-", "_")
    for other_section, keys in sections.items():
        own_name = OTHER_NAMES.get(plain, "")
        if own_name in keys:
            named = own_name if other_section in ("", section) else f"[{other_section}] {own_name}"
            return ConfigError(f"{written}: unknown key; did you mean {named}?")
    near = difflib.get_close_matches(plain, candidates, n=1)
    if near:
        return ConfigError(f"{written}: unknown key; did you mean {near[0]}?")
    close = {
        other: f"[{other_section}] {other}"
        for other_section, keys in sections.items()
        if other_section not in ("", section)
        for other in keys
    }
    far = difflib.get_close_matches(plain, close, n=1)
    if far:
        return ConfigError(f"{written}: unknown key; did you mean {close[far[0]]}?")
    return ConfigError(f"{written}: unknown key; the keys here are {', '.join(candidates)}")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or raise ConfigError."""
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
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
