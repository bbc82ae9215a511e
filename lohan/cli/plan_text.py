"""Plans for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lohan.model.plan import BatchWorkload, Plan
from lohan.model.state import MODES, mode_with
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import Forecast
from lohan.planner.machine_plan import MachinePlan, PlanRequest
from lohan.util.trace import LANES
from lohan.util.units import counted, format_bytes, format_seconds

# -- What an optimizer keeps on SSD, and what another than the usual one saves ---------------------
#
# For people and for programs.


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
    if plan.kind != DEFAULT_KIND:
        words = usual.words() if usual is not None else "it would not fit"
        rows["instead of"] = f"{DEFAULT_KIND}: {words}"
    return rows


def optimizer_json(plan: Plan, usual: Costs | None) -> dict[str, Any]:
    made: dict[str, Any] = {"bytes_per_parameter": bytes_of(plan)}
    if plan.kind != DEFAULT_KIND:
        made["usual"] = vars(usual) if usual is not None else None
    return made


def bytes_of(plan: Plan) -> float:
    """Weights and state of a parameter."""
    mode = mode_with(plan.mode, plan.kind)
    return mode.weight_bytes + mode.state_bytes


# -- A prospect for people and for programs --------------------------------------------------------


LANE_TEXT = {
    "gpu": "compute", "h2d": "link to the device", "d2h": "link from the device",
    "net": "between the GPUs", "ssd": "drives", "cpu": "optimizer on the CPU",
}  # fmt: skip


def title(request: PlanRequest) -> str:
    seq = request.model.sample_tokens or request.seq
    gpus = f" with {request.ranks} GPUs" if request.ranks > 1 else ""
    return (
        f"{request.model.name} on {request.machine.name}{gpus}: "
        f"{request.model.parameters / 1e9:.3g}B parameters, batch {request.batch} x {seq} "
        f"tokens, {request.options.mode}, {format_bytes(request.host)} of main memory"
    )


def describe(prospect: MachinePlan, *, steps: int | None) -> list[str]:
    request, made = prospect.request, prospect.forecast
    machine = request.machine
    lines = [title(request), "", "fits", ""]
    if request.ranks > 1:
        lines.append(f"each of {request.ranks} ranks, one per GPU:")
    lines += prospect.plan.describe(
        host_bytes=request.rank_host, device_bytes=machine.device_bytes or None
    )
    lines += ["", f"step          {format_seconds(made.step_s)}"]
    lines.append(f"tokens/s      {made.tokens_per_s:,.1f}")
    if steps is not None:
        lines.append(counted(steps, "step").ljust(14) + format_seconds(steps * made.step_s))
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


def _lanes(prospect: MachinePlan) -> list[str]:
    made = prospect.forecast
    lines = lane_lines(made)
    gain = made.step_s / prospect.without_binding_s
    lines.append(
        f"{made.binding} binds: without it a step would take "
        f"{format_seconds(prospect.without_binding_s)} ({gain:.2f}x)"
    )
    return lines


def activation_lines(workload: BatchWorkload, plan: Plan) -> list[str]:
    """What one block could keep of the batch, in the planner's order."""
    if not workload.shapes:
        return []
    width, kept = MODES[plan.mode].weight_bytes, plan.kept_counts
    shape = next(iter(workload.shapes.values()))
    lines = [
        "",
        f"{'activations of a block':48} {'bytes':>11} {'GFLOPs saved':>13} {'per byte':>9}",
    ]
    inputs = format_bytes(shape.input_elements * workload.tokens * width)
    lines.append(f"{'(its input, always kept)':48} {inputs:>11}")
    for part in shape.by_benefit(workload.seq):
        size, saved = (
            part.elements * workload.tokens * width,
            part.flops_at(workload.seq) * workload.tokens,
        )
        blocks = kept.get(part.name, 0)
        note = f"  kept in {blocks} of {len(workload.shapes)} blocks" if blocks else ""
        lines.append(
            f"{part.name[:48]:48} {format_bytes(size):>11} {saved / 1e9:13,.2f} "
            f"{saved / size:9,.1f}{note}"
        )
    return lines


def _wear(prospect: MachinePlan, steps: int | None) -> list[str]:
    drives, written = prospect.request.machine.drives, prospect.forecast.written_bytes
    each = written / len(drives)
    text = f"{format_bytes(written)} written per step"
    if len(drives) > 1:
        text += f", {format_bytes(each)} to each of {len(drives)} drives"
    endurance = min((d.endurance_bytes for d in drives if d.endurance_bytes), default=0.0)
    if endurance and each:
        whose = "their" if len(drives) > 1 else "its"
        text += f"; {whose} rated endurance is {endurance / each:,.0f} steps"
        if steps is not None:
            share = f"{100 * steps * each / endurance:.2g} %"
            text += f", {counted(steps, 'step')} take{'s' if steps == 1 else ''} {share} of it"
    return [text]


def _choices(prospect: MachinePlan) -> list[str]:
    plan, request = prospect.plan, prospect.request
    rows = -(-request.batch // request.ranks)
    names = {
        **optimizer_rows(plan, usual_costs(prospect)),
        "micro-batch": f"{plan.micro_batch or rows} of {rows}",
        "activations": _activations(plan)
        + ("; the drives have no room for more" if prospect.scarce else ""),
        "updates": _updates(plan),
        "in memory": f"weights of {counted(len(plan.pinned_weights), 'group')}, "
        f"{counted(len(plan.pinned_state), 'state chunk')}",
    }
    return [f"{name:13} {text}" for name, text in names.items()]


def usual_costs(prospect: MachinePlan) -> Costs | None:
    usual = prospect.usual
    if usual is None:
        return None
    made = usual.forecast
    return Costs(usual.peak_bytes["ssd"], made.step_s, made.written_bytes)


def _activations(plan: Plan) -> str:
    kept = ", ".join(f"{name} of {counted(n, 'block')}" for name, n in plan.kept_counts.items())
    text = "block inputs" + (f", {kept}" if kept else "") + "; the rest is recomputed"
    if not plan.moved_out:
        return text
    return f"{text}; those of {counted(len(plan.moved_out), 'block')} go to SSD"


def _updates(plan: Plan) -> str:
    if plan.holds_all:
        when = "after backward" if plan.grad_offload == "serial" else "in the next forward"
        return f"{plan.grad_offload}: all {when}"
    return f"{plan.grad_offload}: {counted(len(plan.deferred), 'group')} in the next forward"


def to_json(prospect: MachinePlan, *, steps: int | None) -> dict[str, Any]:
    request, made = prospect.request, prospect.forecast
    written, drives = made.written_bytes, request.machine.drives
    return {
        "model": request.model.name,
        "machine": request.machine.name,
        "gpus": request.ranks,
        "parameters": request.model.parameters,
        "batch": request.batch,
        "seq": request.model.sample_tokens or request.seq,
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
        "peak_bytes": prospect.peak_bytes,
        **optimizer_json(prospect.plan, usual_costs(prospect)),
        "plan": prospect.plan.to_json(),
    }


def refusal_json(request: PlanRequest, reason: str) -> dict[str, Any]:
    return {
        "model": request.model.name, "machine": request.machine.name,
        "parameters": request.model.parameters, "batch": request.batch, "fits": False,
        "reason": reason,
    }  # fmt: skip
