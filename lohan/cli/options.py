"""Options that several commands share, options created from settings, and `--machine`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lohan.config import field_of

# Groups of options in `--help`, most common first. Settings of a group appear in this order.
ADVANCED = "Advanced: "
PANELS = {
    "Model and data": ("model", "data", "eval.data", "train.seq", "task"),
    "Training": (
        "train.epochs",
        "train.steps",
        "train.batch",
        "train.lr",
        "train.lora",
        "train.dtype",
        "seed",
    ),
    "Memory and storage": (
        "budget.host",
        "budget.ssd",
        "budget.device",
        "budget.gpus",
        "budget.commit_every",
        "budget.log_gradients",
    ),
    "Output": ("out", "sample.prompts", "output.log"),
    f"{ADVANCED}model and data": (
        "train.pack",
        "train.chat_template",
        "train.max_dropped",
        "eval.split",
        "eval.every",
        "eval.early_stop",
        "init",
        "tokenizer",
    ),
    f"{ADVANCED}training": (
        "train.optimizer",
        "train.moments",
        "train.schedule",
        "train.warmup",
        "train.weight_decay",
        "train.clip",
        "train.ema",
        "train.freeze",
        "train.lora_alpha",
        "train.lora_targets",
        "train.base",
        "preference.loss",
        "preference.beta",
    ),
    f"{ADVANCED}memory and speed": (
        "budget.device_memory",
        "train.micro_batch",
        "train.tiles",
        "train.activations",
        "train.update_mode",
        "train.overlap",
        "train.compile",
        "train.deterministic",
        "budget.link",
    ),
    f"{ADVANCED}output": (
        "output.export",
        "output.export_best",
        "output.trace",
        "sample.every",
        "sample.tokens",
    ),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
WIDEST_METAVAR = 16  # Longer lists of choices would leave no room for the help text.


def option(dotted: str, *, panel: str | None = None, default: bool = False) -> Any:
    """Return the command-line option of a setting; `default` adds its default to the help text.

    Without `default`, the help text names no default, because commands other than `lohan train` may
    have another one. Paths are not checked here but when they are opened.
    """
    info = field_of(dotted)
    is_flag = info.kind.typed is bool
    names = f"{info.option}/--no-{info.option[2:]}" if is_flag else info.option
    metavar = info.kind.metavar if len(info.kind.metavar) <= WIDEST_METAVAR else "NAME"
    return typer.Option(
        names,
        help=info.help_with_default if default else info.help_without_default,
        show_default=False,
        readable=False,
        metavar="" if is_flag else metavar,
        rich_help_panel=panel,
    )


def settings_options(
    *dotted: str, panels: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each of these settings to a command, in panels if it has many.

    The command receives the values as `overrides`, a dictionary that maps the names of settings to
    values. The value of an option that was not given is None.
    """
    order = sorted(dotted, key=list(PANEL_OF).index) if panels else dotted

    def add(command: Callable[..., None]) -> Callable[..., None]:
        names = {name: name.replace(".", "_") for name in order}
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        options = []
        for name in order:
            panel = PANEL_OF[name] if panels else None
            declared = option(name, panel=panel, default=panels)
            options.append(
                inspect.Parameter(
                    names[name],
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[field_of(name).kind.typed | None, declared],
                )
            )
        options += [
            one.replace(kind=one.KEYWORD_ONLY) for one in parameters if one.name != "overrides"
        ]

        def run(**values: Any) -> None:
            command(overrides={name: values.pop(names[name], None) for name in order}, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return run

    return add


MODEL_HELP = "Model preset such as llama-3-8b, a config.json, or a Hugging Face model folder."
MACHINE_HELP = "Machine preset such as rtx4090, or a TOML file from `lohan profile`."
Model = Annotated[str, typer.Option("--model", help=MODEL_HELP, show_default=False)]
Machine = Annotated[str | None, typer.Option("--machine", help=MACHINE_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
Ssds = Annotated[
    int | None,
    typer.Option("--ssds", help="Number of drives, each like the first drive of the machine."),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")]
Host = Annotated[str | None, option("budget.host")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings; options have precedence.")
]
