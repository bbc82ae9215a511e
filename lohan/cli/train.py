"""The command line: `train`, `resume` and `export`."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import ConfigFile, Json, settings_options
from lohan.cli.recipes import OPTIONS_OF_RESUME, refuse_yaml
from lohan.config import DTYPES, field_of, fields_of, load_config
from lohan.device.launch import EXIT_INTERRUPTED, as_ranks, is_rank
from lohan.errors import ConfigError
from lohan.model.layout import ranks_of
from lohan.train.changes import check_changes
from lohan.util.display import echo
from lohan.util.hub import fetch
from lohan.util.libraries import set_up_libraries
from lohan.util.settings import assignment, load_toml
from lohan.util.units import counted

if TYPE_CHECKING:
    from lohan.util.display import Display

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
# Settings without an option of their own.
ONLY_BY_SET = (
    "train.min_lr_ratio",
    "train.schedule_steps",
    "train.beta1",
    "train.beta2",
    "train.eps",
    "train.momentum",
    "train.param_groups",
    "preference.margin",
    "preference.desirable",
    "preference.undesirable",
    "budget.snapshot_every",
    "budget.snapshot_dir",
    "output.export_dtype",
)
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Any setting by its name in a file, such as train.beta2=0.95; may be repeated.",
    ),
]


@settings_options(
    *(info.dotted for info in fields_of() if info.dotted not in ONLY_BY_SET), panels=True
)
def train(
    overrides: dict[str, Any],
    config: ConfigFile = None,
    assignments: Set = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check settings and data, print the plan, and write nothing."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model and export it."""
    if config is not None:
        refuse_yaml(config)
    if not dry_run:
        fetch_model(config, overrides)
    resolved = load_config(config, overrides=overrides, assignments=assignments or ())
    if not dry_run:
        as_ranks(resolved.budget.gpus)
    set_up_libraries()
    with display(stderr=as_json) as shown:
        if dry_run:
            from lohan.cli.plan import describe, to_json
            from lohan.tools.plan_run import dry_run as plan_only

            count, planned = plan_only(resolved, shown)
            if as_json:
                echo(
                    json.dumps(
                        {"steps": count, **to_json(planned, steps=count, schedule=False)}, indent=1
                    )
                )
                return
            for line in (counted(count, "step"), *describe(planned, steps=count)):
                shown.note(line)
            return
        from lohan.train.trainer import train as run_train

        finish(run_train(resolved, shown), resolved.out, shown, as_json=as_json)


