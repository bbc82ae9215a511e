"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from lohan import __version__
from lohan.device.launch import is_first_to_print
from lohan.errors import ConfigError, LohanError, RankError, StorageIOError
from lohan.util.display import echo, printable

MODULES = {  # module of this package -> its commands
    "train": ("train", "resume", "export"),
    "forward": ("eval", "generate"),
    "plan": ("plan",),
    "recipes": ("init",),
    "schema": ("schema",),
    "compare": ("simulate", "compare", "presets"),
    "ui": ("ui",),
    "tools": ("profile", "verify", "report", "doctor"),
}
store_app = typer.Typer(no_args_is_help=True, help="List, check and remove stores.")
EXIT_ERROR = 2


def main(*, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run the command line; an expected failure prints one message and exits with code 2.

    Expected failures are LohanError and an OSError that names a file. `stopped` returns whether
    Ctrl-C was pressed, in which case the failure is reported as an interruption.
    """
    if sys.argv[1:] == ["--version"]:
        echo(f"lohan {__version__}")
        return
    try:
        if sys.argv[1:2] in (["train"], ["plan"], ["init"], ["resume"]):
            import_module("lohan.cli.recipes").refuse_foreign_options(
                sys.argv[2:], resumes=sys.argv[1] == "resume"
            )
        command_line(sys.argv[1:])()
    except (LohanError, OSError) as error:
        if stopped():
            raise KeyboardInterrupt from error
        if isinstance(error, OSError):
            if error.filename is None:  # such as a broken pipe
                raise
            why = f"{error.filename}: {error.strerror}"
            error = StorageIOError(f"{why}; check it and your permissions, then repeat the command")
        fail(error)


def command_line(words: Sequence[str] = ()) -> typer.Typer:
    """Return an app with all commands, or only with the command that the first word names.

    Importing all commands would take longer than `lohan plan` needs to compute.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Fine-tune every parameter of a model far larger than memory, exactly.",
    )
    app.add_typer(store_app, name="store")
    selected = [module for module, commands in MODULES.items() if words and words[0] in commands]
    for module in selected or (() if words[:1] == ["store"] else MODULES):
        import_module(f"lohan.cli.{module}").register(app)
    if selected:
        app.registered_commands = [
            info
            for info in app.registered_commands
            if words[0] in (info.name, info.callback.__name__)  # type: ignore[union-attr]
        ]
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return command_line()
    raise AttributeError(f"module 'lohan.cli.main' has no attribute {name!r}")


def fail(error: LohanError) -> None:
    """Print an error and exit.

    With several ranks, a rank prints only an error that it detected itself and that no other
    rank has printed. It exits immediately, because the other ranks wait for it.
    """
    ranked = os.environ.get("WORLD_SIZE", "1") != "1"
    prefix = f"lohan, rank {os.environ.get('RANK')}" if ranked else "lohan"
    reported = isinstance(error, RankError) and error.reported
    message = printable(str(error))
    if not reported and is_first_to_print(message):
        from rich.console import Console

        Console(stderr=True).print(
            f"{prefix}: {message}", style="red", markup=False, soft_wrap=True
        )
    if ranked:
        sys.stdout.flush()
        os._exit(EXIT_ERROR)
    sys.exit(EXIT_ERROR)


RunsOrStores = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        help="Runs, stores, or folders that contain them; or all directories of a moved store.",
    ),
]
Dirs = Path | list[Path]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]


def print_json(value: Any) -> None:
    import json

    echo(json.dumps(value, indent=1, default=str))


@store_app.command("ls")
def store_ls(
    folders: RunsOrStores = [Path()],  # noqa: B006
    as_json: Json = False,
) -> None:
    """List stores: state, step, size and directories."""
    from lohan.store.admin import describe
    from lohan.util.units import counted, format_bytes

    if as_json:
        stores = [describe(dirs) for dirs in named_stores(folders)]
        print_json([{key: v for key, v in one.items() if key != "meta"} for one in stores])
        return
    for dirs in named_stores(folders):
        facts = describe(dirs)
        step = "-" if facts["step"] is None else facts["step"]
        holder = facts["in_use_by"]
        used = "" if holder is None else f", in use by process {holder or 'unknown'}"
        disk_slots = facts["dirs"][0]["slots"] or 2
        echo(
            f"{first_of(dirs)}: step {step}, {facts['state']}{used}, "
            f"{format_bytes(facts['state_bytes'] * disk_slots)} in "
            f"{counted(len(facts['dirs']), 'directory', 'directories')}"
        )


