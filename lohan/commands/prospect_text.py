"""A prospect for people and for programs."""

from __future__ import annotations

from typing import Any

from lohan.plan import Plan
from lohan.planning.demand import Load
from lohan.planning.forecast import Forecast
from lohan.planning.prospect import Prospect, Question
from lohan.state import MODES
from lohan.trace import LANES
from lohan.units import format_bytes

LANE_TEXT = {
    "gpu": "compute", "h2d": "link to the device", "d2h": "link from the device", "ssd": "drives",
    "cpu": "optimizer on the CPU",
}  # fmt: skip


def title(question: Question) -> str:
    seq = question.model.sample_tokens or question.seq
    return (
        f"{question.model.name} on {question.machine.name}: "
        f"{question.model.parameters / 1e9:.3g}B parameters, batch {question.batch} x {seq} "
        f"tokens, {question.wishes.mode}, {format_bytes(question.host)} of main memory"
    )


def describe(prospect: Prospect, *, steps: int | None) -> list[str]:
    question, made = prospect.question, prospect.forecast
    machine = question.machine
    lines = [title(question), "", "fits", ""]
    lines += prospect.plan.describe(
        host_bytes=question.host, device_bytes=machine.device_bytes or None
    )
    lines += ["", f"step          {format_seconds(made.step_s)}"]
    lines.append(f"tokens/s      {made.tokens_per_s:,.1f}")
    if steps is not None:
        lines.append(f"{steps:,} steps".ljust(14) + format_seconds(steps * made.step_s))
    if prospect.per_1000_usd is not None:
        lines.append(
            f"for the money {prospect.per_1000_usd:,.1f} tokens/s per 1000 USD "
            f"(machine: {machine.usd:,.0f} USD)"
        )
    lines += ["", *_lanes(prospect), "", *_wear(prospect, steps), "", *_choices(prospect)]
    return lines


def lane_lines(made: Forecast) -> list[str]:
    lines = []
    for lane in LANES:
        busy = made.busy_s[lane]
        if busy:
            bar = "#" * round(30 * min(1.0, busy / made.step_s))
            lines.append(f"{lane:4} {100 * busy / made.step_s:5.0f} %  {bar:30}  {LANE_TEXT[lane]}")
    return lines


def _lanes(prospect: Prospect) -> list[str]:
    made = prospect.forecast
    lines = lane_lines(made)
    gain = made.step_s / prospect.without_binding_s
    lines.append(
        f"{made.binding} binds: without it a step would take "
        f"{format_seconds(prospect.without_binding_s)} ({gain:.2f}x)"
    )
    return lines


def activation_lines(load: Load, plan: Plan) -> list[str]:
    """What one block could keep of the batch, in the planner's order."""
    if not load.shapes:
        return []
    width, kept = MODES[plan.mode].weight_bytes, plan.kept_counts
    shape = next(iter(load.shapes.values()))
    lines = [
        "",
        f"{'activations of a block':48} {'bytes':>11} {'GFLOPs saved':>13} {'per byte':>9}",
    ]
    inputs = format_bytes(shape.input_elements * load.tokens * width)
    lines.append(f"{'(its input, always kept)':48} {inputs:>11}")
    for part in shape.by_benefit(load.seq):
        size, saved = part.elements * load.tokens * width, part.flops_at(load.seq) * load.tokens
        blocks = kept.get(part.name, 0)
        note = f"  kept in {blocks} of {len(load.shapes)} blocks" if blocks else ""
        lines.append(
            f"{part.name[:48]:48} {format_bytes(size):>11} {saved / 1e9:13,.2f} "
            f"{saved / size:9,.1f}{note}"
        )
    return lines


def _wear(prospect: Prospect, steps: int | None) -> list[str]:
    drives, written = prospect.question.machine.drives, prospect.forecast.written_bytes
    each = written / len(drives)
    text = f"{format_bytes(written)} written per step"
    if len(drives) > 1:
        text += f", {format_bytes(each)} to each of {len(drives)} drives"
    endurance = min((d.endurance_bytes for d in drives if d.endurance_bytes), default=0.0)
    if endurance and each:
        text += f"; their rated endurance is {endurance / each:,.0f} steps"
        if steps is not None:
            text += f", {steps:,} steps take {100 * steps * each / endurance:.2g} % of it"
    return [text]


def _choices(prospect: Prospect) -> list[str]:
    plan, question = prospect.plan, prospect.question
    names = {
        "micro-batch": f"{plan.micro_batch or question.batch} of {question.batch}",
        "activations": _activations(plan),
        "updates": _updates(plan),
        "in memory": f"weights of {len(plan.pinned_weights)} groups, "
        f"{len(plan.pinned_state)} state chunks",
    }
    return [f"{name:13} {text}" for name, text in names.items()]


def _activations(plan: Plan) -> str:
    kept = ", ".join(f"{name} of {count} blocks" for name, count in plan.kept_counts.items())
    text = "block inputs" + (f", {kept}" if kept else "") + "; the rest is recomputed"
    return text + (f"; {len(plan.moved_out)} blocks' go to SSD" if plan.moved_out else "")


def _updates(plan: Plan) -> str:
    if plan.holds_all:
        when = "after backward" if plan.grad_offload == "serial" else "in the next forward"
        return f"{plan.grad_offload}: all {when}"
    return f"{plan.grad_offload}: {len(plan.deferred)} groups in the next forward"


def format_seconds(seconds: float) -> str:
    """95 -> "1 min 35 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 100 else f"{seconds / 86400:.1f} days"


def to_json(prospect: Prospect, *, steps: int | None) -> dict[str, Any]:
    question, made = prospect.question, prospect.forecast
    written, drives = made.written_bytes, question.machine.drives
    return {
        "model": question.model.name,
        "machine": question.machine.name,
        "parameters": question.model.parameters,
        "batch": question.batch,
        "seq": question.model.sample_tokens or question.seq,
        "fits": True,
        "step_s": made.step_s,
        "tokens_per_s": made.tokens_per_s,
        "steps": steps,
        "total_s": None if steps is None else steps * made.step_s,
        "lane_busy_s": made.busy_s,
        "binding_lane": made.binding,
        "step_s_without_binding_lane": prospect.without_binding_s,
        "tokens_per_s_per_1000_usd": prospect.per_1000_usd,
        "written_bytes_per_step": written,
        "written_bytes_per_drive": [written / len(drives)] * len(drives),
        "peak_bytes": {tier: prospect.plan.tier_bytes(tier) for tier in ("device", "host", "ssd")},
        "plan": prospect.plan.to_json(),
    }


def refusal_json(question: Question, reason: str) -> dict[str, Any]:
    return {
        "model": question.model.name, "machine": question.machine.name,
        "parameters": question.model.parameters, "batch": question.batch, "fits": False,
        "reason": reason,
    }  # fmt: skip
