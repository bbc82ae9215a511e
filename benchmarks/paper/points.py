"""Published points of the paper and of one peer, and what our policies give for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.planner import presets
from lohan.planner.systems import Policy, PolicyResult, fits, policy, run, with_choices

DATA = Path(__file__).with_name("published.json")
MACHINE, SEQ = "ratel-4090", 1024
SIZES = ("1.55", "6", "13", "30", "70", "135", "175", "276", "412")  # the paper's GPT models
BATCHES = (8, 16, 32, 64, 128)  # the batch sizes of the paper's figures
IMAGES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
NOT_PUBLISHED = "-"


@dataclass(frozen=True)
class Point:
    """A published value and the simulated one; None means out of memory."""

    figure: str
    unit: str
    series: str
    policy: str
    over: str
    at: Any
    published: float | str | None
    ours: float | str | None

    @property
    def error(self) -> float | None:
        """The simulated value over the published one, minus 1; None if either is not a number."""
        if isinstance(self.published, str) or isinstance(self.ours, str):
            return None
        if self.published is None or self.ours is None:
            return None
        ratio = self.ours / self.published
        return (1 / ratio if self.unit == "seconds" else ratio) - 1

    @property
    def is_memory(self) -> bool:
        """Whether the point is about what fits in memory, not about speed."""
        return self.unit == "largest model" or self.published is None or self.ours is None

    @property
    def right(self) -> bool:
        """Whether a memory point has the same answer as the paper."""
        if self.unit == "largest model":
            return self.ours == self.published
        return (self.ours is None) == (self.published is None)


@cache
def figures() -> list[dict[str, Any]]:
    actual: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["figures"]
    return actual


def points() -> Iterator[Point]:
    for figure in figures():
        yield from points_of(figure)


def points_of(figure: Mapping[str, Any]) -> Iterator[Point]:
    for series in figure["series"]:
        options = {**figure["common"], **series["options"]}
        each = options.pop("each", {})
        for number, (at, published) in enumerate(
            zip(figure["at"], series["published"], strict=True)
        ):
            if published == NOT_PUBLISHED:
                continue
            here = {
                **options,
                figure["over"]: at,
                **{key: row[number] for key, row in each.items()},
            }
            actual = answer(figure["unit"], here)
            yield Point(
                figure["figure"],
                figure["unit"],
                series["label"],
                options["policy"],
                figure["over"],
                at,
                published,
                actual,
            )


def answer(unit: str, options: Mapping[str, Any]) -> float | str | None:
    if unit == "largest model":
        return largest_model(options)
    model, machine = presets.model(options["model"]), machine_of(options)
    outcome = outcome_of(model, machine, options)
    if not outcome.feasible:
        return None
    if unit == "seconds":
        return outcome.step_s
    if unit == "GiB of main memory":
        return outcome.peak_bytes["host"] / 2**30
    if unit == "TFLOPS":
        return tflops(model, outcome.tokens_per_s)
    if unit == "tokens/s per 1000 USD":
        return outcome.tokens_per_s * 1000 / machine.usd
    return outcome.tokens_per_s


def machine_of(options: Mapping[str, Any]) -> Profile:
    machine = presets.machine(options.get("machine", MACHINE))
    machine = replace(machine, gpus=options.get("gpus", machine.gpus))
    if "host_gb" in options:
        machine = replace(machine, host_bytes=options["host_gb"] * 10**9)
    return machine.with_drives(options["ssds"]) if "ssds" in options else machine


def outcome_of(model: ModelShape, machine: Profile, options: Mapping[str, Any]) -> PolicyResult:
    chosen = with_choices(
        policy(options["policy"]),
        update_mode=options.get("update_mode"),
        activations=options.get("activations"),
    )
    swapped = options.get("swapped_gib")
    batches = {"best": BATCHES, "largest": IMAGES}.get(options["batch"], (options["batch"],))
    if options["batch"] == "largest":
        possible = [b for b in batches if not fits(chosen, model, machine, batch=b, seq=SEQ).reason]
        batches = possible[-1:] or batches[:1]
    outcomes = [simulated(chosen, model, machine, batch, swapped) for batch in batches]
    return max(outcomes, key=lambda outcome: outcome.tokens_per_s)


@cache
def simulated(
    chosen: Policy, model: ModelShape, machine: Profile, batch: int, swapped_gib: float | None
) -> PolicyResult:
    # The published values are rounded.
    swapped = None if swapped_gib is None else (swapped_gib + 0.5) * 2**30
    return run(chosen, model, machine, batch=batch, seq=SEQ, swapped=swapped)


def largest_model(options: Mapping[str, Any]) -> str | None:
    chosen, machine = policy(options["policy"]), machine_of(options)
    fitting = [
        f"gpt-{size}b"
        for size in SIZES
        if not fits(
            chosen, presets.model(f"gpt-{size}b"), machine, batch=options["batch"], seq=SEQ
        ).reason
    ]
    return fitting[-1] if fitting else None


def tflops(model: ModelShape, tokens_per_s: float) -> float:
    """Return TFLOP/s as the paper reports them.

    Forward work counts four times, whether or not it was recomputed. For GPT the size is that
    in the name of the model.
    """
    if model.vocabulary:
        size = float(model.name.removeprefix("gpt-").removesuffix("b")) * 1e9
        return 8 * size * tokens_per_s / 1e12
    return 4 * model.flops_at(model.sample_tokens) * tokens_per_s / 1e12
