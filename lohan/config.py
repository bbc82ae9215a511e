"""What the user wants of a run, and nothing that the planner can work out.

A `Config` comes from a TOML file, from command-line options laid over it, or both. Each field is
declared once with its parser and its help text; the file reader, the checks, the TOML writer,
`--help` and the reference page all work from that declaration (`fields_of`). `None` always means
"not given": LoHan decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lohan import config_parse as parse
from lohan.config_parse import FieldInfo, assignment, load_toml, setting
from lohan.errors import ConfigError
from lohan.settings import (
    DTYPES,
    TASKS,
    BudgetConfig,
    EvalConfig,
    OutputConfig,
    SampleConfig,
    TrainConfig,
)

__all__ = ["DTYPES", "BudgetConfig", "Config", "EvalConfig", "OutputConfig", "SampleConfig"]
__all__ += ["TrainConfig", "fields_of", "help_of", "load_config", "load_toml"]

SIZES = ("host", "device_memory")  # written as people write them


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. `model`, `data` and `out` must be given; the rest has defaults."""

    model: Path = setting(
        MISSING,
        parse.one_path,
        "DIR",
        "Hugging Face model folder, or that of a diffusers pipeline or transformer.",
    )
    data: Path = setting(
        MISSING,
        parse.one_path,
        "FILE",
        "Training data: .txt, .jsonl, .json, .parquet or .arrow, or a folder that save_to_disk of "
        "the datasets package wrote; for diffusion a folder of images or latents.",
    )
    out: Path = setting(MISSING, parse.one_path, "DIR", "Run folder; everything goes there.")
    task: str | None = setting(
        None,
        parse.choice(TASKS),
        "|".join(TASKS),
        "What is taught. Not given: what the model is made for.",
    )
    seed: int = setting(0, parse.whole(0), "N", "Seed of data order, dropout and noise.")
    train: TrainConfig = field(default_factory=TrainConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        self._check_evaluation()
        micro, batch = self.train.micro_batch, self.train.batch
        if micro is not None and micro > batch:
            raise ConfigError(
                f"[train] micro_batch: {micro} is more than batch, {batch}; "
                "lower micro_batch or raise batch"
            )
        if self.budget.gpus > batch:
            raise ConfigError(
                f"[budget] gpus: {self.budget.gpus} are more than the examples of a batch, "
                f"{batch}; raise batch or lower gpus"
            )

    def of_rank(self, world: int) -> Config:
        """With the largest share of a batch that one of so many ranks has."""
        rows, micro = -(-self.train.batch // world), self.train.micro_batch
        train = replace(
            self.train, batch=rows, micro_batch=None if micro is None else min(micro, rows)
        )
        return replace(self, train=train, budget=replace(self.budget, gpus=1))

    def _check_evaluation(self) -> None:
        if self.eval.data is not None and self.eval.split > 0:
            raise ConfigError(
                f"[eval] data and split: {self.eval.data} and a share of {self.eval.split:g} of "
                "the training data are both given; give one of them"
            )
        wishes = {
            "[eval] every": self.eval.every is not None,
            "[eval] early_stop": self.eval.early_stop > 0,
            "[output] export_best": self.output.export_best,
        }
        asked = [name for name, wanted in wishes.items() if wanted]
        if asked and not self.eval.wanted:
            raise ConfigError(
                f"{asked[0]}: there is nothing to evaluate on; add --eval-data FILE or "
                "--eval-split 0.05"
            )
        if self.sample.every is not None and not self.sample.prompts:
            raise ConfigError("[sample] every: there are no prompts; add --sample-prompts")

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
            eval=EvalConfig(**values["eval"]),
            sample=SampleConfig(**values["sample"]),
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
                    lines.append(f"{key} = {parse.toml_value(value, size=key in SIZES)}")
        return "\n".join(lines) + "\n"


def _collect() -> dict[str, dict[str, FieldInfo]]:
    tables = {
        "": Config, "train": TrainConfig, "budget": BudgetConfig, "eval": EvalConfig,
        "sample": SampleConfig, "output": OutputConfig,
    }  # fmt: skip
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


def load_config(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> Config:
    """A config from an optional TOML file with command-line overrides on top, and on top of both
    what `--set` assigns, such as train.lr=2e-5."""
    overrides = {**(overrides or {}), **dict(map(assignment, assignments))}
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
