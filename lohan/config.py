"""What the user wants of a run, and nothing that the planner can work out.

A `Config` comes from a TOML file, from command-line options laid over it, or both. Each field is
declared once with its parser and its help text; the file reader, the checks, the TOML writer,
`--help` and the reference page all work from that declaration (`fields_of`). `None` always means
"not given": LoHan decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from lohan import config_parse as parse
from lohan.config_parse import FieldInfo, load_toml, setting
from lohan.errors import ConfigError
from lohan.lr import SCHEDULES
from lohan.schedule.passes import GRAD_MODES

DTYPES = ("fp32", "bf16", "fp16")
DURABILITIES = ("step", "checkpoint")
ACTIVATIONS = parse.ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: what is optimised and how."""

    steps: int | None = setting(
        None, parse.whole(1), "N", "Optimizer steps. Not given: as many as `epochs` needs."
    )
    epochs: float = setting(
        1.0,
        parse.real("a number above 0", lambda x: x > 0),
        "X",
        "Passes over the data; `steps` has precedence.",
    )
    batch: int = setting(8, parse.whole(1), "N", "Examples per optimizer step.")
    micro_batch: int | None = setting(
        None,
        parse.whole(1),
        "N",
        "Examples that go through a block at once. Changes memory and speed, not the result. "
        "Not given: the planner chooses.",
    )
    seq: int = setting(1024, parse.whole(2), "N", "Longest example in tokens; longer ones are cut.")
    lr: float = setting(
        1e-5, parse.real("a number above 0", lambda x: x > 0), "X", "Peak learning rate."
    )
    schedule: str = setting(
        "cosine", parse.choice(SCHEDULES), "|".join(SCHEDULES), "Course of the rate after warm-up."
    )
    warmup: int | float = setting(
        0,
        parse.warmup_length,
        "N|X",
        "Warm-up: a number of steps, or a share of all steps if below 1.",
    )
    min_lr_ratio: float = setting(
        0.0,
        parse.real("a number from 0 to 1", lambda x: 0 <= x <= 1),
        "X",
        "Where linear and cosine end, as a share of `lr`.",
    )
    weight_decay: float = setting(
        0.0,
        parse.real("a number of at least 0", lambda x: x >= 0),
        "X",
        "Decoupled weight decay; norms and biases are exempt.",
    )
    beta1: float = setting(
        0.9,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "AdamW's decay rate of the first moment.",
    )
    beta2: float = setting(
        0.999,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "AdamW's decay rate of the second moment.",
    )
    eps: float = setting(
        1e-8, parse.real("a number above 0", lambda x: x > 0), "X", "AdamW's denominator term."
    )
    clip: float = setting(
        1.0,
        parse.real("a number of at least 0", lambda x: x >= 0),
        "X",
        "Largest global gradient norm; 0 turns clipping off.",
    )
    grad_offload: str = setting(
        "balanced",
        parse.choice(GRAD_MODES),
        "|".join(GRAD_MODES),
        "When updates run: after backward, during it one by one, during it pipelined, or partly "
        "in the next forward. Changes speed, not the result.",
    )
    activations: str = setting(
        "holistic",
        parse.activations,
        "|".join(ACTIVATIONS) + "|PLAN.json",
        "What blocks keep for backward: only their inputs, everything, what pays on this machine "
        "(the run measures its first steps), or what a plan file says. Changes speed, not the "
        "result.",
    )
    overlap: bool = setting(
        True,
        parse.flag,
        "true|false",
        "Run I/O, updates and compute at the same time. Changes speed, not the result.",
    )
    dtype: str | None = setting(
        None,
        parse.choice(DTYPES),
        "|".join(DTYPES),
        "Compute type; the master copy always has fp32 precision. Not given: fp32.",
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Warm-up in steps, a share rounded up."""
        if isinstance(self.warmup, int):
            return self.warmup
        return math.ceil(self.warmup * total_steps)


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """[budget]: what the run may use, and how safely it stores its state."""

    host: int | None = setting(
        None,
        parse.byte_size,
        "SIZE",
        "Main memory the run may use, such as 8GiB. Not given: read from the machine.",
    )
    ssd: tuple[Path, ...] = setting(
        (),
        parse.path_list,
        "DIR",
        "Folders on SSDs for the training state, one per drive. Not given: OUT/store.",
    )
    durability: str = setting(
        "step",
        parse.choice(DURABILITIES),
        "|".join(DURABILITIES),
        "step: every finished step survives a crash, at twice the disk space. "
        "checkpoint: half the space; a crash goes back to the last snapshot.",
    )
    snapshot_every: int = setting(
        0, parse.whole(0), "N", "Steps between full copies of the state; 0 means none."
    )
    snapshot_dir: Path | None = setting(
        None, parse.one_path, "DIR", "Where full copies go. Not given: OUT/snapshots."
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """[output]: what is written when training ends."""

    export: bool = setting(
        True, parse.flag, "true|false", "Export a Hugging Face folder to OUT/model."
    )
    export_dtype: str | None = setting(
        None,
        parse.choice(DTYPES),
        "|".join(DTYPES),
        "Type of exported weights. Not given: the model's.",
    )
    trace: bool = setting(
        False, parse.flag, "true|false", "Write OUT/trace.json: what every lane did when."
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. `model`, `data` and `out` must be given; the rest has defaults."""

    model: Path = setting(MISSING, parse.one_path, "DIR", "Hugging Face model folder.")
    data: Path = setting(MISSING, parse.one_path, "FILE", "Training data: .txt, .jsonl, .json.")
    out: Path = setting(MISSING, parse.one_path, "DIR", "Run folder; everything goes there.")
    seed: int = setting(0, parse.whole(0), "N", "Seed of data order and dropout.")
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
                    lines.append(f"{key} = {parse.toml_value(value, size=key == 'host')}")
        return "\n".join(lines) + "\n"


def _collect() -> dict[str, dict[str, FieldInfo]]:
    tables = {"": Config, "train": TrainConfig, "budget": BudgetConfig, "output": OutputConfig}
    return {
        section: {
            f.name: FieldInfo(
                section=section,
                key=f.name,
                metavar=f.metadata["metavar"],
                help=f.metadata["help"],
                default=None if f.default is MISSING else f.default,
                required=f.default is MISSING,
                parse=f.metadata["parse"],
            )
            for f in fields(table)
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
                raise parse.wrong(section, table, f"a table; write [{section}] above its keys")
            values[section] = _parse_section(table, section=section, base=base_dir)
    return values


def _parse_section(table: Mapping[str, Any], *, section: str, base: Path) -> dict[str, Any]:
    known = _SECTIONS.get(section)
    values = {}
    for key, value in table.items():
        if known is None or key not in known:
            raise parse.unknown_key(key, section, _SECTIONS)
        if value is not None:
            name = f"[{section}] {key}" if section else key
            values[key] = known[key].parse(value, name, base)
    return values
