"""`lohan simulate` and `lohan compare`: systems by name, including `auto`, on a machine."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from lohan.cli.options import Gpus, Host, Json, Machine, Model, Ssds, option
from lohan.config import UPDATE_MODES, TrainConfig
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions, with_log
from lohan.model.shapes import ModelShape
from lohan.planner.activations import CHOOSERS
from lohan.planner.machine_plan import PlanRequest, plan_for_machine
from lohan.planner.systems import AUTO, POLICIES, PolicyResult, policy, run, with_choices
from lohan.tools.plan_request import machine_of
from lohan.util.display import echo
from lohan.util.files import OutputFile
from lohan.util.trace import LANES, trace_output
from lohan.util.units import GiB, format_bytes

# -- Outcome of a system on a machine -------------------------------------------------------------


def outcome_of(
    name: str,
    model: ModelShape,
    machine: Profile,
    *,
    batch: int,
    seq: int,
    update_mode: str | None = None,
    activations: str | None = None,
    clip: float | None = None,
) -> PolicyResult:
    """Plan or simulate one step of the system `name` on a machine.

    `clip` applies to `auto` only and defaults to the limit that training uses; other systems never
    clip.
    """
    _check("--update-mode", update_mode, UPDATE_MODES)
    _check("--activations", activations, CHOOSERS)
    if name == AUTO:
        return _auto(
            model,
            machine,
            batch=batch,
            seq=seq,
            update_mode=update_mode,
            activations=activations,
            clip=TrainConfig.clip if clip is None else clip,
        )
    chosen = with_choices(policy(name), update_mode=update_mode, activations=activations)
    return run(chosen, model, machine, batch=batch, seq=seq)


def _check(option: str, value: str | None, allowed: Collection[str]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(f"{option}: {value!r}; choose {', '.join(allowed)}")


def _auto(
    model: ModelShape,
    machine: Profile,
    *,
    batch: int,
    seq: int,
    update_mode: str | None,
    activations: str | None,
    clip: float,
) -> PolicyResult:
    """Return the forecast of the plan that LoHan chooses for this machine."""
    if activations is not None:
        raise ConfigError(
            f"auto chooses activations itself, not {activations}; leave --activations out or use "
            "--policy lohan"
        )
    options = PlanOptions(
        dtype="bf16",
        update_mode=update_mode or TrainConfig.update_mode,
        clip=clip,
        can_rerun=True,
        commit=None,
    )
    options = with_log(options, "auto", commit_every="auto")
    request = PlanRequest(
        model=model, machine=machine, options=options, batch=batch, seq=seq, host=machine.host_bytes
    )
    try:
        planned = plan_for_machine(request)
    except BudgetError as refused:
        return PolicyResult(feasible=False, reason=str(refused))
    forecast = planned.forecast
    assert forecast is not None
    return PolicyResult(
        feasible=True,
        step_s=forecast.step_s,
        tokens_per_s=forecast.tokens_per_s,
        lane_busy_s=forecast.busy_s,
        timeline=forecast.timeline,
        peak_bytes=planned.peak_bytes,
        kept_bytes=sum(site.kept_bytes for site in forecast.work.sites),
    )


# -- `lohan simulate`: one policy on one machine, for people and for programs ----------------------


BAR = 30  # characters of a full bar


def simulate_command(
    model: ModelShape,
    machine: Profile,
    policy: str,
    *,
    batch: int,
    seq: int,
    update_mode: str | None = None,
    activations: str | None = None,
    clip: float | None = None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Simulate one system and return what `--json` prints.

    If `trace` is given, a Chrome trace of the simulated steps is written to this file.
    """
    target = None if trace is None else trace_output(trace, "choose another --trace")
    if target is not None:
        target.check()
    outcome = outcome_of(
        policy,
        model,
        machine,
        batch=batch,
        seq=seq,
        update_mode=update_mode,
        activations=activations,
        clip=clip,
    )
    if target is not None and outcome.timeline is not None:
        target.write(json.dumps(outcome.timeline.trace()).encode())
    return {
        "model": model.name,
        "parameters": model.parameters,
        "machine": machine.name,
        "gpus": machine.gpus,
        "ssds": len(machine.drives),
        "host_bytes": machine.host_bytes,
        "policy": policy,
        "batch": batch,
        "seq": model.sample_tokens or seq,
        **outcome.to_json(),
    }


