"""Quick answers about a model on a machine, and the `lohan plan` command of the page Plan.

`lohan plan` takes some seconds to compute a plan and its forecast. Whether a batch fits, and which
parts of the plan use the memory, is known in milliseconds, so the page shows this first.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lohan.config import load_config
from lohan.engine.profile import latest_profile
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.planner import presets
from lohan.planner.machine_plan import PlanRequest, fits, largest_batch, problem_of
from lohan.planner.planner import check_fits
from lohan.tools.plan_request import machine_of, request_of
from lohan.ui.places import Places
from lohan.util.units import parse_bytes

# Settings of a run that the page passes on, by the option of `lohan plan`.
OPTIONS = {
    "batch": "train.batch",
    "seq": "train.seq",
    "host": "budget.host",
    "dtype": "train.dtype",
    "optimizer": "train.optimizer",
    "moments": "train.moments",
    "lora": "train.lora",
    "base": "train.base",
    "steps": "train.steps",
}
BATCHES = (1, 4, 16, 64, 256)  # Batch sizes in the table of all models.
# Numbers that may be typed instead of the machine's own, each with its unit and its meaning.
TYPED = {
    "tflops": (1e12, "TFLOP/s of a block of the model"),
    "link": (1e9, "GB/s of the link to the GPU, each way"),
    "drive_read": (1e9, "GB/s that a drive reads"),
    "drive_write": (1e9, "GB/s that a drive writes"),
    "adam": (1e6, "million parameters per second that AdamW updates"),
}
KEYS = ("model", "machine", "ssds", "gpus", "device_memory", "drive_bytes", "minimise")


@dataclass(frozen=True)
class Question:
    """The input of the page Plan: the texts of its fields, without those that are empty."""

    places: Places
    values: Mapping[str, str]

    @classmethod
    def of(cls, places: Places, query: Mapping[str, str]) -> Question:
        names = {*OPTIONS, *TYPED, *KEYS}
        unknown = [key for key in query if key not in names]
        if unknown:
            raise ConfigError(f"{unknown[0]}: not a field of the plan; reload the page")
        return cls(places, {key: text.strip() for key, text in query.items() if text.strip()})

    @property
    def model(self) -> str:
        """The name of a preset, or the path of a model in one of the folders of `places`."""
        name = self.values.get("model", "")
        if not name:
            raise ConfigError("model: not given; choose one, or give a folder or a config.json")
        if name in presets.model_names():
            return name
        path = self.places.path(name, "model")
        # An unknown preset gets the message with similar names, so only existing paths are used.
        return str(path) if path.exists() else name

    def _number(self, key: str) -> int | None:
        text = self.values.get(key)
        if text is None:
            return None
        if not text.isdecimal() or int(text) < 1 or len(text) > 6:
            raise ConfigError(f"{key}: got {text!r}, wants a whole number from 1")
        return int(text)

    def machine(self) -> Profile:
        """Return the chosen machine with the typed numbers, after checking them."""
        name = self.values.get("machine", "")
        if name and name not in presets.machine_names():
            path = self.places.path(name, "machine")
            name = str(path) if path.is_file() else name
        profile = machine_of(
            name,
            ssds=None,
            gpus=self._number("gpus"),
            device_memory=self.values.get("device_memory"),
        )
        values = asdict(profile)
        typed = {key: self._typed(key) for key in TYPED if key in self.values}
        if (flops := typed.get("tflops")) is not None:
            factor = flops / profile.compute[-1][1]
            for curve in ("compute", "backward"):
                values[curve] = [[tokens, rate * factor] for tokens, rate in values[curve]]
            values["head_flops"] *= factor
        if "link" in typed:
            values["h2d"] = values["d2h"] = typed["link"]
        if "adam" in typed:
            values["adam"] = typed["adam"]
        for drive in values["drives"]:
            drive["read"] = typed.get("drive_read", drive["read"])
            drive["write"] = typed.get("drive_write", drive["write"])
            if "drive_read" in typed or "drive_write" in typed:
                drive["mixed"] = 0.0
            if "drive_bytes" in self.values:
                drive["bytes"] = parse_bytes(self.values["drive_bytes"], name="drive_bytes")
        if typed or "drive_bytes" in self.values:
            values["name"] = f"{profile.name} with typed numbers"
            profile = Profile.from_mapping(values, source="machine")
        ssds = self._number("ssds")
        return profile if ssds is None else profile.with_drives(ssds)

    def _typed(self, key: str) -> float:
        unit, meaning = TYPED[key]
        try:
            number = float(self.values[key])
        except ValueError:
            number = 0.0
        if not 0 < number < 1e9:
            raise ConfigError(f"{key}: got {self.values[key]!r}, wants a number above 0: {meaning}")
        return number * unit

    def request(self) -> PlanRequest:
        """Return the request that `lohan plan` would make from the same settings."""
        overrides: dict[str, Any] = {"model": ".", "data": ".", "out": "."}
        for key, dotted in OPTIONS.items():
            if key in self.values:
                text = self.values[key]
                overrides[dotted] = int(text) if text.isdecimal() and key != "host" else text
        settings = load_config(None, overrides=overrides)
        shape = presets.model(self.model)
        if settings.train.lora and shape.sample_tokens:
            raise ConfigError(
                f"lora: is for language models, {self.model} is a diffusion transformer; leave it "
                "out"
            )
        shape = replace(shape, lora=settings.train.lora, base=settings.train.base or "")
        return request_of(shape, self.machine(), settings, self.values.get("minimise", "time"))

    def words(self, file: Path) -> list[str]:
        """Return the arguments of `lohan` that make this plan for the machine profile in `file`."""
        words = ["plan", "--json", "--model", self.model, "--machine", str(file)]
        for key in (*OPTIONS, "minimise"):
            if key in self.values:
                words += [f"--{key}", self.values[key]]
        return words

    def command(self) -> str:
        """Return the command that makes this plan in a terminal.

        The result is empty if numbers of the machine were typed, because no option has them.
        """
        if any(key in self.values for key in (*TYPED, "drive_bytes")):
            return ""
        keys = ("model", "machine", "ssds", "gpus", "device_memory", *OPTIONS, "minimise")
        words = [
            f"--{key.replace('_', '-')} {shlex.quote(self.values[key])}"
            for key in keys
            if key in self.values
        ]
        return " ".join(["lohan plan", *words])


def quick(question: Question) -> dict[str, Any]:
    """Return whether the batch fits, the memory by owner, and the largest batch."""
    request = question.request()
    machine = request.machine
    facts: dict[str, Any] = {
        "model": request.model.name,
        "parameters": request.model.parameters,
        "machine": machine.name,
        "batch": request.batch,
        "seq": request.model.sample_tokens or request.seq,
        "budgets": {"host": request.host, "device": machine.device_bytes, "ssd": drives(machine)},
        "gpus": machine.gpus,
        "largest_batch": largest_batch(request),
    }
    try:
        problem = problem_of(request).rank_problem
        plan = check_fits(problem)
        problem.check_drives(plan)
    except BudgetError as refused:
        return {**facts, "fits": False, "reason": str(refused)}
    return {**facts, "fits": True, "ledger": [asdict(entry) for entry in plan.ledger]}


def drives(machine: Profile) -> int:
    return sum(drive.bytes for drive in machine.drives)


def row_of_model(question: Question) -> dict[str, Any]:
    """Return one row of the table of all models: which batches fit, and the largest one."""
    request = question.request()
    return {
        "model": question.model,
        "parameters": request.model.parameters,
        "batches": {str(batch): fits(replace(request, batch=batch)) for batch in BATCHES},
        "largest_batch": largest_batch(request),
    }


@lru_cache(maxsize=1)
def models() -> list[dict[str, Any]]:
    """Return the model presets, the smallest first."""
    shapes = [presets.model(name) for name in presets.model_names()]
    shapes.sort(key=lambda shape: shape.parameters)
    return [{"name": shape.name, "parameters": shape.parameters} for shape in shapes]


def machines() -> list[dict[str, Any]]:
    """Return the machine presets and, first, the profile of this machine if it was measured."""
    named = [(name, presets.machine(name)) for name in presets.machine_names()]
    latest = latest_profile()
    profiles = ([("", latest)] if latest is not None else []) + named
    return [
        {
            "name": name,
            "title": profile.name if name else "this machine",
            "device": profile.device,
            "device_bytes": profile.device_bytes,
            "unified": profile.unified,
            "host_bytes": profile.host_bytes,
            "drives": len(profile.drives),
            "drive_bytes": profile.drives[0].bytes if profile.drives else 0,
            "gpus": profile.gpus,
            "usd": profile.usd,
        }
        for name, profile in profiles
    ]
