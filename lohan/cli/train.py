"""The command line: `train`, `resume` and `export`."""

from __future__ import annotations

import os
import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import option
from lohan.config import Config, help_of
from lohan.device.launch import EXIT_INTERRUPTED, as_ranks, is_rank
from lohan.errors import ConfigError
from lohan.model.layout import ranks_of
from lohan.util.system import set_up_libraries

if TYPE_CHECKING:
    from lohan.util.display import Display

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", show_default=False,
        help="Any setting by its name in the file, such as train.beta2=0.95; may be repeated.",
    ),
]  # fmt: skip


def flag(dotted: str, name: str) -> Any:
    return typer.Option(f"--{name}/--no-{name}", help=help_of(dotted))


def train(
    model: Annotated[Path | None, option("model", "--model")] = None,
    data: Annotated[Path | None, option("data", "--data")] = None,
    out: Annotated[Path | None, option("out", "--out")] = None,
    task: Annotated[str | None, option("task", "--task")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with any of these settings.")
    ] = None,
    assignments: Set = None,
    host: Annotated[str | None, option("budget.host", "--host")] = None,
    ssd: Annotated[list[Path] | None, option("budget.ssd", "--ssd")] = None,
    gpus: Annotated[int | None, option("budget.gpus", "--gpus")] = None,
    device: Annotated[str | None, option("budget.device", "--device")] = None,
    device_memory: Annotated[str | None, option("budget.device_memory", "--device-memory")] = None,
    link: Annotated[str | None, option("budget.link", "--link")] = None,
    steps: Annotated[int | None, option("train.steps", "--steps")] = None,
    epochs: Annotated[float | None, option("train.epochs", "--epochs")] = None,
    batch: Annotated[int | None, option("train.batch", "--batch")] = None,
    micro_batch: Annotated[int | None, option("train.micro_batch", "--micro-batch")] = None,
    seq: Annotated[int | None, option("train.seq", "--seq")] = None,
    pack: Annotated[bool | None, flag("train.pack", "pack")] = None,
    optimizer: Annotated[str | None, option("train.optimizer", "--optimizer")] = None,
    moments: Annotated[str | None, option("train.moments", "--moments")] = None,
    lr: Annotated[float | None, option("train.lr", "--lr")] = None,
    schedule: Annotated[str | None, option("train.schedule", "--schedule")] = None,
    warmup: Annotated[float | None, option("train.warmup", "--warmup")] = None,
    weight_decay: Annotated[float | None, option("train.weight_decay", "--weight-decay")] = None,
    ema: Annotated[float | None, option("train.ema", "--ema")] = None,
    clip: Annotated[float | None, option("train.clip", "--clip")] = None,
    grad_offload: Annotated[str | None, option("train.grad_offload", "--grad-offload")] = None,
    activations: Annotated[str | None, option("train.activations", "--activations")] = None,
    overlap: Annotated[bool | None, flag("train.overlap", "overlap")] = None,
    compile: Annotated[bool | None, flag("train.compile", "compile")] = None,
    dtype: Annotated[str | None, option("train.dtype", "--dtype")] = None,
    lora: Annotated[int | None, option("train.lora", "--lora")] = None,
    lora_alpha: Annotated[float | None, option("train.lora_alpha", "--lora-alpha")] = None,
    lora_targets: Annotated[
        list[str] | None, option("train.lora_targets", "--lora-targets")
    ] = None,
    seed: Annotated[int | None, option("seed", "--seed")] = None,
    durability: Annotated[str | None, option("budget.durability", "--durability")] = None,
    eval_data: Annotated[Path | None, option("eval.data", "--eval-data")] = None,
    eval_split: Annotated[float | None, option("eval.split", "--eval-split")] = None,
    eval_every: Annotated[int | None, option("eval.every", "--eval-every")] = None,
    early_stop: Annotated[int | None, option("eval.early_stop", "--early-stop")] = None,
    sample_prompts: Annotated[
        list[str] | None, option("sample.prompts", "--sample-prompts")
    ] = None,
    sample_every: Annotated[int | None, option("sample.every", "--sample-every")] = None,
    sample_tokens: Annotated[int | None, option("sample.tokens", "--sample-tokens")] = None,
    export: Annotated[bool | None, flag("output.export", "export")] = None,
    export_best: Annotated[bool | None, flag("output.export_best", "export-best")] = None,
    trace: Annotated[bool | None, flag("output.trace", "trace")] = None,
    log: Annotated[list[str] | None, option("output.log", "--log")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only the plan; nothing is written.")
    ] = False,
) -> None:
    """Fine-tune a model and export it."""
    from lohan.config import load_config

    if warmup is not None and warmup >= 1 and warmup == int(warmup):
        warmup = int(warmup)
    overrides = {
        "model": model, "data": data, "out": out, "task": task, "seed": seed,
        "budget.host": host, "budget.ssd": ssd, "budget.durability": durability,
        "budget.gpus": gpus, "budget.device": device, "budget.device_memory": device_memory,
        "budget.link": link,
        "train.steps": steps, "train.epochs": epochs, "train.batch": batch,
        "train.micro_batch": micro_batch, "train.seq": seq, "train.pack": pack, "train.lr": lr,
        "train.optimizer": optimizer, "train.moments": moments,
        "train.schedule": schedule, "train.warmup": warmup,
        "train.weight_decay": weight_decay, "train.dtype": dtype, "train.clip": clip,
        "train.ema": ema,
        "train.activations": activations, "train.grad_offload": grad_offload,
        "train.overlap": overlap, "train.compile": compile, "train.lora": lora,
        "train.lora_alpha": lora_alpha,
        "train.lora_targets": lora_targets, "eval.data": eval_data, "eval.split": eval_split,
        "eval.every": eval_every, "eval.early_stop": early_stop,
        "sample.prompts": sample_prompts, "sample.every": sample_every,
        "sample.tokens": sample_tokens, "output.export": export,
        "output.export_best": export_best, "output.trace": trace, "output.log": log,
    }  # fmt: skip
    resolved = load_config(config, overrides=overrides, assignments=assignments or ())
    if not dry_run:
        as_ranks(resolved.budget.gpus)
    set_up_libraries()
    with display() as shown:
        if dry_run:
            _only_plan(resolved, shown)
            return
        from lohan.train.trainer import train as run_train

        finish(run_train(resolved, shown), resolved.out, shown)


