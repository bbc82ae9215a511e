"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lohan.commands.ahead import option, register
from lohan.config import help_of
from lohan.errors import ConfigError, LohanError
from lohan.libraries import set_up_libraries

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Fine-tune every parameter of a model far larger than memory, exactly.",
)  # fmt: skip
store_app = typer.Typer(no_args_is_help=True, help="Look at, check and remove stores.")
app.add_typer(store_app, name="store")
register(app)

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def main() -> None:
    """Entry point: a LohanError is one message and exit code 2, never a stack trace."""
    try:
        app()
    except LohanError as error:
        fail(error)
    except KeyboardInterrupt:
        Console(stderr=True).print("given up; the last committed step is intact")
        sys.exit(EXIT_INTERRUPTED)


def fail(error: LohanError) -> None:
    Console(stderr=True).print(f"lohan: {error}", style="red", markup=False, soft_wrap=True)
    sys.exit(EXIT_ERROR)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]


@app.command()
def train(
    model: Annotated[Path | None, option("model", "--model")] = None,
    data: Annotated[Path | None, option("data", "--data")] = None,
    out: Annotated[Path | None, option("out", "--out")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with any of these settings.")
    ] = None,
    host: Annotated[str | None, option("budget.host", "--host")] = None,
    ssd: Annotated[list[Path] | None, option("budget.ssd", "--ssd")] = None,
    steps: Annotated[int | None, option("train.steps", "--steps")] = None,
    epochs: Annotated[float | None, option("train.epochs", "--epochs")] = None,
    batch: Annotated[int | None, option("train.batch", "--batch")] = None,
    micro_batch: Annotated[int | None, option("train.micro_batch", "--micro-batch")] = None,
    seq: Annotated[int | None, option("train.seq", "--seq")] = None,
    lr: Annotated[float | None, option("train.lr", "--lr")] = None,
    schedule: Annotated[str | None, option("train.schedule", "--schedule")] = None,
    warmup: Annotated[float | None, option("train.warmup", "--warmup")] = None,
    weight_decay: Annotated[float | None, option("train.weight_decay", "--weight-decay")] = None,
    clip: Annotated[float | None, option("train.clip", "--clip")] = None,
    grad_offload: Annotated[str | None, option("train.grad_offload", "--grad-offload")] = None,
    activations: Annotated[str | None, option("train.activations", "--activations")] = None,
    overlap: Annotated[
        bool | None, typer.Option("--overlap/--no-overlap", help=help_of("train.overlap"))
    ] = None,
    dtype: Annotated[str | None, option("train.dtype", "--dtype")] = None,
    seed: Annotated[int | None, option("seed", "--seed")] = None,
    durability: Annotated[str | None, option("budget.durability", "--durability")] = None,
    export: Annotated[
        bool | None, typer.Option("--export/--no-export", help=help_of("output.export"))
    ] = None,
    trace: Annotated[
        bool | None, typer.Option("--trace/--no-trace", help=help_of("output.trace"))
    ] = None,
) -> None:
    """Fine-tune a model and export it."""
    from lohan.config import load_config

    if warmup is not None and warmup >= 1 and warmup == int(warmup):
        warmup = int(warmup)
    overrides = {
        "model": model, "data": data, "out": out, "seed": seed,
        "budget.host": host, "budget.ssd": ssd, "budget.durability": durability,
        "train.steps": steps, "train.epochs": epochs, "train.batch": batch,
        "train.micro_batch": micro_batch, "train.seq": seq, "train.lr": lr,
        "train.schedule": schedule, "train.warmup": warmup,
        "train.weight_decay": weight_decay, "train.dtype": dtype, "train.clip": clip,
        "train.activations": activations, "train.grad_offload": grad_offload,
        "train.overlap": overlap, "output.export": export,
        "output.trace": trace,
    }  # fmt: skip
    resolved = load_config(config, overrides=overrides)
    set_up_libraries()
    from lohan.trainer import train as run_train

    with display() as shown:
        finish(run_train(resolved, shown), resolved.out, shown)


