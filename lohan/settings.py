"""The sections of a config: every setting, declared once with its parser and its help text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan import config_parse as parse
from lohan.config_parse import setting
from lohan.lora import Lora
from lohan.lr import SCHEDULES
from lohan.optim import MOMENTS, OPTIMIZERS, Optimizer, StateKind
from lohan.schedule.phases import GRAD_MODES

DTYPES = ("fp32", "bf16", "fp16")
DURABILITIES = ("step", "checkpoint")
ACTIVATIONS = parse.ACTIVATIONS
DEVICES = ("auto", "cpu", "accelerator", "emulated")
LOGGERS = ("tensorboard", "wandb")
TASKS = ("language", "diffusion")


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
    pack: bool = setting(
        False,
        parse.flag,
        "true|false",
        "Fill rows of `seq` tokens with several short examples; each sees only itself.",
    )
    optimizer: str = setting(
        "adamw",
        parse.choice(tuple(OPTIMIZERS)),
        "|".join(OPTIMIZERS),
        "How weights are updated; sgd and lion keep half of AdamW's state.",
    )
    moments: str = setting(
        "fp32",
        parse.choice(MOMENTS),
        "|".join(MOMENTS),
        "How the optimizer's moments are stored. bf16 and int8 take a half or a quarter of the "
        "room and round them: the result is not that of PyTorch, though always the same.",
    )
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
        "Weight decay, decoupled but for sgd; norms and biases are exempt.",
    )
    beta1: float = setting(
        0.9,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "Decay rate of AdamW's first moment; how much of its momentum a step of Lion takes.",
    )
    beta2: float | None = setting(
        None,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "Decay rate of AdamW's second moment or of Lion's momentum. Not given: 0.999 or 0.99.",
    )
    eps: float = setting(
        1e-8, parse.real("a number above 0", lambda x: x > 0), "X", "AdamW's denominator term."
    )
    momentum: float = setting(
        0.9,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "SGD's momentum.",
    )
    ema: float = setting(
        0.0,
        parse.real("a number from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "Decay of a moving average of the weights, such as 0.9999, kept on SSD beside them and "
        "exported to OUT/ema; 0 keeps none.",
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
        "What blocks keep for backward: what pays on this machine (the run measures its first "
        "steps), only their inputs, everything, what another policy would keep, or what a plan "
        "file says. Changes speed, not the result.",
    )
    overlap: bool = setting(
        True,
        parse.flag,
        "true|false",
        "Run I/O, updates and compute at the same time. Changes speed, not the result.",
    )
    compile: bool = setting(
        False,
        parse.flag,
        "true|false",
        "Compile blocks with torch.compile, on accelerators only. Blocks that keep activations or "
        "draw random numbers run as they are.",
    )
    dtype: str | None = setting(
        None,
        parse.choice(DTYPES),
        "|".join(DTYPES),
        "Compute type; the master copy always has fp32 precision. Not given: fp32.",
    )
    lora: int = setting(
        0,
        parse.whole(0),
        "RANK",
        "Train LoRA adapters of this rank and leave the model as it is; 0 trains all of it.",
    )
    lora_alpha: float | None = setting(
        None,
        parse.real("a number above 0", lambda x: x > 0),
        "X",
        "Adapters count this much over their rank. Not given: twice the rank.",
    )
    lora_targets: tuple[str, ...] = setting(
        (),
        parse.names,
        "NAME",
        "Layers that get an adapter, such as q_proj. Not given: all linear layers of the blocks.",
    )

    @property
    def kind(self) -> StateKind:
        """What the optimizer keeps of every parameter."""
        return StateKind(self.optimizer, self.moments, self.ema > 0)

    def optimizer_with(self, lr: float | Callable[[int], float]) -> Optimizer:
        return OPTIMIZERS[self.optimizer].configured(
            self, lr=lr, weight_decay=self.weight_decay, moments=self.moments, ema=self.ema
        )

    @property
    def adapter(self) -> Lora | None:
        if not self.lora:
            return None
        return Lora(rank=self.lora, alpha=self.lora_alpha, targets=self.lora_targets)

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
    gpus: int = setting(
        1,
        parse.whole(1),
        "N",
        "Ranks that train together on this machine, each with a GPU of its own where there are "
        "some. They share the batch, the state, `host` and the drives.",
    )
    device: str = setting(
        "auto",
        parse.choice(DEVICES),
        "|".join(DEVICES),
        "Where blocks compute. auto: the accelerator that torch finds, or else the cpu. emulated: "
        "the cpu in the part of a device with a memory and a link of its own, for trials.",
    )
    device_memory: int | None = setting(
        None,
        parse.byte_size,
        "SIZE",
        "Memory of the device the run may use. Not given: what is free.",
    )
    link: float | None = setting(
        None,
        parse.byte_rate,
        "RATE",
        "Speed of an emulated device's link each way, such as 2GB/s. Not given: unlimited.",
    )
    ssd: tuple[Path, ...] = setting(
        (),
        parse.drives,
        "DIR",
        "Folders on SSDs for the training state, one per drive; {rank} and {host} in a name stand "
        "for the rank's number and its machine. Not given: OUT/store.",
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
    export_best: bool = setting(
        False,
        parse.flag,
        "true|false",
        "Export the model of the best evaluation so far to OUT/best.",
    )
    log: tuple[str, ...] = setting(
        (),
        parse.choices(LOGGERS),
        "|".join(LOGGERS),
        "Also log metrics there; each needs its package, pip install 'lohan[NAME]'.",
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """[eval]: loss on data that is not trained on."""

    data: Path | None = setting(
        None, parse.one_path, "FILE", "Evaluation data, in any form that training data may have."
    )
    split: float = setting(
        0.0,
        parse.real("a share from 0 to below 1", lambda x: 0 <= x < 1),
        "X",
        "Share of the training examples, chosen by the seed, to evaluate on instead.",
    )
    every: int | None = setting(
        None,
        parse.whole(1),
        "N",
        "Steps between evaluations; one comes after the last step anyway. Not given: an epoch.",
    )
    early_stop: int = setting(
        0,
        parse.whole(0),
        "N",
        "Stop after so many evaluations without a new best loss; 0 means never.",
    )

    @property
    def wanted(self) -> bool:
        return self.data is not None or self.split > 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """[sample]: what the model says to some prompts while it is trained."""

    prompts: tuple[str, ...] = setting(
        (),
        parse.prompts,
        "FILE|TEXT",
        "Prompts to answer now and then: a text, or a file with one per line.",
    )
    every: int | None = setting(
        None,
        parse.whole(1),
        "N",
        "Steps between them; they come after the last step anyway. Not given: an epoch.",
    )
    tokens: int = setting(64, parse.whole(1), "N", "Longest answer in tokens.")
