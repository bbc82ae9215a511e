"""Every published result of the paper next to the simulated one, with the error of each.

    python benchmarks/paper/reproduce.py [--figure TEXT] [--plot DIR] [--json] [--docs FILE]

Everything is simulated, so it needs no GPU and takes about ten seconds. `--docs` rewrites
the summary of docs/paper.md between its markers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from points import Point, figures, points_of

from lohan.cli.compare import Line, chart, new_figure, save
from lohan.errors import LohanError

PER_ROW = 3  # charts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, help="folder for a picture of every figure")
    parser.add_argument("--json", action="store_true", help="print one JSON array, no tables")
    parser.add_argument("--figure", default="", help="only those with this in their name")
    parser.add_argument("--docs", type=Path, help="file whose tables are rewritten")
    options = parser.parse_args()
    wanted = [one for one in figures() if options.figure.lower() in one["figure"].lower()]
    if not wanted:
        names = "; ".join(one["figure"] for one in figures())
        raise LohanError(f"--figure {options.figure!r}: none has it in its name; they are {names}")
    actual = {figure["figure"]: list(points_of(figure)) for figure in wanted}
    everything = [point for points in actual.values() for point in points]
    if options.json:
        print(json.dumps([{**asdict(point), "error": point.error} for point in everything]))
    else:
        for name, points in actual.items():
            print("\n".join([*table(name, points), ""]))
        print("\n".join(summary(everything)))
    if options.docs:
        text = options.docs.read_text(encoding="utf-8")
        options.docs.write_text(with_summary(text, everything), encoding="utf-8")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        for path in draw_all(options.plot, actual):
            print(path, file=sys.stderr)


# -- tables ---------------------------------------------------------------------------------------


def table(name: str, points: Sequence[Point]) -> list[str]:
    lines = [f"{name} ({points[0].unit})", f"  {'':22} {'':20} published      ours   error"]
    for point in points:
        cells = f"{_cell(point.published)} {_cell(point.ours)}"
        lines.append(f"  {point.series:22} {_where(point):>20} {cells} {_error(point)}".rstrip())
    return lines


def _where(point: Point) -> str:
    unit = {"host_gb": " GB", "swapped_gib": " GiB", "ssds": " SSDs"}.get(point.over, "")
    return f"{'batch ' if point.over == 'batch' else ''}{point.at}{unit}"


def _cell(value: float | str | None) -> str:
    if value is None:
        return f"{'no room':>9}"
    return f"{value:>9}" if isinstance(value, str) else f"{value:9,.1f}"


def _error(point: Point) -> str:
    if point.error is not None:
        return f"{100 * point.error:+6.1f} %"
    return "" if point.right else " wrong"


def summary(points: Sequence[Point]) -> list[str]:
    lines = [f"{'':24} points  within 10 %  within 20 %   worst"]
    for name, part in groups(points).items():
        errors = [abs(point.error) for point in part if point.error is not None]
        if errors:
            near, far = (sum(e <= limit for e in errors) / len(errors) for limit in (0.1, 0.2))
            lines.append(
                f"{name:24} {len(errors):6} {100 * near:9.0f} % {100 * far:10.0f} % "
                f"{100 * max(errors):6.0f} %"
            )
    memory = [point for point in points if point.is_memory]
    right = sum(point.right for point in memory)
    return [*lines, f"what fits: {right} of {len(memory)} right"]


def groups(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return the points by group: LoHan's own, then other systems by policy.

    Rival choices of activations form groups of their own.
    """
    created: dict[str, list[Point]] = {}
    for point in points:
        rival = point.series.startswith("lohan, ")
        created.setdefault("lohan, rival activations" if rival else point.policy, []).append(point)
    return created


# -- docs/paper.md --------------------------------------------------------------------------------


NAMES = {
    "lohan": "LoHan (throughput, gradient offloading, SSDs, four GPUs, swapped bytes, DiT, cost)",
    "lohan, rival activations": "rival choices of activations inside LoHan",
    "slideformer": "SlideFormer (throughput, main memory)",
    "zero-infinity": "ZeRO-Infinity",
    "zero-offload": "ZeRO-Offload",
    "colossal-ai": "Colossal-AI",
    "megatron": "Megatron on DGX-A100",
    "fast-dit": "Fast-DiT",
}


def with_summary(text: str, points: Sequence[Point]) -> str:
    """Return a document with its summary brought up to date."""
    start, end = "<!-- summary -->\n", "<!-- end of summary -->"
    if start not in text or end not in text:
        raise LohanError(f"--docs: the file lacks {start.strip()} or {end}; put them in")
    before, rest = text.split(start)
    return before + start + "\n".join(near_table(points)) + "\n" + end + rest.split(end)[1]


def near_table(points: Sequence[Point]) -> list[str]:
    lines = [
        "| points | number | within 10 % | within 20 % | largest error |",
        "|---|---|---|---|---|",
    ]
    actual = groups(points)
    for key, name in NAMES.items():
        errors = [abs(point.error) for point in actual[key] if point.error is not None]
        near, far = (sum(e <= limit for e in errors) / len(errors) for limit in (0.1, 0.2))
        cells = (name, len(errors), f"{near:.0%}", f"{far:.0%}", f"{max(errors):.0%}")
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("%", " %"))
    memory = [point for point in points if point.is_memory]
    right = sum(point.right for point in memory)
    return [
        *lines,
        f"| what runs out of memory, largest model | {len(memory)} | {right} right | | |",
    ]


# -- pictures -------------------------------------------------------------------------------------


def draw_all(folder: Path, figures: dict[str, list[Point]]) -> list[Path]:
    """Draw each figure, and one overview of all figures."""
    files = []
    drawn = {name: points for name, points in figures.items() if len({p.at for p in points}) > 1}
    rows = -(-len(drawn) // PER_ROW)
    overview, axes = new_figure(rows, PER_ROW, (6.2 * PER_ROW, 4.4 * rows))
    for number, (name, points) in enumerate(drawn.items()):
        single, single_axes = new_figure(1, 1, (7.6, 4.8))
        for axis in (single_axes[0][0], axes[number // PER_ROW][number % PER_ROW]):
            _chart(axis, name, points)
        words = re.findall(r"[a-z0-9]+", name.lower())
        files.append(folder / f"{number + 1:02}-{'-'.join(words)}.png")
        save(single, files[-1])
    for number in range(len(drawn), rows * PER_ROW):
        axes[number // PER_ROW][number % PER_ROW].set_visible(False)
    files.append(folder / "overview.png")
    save(overview, files[-1])
    return files


def _chart(axis: object, name: str, points: Sequence[Point]) -> None:
    at = list(dict.fromkeys(point.at for point in points))
    lines = []
    for series in dict.fromkeys(point.series for point in points):
        part = {point.at: point for point in points if point.series == series}
        for published in (True, False):
            values = [
                _height(part[x].published if published else part[x].ours) if x in part else None
                for x in at
            ]
            lines.append(Line(series, values, published=published))
    unit = "billion parameters" if points[0].unit == "largest model" else points[0].unit
    chart(axis, name, [_short(points[0].over, x) for x in at], lines, unit=unit)


def _height(value: float | str | None) -> float | None:
    if isinstance(value, str):
        return float(value.removeprefix("gpt-").removesuffix("b"))
    return value


def _short(over: str, value: object) -> str:
    text = str(value).removeprefix("gpt-").removeprefix("dit-")
    return text + {"host_gb": " GB", "swapped_gib": " GiB"}.get(over, "")


if __name__ == "__main__":
    try:
        main()
    except LohanError as error:
        sys.exit(f"error: {error}")
