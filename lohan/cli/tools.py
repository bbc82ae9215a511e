"""The command line: `profile`, `verify`, `report` and `doctor`."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import Json, option, settings_options
from lohan.config import load_config
from lohan.device.launch import as_ranks
from lohan.errors import ConfigError
from lohan.model.layout import ranks_of
from lohan.util.display import echo
from lohan.util.settings import DEVICES, byte_rate
from lohan.util.units import counted, parse_bytes

if TYPE_CHECKING:
    from lohan.tools.verify import Compared, Verification


# -- The command line: `profile` -------------------------------------------------------------------


def profile(
    ssd: Annotated[
        list[Path] | None,
        typer.Option(
            "--ssd",
            metavar="DIR",
            help="Folder on a drive to measure; may be repeated. Default: the current folder.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, option("budget.device", default=True)] = "auto",
    device_memory: Annotated[str | None, option("budget.device_memory", default=True)] = None,
    link: Annotated[str | None, option("budget.link", default=True)] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model whose width the measured blocks have.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write the result to this TOML file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speed of this machine in less than a minute."""
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from rich.console import Console

    from lohan.device.choose import canonical_name
    from lohan.engine.profile import ComputePlace, run_profile
    from lohan.planner import presets
    from lohan.util.display import open_display

    shape = None if model is None else presets.model(model)

    place = ComputePlace(
        canonical_name(device),
        parse_bytes(device_memory, name="--device-memory") if device_memory else None,
        byte_rate(link, "--link", Path()) if link else None,
    )
    shown = open_display(Console(stderr=True))
    try:
        text = run_profile(
            ssd or [Path.cwd()],
            place=place,
            out=out,
            as_json=as_json,
            progress=shown.advance,
            model=shape,
        )
    finally:
        shown.close()
    echo(text)


def register(app: typer.Typer) -> None:
    for command in (profile, verify, report, doctor):
        app.command()(command)


# -- `lohan doctor` on the command line ------------------------------------------------------------


EXIT_PROBLEM = 1


