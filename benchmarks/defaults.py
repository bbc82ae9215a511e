"""What the default settings cost: clipping on, below and above the limit, against no clipping.

    python benchmarks/defaults.py [--model-there qwen3-8b] [--seconds 8] [--rounds 2]

A small model on an emulated device in the proportions of a desktop (emulated.py says how), main
memory included: as large a share of the state fits into it as there. A limit that no norm reaches
lets every update run in backward; one that every norm exceeds makes every step wait for its norm.
The forecast ratio is the simulator's, from a profile made through the same device.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import reference
from children import alternate
from common import Report, median, note, parser_of, work_folder
from emulated import add_options, measure, measured_text, rates_text, scaled_rates

SERVER = "rtx4090"
LIMITS = {"--clip 0": 0.0, "below the limit": 1e9, "every step clipped": 1e-3}
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "defaults") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        rates = scaled_rates(
            options, work / "model", server=SERVER, large_model=options.model_there
        )
        options.host = host_text(options, work / "model")
        report.facts({"rates": rates_text(rates), "host": options.host})
        note("profiling the emulated device")
        report.facts({"measured": measured_text(measure(options, work, rates))})
        sides = {
            name: partial(run_limit, options, work, rates, name, clip)
            for name, clip in LIMITS.items()
        }
        rows = rows_of(alternate(sides, options.rounds))
        report.table(f"{SERVER}, {options.model_there}, batch {options.batch_there}", rows)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(parser)
    parser.set_defaults(batch_there=64, warmup=4, steps=4)
    parser.add_argument("--model-there", default="qwen3-8b", help="preset whose step is copied")
    parser.add_argument("--share", type=float, default=0.7, help="of main memory, for the state")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def host_text(options: argparse.Namespace, model: Path) -> str:
    """Main memory with room for the same share of the state as there; what is left of it there
    holds activations, which are next to nothing here."""
    from lohan.planner import presets

    smaller = presets.model(model).parameters / presets.model(options.model_there).parameters
    room = presets.machine(SERVER).host_bytes * options.share * smaller
    return f"{int(room / 2**20)}MiB"


def run_limit(
    options: argparse.Namespace, work: Path, rates: dict[str, float], name: str, clip: float
) -> Child:
    spec = {
        **reference.spec_of(options, work / "model", options.tokens), **reference.WAY,
        "clip": clip, "host": options.host, "ssd": str(work / "ssd"), "rates": rates,
        "profile": str(work / reference.MACHINE), "activations": "recompute",
        "device_memory": options.device_memory * 2**20,
    }  # fmt: skip
    return reference.run_side("side_emulated.py", options, spec, name)


def rows_of(found: dict[str, list[Child]]) -> list[dict[str, Any]]:
    base = next(iter(found.values()))
    rows = []
    for name, children in found.items():
        pairs = zip(base, children, strict=True)
        ratios = [median(one["step_s"]) / median(own["step_s"]) for one, own in pairs]
        rows.append(
            {
                "settings": name,
                "measured s": median([median(child["step_s"]) for child in children]),
                "speed / --clip 0": median(ratios),
                "rounds": f"{min(ratios):.2f} .. {max(ratios):.2f}",
                "forecast s": children[0]["forecasts"][0]["step_s"],
                "written MiB": children[0]["ssd_written_bytes"] / 2**20,
                "loss": reference.loss_text(children[0]["losses"]),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
