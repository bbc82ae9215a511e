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
        None, whole(1), "Optimizer steps. Not given: as many as `epochs` needs."
    )
    epochs: float = setting(1.0, ABOVE_0, "Passes over the data; `steps` has precedence.")
    batch: int = setting(8, whole(1), "Examples per optimizer step.")
    micro_batch: int | None = setting(
        None,
        whole(1),
        "Examples that go through a block at once. Changes memory and speed, not the result. "
        "Not given: the planner chooses.",
    )
    tiles: int | str = setting(
        "auto",
        tile_tokens,
        "Tokens at a time in those parts of a block that do not mix tokens (MLP, norms): less "
        "memory for long sequences, sums of weight gradients in another order. auto: only where "
        "the run would not fit without, or a GPU is faster with the batch in one slice of tiles "
        "than in several slices; or off, or a number.",
    )
    seq: int = setting(1024, whole(2), "Longest example in tokens; longer ones are cut.")
    chat_template: str | None = setting(
        None,
        template,
        "Template for chats and prompts instead of the model's own: chatml, llama-3, alpaca, or a "
        "file.",
    )
    max_dropped: float = setting(
        0.1,
        real("a share from 0 to 1", lambda x: 0 <= x <= 1),
        "Refuse data of which more than this share is dropped because nothing of an answer is "
        "within `seq` tokens.",
    )
    pack: bool = setting(
        False, flag, "Fill rows of `seq` tokens with several short examples; each sees only itself."
    )
    optimizer: str = setting(
        "adamw",
        choice(tuple(OPTIMIZERS)),
        "How weights are updated; sgd and lion keep half of AdamW's state.",
    )
    moments: str = setting(
        "fp32",
        choice(MOMENTS),
        "How the optimizer's moments are stored. bf16 and int8 take a half or a quarter of the "
        "room and round them: the result is not that of PyTorch, though always the same.",
    )
    lr: float = setting(1e-5, ABOVE_0, "Peak learning rate.")
    schedule: str = setting("cosine", choice(SCHEDULES), "Course of the rate after warm-up.")
    schedule_steps: int | None = setting(
        None, whole(1), "Steps that the course is laid out over. Not given: all of the run."
    )
    warmup: int | float = setting(
        0, warmup_length, "Warm-up: a number of steps, or a share of all steps if below 1."
    )
    min_lr_ratio: float = setting(
        0.0,
        real("a number from 0 to 1", lambda x: 0 <= x <= 1),
        "Where linear and cosine end, as a share of `lr`.",
    )
    weight_decay: float = setting(
        0.0, AT_LEAST_0, "Weight decay, decoupled but for sgd; norms and biases are exempt."
    )
    beta1: float = setting(
        0.9,
        BELOW_1,
        "Decay rate of AdamW's first moment; how much of its momentum a step of Lion takes.",
    )
    beta2: float | None = setting(
        None,
        BELOW_1,
        "Decay rate of AdamW's second moment or of Lion's momentum. Not given: 0.999 or 0.99.",
    )
    eps: float = setting(1e-8, ABOVE_0, "AdamW's denominator term.")
    momentum: float = setting(0.9, BELOW_1, "SGD's momentum.")
    param_groups: tuple[GroupSetting, ...] = setting(
        (),
        group_settings,
        "Tables of parameters that have a learning rate, weight decay or betas of their own, each "
        "under [[train.param_groups]].",
    )
    ema: float = setting(
        0.0,
        BELOW_1,
        "Decay of a moving average of the weights, such as 0.9999, kept on SSD too and "
        "exported to OUT/ema; 0 keeps none.",
    )
    clip: float = setting(1.0, AT_LEAST_0, "Largest gradient norm; 0 turns clipping off.")
    update_mode: str = setting(
        "balanced",
        choice(UPDATE_MODES),
        "When updates run: after backward, during it one by one, during it pipelined, or partly "
        "in the next forward. Changes speed, not the result.",
    )
    activations: str = setting(
        "holistic",
        activations,
        "What blocks keep for backward: what pays on this machine (the run measures its first "
        "steps), only their inputs, everything, what another policy would keep, or what a plan "
        "file says. Changes speed, not the result.",
    )
    overlap: bool = setting(
        True, flag, "Run I/O, updates and compute at the same time. Changes speed, not the result."
    )
    compile: bool = setting(
        False,
        flag,
        "Compile blocks with torch.compile, on accelerators only. Blocks that keep activations or "
        "draw random numbers run as they are.",
    )
    deterministic: bool = setting(
        False,
        flag,
        "Repeat a run on an accelerator bit for bit: kernels with a fixed order of sums, which are "
        "slower, and an error where torch has none. Runs on the CPU repeat without it.",
    )
    dtype: str | None = setting(
        None,
        choice(DTYPES),
        "Compute type; the master copy always has fp32 precision. Not given: fp32 on the CPU, bf16 "
        "on an accelerator that has it.",
    )
    lora: int = setting(
        0,
        whole(0),
        "Train LoRA adapters of this rank and leave the model as it is; 0 trains all of it.",
        metavar="RANK",
    )
    lora_alpha: float | None = setting(
        None, ABOVE_0, "Adapters count this much over their rank. Not given: twice the rank."
    )
    lora_targets: tuple[str, ...] = setting(
        (),
        names,
        "Layers that get an adapter, such as q_proj. Not given: all linear layers of the blocks.",
    )
    freeze: tuple[str, ...] | None = setting(
        None,
        names,
        "Parts of the model that stay as they are, such as embed_tokens or layers.0; none: all "
        "learn. Not given: the vision tower of a vision-language model.",
    )
    base: str | None = setting(
        None,
        choice(PACKINGS),
        "With --lora: linear layers of the blocks lie packed on SSD and in memory, in about 4.5 "
        "bits a weight or 8, and are dequantised in each block's call. Not given: as they compute.",
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

        The `lr` of a group is a peak value, to which the schedule of the run applies.
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
        "Of pairs dpo, ipo, orpo or simpo; of rated answers kto.",
    )
    beta: float = setting(
        0.1, ABOVE_0, "How strongly the model is held to the reference; of orpo the odds' weight."
    )
    margin: float = setting(
        0.5, AT_LEAST_0, "Of simpo: by how much a chosen answer is to lead, times beta."
    )
    desirable: float = setting(1.0, ABOVE_0, "Of kto: weight of wanted answers.")
    undesirable: float = setting(1.0, ABOVE_0, "Of kto: weight of the others.")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """[budget]: the resources that the run may use, its commits and its snapshots."""

    host: int | None = setting(
        None,
        byte_size,
        "Main memory the run may use, such as 8GiB. Not given: read from the machine.",
    )
    gpus: int = setting(
        1,
        whole(1),
        "Ranks that train together on this machine, each with a GPU of its own where there are "
        "some. They share the batch, the state, `host` and the drives.",
    )
    device: str = setting(
        "auto",
        device_name,
        "Where blocks compute. auto: the accelerator that torch finds, or else the cpu; cuda, gpu "
        "or xpu name it too, cuda:1 the second of several. emulated: "
        "the cpu in the part of a device with a memory and a link of its own, for trials; "
        "emulated-unified: the same, in one memory with the host.",
    )
    device_memory: int | None = setting(
        None, byte_size, "Memory of the device the run may use. Not given: what is free."
    )
    link: float | None = setting(
        None,
        byte_rate,
        "Speed of an emulated device's link each way, such as 2GB/s. Not given: unlimited.",
    )
    ssd: tuple[Path, ...] = setting(
        (),
        drives,
        "Folders on SSDs for the training state, one per drive; {rank} and {host} in a name stand "
        "for the rank's number and its machine. Not given: OUT/store.",
    )
    commit_every: str = setting(
        AUTO,
        interval,
        "How much a crash may cost: step, a number of steps, or a time such as 10min. Between two "
        "commits what stays in memory is not written. auto: every step where that costs little "
        "time and little of the drives' life, otherwise as often as does, at least every 15 "
        "minutes. Changes speed and wear, not the result.",
    )
    log_gradients: str = setting(
        "off",
        logged_steps,
        "Commit every step by its gradients, and write the full state only every so many steps (2 "
        "to 64): a third of the writes. Needs the 16-bit weights in main memory. Changes speed, "
        "wear and room on the drives, not the result.",
    )
    snapshot_every: int = setting(
        0, whole(0), "Steps between full copies of the state; 0 means none."
    )
    snapshot_dir: Path | None = setting(
        None, folder, "Where full copies go. Not given: OUT/snapshots."
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """[output]: the files and logs that a run writes."""

    export: bool = setting(True, flag, "Export a Hugging Face folder to OUT/model.")
    export_dtype: str | None = setting(
        None, choice(DTYPES), "Type of exported weights. Not given: the model's."
    )
    trace: bool = setting(False, flag, "Write OUT/trace.json: what every lane did when.")
    export_best: bool = setting(
        False, flag, "Export the model of the best evaluation so far to OUT/best."
    )
    log: tuple[str, ...] = setting(
        (),
        choices(LOGGERS),
        "Also log metrics there; each needs its package, pip install 'lohan[NAME]'.",
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
        "Share of the training examples, chosen by the seed, to evaluate on instead.",
    )
    every: int | None = setting(
        None,
        whole(1),
        "Steps between evaluations; one comes after the last step anyway. Not given: an epoch.",
    )
    early_stop: int = setting(
        0, whole(0), "Stop after so many evaluations without a new best loss; 0 means never."
    )

    @property
    def wanted(self) -> bool:
        return self.data is not None or self.split > 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """[sample]: answers of the model to some prompts during training."""

    prompts: tuple[str, ...] = setting(
        (), prompts, "Prompts to answer now and then: a text, or a file with one per line."
    )
    every: int | None = setting(
        None,
        whole(1),
        "Steps between them; they come after the last step anyway. Not given: an epoch.",
    )
    tokens: int = setting(64, whole(1), "Longest answer in tokens.")


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
        "Hugging Face model folder, or that of a diffusers pipeline or transformer; or the name of "
        "a model of the hub, from its cache; `lohan train` fetches what is not there.",
    )
    data: tuple[Source, ...] = setting(
        MISSING,
        sources,
        "Training data: .txt, .jsonl, .json, .csv, .tsv (also packed: .jsonl.gz), .parquet or "
        ".arrow, or a folder of such files or of save_to_disk of the datasets package; for "
        "diffusion a folder of images or latents. "
        "May be given several times, with weights as shares of every batch.",
    )
    out: Path = setting(MISSING, folder, "Run folder; everything goes there.")
    init: Path | None = setting(
        None,
        file,
        "Train from random weights, by the model's own initialisation and the seed: a config.json "
        "instead of a model folder.",
    )
    tokenizer: Path | None = setting(
        None, folder, "Folder of the tokenizer that goes with --init; not for tokenised data."
    )
    task: str | None = setting(
        None, choice(TASKS), "What is taught. Not given: what the model is made for."
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
            raise ConfigError(
                "[train] lora: an adapter needs a model that has learnt; leave --init"
            )

    def of_rank(self, world: int) -> Config:
        """Return the config of one of `world` ranks, with the largest share of a batch."""
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
        asked = [name for name, wanted in options.items() if wanted]
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
            if (given := values[""].setdefault("model", base)) != base:
                raise ConfigError(
                    f"model and init: {given} has weights, --init draws them; give one of them"
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

    `assignments` are the arguments of `--set`, such as train.lr=2e-5, and have precedence over
    both.
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