@settings_options(*OPTIONS_OF_RESUME)
def resume(
    overrides: dict[str, Any],
    run: Run,
    steps: Annotated[int | None, typer.Option("--steps", help="New total number of steps.")] = None,
    keep_schedule: Annotated[
        bool,
        typer.Option(
            "--keep-schedule",
            help="With --steps: keep the learning-rate schedule of the original number of steps.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="Number of ranks. Default: the same as before."),
    ] = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Continue a run from its last committed step.

    Settings given here replace those of the run from this step on. --ssd names the folders of a
    store that was moved.
    """
    if keep_schedule and steps is None:
        raise ConfigError("--keep-schedule goes with --steps; give both, or leave it out")
    from lohan.train.run_folder import RunFolder, lost_with_snapshot, stores_of

    changes = {name: value for name, value in overrides.items() if value is not None}
    changes |= dict(map(assignment, assignments or ()))
    check_changes(changes)
    folder = RunFolder(run.absolute())
    config = folder.config(changes)
    # A store that is restored from a snapshot has one rank.
    alone = is_rank() or lost_with_snapshot(folder, config)
    as_ranks(gpus or (1 if alone else stores_of(folder, config).world))
    set_up_libraries()
    from lohan.train.trainer import resume as run_resume

    with display(stderr=as_json) as shown:
        ended = run_resume(folder, shown, steps=steps, keep_schedule=keep_schedule, changes=changes)
        finish(ended, folder.path, shown, as_json=as_json)


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder or, with --merge, adapter folder.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help=field_of("output.export_dtype").help, show_default=False),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the moving average of the weights instead.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export in this folder.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapter to the weights of its base model.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Base model of an adapter folder. Default: the model that it names.",
            show_default=False,
        ),
    ] = None,
    as_lora: Annotated[
        int | None,
        typer.Option(
            "--as-lora",
            min=1,
            metavar="RANK",
            help="Write the best LoRA approximation of a full fine-tune, as a PEFT folder.",
            show_default=False,
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="ORG/NAME",
            help="Also upload what was written to the Hugging Face hub.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the weights of the last committed step as a Hugging Face folder.

    A LoRA run is written as a PEFT adapter; --merge adds the adapter to the weights of its base
    instead. --as-lora writes an adapter that approximates a full fine-tune.
    """
    check_dtype(dtype)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
    set_up_libraries()
    if push is not None:
        from lohan.checkpoint.hub import check_upload

        check_upload(push, offline=offline)
    if as_lora is not None:
        if merge or model is not None:
            raise ConfigError("--as-lora: makes an adapter of a run; leave --merge and --model out")
        facts = export_as_lora(
            run, out, as_lora, dtype=dtype, ema=ema, overwrite=overwrite, quiet=as_json
        )
    elif (run / "adapter_config.json").is_file():
        if not merge:
            raise ConfigError(f"{run} is an adapter folder; add --merge")
        facts = merge_adapter(run, model, out, dtype=dtype, overwrite=overwrite, quiet=as_json)
    elif model is not None:
        raise ConfigError(
            f"--model: {run} is not an adapter folder, and a run records its model; leave the "
            "option out"
        )
    else:
        facts = export_run(
            run, out, dtype=dtype, ema=ema, overwrite=overwrite, merge=merge, quiet=as_json
        )
    if push is not None:
        from lohan.checkpoint.hub import upload

        facts["pushed"] = upload(out.absolute(), push)
        if not as_json:
            echo(f"uploaded to {push}: {facts['pushed']}")
    if as_json:
        echo(json.dumps(facts, indent=1))


def export_run(
    run: Path,
    out: Path,
    *,
    dtype: str | None,
    ema: bool,
    overwrite: bool,
    merge: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Export a run and return what was written. With `quiet`, messages go to stderr."""
    from lohan.checkpoint.resharding import open_set
    from lohan.checkpoint.store_io import store_reader
    from lohan.checkpoint.train_state import TrainState, restore_buffers
    from lohan.data.text import chosen_template
    from lohan.engine.export import export_merged, export_store
    from lohan.engine.logged import fold_log
    from lohan.model.state import stored_state_format
    from lohan.train.inputs import task_of
    from lohan.train.model_card import model_card
    from lohan.train.run_folder import RunFolder, check_export_to, stores_of

    folder = RunFolder(run.absolute())
    config = folder.config()
    if merge and not config.train.lora:
        raise ConfigError(f"--merge: {run} has trained all weights, not an adapter; leave it out")
    check_export_to(folder, config, out)
    with (
        display(stderr=quiet) as shown,
        open_set(stores_of(folder, config), fold=fold_log) as stores,
    ):
        meta = stores[0].meta
        stored_dtype = stored_state_format(meta).name
        trained = task_of(config).load(config, dtype=stored_dtype)
        restore_buffers(trained, meta)
        step = TrainState.of(meta).step
        what = "merged model" if merge else "adapter" if config.train.lora else "weights"
        how: dict[str, Any] = {
            "card": model_card(folder, config, step=step, content=what, averaged=ema),
            "source_folder": config.model,
            "overwrite": overwrite,
            "chat_template": chosen_template(config.train.chat_template),
            "progress": lambda done, all_: shown.advance("exporting", done, all_),
        }
        if merge:
            read = store_reader(*stores, ema=ema)
            export_merged(trained, read, out, dtype=dtype or stored_dtype, **how)
        else:
            export_store(stores, out, dtype=dtype, model=trained, ema=ema, **how)
        shown.note(f"{'averaged ' if ema else ''}{what} after step {step}: {out}")
    return {"path": str(out.absolute()), "step": step, "content": what, "averaged": ema}


def export_as_lora(
    run: Path,
    out: Path,
    rank: int,
    *,
    dtype: str | None,
    ema: bool,
    overwrite: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Write the best rank-`rank` adapter for the difference between a run and its base model."""
    from lohan.capture.blocks import dtype_of
    from lohan.checkpoint.low_rank import export_low_rank
    from lohan.checkpoint.resharding import open_set
    from lohan.checkpoint.store_io import source_of, store_reader
    from lohan.checkpoint.train_state import TrainState
    from lohan.engine.logged import fold_log
    from lohan.model.state import STATE_FORMATS, stored_state_format
    from lohan.train.inputs import task_of
    from lohan.train.model_card import model_card
    from lohan.train.run_folder import RunFolder, check_export_to, stores_of

    folder = RunFolder(run.absolute())
    config = folder.config()
    if config.train.lora:
        raise ConfigError(f"--as-lora: {run} has trained an adapter already; leave it out")
    check_export_to(folder, config, out)
    with (
        display(stderr=quiet) as shown,
        open_set(stores_of(folder, config), fold=fold_log) as stores,
    ):
        stored_dtype = stored_state_format(stores[0].meta).name
        model = task_of(config).load(config, dtype=stored_dtype)
        step = TrainState.of(stores[0].meta).step
        held = export_low_rank(
            model,
            store_reader(*stores, ema=ema),
            source_of(model),
            out,
            rank=rank,
            dtype=dtype_of(STATE_FORMATS[dtype or stored_dtype]),
            overwrite=overwrite,
            card=model_card(
                folder,
                config,
                step=step,
                content=f"The rank-{rank} approximation, as a LoRA adapter, of a full fine-tune",
                averaged=ema,
            ),
            progress=lambda done, all_: shown.advance("exporting", done, all_),
        )
        changed = [each for each in held if each.total]
        total = sum(each.total for each in changed)
        share = sum(each.exported for each in changed) / total if total else 1.0
        if not quiet:
            width = max((len(each.name) for each in changed), default=0)
            for each in changed:
                shown.note(f"{each.name:{width}} {each.share:7.1%}")
        shown.note(
            f"adapter of rank {rank} after step {step}: {out}; it captures {share:.1%} of the "
            "change from the base, by squared norm"
        )
    return {
        "path": str(out.absolute()),
        "step": step,
        "content": "adapter",
        "rank": rank,
        "share": share,
        "parameters": {each.name: each.share for each in changed},
    }


def merge_adapter(
    adapter: Path,
    model: Path | None,
    out: Path,
    *,
    dtype: str | None,
    overwrite: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Merge a folder's adapter into the given base model, or into the one that it names."""
    from lohan.checkpoint.adapters import named_base
    from lohan.checkpoint.store_io import source_of
    from lohan.engine.attach import load
    from lohan.engine.export import export_merged
    from lohan.train.streaming import own_dtype

    base = model or named_base(adapter)
    for what, path in (("the adapter", adapter), ("--model", base)):
        if out.resolve() in (path.resolve(), *path.resolve().parents):
            raise ConfigError(f"--out {out} holds {what} ({path}); give another --out")
    base_dtype = own_dtype(base)
    with display(stderr=quiet) as shown:
        adapted = load(base, dtype=base_dtype, adapter=adapter)
        export_merged(
            adapted,
            source_of(adapted),
            out,
            dtype=dtype or base_dtype,
            source_folder=base,
            overwrite=overwrite,
            progress=lambda done, all_: shown.advance("exporting", done, all_),
        )
        shown.note(f"merged model: {out}")
    return {"path": str(out.absolute()), "content": "merged model"}


def fetch_model(config: Path | None, overrides: dict[str, Any]) -> None:
    """Download the model into the Hugging Face cache unless it is a local folder."""
    model, base = overrides.get("model"), Path.cwd()
    if model is None and config is not None:
        model, base = load_toml(config).get("model"), config.parent
    if model is not None and not (base / str(model)).exists():
        fetch(str(model))


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: unknown {dtype!r}; choose {', '.join(DTYPES)}")


def display(*, stderr: bool = False) -> AbstractContextManager[Display]:
    from contextlib import closing

    from rich.console import Console

    from lohan.util.display import Display, open_display

    if not ranks_of(os.environ).first:
        return closing(Display())
    return closing(open_display(Console(stderr=stderr)))


def finish(outcome: Any, out: Path, shown: Display, *, as_json: bool = False) -> None:
    """Report the end of a run, as JSON if asked, and exit with 130 if it was stopped early."""
    if as_json and ranks_of(os.environ).first:
        from lohan.train.run_folder import RunFolder, final_exports

        folder = RunFolder(out.absolute())
        exports = final_exports(folder, folder.config()) if outcome.exported else {}
        facts = {
            "run": str(folder.path),
            "step": outcome.step,
            "steps": outcome.total,
            "stopped": outcome.stopped,
            "metrics": str(folder.metrics_file),
            "exports": [str(path) for path in exports.values()],
        }
        shown.close()
        echo(json.dumps(facts, indent=1))
    if outcome.stopped and outcome.step < outcome.total:
        shown.close()  # The bar stays in place, and the message is printed below it.
        shown.note(
            f"stopped after step {outcome.step} of {outcome.total}; all steps are on disk; "
            f"continue with `lohan resume {shlex.quote(str(out))}`"
        )
        raise typer.Exit(EXIT_INTERRUPTED)


def register(app: typer.Typer) -> None:
    for command in (train, resume, export):
        app.command()(command)
