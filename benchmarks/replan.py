"""What a run gains by the plan that it makes after its first steps, and what making it costs.

    python benchmarks/replan.py [--tokens 64] [--host 1GiB 4GiB] [--clip 1 0]

Runs on this machine, of which no profile is known, as `lohan train` begins without `lohan profile`:
after three steps it plans again for the machine that it has measured. "before" are steps 2 and 3
(the first runs on demand), "new plan" what was done between two steps, "first" the step behind it,
"later" those from the third behind it on. More memory should never make a step slower.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import reference
from children import alternate
from common import Report, median, note, parser_of, work_folder

Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "replan") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        for tokens in options.tokens:
            note(f"{tokens} tokens")
            sides = {
                f"--host {host}, --clip {clip:g}": partial(run, options, work, tokens, host, clip)
                for host, clip in product(options.host, options.clip)
            }
            found = alternate(sides, options.rounds)
            report.table(f"{tokens} tokens", [row(name, found[name]) for name in sides])
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.set_defaults(warmup=0, steps=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--host", nargs="+", default=["1GiB", "4GiB"])
    parser.add_argument("--clip", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def run(options: argparse.Namespace, work: Path, tokens: int, host: str, clip: float) -> Child:
    spec = {
        **reference.spec_of(options, work / "model", tokens), **reference.WAY, "clip": clip,
        "host": host, "ssd": str(work / "ssd"),
    }  # fmt: skip
    return reference.run_side("side_lohan.py", options, spec, f"{host}, clip {clip:g}")


def row(name: str, children: list[Child]) -> dict[str, Any]:
    parts = [parts_of(child) for child in children]
    before, later = (median([part[key] for part in parts]) for key in ("before", "later"))
    taken = [change for child in children for change in child["changes"]]
    firsts = [part["first"] for part in parts if part["first"] is not None]
    return {
        "run": name,
        "before s": before,
        "new plan s": median([change["seconds"] for change in taken]) if taken else None,
        "first s": median(firsts) if firsts else None,
        "later s": later,
        "before / later": before / later,
        "extra steps": cost(parts, taken, later),
        "found": children[0]["changes"][0]["said"] if children[0]["changes"] else "the same plan",
    }


def parts_of(child: Child) -> Child:
    """Seconds of the steps before a new plan, of the first by it, and of later ones."""
    steps = list(child["step_s"])
    after = child["changes"][0]["after"] if child["changes"] else 3
    for change in child["changes"]:
        steps[change["after"] - 1] -= change["seconds"]  # it was made within that step
    return {
        "before": median(steps[1:after]),
        "first": steps[after] if child["changes"] else None,
        "later": median(steps[after + 2 :]),
    }


def cost(parts: list[Child], taken: list[Child], later_s: float) -> float | None:
    """Of a new plan, in steps by it: making it, and what the first step takes longer."""
    if not taken:
        return None
    made_s = median([change["seconds"] for change in taken])
    first_s = median([part["first"] for part in parts if part["first"] is not None])
    return (made_s + first_s - later_s) / later_s


if __name__ == "__main__":
    sys.exit(main())
