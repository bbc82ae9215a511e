"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lohan.commands import ahead, doctor, forward, report, verify
from lohan.commands import train as training
from lohan.commands.train import EXIT_INTERRUPTED, display
from lohan.errors import ConfigError, LohanError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Fine-tune every parameter of a model far larger than memory, exactly.",
)  # fmt: skip
store_app = typer.Typer(no_args_is_help=True, help="Look at, check and remove stores.")
app.add_typer(store_app, name="store")
for commands in (training, forward, ahead, verify, report, doctor):
    commands.register(app)

EXIT_ERROR = 2


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


if __name__ == "__main__":
    main()
