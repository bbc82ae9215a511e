"""What an optimizer keeps on SSD, and what another than the usual one saves, for people and for
programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lohan.model.plan import Plan
from lohan.model.state import mode_with
from lohan.optim import USUAL
from lohan.util.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Costs:
    """Of a run with one optimizer; what is not known is None."""

    ssd_bytes: int
    step_s: float | None = None
    written_bytes: float | None = None  # per step

    def words(self) -> str:
        parts = [f"{format_bytes(self.ssd_bytes)} on SSD"]
        if self.written_bytes is not None:
            parts.append(f"{format_bytes(self.written_bytes)} written per step")
        if self.step_s is not None:
            parts.append(f"{format_seconds(self.step_s)} per step")
        return ", ".join(parts)


def optimizer_rows(plan: Plan, usual: Costs | None) -> dict[str, str]:
    """What is kept, and beside it what the usual optimizer would cost, if it is not that one."""
    rows = {"optimizer": f"{plan.kind}: {bytes_of(plan):g} bytes per parameter and copy on SSD"}
    if plan.kind != USUAL:
        words = usual.words() if usual is not None else "it would not fit"
        rows["instead of"] = f"{USUAL}: {words}"
    return rows


def optimizer_json(plan: Plan, usual: Costs | None) -> dict[str, Any]:
    made: dict[str, Any] = {"bytes_per_parameter": bytes_of(plan)}
    if plan.kind != USUAL:
        made["usual"] = vars(usual) if usual is not None else None
    return made


def bytes_of(plan: Plan) -> float:
    """Weights and state of a parameter."""
    mode = mode_with(plan.mode, plan.kind)
    return mode.weight_bytes + mode.state_bytes
