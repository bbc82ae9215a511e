"""`lohan compare`: policies over batch sizes, main memory sizes or numbers of drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lohan.cli.compare import outcome_of
from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape

DEFAULT = ("auto", "lohan", "zero-infinity", "zero-offload", "colossal-ai")
OPTIONS = {"batch": "--batch", "host": "--host", "ssds": "--ssds"}
UNIT = "tokens/s"


def compare_command(
    model: ModelShape, machine: Profile, *, batches: Sequence[int], hosts: Sequence[int] = (),
    ssds: Sequence[int] = (), policies: Sequence[str] = DEFAULT, seq: int,
) -> dict[str, Any]:  # fmt: skip
    """What `--json` prints. One of batches, hosts (bytes) and ssds may have several values."""
    over, at = _axis({"batch": batches, "host": hosts, "ssds": ssds})
    first = _Case(batches[0], hosts[0] if hosts else None, ssds[0] if ssds else None)
    cases = [replace(first, **{over: value}) for value in at]
    outcomes = {
        name: [
            outcome_of(name, model, case.on(machine), batch=case.batch, seq=seq) for case in cases
        ]
        for name in policies
    }
    fixed = {key: x for key, x in asdict(first).items() if key != over and x is not None}
    return {
        "model": model.name, "machine": machine.name, "gpus": machine.gpus,
        "seq": model.sample_tokens or seq, "over": over, "at": list(at), "unit": UNIT,
        "fixed": fixed,
        "policies": {
            name: [one.tokens_per_s if one.feasible else None for one in row]
            for name, row in outcomes.items()
        },
        "reasons": {name: [one.reason for one in row] for name, row in outcomes.items()},
    }  # fmt: skip


@dataclass(frozen=True)
class _Case:
    batch: int
    host: int | None
    ssds: int | None

    def on(self, machine: Profile) -> Profile:
        if self.host is not None:
            machine = replace(machine, host_bytes=self.host)
        return machine if self.ssds is None else machine.with_drives(self.ssds)


def _axis(choices: dict[str, Sequence[int]]) -> tuple[str, Sequence[int]]:
    if not choices["batch"]:
        raise ConfigError("--batch: give at least one batch size")
    several = [name for name, given in choices.items() if len(given) > 1]
    if len(several) > 1:
        names = " and ".join(OPTIONS[name] for name in several)
        raise ConfigError(f"{names} have several values each; give one of them a single value")
    over = several[0] if several else "batch"
    return over, choices[over]


def title(made: dict[str, Any]) -> str:
    gpus = f", {made['gpus']} GPUs" if made["gpus"] > 1 else ""
    fixed = "".join(f", {_value(name, x)}" for name, x in made["fixed"].items())
    return f"{made['model']} on {made['machine']}{gpus}{fixed}"


def describe(made: dict[str, Any]) -> list[str]:
    """A table; what does not fit is a dash, and the last lines say why."""
    heads = [_value(made["over"], x) for x in made["at"]]
    width = max(10, *(len(head) + 2 for head in heads))
    first = max(len(name) for name in made["policies"]) + 2
    lines = [f"{title(made)}: {made['unit']}", ""]
    lines.append(" " * first + "".join(f"{head:>{width}}" for head in heads))
    for name, values in made["policies"].items():
        cells = "".join(f"{'-' if x is None else _number(x):>{width}}" for x in values)
        lines.append(f"{name:{first}}{cells}")
    why = [next((text for text in row if text), "") for row in made["reasons"].values()]
    return lines + ([""] if any(why) else []) + [f"- {text}" for text in why if text]


def _value(over: str, value: int) -> str:
    if over == "host":
        return f"{value / 1e9:g} GB"
    return f"batch {value}" if over == "batch" else f"{value} SSD{'' if value == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plot(made: dict[str, Any], path: Path) -> None:
    """The table as a picture; needs matplotlib."""
    from lohan.cli.plots import Line, draw

    lines = [Line(name, values) for name, values in made["policies"].items()]
    heads = [_value(made["over"], x) for x in made["at"]]
    draw(path, title(made), heads, lines, unit=made["unit"])
