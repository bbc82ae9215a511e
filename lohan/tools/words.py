"""What the numbers mean, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan.tools.markup import Markup, text
from lohan.util.units import format_bytes

LANE_NAMES = {
    "gpu": "compute", "h2d": "link to the device", "d2h": "link from the device",
    "ssd": "drives", "cpu": "optimizer", "net": "exchange between ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Something that would make a run so many times as fast. `bound`: what cannot be had."""

    what: str
    gain: float
    bound: bool = False


@dataclass(frozen=True)
class Advice:
    """What would help, best first; `reason`: why that is not known."""

    changes: Sequence[Change] = ()
    reason: str = ""


def bottleneck(measured: Mapping[str, float], step_s: float, advice: Advice) -> str:
    """HTML: "ssd binds 82 % of the step; a second drive would give 1.6x; --host +8GiB 1.2x"."""
    lane = max(measured, key=lambda each: measured[each])
    name = LANE_NAMES[lane] if lane == "gpu" else lane
    parts = [f"<b>{name}</b> binds {100 * measured[lane] / step_s:.0f} % of the step"]
    offers = [change for change in advice.changes if not change.bound]
    for change in _different(offers)[:2]:
        would = "would give " if len(parts) == 1 else ""
        parts.append(f"{named(change)} {would}{change.gain:.1f}x")
    return "; ".join(parts)


def _different(offers: Sequence[Change]) -> list[Change]:
    """The best of each kind: more host memory, more drives."""
    kinds: dict[bool, Change] = {}
    for change in offers:
        kinds.setdefault(change.what.startswith("--"), change)
    return list(kinds.values())


def named(change: Change) -> Markup:
    """Options as code."""
    name = text(change.what)
    return Markup(f"<code>{name}</code>" if change.what.startswith("--") else name)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float) -> str:
    return format_bytes(count)