def doctor(
    ssd: Annotated[
        list[Path] | None,
        typer.Option(
            "--ssd",
            help="Folder on a drive to check; may be repeated. Default: the current folder.",
        ),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Check the numbers, memory and speed of the GPU instead. Takes minutes."
        ),
    ] = False,
    device: Annotated[str | None, option("budget.device")] = None,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", help="With --gpu: run only this check; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="With --gpu: write a report to this JSON file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, or with --gpu its GPU, for what a run needs.

    The exit code is 1 if something keeps a run from working.
    """
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    if gpu:
        return _self_test((ssd or [Path.cwd()])[0], device or "accelerator", check, out, as_json)
    for name, value in (("--device", device), ("--check", check), ("-o", out)):
        if value:
            raise ConfigError(
                f"{name}: belongs to `lohan doctor --gpu`; add --gpu, or leave it out"
            )
    from lohan.tools.doctor import check_drives, check_machine, describe, passed

    findings = [*check_machine(), *check_drives(ssd or [Path.cwd()])]
    if as_json:
        result = {"ok": passed(findings), "findings": [asdict(finding) for finding in findings]}
        echo(json.dumps(result, indent=1))
    else:
        echo("\n".join(describe(findings)))
    if not passed(findings):
        raise typer.Exit(EXIT_PROBLEM)


_NOT_A_GPU = tuple(name for name in DEVICES if name not in ("auto", "accelerator"))


def _self_test(
    ssd: Path, device: str, check: list[str] | None, out: Path | None, as_json: bool
) -> None:
    from lohan.tools import self_test as kit
    from lohan.util.files import OutputFile

    if not ssd.is_dir():
        raise ConfigError(f"--ssd {ssd}: no such folder; create it or choose another")
    if device in _NOT_A_GPU:
        raise ConfigError(
            f"--device {device}: `lohan doctor --gpu` checks a GPU; leave --device out, or give "
            "cuda or cuda:1"
        )
    names = kit.chosen(check or ())
    target = (
        None
        if out is None
        else OutputFile(out, "choose another -o", "a report of the GPU", kit.REPORT.encode())
    )
    if target is not None:
        target.check()
    repeat = f"lohan doctor --gpu --ssd {ssd}" + (
        "" if device == "accelerator" else f" --device {device}"
    )
    results = []
    for each in kit.self_test(device, ssd, names):
        results.append(each)
        if not as_json:
            echo("\n".join(kit.describe(each, repeat)))
    text = kit.report(results, device)
    if target is not None:
        target.write(text.encode())
    if as_json:
        echo(text)
    else:
        echo("\n" + kit.summary(results))
        report_line = f"report: {out}" if out else "-o FILE writes the report"
        echo(
            f"{report_line}; docs/first-gpu-run.md explains each line and where to send the report"
        )
    if not kit.passed(results):
        raise typer.Exit(EXIT_PROBLEM)


# -- `lohan report` on the command line ------------------------------------------------------------


MERGED = "trace-all.json"


def report(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folder; several are drawn into the same charts.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write. Default: RUN/report.html."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML file about a run: curves, lanes, memory and wear."""
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from lohan.train.run_folder import RunFolder, owner_only
    from lohan.ui.report import GENERATOR, advice_for, page
    from lohan.ui.runs import read_run
    from lohan.ui.traces import read_traces, write_merged
    from lohan.util.files import OutputFile

    folders = [RunFolder(path.absolute()) for path in run]
    runs = [read_run(folder) for folder in folders]
    file, remedy = out or folders[0].path / "report.html", "choose another -o"
    target = OutputFile(file, remedy, "a report", GENERATOR)
    target.check()
    text = page([(each, advice_for(each)) for each in runs])
    with owner_only():
        target.write(text.encode())
    written = [("report", str(file))]
    for folder in folders:
        traces = read_traces(folder)
        if len(traces) > 1:
            write_merged(folder.path / MERGED, traces)
            written.append(("trace of all ranks", str(folder.path / MERGED)))
    if as_json:
        echo(json.dumps({key.replace(" ", "_"): path for key, path in written}, indent=1))
        return
    for key, path in written:
        echo(f"{key}: {path}")


# -- `lohan verify` for people and programs --------------------------------------------------------


EXIT_DIFFERENT = 1


VERIFIED = (
    "model",
    "data",
    "seed",
    "budget.gpus",
    "budget.host",
    "budget.ssd",
    "budget.commit_every",
    "budget.log_gradients",
    *(
        f"train.{key}"
        for key in (
            "batch",
            "micro_batch",
            "tiles",
            "seq",
            "lr",
            "clip",
            "update_mode",
            "activations",
            "overlap",
            "dtype",
        )
    ),
)


