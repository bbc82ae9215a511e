"""Does the simulator know this machine? Predicted against measured seconds per step.

    python benchmarks/forecast.py [--tokens 64 256 1024] [--host 1GiB]

The machine is profiled right before each setting runs, as `lohan profile` does it, and the plan of
the run is forecast with that profile.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any

import reference
from children import order
from common import Report, median, parser_of, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "forecast") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        settings = {
            f"{host}, {tokens} tokens": (tokens, host)
            for tokens, host in product(options.tokens, options.host)
        }
        found: dict[str, list[Child]] = {name: [] for name in settings}
        for number in range(options.rounds):
            for name in order(list(settings), number):
                tokens, host = settings[name]
                reference.profile_machine(options, work)  # right before: machines change
                found[name].append(
                    reference.run_lohan(
                        options, work, tokens, host=host, activations=options.activations
                    )
                )
        report.table("predicted and measured", [row(name, found[name]) for name in settings])
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--host", nargs="+", default=["1GiB"])
    parser.add_argument("--activations", default="recompute")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def row(name: str, children: list[Child]) -> dict[str, Any]:
    ratios = [child["forecast_s"] / median(child["step_s"]) for child in children]
    lanes: dict[str, float] = {}
    promised: dict[str, float] = {}
    for child in children:
        for lane, lane_s in child["busy_s"].items():
            lanes[lane] = lanes.get(lane, 0.0) + lane_s
        for lane, lane_s in child["forecast_busy_s"].items():
            promised[lane] = promised.get(lane, 0.0) + lane_s
    return {
        "setting": name,
        "measured s": median([median(child["step_s"]) for child in children]),
        "predicted s": median([child["forecast_s"] for child in children]),
        "predicted / measured": median(ratios),
        "rounds": f"{min(ratios):.2f} .. {max(ratios):.2f}",
        "binding measured": max(lanes, key=lambda lane: lanes[lane]),
        "binding predicted": max(promised, key=lambda lane: promised[lane]),
    }


if __name__ == "__main__":
    sys.exit(main())