@store_app.command("verify")
def store_verify(folders: RunsOrStores, as_json: Json = False) -> None:
    """Read a whole store and compare every chunk with its checksum."""
    from lohan.cli.train import display
    from lohan.store.admin import verify
    from lohan.store.store import Store

    bad = 0
    results = []
    for dirs in named_stores(folders):
        with display(stderr=as_json) as shown, Store.open(dirs) as store:
            findings = verify(store, progress=lambda d, t: shown.advance("verifying", d, t))
            for finding in findings:
                shown.note(finding.problem)
            bad += len(findings)
            chunks = len(store.layout.durable)
            shown.note(f"{first_of(dirs)}: {chunks - len(findings)} of {chunks} chunks are correct")
            problems = [finding.problem for finding in findings]
            results.append({"path": str(first_of(dirs)), "chunks": chunks, "problems": problems})
    if as_json:
        print_json(results)
    if bad:
        raise typer.Exit(EXIT_ERROR)


@store_app.command("fold")
def store_fold(folders: RunsOrStores, as_json: Json = False) -> None:
    """Apply the logged steps of a run that was killed, and write the full state.

    Resuming the run does the same.
    """
    from lohan.cli.train import display
    from lohan.engine.logged import fold_log
    from lohan.store.store import Store

    results = []
    for dirs in named_stores(folders):
        with display(stderr=as_json) as shown, Store.open(dirs, replays=True) as store:
            if store.log is not None and store.meta.get("world", 1) > 1:
                raise ConfigError(
                    f"{first_of(dirs)}: has logged steps of {store.meta['world']} ranks, which "
                    "have to agree on the last one; resume the run with as many ranks"
                )
            count = fold_log(store, progress=lambda d, t: shown.advance("folding", d, t))
            shown.note(
                f"{first_of(dirs)}: {count} logged steps are folded"
                if count
                else f"{first_of(dirs)}: no logged steps"
            )
            results.append({"path": str(first_of(dirs)), "steps": count})
    if as_json:
        print_json(results)


@store_app.command("rm")
def store_rm(
    folders: RunsOrStores,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Remove stores to free their space. Logs and exported models of a run stay."""
    from lohan.store.admin import remove
    from lohan.train.run_folder import RunFolder, check_original

    for path in folders:
        folder = RunFolder(path.absolute())
        if folder.config_file.is_file():
            check_original(folder, folder.config())
    if as_json and not yes:
        raise ConfigError("--json: a program cannot answer the question; add --yes")
    removed = []
    for dirs in named_stores(folders):
        if yes or _sure(f"remove the store {first_of(dirs)}?"):
            for path in remove(dirs):
                removed.append(str(path))
                if not as_json:
                    echo(f"removed {path}")
    if as_json:
        print_json({"removed": removed})


def _sure(question: str) -> bool:
    try:
        return typer.confirm(printable(question))
    except typer.Abort as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise ConfigError(f"{question} there is no terminal to answer on; add --yes") from None


def named_stores(folders: Sequence[Path]) -> list[Dirs]:
    """Return the stores that the given folders name.

    A store is given by its first directory, or by all of its directories if it was moved.
    """
    from lohan.store.files import IDENTITY
    from lohan.store.manifest import read_identity

    if len(folders) > 1 and (folders[0] / IDENTITY).is_file():
        identity = read_identity(folders[0])
        if identity.index == 0 and identity.count == len(folders):
            return [list(folders)]
    return [primary for folder in folders for primary in stores_at(folder)]


def first_of(dirs: Dirs) -> Path:
    return dirs if isinstance(dirs, Path) else dirs[0]


def stores_at(path: Path) -> list[Path]:
    """Return the primary directories of a run's stores, or of all stores below a folder."""
    from lohan.store.admin import list_stores
    from lohan.train.run_folder import RunFolder, sets_of

    folder = RunFolder(path.absolute())
    if folder.config_file.is_file():
        sets = sets_of(folder, config := folder.config())
        primaries = [one for stores in sets for one in stores.primaries if one.exists()]
        return primaries or [folder.store_dirs(config)[0]]
    stores = list_stores(path) if path.is_dir() else []
    if not stores:
        raise ConfigError(f"{path}: no store here or below; give a run or an --ssd folder")
    return stores