@settings_options(*VERIFIED, panels=True)
def verify(
    overrides: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of a run, such as RUN/run.toml.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps to compare.")] = 5,
    every_mode: Annotated[
        bool, typer.Option("--all-modes", help="Compare every update mode and activation policy.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Use only the first layers of the model.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting, such as train.beta2=0.95; may be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the first steps of a run with plain PyTorch in memory.

    A model that does not fit in memory is compared as a copy with fewer layers. The state is
    under --ssd or in the current folder, and is removed at the end. The exit code is 1 if the runs
    differ by more than rounding.
    """
    overrides["out"] = "."  # Nothing is written there.
    settings = load_config(config, overrides=overrides, assignments=assignments or ())
    as_ranks(settings.budget.gpus)
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from contextlib import closing

    from rich.console import Console

    from lohan.tools.verify import verify as run
    from lohan.util.display import Display, open_display

    first = ranks_of(os.environ).first
    with closing(open_display(Console(stderr=True)) if first else Display()) as shown:
        result = run(settings, shown, steps=steps, layers=layers, every_mode=every_mode)
    if result is None:  # only the first rank has the result
        return
    echo(json.dumps(finite(to_json(result)), indent=1) if as_json else "\n".join(describe(result)))
    if not result.passed:
        raise typer.Exit(EXIT_DIFFERENT)


def describe(result: Verification) -> list[str]:
    train, copy = result.config.train, result.copy
    layers = f"{copy.layers} of {counted(copy.all_layers, 'layer')}, " if copy.shrunk else ""
    lines = [
        f"{result.config.model}: {layers}{result.parameters:,} parameters, "
        f"{train.dtype or 'fp32'}; batch {train.batch}; the first "
        f"{counted(len(result.reference_losses), 'step')} of {result.total:,}",
        *result.notes,
    ]
    for each in result.compared:
        lines += ["", *_mode_lines(result, each)]
    failed = [str(each.mode) for each in result.compared if not each.passed]
    lines += ["", f"FAIL: {'; '.join(failed)}" if failed else _passed(result)]
    return lines


def _mode_lines(result: Verification, each: Compared) -> list[str]:
    from lohan.tools.verify import worst

    lines = [
        str(each.mode),
        f"{'step':>5} {'in memory':>12} {'LoHan':>12} {'losses':>9} {'limit':>9}   "
        f"{'weights':>9} {'limit':>9}  apart, of the tensor nearest to its limit",
    ]
    for number, step in enumerate(each.weights):
        loss, tensor = each.losses[number], worst(step)
        wrong = [verdict for verdict in step if not verdict.passed]
        mark = f"  FAIL: {len(wrong)} of {len(step)} tensors" if wrong else ""
        mark += "" if loss.passed else "  FAIL: loss"
        lines.append(
            f"{number + 1:5} {result.reference_losses[number]:12.6f} "
            f"{each.free.losses[number]:12.6f} {loss.difference:9.2e} {loss.limit:9.2e}   "
            f"{tensor.difference:9.2e} {tensor.limit:9.2e}  {tensor.what}{mark}"
        )
    if each.other_bits:
        lines.append(f"FAIL: other bits than {each.other_bits}")
    return lines


def _passed(result: Verification) -> str:
    tensors = len(result.compared[0].weights[0])
    noise = ", rounding noise measured" if result.noise is not None else ""
    return (
        f"pass: {counted(tensors, 'tensor')} and the loss of every step within the tolerance"
        f"{noise}; {counted(len(result.compared), 'mode')}"
    )


def to_json(result: Verification) -> dict[str, Any]:
    return {
        "pass": result.passed,
        "model": str(result.config.model),
        "parameters": result.parameters,
        "layers": result.copy.layers,
        "all_layers": result.copy.all_layers,
        "dtype": result.config.train.dtype or "fp32",
        "notes": result.notes,
        "tolerance": {"loss": result.tolerance.loss, "way": result.tolerance.update},
        "noise_measured": result.noise is not None,
        "modes": [_mode_json(result, each) for each in result.compared],
    }


def _mode_json(result: Verification, each: Compared) -> dict[str, Any]:
    mode = each.mode
    return {
        "update_mode": mode.update_mode,
        "activations": mode.activations,
        "overlap": mode.overlap,
        "micro_batch": each.free.plan.micro_batch,
        "pass": each.passed,
        "other_bits_than": each.other_bits or None,
        "steps": [
            {
                "step": number + 1,
                "reference_loss": result.reference_losses[number],
                "loss": each.free.losses[number],
                "loss_difference": each.losses[number].difference,
                "loss_limit": each.losses[number].limit,
                "tensors": [
                    {
                        "name": v.what,
                        "distance": v.difference,
                        "limit": v.limit,
                        "way": d.update,
                        "largest": d.largest,
                        "pass": v.passed,
                    }
                    for v, d in zip(step, each.stepwise.differences[number], strict=True)
                ],
            }
            for number, step in enumerate(each.weights)
        ],
    }


def finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value
