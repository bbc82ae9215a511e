"""A machine as a run itself sees it: rates of its lanes from the spans of one of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from lohan.planning.cost import Workload
from lohan.profile import Drive, Profile
from lohan.trace import Span, busy_s

LEAST_BACKWARD = 0.2  # of a backward, that is not recomputation, however fast forward was
UNKNOWN_DRIVE = 1e9  # bytes/s, where a step moved nothing: a careful guess


def profile_of_step(
    spans: Sequence[Span], work: Workload, *, moved_bytes: int, host_bytes: int
) -> Profile | None:
    """None if the step did not do all of it. What I/O costs the compute beside it is in its
    rates."""
    seconds: dict[str, float] = {}
    updated = 0
    for span in spans:
        kind, rest = span.name[0], span.name[1:]
        site = _site(kind, rest, work)
        seconds[site] = seconds.get(site, 0.0) + span.stop_s - span.start_s
        if kind == "U":
            group, chunk = rest.split(".")
            updated += work.chunk(int(group), int(chunk))
    blocks = [site for site in work.sites if not site.head]
    forward = sum(site.forward_flops for site in blocks)
    again = sum(site.recompute_flops for site in blocks)
    if not all(seconds.get(kind) for kind in "FBU") or not forward:
        return None
    rate = forward / seconds["F"]
    back_s = max(seconds["B"] - again / rate, LEAST_BACKWARD * seconds["B"])
    heads = [site for site in work.sites if site.head]
    head_flops = 3 * sum(site.forward_flops for site in heads)
    ssd_s = busy_s(spans, float("-inf"), float("inf"))["ssd"]
    ssd = moved_bytes / ssd_s if ssd_s and moved_bytes else UNKNOWN_DRIVE
    return Profile(
        name="this run", device="cpu", compute=((1.0, rate),),
        backward=((1.0, 2 * forward / back_s),),
        head_flops=head_flops / seconds["head"] if seconds.get("head") else 0.0,
        host_bytes=host_bytes, adam=updated / seconds["U"],
        drives=(Drive(name="measured", read=ssd, write=ssd, mixed=ssd),),
    )  # fmt: skip


def _site(kind: str, rest: str, work: Workload) -> str:
    """Under what a span counts: its kind, or the head apart."""
    if kind in "FB" and rest.isdigit() and work.sites[int(rest)].head:
        return "head"
    return kind