@app.command()
def resume(
    run: Run,
    steps: Annotated[int | None, typer.Option("--steps", help="New total number of steps.")] = None,
) -> None:
    """Continue a run from its last committed step."""
    set_up_libraries()
    from lohan.run import RunFolder
    from lohan.trainer import resume as run_resume

    folder = RunFolder(run.absolute())
    folder.config()
    with display() as shown:
        finish(run_resume(folder, shown, steps=steps), run, shown)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)],
    dtype: Annotated[str | None, option("output.export_dtype", "--dtype")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
) -> None:
    """Write the weights of the last committed step as a Hugging Face folder."""
    from lohan.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: unknown {dtype!r}; choose {', '.join(DTYPES)}")
    set_up_libraries()
    from lohan.run import RunFolder
    from lohan.session import export_store
    from lohan.storage.store import Store

    folder = RunFolder(run.absolute())
    config = folder.config()
    with display() as shown, Store.open(folder.store_dirs(config)) as store:
        export_store(
            store, out, source_folder=config.model, dtype=dtype, overwrite=overwrite,
            progress=lambda done, all_: shown.advance("exporting", done, all_),
        )  # fmt: skip
        step = store.meta["progress"]["step"]
        shown.note(f"weights after step {step}: {out}")


Place = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run, a store, or a folder that holds some.")
]


@store_app.command("ls")
def store_ls(place: Place = Path()) -> None:
    """List stores: state, step, size and directories."""
    from lohan.storage.admin import describe
    from lohan.units import format_bytes

    console = Console()
    for primary in stores_at(place):
        facts = describe(primary)
        step = facts["meta"].get("progress", {}).get("step", "-")
        used = f", in use by process {facts['in_use_by']}" if facts["in_use_by"] else ""
        slots = facts["dirs"][0]["slots"] or 2
        console.print(
            f"{primary}: step {step}, {facts['state']}{used}, "
            f"{format_bytes(facts['state_bytes'] * slots)} in {len(facts['dirs'])} "
            f"director{'y' if len(facts['dirs']) == 1 else 'ies'}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


@store_app.command("verify")
def store_verify(place: Place) -> None:
    """Read a whole store and compare every chunk with its checksum."""
    from lohan.storage.store import Store
    from lohan.storage.verify import verify

    bad = 0
    for primary in stores_at(place):
        with display() as shown, Store.open(primary) as store:
            findings = verify(store, progress=lambda d, t: shown.advance("verifying", d, t))
            for finding in findings:
                shown.note(finding.problem)
            bad += len(findings)
            chunks = len(store.layout.state)
            shown.note(f"{primary}: {chunks - len(findings)} of {chunks} chunks are right")
    if bad:
        raise typer.Exit(EXIT_ERROR)


@store_app.command("rm")
def store_rm(
    place: Place, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Remove stores and give their space back. The run's log and exported model stay."""
    from lohan.storage.admin import remove

    for primary in stores_at(place):
        if yes or typer.confirm(f"remove the store {primary}?"):
            for path in remove(primary):
                Console().print(f"removed {path}", markup=False, highlight=False, soft_wrap=True)


def stores_at(place: Path) -> list[Path]:
    """Primary store directories that a path means: of a run, or in and below a folder."""
    from lohan.run import RunFolder
    from lohan.storage.admin import list_stores

    folder = RunFolder(place.absolute())
    if folder.config_file.is_file():
        return [folder.store_dirs(folder.config())[0]]
    found = list_stores(place) if place.is_dir() else []
    if not found:
        raise ConfigError(f"{place}: no store here or below; give a run or an --ssd folder")
    return found


def display() -> Any:
    from contextlib import closing

    from lohan.display import open_display

    return closing(open_display(Console()))


def finish(outcome: Any, out: Path, shown: Any) -> None:
    if outcome.stopped and outcome.step < outcome.total:
        shown.close()  # the bar stays where it is, the message comes below it
        shown.note(
            f"stopped after step {outcome.step} of {outcome.total}, all of it safe; continue with "
            f"`lohan resume {out}`"
        )
        raise typer.Exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
