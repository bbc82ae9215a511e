"""The settings of a run, each declared once with its parser and help text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.optim import (
    MOMENTS,
    OPTIMIZERS,
    PACKINGS,
    SCHEDULES,
    Lora,
    Optimizer,
    StateKind,
    lr_at,
)
from lohan.param_groups import GroupSetting, ParamGroup, group_settings, parse_groups
from lohan.util.settings import (
    FieldInfo,
    Source,
    assignment,
    byte_rate,
    byte_size,
    choice,
    choices,
    device_name,
    drives,
    file,
    flag,
    folder,
    interval,
    kind,
    load_toml,
    logged_steps,
    model_folder,
    names,
    one_path,
    prompts,
    real,
    setting,
    sources,
    template,
    tile_tokens,
    toml_value,
    unknown_key,
    warmup_length,
    whole,
    wrong,
)
from lohan.util.units import AUTO

UPDATE_MODES = ("serial", "naive", "optimized", "balanced")

ACTIVATIONS = (
    "holistic",
    "recompute",
    "inputs",
    "all",
    "static",
    "capuchin",
    "checkmate",
    "g10",
)


@kind(
    "|".join(ACTIVATIONS) + "|PLAN.json",
    str,
    anyOf=[{"enum": list(ACTIVATIONS)}, {"type": "string", "pattern": r"\.json$"}],
)
def activations(value: Any, name: str, base: Path) -> str:
    """Parse the name of an activation policy, or the path of a plan file."""
    if isinstance(value, str) and value in ACTIVATIONS:
        return value
    if isinstance(value, str) and value.endswith(".json"):
        return str(one_path(value, name, base))
    raise wrong(name, value, f"one of {', '.join(ACTIVATIONS)}, or a plan file (.json)")


# -- The sections of a config ----------------------------------------------------------------------
#
# Each setting is declared once, with its parser and its help text.


ABOVE_0 = real("a number above 0", lambda x: x > 0)
AT_LEAST_0 = real("a number of at least 0", lambda x: x >= 0)
BELOW_1 = real("a number from 0 to below 1", lambda x: 0 <= x < 1)

DTYPES = ("fp32", "bf16", "fp16")
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
TASKS = (
    "language",
    "masked",
    "text-to-text",
    "classification",
    "question-answering",
    "image-classification",
    "vision-language",
    "diffusion",
    "preference",
    "reward",
)
PREFERENCE_LOSSES = ("dpo", "ipo", "orpo", "simpo", "kto")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: how the model is trained."""

    steps: int | None = setting(
        None, whole(1), "Optimizer steps. Default: as many as `epochs` needs."
    )
    epochs: float = setting(1.0, ABOVE_0, "Passes over the data. `steps` has precedence.")
    batch: int = setting(8, whole(1), "Examples per optimizer step, over all ranks.")
    micro_batch: int | None = setting(
        None,
        whole(1),
        "Examples that go through a block at once. Affects memory, speed and rounding. Default: "
        "the planner chooses.",
    )
    tiles: int | str = setting(
        "auto",
        tile_tokens,
        "Tokens at a time in the parts of a block that do not mix tokens. Saves memory for "
        "long sequences.",
    )
    seq: int = setting(1024, whole(2), "Maximum tokens per example; longer examples are truncated.")
    chat_template: str | None = setting(
        None,
        template,
        "Chat template instead of the model's: chatml, llama-3, alpaca, or a file.",
    )
    max_dropped: float = setting(
        0.1,
        real("a share from 0 to 1", lambda x: 0 <= x <= 1),
        "Largest share of examples that may be dropped because `seq` cuts off their whole answer.",
    )
    pack: bool = setting(
        False,
        flag,
        "Fill rows of `seq` tokens with several examples. Each example attends only to itself.",
    )
    optimizer: str = setting(
        "adamw",
        choice(tuple(OPTIMIZERS)),
        "Optimizer. SGD and Lion keep half of AdamW's state.",
    )
    moments: str = setting(
        "fp32",
        choice(MOMENTS),
        "Format of the optimizer's moments. bf16 and int8 are smaller but rounded, so results "
        "differ from PyTorch.",
    )
    lr: float = setting(1e-5, ABOVE_0, "Peak learning rate.")
    schedule: str = setting(
        "cosine",
        choice(SCHEDULES),
        "Learning-rate schedule after warm-up: constant, linear or cosine.",
    )
    schedule_steps: int | None = setting(
        None,
        whole(1),
        "Length of the learning-rate schedule in steps. Default: all steps of the run.",
    )
    warmup: int | float = setting(
        0, warmup_length, "Warm-up steps, or a share of all steps if below 1."
    )
    min_lr_ratio: float = setting(
        0.0,
        real("a number from 0 to 1", lambda x: 0 <= x <= 1),
        "Final learning rate of linear and cosine, as a share of `lr`.",
    )
    weight_decay: float = setting(
        0.0, AT_LEAST_0, "Weight decay, decoupled except for SGD. Norms and biases are exempt."
    )
    beta1: float = setting(
        0.9,
        BELOW_1,
        "AdamW: decay rate of the first moment. Lion: share of the momentum in an update.",
    )
    beta2: float | None = setting(
        None,
        BELOW_1,
        "Decay rate of AdamW's second moment or of Lion's momentum. Default: 0.999, or 0.99 "
        "for Lion.",
    )
    eps: float = setting(1e-8, ABOVE_0, "Epsilon in AdamW's denominator.")
    momentum: float = setting(0.9, BELOW_1, "SGD momentum.")
    param_groups: tuple[GroupSetting, ...] = setting(
        (),
        group_settings,
        "Tables of parameters with their own learning rate, weight decay or betas, each under "
        "[[train.param_groups]].",
    )
    ema: float = setting(
        0.0,
        BELOW_1,
        "Decay of a moving average of the weights, such as 0.9999, exported to OUT/ema. 0 "
        "keeps none.",
    )
    clip: float = setting(1.0, AT_LEAST_0, "Maximum gradient norm. 0 turns clipping off.")
    update_mode: str = setting(
        "balanced",
        choice(UPDATE_MODES),
        "When updates run: after backward (serial), during it (naive, optimized), or partly in "
        "the next forward (balanced). Affects speed only.",
    )
    activations: str = setting(
        "holistic",
        activations,
        "Which activations blocks keep for backward: holistic, recompute, all, another policy, "
        "or a plan file. Affects speed and memory only.",
    )
    overlap: bool = setting(
        True, flag, "Run I/O, updates and compute at the same time. Affects speed only."
    )
    compile: bool = setting(
        False,
        flag,
        "Compile blocks with torch.compile, on accelerators only.",
    )
    deterministic: bool = setting(
        False,
        flag,
        "Make runs on an accelerator bit-reproducible, with slower kernels. CPU runs always are.",
    )
    dtype: str | None = setting(
        None,
        choice(DTYPES),
        "Compute type; master weights have fp32 precision. Default: fp32 on the CPU; bf16 on "
        "an accelerator, or fp16 without bf16.",
    )
    lora: int = setting(
        0,
        whole(0),
        "Train LoRA adapters of this rank instead of all weights. 0 trains all weights.",
        metavar="RANK",
    )
    lora_alpha: float | None = setting(
        None, ABOVE_0, "LoRA alpha; updates are scaled by alpha / rank. Default: twice the rank."
    )
    lora_targets: tuple[str, ...] = setting(
        (),
        names,
        "Layers that get an adapter, such as q_proj. Default: all linear layers of the blocks.",
    )
    freeze: tuple[str, ...] | None = setting(
        None,
        names,
        "Parts of the model to freeze, such as embed_tokens or layers.0; `none` trains all. "
        "Default: the vision tower of a vision-language model.",
    )
    base: str | None = setting(
        None,
        choice(PACKINGS),
        "Quantize the frozen base of a LoRA run to about 4.5 or 8 bits per weight. Default: "
        "not quantized.",
    )

    @property
    def kind(self) -> StateKind:
        """The kind of state that the optimizer keeps for every parameter."""
        return StateKind(self.optimizer, self.moments, self.ema > 0)

    def optimizer_with(self, lr: float | Callable[[int], float]) -> Optimizer:
        return OPTIMIZERS[self.optimizer].configured(
            self, lr=lr, weight_decay=self.weight_decay, moments=self.moments, ema=self.ema
        )

    def param_groups_with(self, total_steps: int) -> list[dict[str, Any]]:
        """Return the parameter groups in the form that `attach` takes.

        The `lr` of a group is a peak value; the schedule of the run scales it.
        """
        groups = [group.table() for group in self.param_groups]
        for table in groups:
            if "lr" in table:
                table["lr"] = partial(replace(self, lr=table["lr"]).lr_at, total_steps=total_steps)
        return groups

    def check_groups(self) -> list[ParamGroup]:
        """Return the parameter groups, after checking their values with the optimizer."""
        tables = [group.table() for group in self.param_groups]
        label = "[[train.param_groups]] {}".format
        return parse_groups(tables, self.optimizer_with(self.lr), lambda n: label(n + 1))

    @property
    def adapter(self) -> Lora | None:
        if not self.lora:
            return None
        return Lora(rank=self.lora, alpha=self.lora_alpha, targets=self.lora_targets)

    def lr_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of a step, counted from 0, in a run of `total_steps`."""
        total = self.schedule_steps or total_steps
        return lr_at(
            step,
            total_steps=total,
            peak_lr=self.lr,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps(total),
            min_lr_ratio=self.min_lr_ratio,
        )

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps; a share of the steps is rounded up."""
        if isinstance(self.warmup, int):
            return self.warmup
        return math.ceil(self.warmup * total_steps)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """[preference]: the loss that `--task preference` minimises."""

    loss: str = setting(
        "dpo",
        choice(PREFERENCE_LOSSES),
        "Preference loss: dpo, ipo, orpo or simpo for pairs, kto for rated answers.",
    )
    beta: float = setting(
        0.1,
        ABOVE_0,
        "Strength of the penalty for leaving the reference; weight of the odds ratio in ORPO.",
    )
    margin: float = setting(0.5, AT_LEAST_0, "SimPO target reward margin, in units of beta.")
    desirable: float = setting(1.0, ABOVE_0, "KTO weight of wanted answers.")
    undesirable: float = setting(1.0, ABOVE_0, "KTO weight of unwanted answers.")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """[budget]: the resources that the run may use, its commits and its snapshots."""

    host: int | None = setting(
        None,
        byte_size,
        "Main memory that the run may use, such as 8GiB. Default: four fifths of the free memory.",
    )
    gpus: int = setting(
        1,
        whole(1),
        "Ranks on this machine, one per GPU. They share the batch, the state, `host` and the "
        "drives.",
    )
    device: str = setting(
        "auto",
        device_name,
        "Where blocks compute: auto, cpu, cuda, cuda:1, accelerator, or emulated for trials.",
    )
    device_memory: int | None = setting(
        None, byte_size, "Memory of the device that the run may use. Default: the free memory."
    )
    link: float | None = setting(
        None,
        byte_rate,
        "Speed of an emulated device's link in each direction, such as 2GB/s. Default: unlimited.",
    )
    ssd: tuple[Path, ...] = setting(
        (),
        drives,
        "Folder on an SSD for the training state; repeat it for each drive. Default: OUT/store.",
    )
    commit_every: str = setting(
        AUTO,
        interval,
        "How much a crash may lose: step, a number of steps, a time such as 10min, or auto. "
        "Affects speed and wear only.",
    )
    log_gradients: str = setting(
        AUTO,
        logged_steps,
        "Commit each step by writing its gradients, and write the full state every N steps (2 to "
        "64). auto does so if a profile of the machine shows that steps are faster.",
    )
    snapshot_every: int = setting(
        0, whole(0), "Steps between full copies of the state. 0 makes none."
    )
    snapshot_dir: Path | None = setting(
        None, folder, "Folder for full copies of the state. Default: OUT/snapshots."
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """[output]: the files and logs that a run writes."""

    export: bool = setting(True, flag, "Export a Hugging Face folder to OUT/model at the end.")
    export_dtype: str | None = setting(
        None, choice(DTYPES), "Type of exported weights. Default: that of the model."
    )
    trace: bool = setting(False, flag, "Write OUT/trace.json, a timeline of every lane.")
    export_best: bool = setting(False, flag, "Export the model of the best evaluation to OUT/best.")
    log: tuple[str, ...] = setting(
        (),
        choices(LOGGERS),
        "Also log metrics to tensorboard, wandb, trackio or mlflow. Each needs pip install "
        "'lohan[NAME]'.",
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """[eval]: the evaluation of the loss on data that is not trained on."""

    data: Path | None = setting(
        None, file, "Evaluation data, in any form that training data may have."
    )
    split: float = setting(
        0.0,
        real("a share from 0 to below 1", lambda x: 0 <= x < 1),
        "Share of the training examples to hold out for evaluation.",
    )
    every: int | None = setting(
        None,
        whole(1),
        "Steps between evaluations; the last step is always evaluated. Default: one epoch.",
    )
    early_stop: int = setting(
        0,
        whole(0),
        "Stop after this many evaluations without a new best loss. 0 never stops early.",
    )

    @property
    def wanted(self) -> bool:
        return self.data is not None or self.split > 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """[sample]: answers of the model to some prompts during training."""

    prompts: tuple[str, ...] = setting(
        (), prompts, "Prompts to answer during training: a text, or a file with one per line."
    )
    every: int | None = setting(
        None,
        whole(1),
        "Steps between answers; the last step is always included. Default: one epoch.",
    )
    tokens: int = setting(64, whole(1), "Maximum length of an answer in tokens.")


# -- The config of a run: decisions of the user, and nothing that the planner can derive -----------
#
# A `Config` is created from a TOML file, from command-line options, or from both; options override
# the file. Each field is declared once with its parser and its help text. The file reader, the
# checks, the TOML writer, `--help` and the reference page all use that declaration (`fields_of`).
# `None` always means "not given": LoHan decides.


__all__ = ["DTYPES", "BudgetConfig", "Config", "EvalConfig", "OutputConfig", "SampleConfig"]
__all__ += ["TrainConfig", "field_of", "fields_of", "load_config"]

# Subfolder of a run's folder with the initial model, if its weights are random.
BASE = "base"
SIZES = ("host", "device_memory")  # Written with a unit, such as 8GiB.


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one run. `model`, `data` and `out` are required; the others have defaults."""

    model: Path = setting(
        MISSING,
        model_folder,
        "Hugging Face or diffusers model folder, or ORG/NAME on the hub, which `lohan train` "
        "downloads.",
    )
    data: tuple[Source, ...] = setting(
        MISSING,
        sources,
        "Training data: a .jsonl, .json, .csv, .tsv, .txt, .parquet or .arrow file, or a "
        "folder. May be repeated, with weights.",
    )
    out: Path = setting(MISSING, folder, "Run folder, which holds everything that the run writes.")
    init: Path | None = setting(
        None,
        file,
        "Train from random weights: a config.json instead of a model folder.",
    )
    tokenizer: Path | None = setting(
        None, folder, "Tokenizer folder for --init; not needed for tokenised data."
    )
    task: str | None = setting(
        None,
        choice(TASKS),
        "Training objective, such as language, classification or preference. Default: what the "
        "model is made for.",
    )
    seed: int = setting(0, whole(0), "Seed of data order, dropout and noise.")
    train: TrainConfig = field(default_factory=TrainConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        self._check_evaluation()
        self._check_start()
        micro, batch = self.train.micro_batch, self.train.batch
        if micro is not None and micro > batch:
            raise ConfigError(
                f"[train] micro_batch: {micro} is more than batch, {batch}; "
                "lower micro_batch or raise batch"
            )
        if self.train.base and not self.train.lora:
            raise ConfigError(
                f"[train] base: {self.train.base} is for weights that are only read, and this run "
                "trains all of them; add --lora 16, or leave base out"
            )
        self.train.check_groups()
        if self.budget.gpus > batch:
            raise ConfigError(
                f"[budget] gpus: {self.budget.gpus} are more than the examples of a batch, "
                f"{batch}; raise batch or lower gpus"
            )

    def _check_start(self) -> None:
        if self.init is None and self.tokenizer is not None:
            raise ConfigError(
                "tokenizer: goes with --init; a model folder has its own, leave it out"
            )
        if self.init is not None and self.train.lora:
            raise ConfigError("[train] lora: an adapter needs a trained model; leave --init out")

    def of_rank(self, world: int) -> Config:
        """Return the config with the batch of one of `world` ranks, the one with the most rows."""
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
        options = {
            "[eval] every": self.eval.every is not None,
            "[eval] early_stop": self.eval.early_stop > 0,
            "[output] export_best": self.output.export_best,
        }
        requested = [name for name, wanted in options.items() if wanted]
        if requested and not self.eval.wanted:
            raise ConfigError(
                f"{requested[0]}: there is nothing to evaluate on; add --eval-data FILE or "
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
        """Create a config from nested tables, with overrides such as {"train.lr": 1e-4}.

        Relative paths in `mapping` start at `base_dir`, those in `overrides` at the current folder.
        An override that is None or an empty list counts as not given.
        """
        values = _parse_tables(mapping, base_dir=base_dir.absolute())
        for dotted, value in (overrides or {}).items():
            if value is None or value in ((), []):
                continue
            section, _, key = dotted.rpartition(".")
            parsed = _parse_section({key: value}, section=section, base=Path.cwd())
            values[section].update(parsed)
        if "init" in values[""] and "out" in values[""]:
            base = values[""]["out"] / BASE
            if (model := values[""].setdefault("model", base)) != base:
                raise ConfigError(
                    f"model and init: {model} has weights, and --init starts from random ones; "
                    "give one of them"
                )
        missing = [key for key in ("model", "data", "out") if key not in values[""]]
        if missing:
            hints = ", ".join(f"--{key} {_SECTIONS[''][key].kind.metavar}" for key in missing)
            raise ConfigError(
                f"{missing[0]}: not given; add {hints}, or the same keys to the config file"
            )
        return cls(
            **values[""],
            train=TrainConfig(**values["train"]),
            preference=PreferenceConfig(**values["preference"]),
            budget=BudgetConfig(**values["budget"]),
            eval=EvalConfig(**values["eval"]),
            sample=SampleConfig(**values["sample"]),
            output=OutputConfig(**values["output"]),
        )

    def to_toml(self) -> str:
        """Return the config as TOML; `from_mapping(tomllib.loads(...))` restores it."""
        lines: list[str] = []
        for section, fields_of_section in _SECTIONS.items():
            table = getattr(self, section) if section else self
            if section:
                lines += ["", f"[{section}]"]
            for key in fields_of_section:
                value = getattr(table, key)
                if key == "data" and isinstance(value, tuple) and len(value) == 1:
                    value = value[0]
                if key == "param_groups":
                    value = tuple(group.table() for group in value)
                if value is not None:
                    lines.append(f"{key} = {toml_value(value, size=key in SIZES)}")
        return "\n".join(lines) + "\n"


def _collect() -> dict[str, dict[str, FieldInfo]]:
    tables = {
        "": Config,
        "train": TrainConfig,
        "preference": PreferenceConfig,
        "budget": BudgetConfig,
        "eval": EvalConfig,
        "sample": SampleConfig,
        "output": OutputConfig,
    }

    def info(section: str, f: Any) -> FieldInfo:
        required = f.default is MISSING
        default = None if required else f.default
        return FieldInfo(
            section=section, key=f.name, default=default, required=required, **f.metadata
        )

    return {
        section: {f.name: info(section, f) for f in fields(table) if "kind" in f.metadata}
        for section, table in tables.items()
    }


_SECTIONS = _collect()


def fields_of() -> Iterator[FieldInfo]:
    """Yield every field with section, default and help, in the order of the file."""
    for infos in _SECTIONS.values():
        yield from infos.values()


def field_of(dotted: str) -> FieldInfo:
    """Return a field by its name, such as "train.lr"."""
    section, _, key = dotted.rpartition(".")
    return _SECTIONS[section][key]


def load_config(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> Config:
    """Load a config from an optional TOML file, with overrides from the command line.

    `assignments` are the arguments of `--set`, such as train.lr=2e-5, and take precedence over both
    the file and `overrides`.
    """
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
                raise wrong(section, table, f"a table; write [{section}] above its keys")
            values[section] = _parse_section(table, section=section, base=base_dir)
    return values


def _parse_section(table: Mapping[str, Any], *, section: str, base: Path) -> dict[str, Any]:
    infos = _SECTIONS.get(section)
    values = {}
    for key, value in table.items():
        if infos is None or key not in infos:
            raise unknown_key(key, section, _SECTIONS)
        if value is not None:
            name = f"[{section}] {key}" if section else key
            values[key] = infos[key].kind(value, name, base)
    return values