def _only_plan(config: Config, shown: Display) -> None:
    """What `train` would begin with: its data is looked at, in a folder that goes again."""
    from lohan.cli.plan_run import plan_lines

    for line in plan_lines(config, shown):
        shown.note(line)


def resume(
    run: Run,
    steps: Annotated[int | None, typer.Option("--steps", help="New total number of steps.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="Ranks to go on with. Not given: as many as before."),
    ] = None,
) -> None:
    """Continue a run from its last committed step."""
    from lohan.train.run_folder import RunFolder, stores_of

    folder = RunFolder(run.absolute())
    config = folder.config()
    # Written in place, it has one rank, and its store may have to come from a snapshot first.
    alone = is_rank() or config.budget.durability == "checkpoint"
    as_ranks(gpus or (1 if alone else stores_of(folder, config).world))
    set_up_libraries()
    from lohan.train.trainer import resume as run_resume

    with display() as shown:
        finish(run_resume(folder, shown, steps=steps), folder.path, shown)


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)],
    dtype: Annotated[str | None, option("output.export_dtype", "--dtype")] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the weights instead.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
) -> None:
    """Write the weights of the last committed step as a Hugging Face folder, or the adapter of a
    LoRA run as a PEFT folder."""
    check_dtype(dtype)
    set_up_libraries()
    from lohan.capture.call import restore_buffers
    from lohan.checkpoint.resharding import open_set
    from lohan.checkpoint.store_io import TrainState
    from lohan.engine.session import export_store
    from lohan.model.state import stored_mode
    from lohan.train.inputs import task_of
    from lohan.train.run_folder import RunFolder, check_export_to, stores_of

    folder = RunFolder(run.absolute())
    config = folder.config()
    check_export_to(folder, config, out)
    with display() as shown, open_set(stores_of(folder, config)) as stores:
        meta = stores[0].meta
        model = task_of(config).load(config, dtype=stored_mode(meta).name)
        restore_buffers(model, meta)
        export_store(
            stores, out, source_folder=config.model, dtype=dtype, overwrite=overwrite, model=model,
            ema=ema, progress=lambda done, all_: shown.advance("exporting", done, all_),
        )  # fmt: skip
        step = TrainState.of(meta).step
        what = "adapter" if config.train.lora else "weights"
        shown.note(f"{'averaged ' if ema else ''}{what} after step {step}: {out}")


def check_dtype(dtype: str | None) -> None:
    from lohan.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: unknown {dtype!r}; choose {', '.join(DTYPES)}")


def display(*, stderr: bool = False) -> AbstractContextManager[Display]:
    from contextlib import closing

    from rich.console import Console

    from lohan.util.display import Silent, open_display

    if not ranks_of(os.environ).first:
        return closing(Silent())
    return closing(open_display(Console(stderr=stderr)))


def finish(outcome: Any, out: Path, shown: Display) -> None:
    if outcome.stopped and outcome.step < outcome.total:
        shown.close()  # the bar stays where it is, the message comes below it
        shown.note(
            f"stopped after step {outcome.step} of {outcome.total}, all of it safe; continue with "
            f"`lohan resume {shlex.quote(str(out))}`"
        )
        raise typer.Exit(EXIT_INTERRUPTED)


def register(app: typer.Typer) -> None:
    for command in (train, resume, export):
        app.command()(command)
