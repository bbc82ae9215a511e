"""The benefit of kept activations: seconds per step by policy and tokens, against recomputation.

    python benchmarks/activations.py [--tokens 64 256 1024 4096] [--host 4GiB]

The machine is profiled, and every policy plans with that profile. Policies with different plans run
in turn (children.py), as long as they fit into memory together. This takes about 40 minutes on two
cores; --tokens, --policies and --rounds make it shorter. --log appends every result to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import reference
from children import run_child, take_turns
from common import Report, median, note, parser_of, work_folder

POLICIES = ("static", "capuchin", "checkmate", "g10", "all", "holistic")
BESIDE = 1.2  # A process takes at most this multiple of its host budget.
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
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every policy")
    parser.add_argument("--log", type=Path, help="file to which every result is added at once")
    parser.set_defaults(warmup=1, steps=None)
    return parser.parse_args()


def policies(options: argparse.Namespace, work: Path, tokens: int) -> list[dict[str, Any]]:
    """Predict and measure every policy, in rounds; measure policies with the same plan once."""
    planned = plans(options, work, tokens)
    first = {}  # the policy that is run for a plan
    for name, plan in planned.items():
        if "refused" not in plan:
            first.setdefault(plan["same"], name)
    measured = measure(options, work, tokens, list(first.values()))
    rows = []
    for name, plan in planned.items():
        if "refused" in plan:
            rows.append({"policy": name, "note": plan["refused"]})
        else:
            like = first[plan["same"]]
            result = row(name, plan, measured[like], like=like)
            if "static" in measured:
                faster, apart = reference.speed(measured["static"], measured[like])
                result |= {"speed / static": faster, "rounds": apart}
            rows.append(result)
    return rows


def measure(
    options: argparse.Namespace, work: Path, tokens: int, names: list[str]
) -> dict[str, Child]:
    """Run the policies in turn, or one after another if they do not fit into memory together."""
    note(f"{tokens} tokens, {options.host}: {', '.join(names)}")
    turn = reference.turn_of(options, tokens)
    limits = {"threads": options.threads, "deadline_s": options.deadline}
    sides = {}
    with work_folder(work, "stores") as stores:
        for name in names:
            spec = reference.lohan_spec(turn, work, tokens, host=options.host, activations=name)
            sides[name] = "side_lohan.py", {**spec, "ssd": str(stores / name)}
        if together(options, names):
            actual = take_turns(sides, options.rounds, **limits)
        else:
            actual = {name: run_child(*side, **limits) for name, side in sides.items()}
    for name, child in actual.items():
        reference.show(name, child)
        if options.log:
            line = {"tokens": tokens, "host": options.host, "activations": name, **child}
            with options.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return actual


def together(options: argparse.Namespace, names: list[str]) -> bool:
    """Return whether the processes of all these sides fit in memory together."""
    from lohan.util.memory import host_memory_bytes
    from lohan.util.units import parse_bytes

    return len(names) * BESIDE * parse_bytes(options.host, name="host") < host_memory_bytes()


def row(name: str, plan: Child, child: Child, *, like: str) -> dict[str, Any]:
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
        "note": f"the same plan as {like}" if name != like else "",
    }


def plans(options: argparse.Namespace, work: Path, tokens: int) -> Child:
    """Return the plan of each policy, by name."""
    spec = {
        **reference.spec_of(options, work / "model", tokens),
        **reference.WAY,
        "host": options.host,
        "profile": str(work / reference.MACHINE),
        "policies": list(options.policies),
        "curve": False,
    }
    result = run_child("side_plans.py", spec, threads=options.threads, deadline_s=options.deadline)
    return dict(result["policies"])


if __name__ == "__main__":
    sys.exit(main())