def describe_simulation(result: dict[str, Any]) -> list[str]:
    gpus = "1 GPU" if result["gpus"] == 1 else f"{result['gpus']} GPUs"
    ssds = "1 SSD" if result["ssds"] == 1 else f"{result['ssds']} SSDs"
    lines = [
        f"{result['policy']}: {about(result['policy'])}",
        f"{result['model']} ({result['parameters'] / 1e9:.3g}B parameters) on {result['machine']}, "
        f"{gpus}, {ssds}, {format_bytes(result['host_bytes'])} of main memory; "
        f"batch {result['batch']} x {result['seq']} tokens",
        "",
    ]
    if not result["feasible"]:
        return [*lines, "does not fit", result["reason"]]
    lines += [f"step      {result['step_s']:.2f} s", f"tokens/s  {result['tokens_per_s']:,.1f}", ""]
    for lane in LANES:
        share = result["lane_busy_s"].get(lane, 0.0) / result["step_s"]
        if lane == "net" and not share:
            continue
        lines.append(
            f"{lane:9} {100 * share:5.0f} %  {'#' * round(BAR * min(1.0, share))}".rstrip()
        )
    lines.append("")
    lines += [f"{tier:6} {format_bytes(size):>11}" for tier, size in result["peak_bytes"].items()]
    return lines


def about(policy: str) -> str:
    return "LoHan as planned here" if policy == AUTO else POLICIES[policy].about


# -- `lohan compare`: policies over batch sizes, main memory sizes or numbers of drives ------------


DEFAULT = ("auto", "lohan", "zero-infinity", "zero-offload", "colossal-ai")
OPTIONS = {"batch": "--batch", "host": "--host", "ssds": "--ssds"}
UNIT = "tokens/s"
MOST_CASES = 64  # limit of combinations, each of which is planned for every policy


def compare_command(
    model: ModelShape,
    machine: Profile,
    *,
    batches: Sequence[int],
    hosts: Sequence[int] = (),
    ssds: Sequence[int] = (),
    policies: Sequence[str] = DEFAULT,
    seq: int,
    clip: float | None = None,
) -> dict[str, Any]:
    """Return what `--json` prints: each policy at every combination of batch, host and drives.

    If one of the three has several values, "over" is its name and "at" is the list of its values.
    If more than one has several values, "over" is a list of names and "at" is a list of lists.
    """
    over, at = _axes({"batch": batches, "host": hosts, "ssds": ssds})
    first = _Case(batches[0], hosts[0] if hosts else None, ssds[0] if ssds else None)
    cases = [replace(first, **dict(zip(over, values, strict=True))) for values in at]
    outcomes = {
        name: [
            outcome_of(name, model, case.on(machine), batch=case.batch, seq=seq, clip=clip)
            for case in cases
        ]
        for name in policies
    }
    fixed = {key: x for key, x in asdict(first).items() if key not in over and x is not None}
    one_axis = len(over) == 1
    return {
        "model": model.name,
        "machine": machine.name,
        "gpus": machine.gpus,
        "seq": model.sample_tokens or seq,
        "unit": UNIT,
        "over": over[0] if one_axis else over,
        "at": [values[0] if one_axis else list(values) for values in at],
        "fixed": fixed,
        "usd": [case.on(machine).usd or None for case in cases],
        "policies": {
            name: [one.tokens_per_s if one.feasible else None for one in row]
            for name, row in outcomes.items()
        },
        "reasons": {name: [one.reason for one in row] for name, row in outcomes.items()},
    }


@dataclass(frozen=True)
class _Case:
    batch: int
    host: int | None
    ssds: int | None

    def on(self, machine: Profile) -> Profile:
        if self.host is not None:
            machine = machine.with_host(self.host)
        return machine if self.ssds is None else machine.with_drives(self.ssds)


