"""A machine as a run itself sees it: rates of its lanes from the spans of one of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from lohan.model.machine import Drive, Profile
from lohan.planner.cost import StepWork
from lohan.util.trace import Span, busy_s

LEAST_BACKWARD = 0.2  # of a backward, that is not recomputation, however fast forward was
UNKNOWN_DRIVE = 1e9  # bytes/s, where a step moved nothing: a careful guess


def profile_of_step(
    spans: Sequence[Span], work: StepWork, *, moved_bytes: int, host_bytes: int,
    device: str = "cpu", device_bytes: int = 0,
) -> Profile | None:  # fmt: skip
    """None if the step did not do all of it. What concurrent I/O costs compute is in its
    rates. `device_bytes`: of a device with a memory of its own, whose link is measured too."""
    seconds: dict[str, float] = {}
    linked = {"L": 0.0, "D": 0.0}  # bytes of weights and gradients over the link
    per_parameter = {"L": work.layout.weight, "D": work.layout.gradient}
    updated = 0.0  # parameters, as if by AdamW
    for span in spans:
        kind, rest = span.name[0], span.name[1:]
        site = _site(kind, rest, work)
        seconds[site] = seconds.get(site, 0.0) + span.stop_s - span.start_s
        if kind == "U":
            group, chunk = rest.split(".")
            updated += work.chunk(int(group), int(chunk)) * work.layout.update
        elif kind in linked:
            linked[kind] += work.groups[int(rest)] * per_parameter[kind]
    blocks = [site for site in work.sites if not site.head]
    forward = sum(site.forward_flops for site in blocks)
    again = sum(site.recompute_flops for site in blocks)
    gradients = sum(site.gradient_flops for site in blocks if not site.still)
    needed = "FBULD" if device_bytes else "FBU"
    if not all(seconds.get(kind) for kind in needed) or not forward:
        return None
    rate = forward / seconds["F"]
    back_s = max(seconds["B"] - again / rate, LEAST_BACKWARD * seconds["B"])
    heads = [site for site in work.sites if site.head]
    head_flops = sum(site.forward_flops + site.gradient_flops for site in heads)
    ssd_s = busy_s(spans, float("-inf"), float("inf"))["ssd"]
    ssd = moved_bytes / ssd_s if ssd_s and moved_bytes else UNKNOWN_DRIVE
    return Profile(
        name="this run", device=device, device_bytes=device_bytes, compute=((1.0, rate),),
        backward=((1.0, gradients / back_s),),
        head_flops=head_flops / seconds["head"] if seconds.get("head") else 0.0,
        h2d=linked["L"] / seconds["L"] if device_bytes else 0.0,
        d2h=linked["D"] / seconds["D"] if device_bytes else 0.0,
        host_bytes=host_bytes, adam=updated / seconds["U"],
        drives=(Drive(name="measured", read=ssd, write=ssd, mixed=ssd),),
    )  # fmt: skip


def _site(kind: str, rest: str, work: StepWork) -> str:
    """Under what a span counts: its kind, or the head apart."""
    if kind in "FB" and rest.isdigit() and work.sites[int(rest)].head:
        return "head"
    return kind
