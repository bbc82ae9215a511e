"""Does the simulator know this machine? Predicted against measured seconds per step.

    python benchmarks/forecast.py [--tokens 64 256 1024] [--host 1GiB]

The machine is profiled first, as `lohan profile` does it; then each setting runs, and its own plan
is forecast with that profile.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import reference
from common import Report, alternate, median, parser_of, run_child, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "forecast") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)
        sides = {
            f"{host}, {tokens} tokens": partial(run, options, work, host, tokens)
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


def run(options: argparse.Namespace, work: Path, host: str, tokens: int) -> Child:
    spec = {
        **reference.spec_of(options, work / "model", tokens), "clip": 0.0, "host": host,
        "grad_offload": "balanced", "durability": "step", "ssd": str(work / "ssd"),
        "profile": str(work / reference.MACHINE), "activations": options.activations,
    }  # fmt: skip
    try:
        child = run_child(
            "side_lohan.py", spec, threads=options.threads, deadline_s=options.deadline
        )
    finally:
        shutil.rmtree(work / "ssd", ignore_errors=True)
    reference.show(f"LoHan {host}, {tokens} tokens", child)
    return child


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