def _axes(choices: dict[str, Sequence[int]]) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the names that have several values, and every combination of these values."""
    if not choices["batch"]:
        raise ConfigError("--batch: give at least one batch size")
    over = [name for name, values in choices.items() if len(values) > 1] or ["batch"]
    combinations = list(product(*(choices[name] for name in over)))
    if len(combinations) > MOST_CASES:
        raise ConfigError(
            f"{', '.join(OPTIONS[name] for name in over)}: {len(combinations)} combinations, more "
            f"than {MOST_CASES}; give fewer values"
        )
    return over, combinations


def title(comparison: dict[str, Any]) -> str:
    gpus = f", {comparison['gpus']} GPUs" if comparison["gpus"] > 1 else ""
    fixed = "".join(f", {_value(name, x)}" for name, x in comparison["fixed"].items())
    return f"{comparison['model']} on {comparison['machine']}{gpus}{fixed}"


def describe_comparison(comparison: dict[str, Any]) -> list[str]:
    """Return a table in which a dash marks what does not fit; the last lines give the reasons.

    If one option has several values, the table has a column for each value. If more than one has
    several values, the table has a row for each combination. Prices of machines are included if
    they are given.
    """
    heads = _heads(comparison)
    rows = {name: [_cell(x) for x in values] for name, values in comparison["policies"].items()}
    if any(comparison["usd"]):
        rows["USD"] = [_cell(x) for x in comparison["usd"]]
    if isinstance(comparison["over"], list):
        columns = list(zip(*rows.values(), strict=True))
        heads, rows = list(rows), dict(zip(heads, map(list, columns), strict=True))
    width = max(10, *(len(head) + 2 for head in heads))
    first = max(map(len, rows)) + 2
    lines = [f"{title(comparison)}: {comparison['unit']}", ""]
    lines.append(" " * first + "".join(f"{head:>{width}}" for head in heads))
    lines += [
        f"{name:{first}}" + "".join(f"{x:>{width}}" for x in row) for name, row in rows.items()
    ]
    why = [next((text for text in row if text), "") for row in comparison["reasons"].values()]
    return lines + ([""] if any(why) else []) + [f"- {text}" for text in why if text]


def _heads(comparison: dict[str, Any]) -> list[str]:
    over = comparison["over"]
    if isinstance(over, str):
        return [_value(over, x) for x in comparison["at"]]
    return [", ".join(map(_value, over, values)) for values in comparison["at"]]


def _cell(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _value(over: str, value: int) -> str:
    if over == "host":
        in_gib = value % GiB == 0  # as it was given
        return f"{value / GiB:g} GiB" if in_gib else f"{value / 1e9:g} GB"
    return f"batch {value}" if over == "batch" else f"{value} SSD{'' if value == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plot(comparison: dict[str, Any], path: Path) -> None:
    """Draw the table as a line chart, which needs matplotlib."""
    lines = [Line(name, values) for name, values in comparison["policies"].items()]
    heads = _heads(comparison)
    draw(path, title(comparison), heads, lines, unit=comparison["unit"])


# -- Line charts as PNG or SVG, through matplotlib where it is installed ---------------------------


SUFFIXES = (".png", ".svg", ".pdf")
_DRAWN_BY = "lohan compare --plot"  # metadata that identifies pictures of this command
COLOURS = ("#0b6e99", "#d1495b", "#e09f3e", "#5b8e7d", "#7d5ba6", "#6c757d", "#3d405b", "#bc4b51")
INK, GRID = "#22262b", "#d9dde1"
OUR_OWN = {"auto": "#111111", "lohan": COLOURS[0]}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    `values` are ordered by position; None means that the system does not run there. A
    `published` line is dashed, with hollow markers, and is drawn behind the measured line of
    the same label.
    """

    label: str
    values: Sequence[float | None]
    published: bool = False


def check_plot(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the file must end in {', '.join(SUFFIXES)}")
    _plot_output(path).check()


def _plot_output(path: Path) -> OutputFile:
    return OutputFile(path, "choose another --plot", "a picture", _DRAWN_BY.encode())


def draw(path: Path, title: str, at: Sequence[str], lines: Sequence[Line], *, unit: str) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.4), constrained_layout=True)
    chart(axes, title, at, lines, unit=unit)
    _plot_output(path).write(_picture(figure, path.suffix.removeprefix(".")))
    plt.close(figure)


def chart(axes: Any, title: str, at: Sequence[str], lines: Sequence[Line], *, unit: str) -> None:
    """Draw a line chart into the given axes."""
    rest = iter([c for c in COLOURS if c not in OUR_OWN.values()] * len(lines))
    names = dict.fromkeys(line.label for line in lines)
    colours = {name: OUR_OWN.get(name) or next(rest) for name in names}
    for line in lines:
        points = [(x, y) for x, y in enumerate(line.values) if y is not None]
        style: dict[str, Any] = {"color": colours[line.label], "marker": "o"}
        if line.published:
            style |= {"linestyle": (0, (4, 2)), "linewidth": 1.2, "markerfacecolor": "white"}
            style |= {"markersize": 5, "zorder": 2, "alpha": 0.9}
        else:
            style |= {"linewidth": 2.0, "markersize": 5.5, "zorder": 3}
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, label=None if line.published else line.label, **style)
    if any(line.published for line in lines):
        axes.plot(
            [],
            [],
            color=INK,
            linestyle=(0, (4, 2)),
            linewidth=1.2,
            marker="o",
            markerfacecolor="white",
            markersize=5,
            label="published",
        )
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_ylabel(unit, color=INK)
    axes.set_xticks(range(len(at)), at)
    axes.set_xlim(-0.3, len(at) - 0.7)
    highest = max((y for line in lines for y in line.values if y is not None), default=1.0)
    axes.set_ylim(0, 1.08 * highest)
    _plain(axes)


def save(figure: Any, path: Path) -> None:
    path.write_bytes(_picture(figure, path.suffix.removeprefix(".")))


