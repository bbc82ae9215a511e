"""What the user wants of a run, and nothing that the planner can work out.

A `Config` comes from a TOML file, from command-line options laid over it, or both. Each field is
declared once with its parser and its help text; the file reader, the checks, the TOML writer,
`--help` and the reference page all work from that declaration (`fields_of`). `None` always means
"not given": LoHan decides.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.lr import SCHEDULES
from lohan.schedule import GRAD_MODES
from lohan.units import GiB, MiB, parse_bytes

DTYPES = ("fp32", "bf16", "fp16")
DURABILITIES = ("step", "checkpoint")

# A parser takes the raw value, the key as the user knows it and the folder that relative paths
# start from; it returns the value or raises ConfigError.
Parser = Callable[[Any, str, Path], Any]


def _wrong(name: str, value: object, wants: str) -> ConfigError:
    shown = json.dumps(value, default=str) if not isinstance(value, float) else repr(value)
    kind = {str: "text ", bool: "", int: "", float: "", dict: "a table ", list: "a list "}
    return ConfigError(f"{name}: got {kind.get(type(value), '')}{shown}, wants {wants}")


def _whole(least: int) -> Parser:
    def parse(value: Any, name: str, base: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise _wrong(name, value, f"a whole number of at least {least}")
        return value

    return parse


def _real(wants: str, accepts: Callable[[float], bool]) -> Parser:
    def parse(value: Any, name: str, base: Path) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(name, value, wants)
        if not math.isfinite(value) or not accepts(value):
            raise _wrong(name, value, wants)
        return float(value)

    return parse


def _choice(options: tuple[str, ...]) -> Parser:
    def parse(value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or value not in options:
            raise _wrong(name, value, "one of " + ", ".join(options))
        return value

    return parse


def _flag(value: Any, name: str, base: Path) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _path(value: Any, name: str, base: Path) -> Path:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise _wrong(name, value, "a path")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(name, value, "a path whose name is valid UTF-8") from None
    try:
        return base / Path(text).expanduser()
    except RuntimeError:
        raise _wrong(name, value, "a path; there is no such home folder") from None


def _paths(value: Any, name: str, base: Path) -> tuple[Path, ...]:
    entries = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(entries, (list, tuple)):
        raise _wrong(name, value, "a list of folders")
    paths = tuple(_path(entry, name, base) for entry in entries)
    if len(set(paths)) < len(paths):
        raise _wrong(name, value, "each folder once")
    return paths


def _bytes(value: Any, name: str, base: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong(name, value, "a byte size such as 8GiB")
    return parse_bytes(value, name=name)


def _warmup(value: Any, name: str, base: Path) -> int | float:
    wants = "a number of steps, or a share of them between 0 and 1"
    number = _real(wants, lambda x: 0 <= x < 2**53)(value, name, base)
    if number >= 1 and number != int(number):
        raise _wrong(name, value, wants)
    return number if 0 < number < 1 else int(number)


def _field(default: Any, parse: Parser, metavar: str, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: what is optimised and how."""

    steps: int | None = _field(
        None, _whole(1), "N", "Optimizer steps. Not given: as many as `epochs` needs."
    )
    epochs: float = _field(
        1.0,
        _real("a number above 0", lambda x: x > 0),
        "X",
        "Passes over the data; `steps` has precedence.",
    )
    batch: int = _field(8, _whole(1), "N", "Examples per optimizer step.")
    micro_batch: int | None = _field(
        None,
        _whole(1),
        "N",
        "Examples that go through a block at once. Changes memory and speed, not the result. "
        "Not given: the planner chooses.",
    )
    seq: int = _field(1024, _whole(2), "N", "Longest example in tokens; longer ones are cut.")
    lr: float = _field(1e-5, _real("a number above 0", lambda x: x > 0), "X", "Peak learning rate.")
    schedule: str = _field(
        "cosine", _choice(SCHEDULES), "|".join(SCHEDULES), "Course of the rate after warm-up."
    )
    warmup: int | float = _field(
        0, _warmup, "N|X", "Warm-up: a number of steps, or a share of all steps if below 1."
    )
    min_lr_ratio: float = _field(
        0.0,
        _real("a number from 0 to 1", lambda x: 0 <= x <= 1),
        "X",
        "Where linear and cosine end, as a share of `lr`.",
    )
    weight_decay: float = _field(
        0.0,
        _real("a number of at least 0", lambda x: x >= 0),
        "X",
        "Decoupled weight decay; norms and biases are exempt.",
    )
    beta1: float = _field(
        0.9,
        _real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "AdamW's decay rate of the first moment.",
    )
    beta2: float = _field(
        0.999,
        _real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "AdamW's decay rate of the second moment.",
    )
    eps: float = _field(
        1e-8, _real("a number above 0", lambda x: x > 0), "X", "AdamW's denominator term."
    )
    clip: float = _field(
        1.0,
        _real("a number of at least 0", lambda x: x >= 0),
        "X",
        "Largest global gradient norm; 0 turns clipping off.",
    )
    grad_offload: str = _field(
        "balanced",
        _choice(GRAD_MODES),
        "|".join(GRAD_MODES),
        "When updates run: after backward, during it one by one, during it pipelined, or partly "
        "in the next forward. Changes speed, not the result.",
    )
    overlap: bool = _field(
        True,
        _flag,
        "true|false",
        "Run I/O, updates and compute at the same time. Changes speed, not the result.",
    )
    dtype: str | None = _field(
        None,
        _choice(DTYPES),
        "|".join(DTYPES),
        "Compute type; the master copy always has fp32 precision. "
        "Not given: fp32 on a CPU, bf16 on an accelerator that has it, fp16 on others.",
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Warm-up in steps, a share rounded up."""
        if isinstance(self.warmup, int):
            return self.warmup
        return math.ceil(self.warmup * total_steps)


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """[budget]: what the run may use, and how safely it stores its state."""

    host: int | None = _field(
        None,
        _bytes,
        "SIZE",
        "Main memory the run may use, such as 8GiB. Not given: read from the machine.",
    )
    ssd: tuple[Path, ...] = _field(
        (),
        _paths,
        "DIR",
        "Folders on SSDs for the training state, one per drive. Not given: OUT/store.",
    )
    durability: str = _field(
        "step",
        _choice(DURABILITIES),
        "|".join(DURABILITIES),
        "step: every finished step survives a crash, at twice the disk space. "
        "checkpoint: half the space; a crash goes back to the last snapshot.",
    )
    snapshot_every: int = _field(
        0, _whole(0), "N", "Steps between full copies of the state; 0 means none."
    )
    snapshot_dir: Path | None = _field(  # noqa: RUF009
        None, _path, "DIR", "Where full copies go. Not given: OUT/snapshots."
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """[output]: what is written when training ends."""

    export: bool = _field(True, _flag, "true|false", "Export a Hugging Face folder to OUT/model.")
    export_dtype: str | None = _field(
        None, _choice(DTYPES), "|".join(DTYPES), "Type of exported weights. Not given: the model's."
    )
    trace: bool = _field(
        False, _flag, "true|false", "Write OUT/trace.json: what every lane did when."
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. `model`, `data` and `out` must be given; the rest has defaults."""

    model: Path = field(
        metadata={"parse": _path, "metavar": "DIR", "help": "Hugging Face model folder."}
    )
    data: Path = field(
        metadata={"parse": _path, "metavar": "FILE", "help": "Training data: .txt, .jsonl, .json."}
    )
    out: Path = field(
        metadata={"parse": _path, "metavar": "DIR", "help": "Run folder; everything goes there."}
    )
    seed: int = _field(0, _whole(0), "N", "Seed of data order and dropout.")
    train: TrainConfig = field(default_factory=TrainConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        micro, batch = self.train.micro_batch, self.train.batch
        if micro is not None and micro > batch:
            raise ConfigError(
                f"[train] micro_batch: {micro} is more than batch, {batch}; "
                "lower micro_batch or raise batch"
            )

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        *,
        base_dir: Path,
        overrides: Mapping[str, Any] | None = None,
    ) -> Config:
        """A config from nested tables, with overrides such as {"train.lr": 1e-4} on top.

        Relative paths in `mapping` start at `base_dir`, those in `overrides` at the current
        folder. An override that is None or an empty list was not given.
        """
        values = _parse_tables(mapping, base_dir=base_dir.absolute())
        for dotted, value in (overrides or {}).items():
            if value is None or value in ((), []):
                continue
            section, _, key = dotted.rpartition(".")
            parsed = _parse_section({key: value}, section=section, base=Path.cwd())
            values[section].update(parsed)
        missing = [key for key in ("model", "data", "out") if key not in values[""]]
        if missing:
            hints = ", ".join(f"--{key} {_SECTIONS[''][key].metavar}" for key in missing)
            raise ConfigError(
                f"{missing[0]}: not given; add {hints}, or the same keys to the config file"
            )
        return cls(
            **values[""],
            train=TrainConfig(**values["train"]),
            budget=BudgetConfig(**values["budget"]),
            output=OutputConfig(**values["output"]),
        )

    def to_toml(self) -> str:
        """The whole config as TOML; `from_mapping(tomllib.loads(...))` gives it back."""
        lines: list[str] = []
        for section, known in _SECTIONS.items():
            table = getattr(self, section) if section else self
            if section:
                lines += ["", f"[{section}]"]
            for key in known:
                value = getattr(table, key)
                if value is not None:
                    lines.append(f"{key} = {_toml_value(value, size=key == 'host')}")
        return "\n".join(lines) + "\n"


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


def _collect() -> dict[str, dict[str, FieldInfo]]:
    tables = {"": Config, "train": TrainConfig, "budget": BudgetConfig, "output": OutputConfig}
    return {
        section: {
            f.name: FieldInfo(
                section=section,
                key=f.name,
                metavar=f.metadata["metavar"],
                help=f.metadata["help"],
                default=None if f.default is dataclasses.MISSING else f.default,
                required=f.default is dataclasses.MISSING,
                parse=f.metadata["parse"],
            )
            for f in dataclasses.fields(table)
            if "parse" in f.metadata
        }
        for section, table in tables.items()
    }


_SECTIONS = _collect()


def fields_of() -> Iterator[FieldInfo]:
    """Every field with section, default and help, in the order of the file."""
    for known in _SECTIONS.values():
        yield from known.values()


def help_of(dotted: str) -> str:
    """The help text of one field, such as "train.lr"."""
    section, _, key = dotted.rpartition(".")
    return _SECTIONS[section][key].help


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


def load_config(path: Path | None, *, overrides: Mapping[str, Any] | None = None) -> Config:
    """A config from an optional TOML file with command-line overrides on top."""
    if path is None:
        return Config.from_mapping({}, base_dir=Path.cwd(), overrides=overrides)
    return Config.from_mapping(load_toml(path), base_dir=path.parent, overrides=overrides)


def _parse_tables(mapping: Mapping[str, Any], *, base_dir: Path) -> dict[str, dict[str, Any]]:
    top = {key: value for key, value in mapping.items() if key not in _SECTIONS or key == ""}
    values = {"": _parse_section(top, section="", base=base_dir)}
    for section in _SECTIONS:
        if section:
            table = mapping.get(section, {})
            if not isinstance(table, Mapping):
                raise _wrong(section, table, f"a table; write [{section}] above its keys")
            values[section] = _parse_section(table, section=section, base=base_dir)
    return values


def _parse_section(table: Mapping[str, Any], *, section: str, base: Path) -> dict[str, Any]:
    known = _SECTIONS.get(section)
    values = {}
    for key, value in table.items():
        if known is None or key not in known:
            raise _unknown(key, section)
        if value is not None:
            name = f"[{section}] {key}" if section else key
            values[key] = known[key].parse(value, name, base)
    return values


def _unknown(key: str, section: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    place = f"[{section}] {key}" if section else key
    here = [*_SECTIONS.get(section, {}), *(() if section else filter(None, _SECTIONS))]
    for other, known in _SECTIONS.items():
        if key in known:
            where = f"under [{other}]" if other else "at the top, above the first [section]"
            return ConfigError(f"{place}: unknown key; {key} goes {where}")
    near = difflib.get_close_matches(key.lower().replace("-", "_"), here, n=1)
    if near:
        return ConfigError(f"{place}: unknown key; did you mean {near[0]}?")
    elsewhere = [f"[{i.section}] {i.key}" for i in fields_of() if i.section not in ("", section)]
    close = {name.rsplit(" ", 1)[1]: name for name in elsewhere}
    far = difflib.get_close_matches(key.lower().replace("-", "_"), close, n=1)
    if far:
        return ConfigError(f"{place}: unknown key; did you mean {close[far[0]]}?")
    return ConfigError(f"{place}: unknown key; the keys here are {', '.join(here)}")


def _toml_value(value: Any, *, size: bool = False) -> str:
    if size:
        for unit, suffix in ((GiB, "GiB"), (MiB, "MiB")):
            if value % unit == 0:
                return f'"{value // unit}{suffix}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(entry) for entry in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
