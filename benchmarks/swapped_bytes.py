"""Measure step time over swapped activations on an emulated device.

    python benchmarks/swapped_bytes.py [--batch-there 20] [--points 7] [--plot curve.png]

The device has the proportions of the paper's server. As in its figure 9b, step time falls while
compute binds and rises when the drives do. More and more activations are kept in order of benefit,
within little main memory, so that ever more of them go to SSD. Compute, link, drives and updates
have the server's rates times one factor (emulated.py); the bytes are real. The table and the
picture show predicted and measured steps, relative to the step that keeps only the inputs of
blocks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import emulated
import reference
from children import run_child
from common import Report, median, note, parser_of, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "swapped") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        rates = emulated.scaled_rates(options, work / "model")
        report.facts({"rates": emulated.rates_text(rates)})
        note("profiling the emulated device")
        report.facts({"measured": emulated.measured_text(emulated.measure(options, work, rates))})
        level_results = levels(options, work)
        points = chosen(level_results, options.points)
        children = [
            emulated.run_mode(options, work, rates, "optimized", point["kept"] or "recompute")
            for point in points
        ]
        rows = rows_of(points, children)
        title = f"{emulated.SERVER}, {emulated.MODEL}, batch {options.batch_there}, scaled down"
        report.table(title, rows)
        if options.plot:
            draw(options.plot, level_results, rows, title)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    emulated.add_options(parser)
    parser.add_argument("--points", type=int, default=7, help="measured of the curve")
    parser.add_argument("--plot", type=Path, help="picture of step time over swapped bytes")
    parser.set_defaults(tokens=640, seconds=8.0, host="160MiB", batch_there=20, steps=2, warmup=2)
    return parser.parse_args()


def levels(options: argparse.Namespace, work: Path) -> list[Child]:
    """Return every level of activations that may be kept, with its forecast."""
    spec = {
        **reference.spec_of(options, work / "model", options.tokens),
        **reference.WAY,
        "update_mode": "optimized",
        "host": options.host,
        "policies": [],
        "curve": True,
        "profile": str(work / reference.MACHINE),
    }
    limits = {"threads": options.threads, "deadline_s": options.deadline}
    return list(run_child("side_plans.py", spec, **limits)["curve"])


def chosen(points: list[Child], count: int) -> list[Child]:
    """Choose `count` points of a curve, evenly over its bytes, with both ends and the minimum."""
    low, high = points[0]["swapped_bytes"], points[-1]["swapped_bytes"]
    wanted = [low + (high - low) * i / max(1, count - 2) for i in range(count - 1)]
    near = [
        min(range(len(points)), key=lambda i: abs(points[i]["swapped_bytes"] - size))
        for size in wanted
    ]
    lowest = min(range(len(points)), key=lambda i: points[i]["forecast_s"])
    return [points[i] for i in sorted({*near, lowest})]


def rows_of(points: list[Child], children: list[Child]) -> list[dict[str, Any]]:
    rows = []
    first_s = median(children[0]["step_s"])
    for point, child in zip(points, children, strict=True):
        step_s = median(child["step_s"])
        rows.append(
            {
                "swapped MiB": point["swapped_bytes"] / 2**20,
                "on SSD MiB": point["ssd_bytes"] / 2**20,
                "step s": step_s,
                "predicted s": point["forecast_s"],
                "predicted / measured": point["forecast_s"] / step_s,
                "step / first": step_s / first_s,
                "predicted / first": point["forecast_s"] / points[0]["forecast_s"],
                "predicted binding": point["binding"],
                "loss first .. last": reference.loss_text(child["losses"]),
            }
        )
    return rows


def draw(path: Path, children: list[Child], rows: list[dict[str, Any]], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(
        [point["swapped_bytes"] / 2**20 for point in children],
        [point["forecast_s"] / children[0]["forecast_s"] for point in children],
        "-",
        color="0.6",
        label="predicted",
    )
    swapped = [row["swapped MiB"] for row in rows]
    axes.plot(swapped, [row["step / first"] for row in rows], "o", label="measured")
    axes.set(
        xlabel="activations swapped, MiB", ylabel="step / step with the inputs alone", title=title
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
