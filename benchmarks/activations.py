"""What is it worth to keep activations? Seconds per step by policy and tokens, against recompute.

    python benchmarks/activations.py [--tokens 64 256 1024 4096] [--host 4GiB] [--plot curve.png]

With --plot, one more series keeps more and more in order of benefit within a small host budget, so
that ever more bytes go to SSD, and draws step time over swapped bytes: as in the paper's figure it
falls while compute binds, and rises when the drives do. All of it takes about 25 minutes on two
cores; --tokens, --policies, --steps and --points cut it short. --log keeps every result as it
comes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import reference
from common import Report, median, note, parser_of, run_child, work_folder

POLICIES = ("static", "capuchin", "checkmate", "g10", "all", "holistic")
LONG = 4096  # tokens: from here on a step takes minutes, and one says enough
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "activations") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)
        for tokens in options.tokens:
            report.table(f"{tokens} tokens, {options.host}", policies(options, work, tokens))
        if options.plot:
            curve(options, work, report)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 256, 1024, LONG])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--plot", type=Path, help="picture of step time over swapped bytes")
    parser.add_argument("--curve-host", default="640MiB", help="budget of the series of --plot")
    parser.add_argument(
        "--curve-tokens", type=int, nargs="+", default=[128, 256, 384, 512, 768, 1024],
        help="of which the one is measured whose predicted curve turns most clearly",
    )  # fmt: skip
    parser.add_argument("--points", type=int, default=7, help="measured of the curve")
    parser.add_argument("--log", type=Path, help="file to which every result is added at once")
    parser.set_defaults(steps=3)
    return parser.parse_args()


# -- policies -------------------------------------------------------------------------------------


def policies(options: argparse.Namespace, work: Path, tokens: int) -> list[dict[str, Any]]:
    """Every policy predicted and measured; those that come to the same plan are measured once."""
    planned = plans(options, work, tokens, options.host, names=options.policies)["policies"]
    measured: dict[str, Child] = {}
    rows = []
    for name, plan in planned.items():
        if "refused" in plan:
            rows.append({"policy": name, "note": plan["refused"]})
            continue
        known = plan["same"] in measured
        if not known:
            measured[plan["same"]] = run(options, work, tokens, options.host, name)
        rows.append(row(name, plan, measured[plan["same"]], again=known))
    base = next((r["step s"] for r in rows if r["policy"] == "static"), None)
    for made in rows:
        if base and "step s" in made:
            made["speed / static"] = base / made["step s"]
    return rows


def row(name: str, plan: Child, child: Child, *, again: bool) -> dict[str, Any]:
    step_s = median(child["step_s"])
    return {
        "policy": name,
        "step s": step_s,
        "predicted s": plan["forecast_s"],
        "predicted / measured": plan["forecast_s"] / step_s,
        "kept MiB": plan["swapped_bytes"] / 2**20,
        "on SSD MiB": plan["ssd_bytes"] / 2**20,
        "peak GiB": child["peak_bytes"] / 2**30,
        "loss first .. last": reference.loss_text(child["losses"]),
        "note": "the same plan as above" if again else "",
    }


def plans(
    options: argparse.Namespace, work: Path, tokens: int, host: str, *, names: Any = (),
    curve: bool = False,
) -> Child:  # fmt: skip
    spec = {
        **reference.spec_of(options, work / "model", tokens), **reference.WAY, "host": host,
        "profile": str(work / reference.MACHINE), "policies": list(names), "curve": curve,
    }  # fmt: skip
    return run_child("side_plans.py", spec, threads=options.threads, deadline_s=options.deadline)


def run(options: argparse.Namespace, work: Path, tokens: int, host: str, activations: Any) -> Child:
    """One child, with fewer steps where they are long."""
    few = argparse.Namespace(**vars(options))
    if tokens >= LONG:
        few.warmup, few.steps = min(options.warmup, 1), 1
    child = reference.run_lohan(few, work, tokens, host=host, activations=activations)
    if options.log:
        with options.log.open("a") as file:
            line = {"tokens": tokens, "host": host, "activations": activations, **child}
            file.write(json.dumps(line) + "\n")
    return child


# -- the curve ------------------------------------------------------------------------------------


def curve(options: argparse.Namespace, work: Path, report: Report) -> None:
    """More and more kept, by benefit; what host memory cannot hold goes to SSD."""
    host = options.curve_host
    predicted = {
        tokens: plans(options, work, tokens, host, curve=True)["curve"]
        for tokens in options.curve_tokens
    }
    for tokens, points in predicted.items():
        note(f"  {tokens} tokens: predicted turn {turn(points):.3f}")
    tokens = max(predicted, key=lambda t: turn(predicted[t]))
    rows = []
    for point in chosen(predicted[tokens], options.points):
        child = run(options, work, tokens, host, point["kept"] or "recompute")
        rows.append(
            {
                "swapped MiB": point["swapped_bytes"] / 2**20,
                "on SSD MiB": point["ssd_bytes"] / 2**20,
                "step s": median(child["step_s"]),
                "predicted s": point["forecast_s"],
                "predicted binding": point["binding"],
            }
        )
        draw(options.plot, predicted, tokens, rows, host)
    report.table(f"{tokens} tokens, {host}, more and more kept", rows)


def turn(points: list[Child]) -> float:
    """How much the ends of a curve lie above its lowest point, the nearer end of both: above 1, it
    falls and then rises."""
    seconds = [point["forecast_s"] for point in points]
    return min(seconds[0], seconds[-1]) / min(seconds)


def chosen(points: list[Child], count: int) -> list[Child]:
    """So many of a curve, evenly over its bytes, with both ends and the lowest."""
    low, high = points[0]["swapped_bytes"], points[-1]["swapped_bytes"]
    wanted = [low + (high - low) * i / max(1, count - 2) for i in range(count - 1)]
    near = [
        min(range(len(points)), key=lambda i: abs(points[i]["swapped_bytes"] - size))
        for size in wanted
    ]
    lowest = min(range(len(points)), key=lambda i: points[i]["forecast_s"])
    return [points[i] for i in sorted({*near, lowest})]


def draw(
    path: Path,
    predicted: dict[int, list[Child]],
    tokens: int,
    rows: list[dict[str, Any]],
    host: str,
) -> None:
    """The measured series, and the predicted ones relative to their own lowest point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    points = predicted[tokens]
    left.plot(
        [p["swapped_bytes"] / 2**20 for p in points], [p["forecast_s"] for p in points], "-",
        color="0.6", label="predicted",
    )  # fmt: skip
    left.plot([r["swapped MiB"] for r in rows], [r["step s"] for r in rows], "o-", label="measured")
    left.set(xlabel="activations swapped, MiB", ylabel="seconds per step", title=f"{tokens} tokens")
    left.legend()
    for number, series in predicted.items():
        low, high = series[0]["swapped_bytes"], series[-1]["swapped_bytes"]
        best = min(p["forecast_s"] for p in series)
        share = [(p["swapped_bytes"] - low) / (high - low) for p in series]
        right.plot(share, [p["forecast_s"] / best for p in series], label=f"{number} tokens")
    right.set(
        xlabel="share of the activations swapped", ylabel="predicted step / best",
        title=f"--host {host}",
    )  # fmt: skip
    right.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
