"""A picture of one step, lane by lane, from a Chrome trace.

    make docs

The trace may also be that of a run (`lohan train --trace`, RUN/trace.json). Drawn is the last whole
step: from the start of its forward to the end of its backward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path

Span = tuple[str, str, float, float]  # lane, kind, start and end in seconds

LANES = {
    "ssd": "drives",
    "h2d": "link to the device",
    "compute": "compute",
    "d2h": "link to main memory",
    "optimizer": "optimizer",
}
KINDS = {  # tokens of schedules, docs/design.md; what they are; colour
    "F": ("forward", "#4c8bf5"),
    "B": ("backward", "#1f4fa8"),
    "RLSGIV": ("weights, state and activations in", "#3a9d6e"),
    "WPODK": ("state, gradients and activations out", "#e08a3c"),
    "UH": ("updates", "#8e5bb5"),
}
LEFT, WIDTH, ROW, BAR, TOP = 150, 700, 34, 22, 34


def read(path: Path) -> list[Span]:
    events = json.loads(path.read_text())["traceEvents"]
    named = ((e["tid"], e["args"]["name"].split()[0]) for e in events if e["ph"] == "M")
    rows = dict(named)
    spans = [
        (rows[e["tid"]], e["name"][0], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: span[2])


def last_step(spans: list[Span]) -> tuple[float, float]:
    """Start of the last forward that has a backward, and the end of that backward."""
    compute = [span for span in spans if span[0] == "compute" and span[1] in "FB"]
    phases = [list(run) for _, run in groupby(compute, key=lambda span: span[1])]
    last = max(n for n, phase in enumerate(phases) if phase[0][1] == "B")
    return phases[last - 1][0][2], max(span[3] for span in phases[last])


def within(spans: Iterable[Span], start: float, stop: float) -> Iterator[Span]:
    for lane, kind, low, high in spans:
        if high > start and low < stop:
            yield lane, kind, max(low, start) - start, min(high, stop) - start


def joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Neighbours of one colour that are less than `gap` apart, as one."""
    created: list[Span] = []
    for lane, kind, low, high in spans:
        if created and colour(created[-1][1]) == colour(kind) and low - created[-1][3] < gap:
            high, low = max(high, created[-1][3]), created.pop()[2]
        created.append((lane, kind, low, high))
    return created


def colour(kind: str) -> str:
    return next(shade for kinds, (_, shade) in KINDS.items() if kind in kinds)


def busy_s(spans: Iterable[Span]) -> float:
    total = end = 0.0
    for _, _, low, high in spans:
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def svg(spans: list[Span], title: str) -> str:
    start, stop = last_step(spans)
    step, scale = list(within(spans, start, stop)), WIDTH / (stop - start)
    height = TOP + len(LANES) * ROW + 74
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="{height}" fill="#fff"/>',
        text(10, 20, title, weight="bold"),
    ]
    for row, (lane, meaning) in enumerate(LANES.items()):
        lane_spans, top = [span for span in step if span[0] == lane], TOP + row * ROW
        parts += [
            text(10, top + 11, lane, weight="bold"),
            text(10, top + 24, meaning, fill="#666"),
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{BAR}" fill="#f0f0f0"/>',
            *bars(joined(lane_spans, 0.3 / scale), top, scale),
            text(LEFT + WIDTH + 8, top + 16, f"{busy_s(lane_spans) / (stop - start):.0%}"),
        ]
    bottom = TOP + len(LANES) * ROW
    return "\n".join([*parts, *axis(stop - start, bottom), *legend(bottom + 54), "</svg>"]) + "\n"


def text(x: float, y: float, words: str, **style: str) -> str:
    more = "".join(f' {"font-weight" if k == "weight" else k}="{v}"' for k, v in style.items())
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'


def bars(spans: list[Span], top: float, scale: float) -> Iterator[str]:
    for shade, runs in groupby(
        sorted(spans, key=lambda s: colour(s[1])), key=lambda s: colour(s[1])
    ):
        path = " ".join(
            f"M{LEFT + low * scale:.1f} {top}h{max(0.3, (high - low) * scale - 0.3):.1f}v{BAR}"
            f"H{LEFT + low * scale:.1f}z"
            for _, _, low, high in runs
        )
        yield f'<path fill="{shade}" d="{path}"/>'


def axis(step_s: float, y: float) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        x = LEFT + WIDTH * tenth / 10
        yield f'<path stroke="#999" d="M{x:g} {y - 8}v6"/>'
        yield text(x, y + 12, f"{step_s * tenth / 10:.1f} s", **{"text-anchor": "middle"})


def legend(y: float) -> Iterator[str]:
    x = 10.0
    for meaning, shade in KINDS.values():
        yield f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" fill="{shade}"/>'
        yield text(x + 17, y, meaning)
        x += 42 + 6.4 * len(meaning)


if __name__ == "__main__":
    source, target, heading = sys.argv[1:]
    Path(target).write_text(svg(read(Path(source)), heading), encoding="utf-8")
