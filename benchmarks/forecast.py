"""Does the simulator know this machine? Predicted against measured seconds per step.

    python benchmarks/forecast.py [--tokens 64 256 1024] [--host 1GiB]

The machine is profiled first, as `lohan profile` does it; then each setting runs, and its own plan
is forecast with that profile.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import reference
from common import Report, alternate, median, parser_of, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "forecast") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)
        sides = {
            f"{host}, {tokens} tokens": partial(
                reference.run_lohan,
                options,
                work,
                tokens,
                host=host,
                activations=options.activations,
            )
            for tokens in options.tokens
            for host in options.host
        }
        found = alternate(sides, options.rounds)
        report.table("predicted and measured", [row(name, found[name]) for name in sides])
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
    measured = median([median(child["step_s"]) for child in children])
    predicted = children[0]["forecast_s"]
    lanes: dict[str, float] = {}
    for child in children:
        for lane, lane_s in child["busy_s"].items():
            lanes[lane] = lanes.get(lane, 0.0) + lane_s
    promised = children[0]["forecast_busy_s"]
    return {
        "setting": name,
        "measured s": measured,
        "predicted s": predicted,
        "predicted / measured": predicted / measured,
        "binding measured": max(lanes, key=lambda lane: lanes[lane]),
        "binding predicted": max(promised, key=lambda lane: promised[lane]),
    }


if __name__ == "__main__":
    sys.exit(main())
