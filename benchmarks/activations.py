"""What is it worth to keep activations? Seconds per step by policy and tokens, against recompute.

    python benchmarks/activations.py [--tokens 64 256 1024 4096] [--host 4GiB] [--plot curve.png]

With --plot, one more series keeps more and more classes in order of their benefit, and draws step
time over kept bytes.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import reference
from common import Report, alternate, median, parser_of, work_folder

POLICIES = ("recompute", "all", "holistic")
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "activations") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)
        for tokens in options.tokens:
            sides = {
                name: partial(
                    reference.run_lohan, options, work, tokens, host=options.host, activations=name
                )
                for name in POLICIES
            }
            found = alternate(sides, options.rounds)
            report.table(f"{tokens} tokens", rows(found))
        if options.plot:
            curve(options, work, report)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--curve-host", default="1GiB", help="budget of the series of --plot")
    parser.add_argument("--plot", type=Path, help="picture of step time over kept bytes")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def rows(found: dict[str, list[Child]]) -> list[dict[str, Any]]:
    seconds = {name: median([median(c["step_s"]) for c in found[name]]) for name in found}
    return [
        {
            "policy": name,
            "step s": seconds[name],
            "predicted s": children[0]["forecast_s"],
            "speed / recompute": seconds["recompute"] / seconds[name],
            "kept MiB": children[0]["kept_bytes"] / 2**20,
            "blocks on SSD": children[0]["moved_out"],
            "peak GiB": max(child["peak_bytes"] for child in children) / 2**30,
            "loss first .. last": reference.loss_text(children[0]["losses"]),
        }
        for name, children in found.items()
    ]


def curve(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Classes added one by one, by benefit; what host memory cannot hold goes to SSD."""
    tokens = max(t for t in options.tokens if t <= 1024)
    run = partial(reference.run_lohan, options, work, tokens, host=options.curve_host)
    everything = run(activations="all")
    classes = everything["kept"]
    made = []
    for count in range(len(classes) + 1):
        kept = [tuple(pair) for pair in classes[:count]]
        child = run(activations=kept or "recompute")
        made.append((child["planned_bytes"] / 2**30, median(child["step_s"]), child["moved_out"]))
    report.table(
        f"{tokens} tokens, {options.curve_host}, one class after the other",
        [{"kept GiB": x, "step s": y, "blocks on SSD": z} for x, y, z in made],
    )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([x for x, _, _ in made], [y for _, y, _ in made], "o-")
    axes.set(xlabel="activations kept, GiB", ylabel="seconds per step", ylim=(0, None))
    axes.set_title(f"{tokens} tokens, --host {options.curve_host}")
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