def _picture(figure: Any, kind: str) -> bytes:
    buffer, key = io.BytesIO(), "Software" if kind == "png" else "Creator"
    figure.savefig(buffer, format=kind, dpi=160, facecolor="white", metadata={key: _DRAWN_BY})
    return buffer.getvalue()


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a new matplotlib figure and its array of axes."""
    figure, axes = _pyplot().subplots(
        rows, columns, figsize=size, constrained_layout=True, squeeze=False
    )
    return figure, axes


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; `pip install 'lohan[plot]'`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def simulate(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="System to simulate: auto, lohan, zero-infinity, ... as `lohan presets` lists.",
        ),
    ] = "auto",
    batch: Annotated[int, option("train.batch")] = 8,
    seq: Annotated[int, option("train.seq")] = 1024,
    ssds: Ssds = None,
    gpus: Gpus = None,
    host: Host = None,
    update_mode: Annotated[str | None, option("train.update_mode")] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations", help="Activation policy of --policy lohan, such as holistic."
        ),
    ] = None,
    clip: Annotated[float | None, option("train.clip")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome trace of the step to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step of a system on a machine that need not be present.

    auto is LoHan with default settings, for steps that are not clipped; other systems never clip.
    """
    from lohan.cli.compare import describe_simulation, simulate_command
    from lohan.planner import presets

    profile = machine_of(machine or "", ssds=ssds, gpus=gpus, host=host)
    result = simulate_command(
        presets.model(model),
        profile,
        policy,
        batch=batch,
        seq=seq,
        update_mode=update_mode,
        activations=activations,
        clip=clip,
        trace=trace,
    )
    echo(json.dumps(result, indent=1) if as_json else "\n".join(describe_simulation(result)))


def compare(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="System to compare; may be repeated.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, such as 8,16,32.")] = "8",
    seq: Annotated[int, option("train.seq")] = 1024,
    host: Annotated[
        str | None, typer.Option("--host", help="Sizes of main memory, such as 128GB,256GB.")
    ] = None,
    ssds: Annotated[
        str | None, typer.Option("--ssds", help="Numbers of drives, such as 1,2,4.")
    ] = None,
    gpus: Gpus = None,
    clip: Annotated[float | None, option("train.clip")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result to this .png or .svg file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate and compare systems over batch sizes, main memory and drives."""
    from lohan.cli import compare as command
    from lohan.planner import presets
    from lohan.util.units import parse_bytes

    if plot is not None:
        command.check_plot(plot)
    comparison = command.compare_command(
        presets.model(model),
        machine_of(machine or "", ssds=None, gpus=gpus),
        batches=_numbers("--batch", batch),
        ssds=_numbers("--ssds", ssds or ""),
        hosts=[parse_bytes(size, name="--host") for size in (host or "").split(",") if size],
        policies=policy or command.DEFAULT,
        seq=seq,
        clip=clip,
    )
    echo(
        json.dumps(comparison, indent=1)
        if as_json
        else "\n".join(command.describe_comparison(comparison))
    )
    if plot is not None:
        command.plot(comparison, plot)


def _numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise ConfigError(f"{name}: {text!r}; give whole numbers from 1, such as 8,16,32")
    return values


def presets(as_json: Json = False) -> None:
    """List the named machines, models and policies."""
    from lohan.planner import presets as catalogue
    from lohan.planner.systems import policy_names

    if as_json:
        machines = [asdict(catalogue.machine(name)) for name in catalogue.machine_names()]
        lists = {"models": list(catalogue.model_names()), "policies": list(policy_names())}
        echo(json.dumps({"machines": machines, **lists}, indent=1, default=str))
        return
    echo("machines:")
    for line in _machines([catalogue.machine(name) for name in catalogue.machine_names()]):
        echo(f"  {line}")
    for what, names in (("models", catalogue.model_names()), ("policies", policy_names())):
        echo(f"{what}:")
        for name in names:
            echo(f"  {name}")


def _machines(machines: list[Profile]) -> Iterator[str]:
    """Yield the rows of a table of machines."""
    from lohan.util.units import format_bytes

    rows = [("name", "GPU", "its memory", "host memory", "drives", "rated writes", "USD")]
    for m in machines:
        drive, count = m.drives[0], len(m.drives)
        price = f", {drive.usd:,.0f} USD" if drive.usd else ""
        gpu = f"{m.gpus} x {m.device}" if m.gpus > 1 else m.device
        rows.append(
            (
                m.name,
                gpu,
                "unified" if m.unified else format_bytes(m.device_bytes),
                f"{m.host_bytes / 1e9:,.0f} GB",
                f"{count} x {drive.bytes / 1e12:.3g} TB{price}",
                f"{drive.endurance_bytes / 1e15:.2g} PB each",
                f"{m.usd:,.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()


def register(app: typer.Typer) -> None:
    for command in (simulate, compare, presets):
        app.command()(command)
