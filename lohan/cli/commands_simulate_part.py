"""`lohan simulate`: one policy on one machine, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.cli.compare import outcome_of
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.planner.policies_systems_part import AUTO, POLICIES
from lohan.util.trace import LANES
from lohan.util.units import format_bytes

BAR = 30  # characters of a full bar


def simulate_command(
    model: ModelShape, machine: Profile, policy: str, *, batch: int, seq: int,
    grad_offload: str | None = None, activations: str | None = None, trace: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What `--json` prints. `trace`: file for a Chrome trace of the simulated steps."""
    outcome = outcome_of(
        policy, model, machine, batch=batch, seq=seq, grad_offload=grad_offload,
        activations=activations,
    )  # fmt: skip
    if trace is not None and outcome.timeline is not None:
        outcome.timeline.write_trace(trace)
    return {
        "model": model.name, "parameters": model.parameters, "machine": machine.name,
        "gpus": machine.gpus, "ssds": len(machine.drives), "host_bytes": machine.host_bytes,
        "policy": policy, "batch": batch, "seq": model.sample_tokens or seq, **outcome.to_json(),
    }  # fmt: skip


def describe(made: dict[str, Any]) -> list[str]:
    gpus = "1 GPU" if made["gpus"] == 1 else f"{made['gpus']} GPUs"
    ssds = "1 SSD" if made["ssds"] == 1 else f"{made['ssds']} SSDs"
    lines = [
        f"{made['policy']}: {about(made['policy'])}",
        f"{made['model']} ({made['parameters'] / 1e9:.3g}B parameters) on {made['machine']}, "
        f"{gpus}, {ssds}, {format_bytes(made['host_bytes'])} of main memory; "
        f"batch {made['batch']} x {made['seq']} tokens",
        "",
    ]
    if not made["feasible"]:
        return [*lines, "does not fit", made["reason"]]
    lines += [f"step      {made['step_s']:.2f} s", f"tokens/s  {made['tokens_per_s']:,.1f}", ""]
    for lane in LANES:
        share = made["lane_busy_s"].get(lane, 0.0) / made["step_s"]
        if lane == "net" and not share:
            continue
        lines.append(
            f"{lane:4} {100 * share:5.0f} %  {'#' * round(BAR * min(1.0, share))}".rstrip()
        )
    lines.append("")
    lines += [f"{tier:6} {format_bytes(size):>11}" for tier, size in made["peak_bytes"].items()]
    return lines


def about(policy: str) -> str:
    return "LoHan as planned here" if policy == AUTO else POLICIES[policy].about
