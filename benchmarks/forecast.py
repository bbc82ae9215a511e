"""The accuracy of the simulator: predicted against measured seconds per step.

    python benchmarks/forecast.py [--tokens 64 256 1024] [--host 1GiB]

The settings of one --host run in turn (children.py). The machine is profiled before every round and
after the last, as `lohan profile` does it. The steps of a round are compared with the mean of the
forecasts from the profiles before and after it, for the plan of the run. This takes about 12
minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import reference
from children import take_turns
from common import Report, median, parser_of, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "forecast") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)  # for the plans
        rows = []
        for host in options.host:
            actual = take_turns(
                sides(options, work, host),
                options.rounds,
                lambda number: reference.profile_machine(options, work, profile_name(number)),
                threads=options.threads,
                deadline_s=options.deadline,
            )
            for name, child in actual.items():
                reference.show(name, child)
                rows.append(row(name, child))
        report.table("predicted and measured", rows)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--host", nargs="+", default=["1GiB"])
    parser.add_argument("--activations", default="recompute")
    parser.add_argument("--rounds", type=int, default=4)
    parser.set_defaults(warmup=1, steps=None)
    return parser.parse_args()


def profile_name(number: int) -> str:
    return f"machine-{number}.toml"


def sides(options: argparse.Namespace, work: Path, host: str) -> dict[str, tuple[str, Child]]:
    profiles = [str(work / profile_name(number)) for number in range(options.rounds + 1)]
    created = {}
    for tokens in options.tokens:
        turn = reference.turn_of(options, tokens)
        spec = reference.lohan_spec(turn, work, tokens, host=host, activations=options.activations)
        store = str(work / f"ssd-{tokens}-{host}")
        settings = {**spec, "ssd": store, "profiles": profiles}
        created[f"{host}, {tokens} tokens"] = "side_lohan.py", settings
    return created


def row(name: str, child: Child) -> dict[str, Any]:
    promised = [item["step_s"] for item in child["forecasts"]]
    around = [(before + after) / 2 for before, after in pairwise(promised)]
    measured = reference.rounds_of(child)
    ratios = [
        forecast_s / measured_s for forecast_s, measured_s in zip(around, measured, strict=True)
    ]
    lanes: Counter[str] = Counter()
    for item in child["forecasts"]:
        lanes.update(item["busy_s"])
    return {
        "setting": name,
        "measured s": median(measured),
        "predicted s": median(around),
        "predicted / measured": median(ratios),
        "rounds": f"{min(ratios):.2f} .. {max(ratios):.2f}",
        "binding measured": max(child["busy_s"], key=child["busy_s"].get),
        "binding predicted": max(lanes, key=lambda lane: lanes[lane]),
    }


if __name__ == "__main__":
    sys.exit(main())
