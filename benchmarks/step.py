"""Seconds per step: LoHan against PyTorch with everything in memory, in turn.

    python benchmarks/step.py [--tokens 64 256 1024] [--host 1GiB] [--update-mode optimized serial]

Every side is a process of its own with the same threads, starting from the same checkpoint and
taking the same batches: losses must agree. All are alive and take turns, a few steps each, so all
must fit into memory together. Files go to a folder under --work and are removed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

import reference
from children import take_turns
from common import Report, median, note, parser_of, work_folder

CHECKPOINTED, WHOLE = "PyTorch in memory, checkpointing", "PyTorch in memory"
UPDATE_MODES = ("serial", "naive", "optimized", "balanced")
LANES = {"optimizer": "adam"}  # the name of the optimizer lane in a profile
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "step") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        report.facts({"settings": settings_text(options)})
        reference.profile_machine(options, work)
        for tokens in options.tokens:
            note(f"{tokens} tokens")
            with work_folder(work, "stores") as stores:
                sides = sides_of(options, work, stores, tokens)
                limits = {"threads": options.threads, "deadline_s": options.deadline}
                actual = take_turns(sides, options.rounds, **limits)
            report.table(f"{tokens} tokens", rows_of(actual))
            report.table(f"{tokens} tokens, lanes", lane_rows(actual))
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--host", nargs="+", default=["1GiB"])
    parser.add_argument("--update-mode", nargs="+", choices=UPDATE_MODES, default=["balanced"])
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--activations", default="recompute", help="as in `lohan train`")
    parser.add_argument("--rounds", type=int, default=4)
    parser.set_defaults(warmup=1, steps=2)
    return parser.parse_args()


def settings_text(options: argparse.Namespace) -> str:
    return (
        f"{options.rounds} turns, each {options.warmup} steps before and {options.steps} measured; "
        f"batch {options.batch}, clip {options.clip:g}, {options.threads} threads, "
        f"activations {options.activations}, OMP_WAIT_POLICY=PASSIVE"
    )


def sides_of(
    options: argparse.Namespace, work: Path, stores: Path, tokens: int
) -> dict[str, tuple[str, Child]]:
    """Return script and settings of each side, by name."""
    spec = {**reference.spec_of(options, work / "model", tokens), "clip": options.clip}
    sides: dict[str, tuple[str, Child]] = {}
    for name, checkpointing in ((CHECKPOINTED, True), (WHOLE, False)):
        sides[name] = "side_torch.py", {**spec, "checkpointing": checkpointing}
    for host, mode in product(options.host, options.update_mode):
        name = f"LoHan {host}, {mode}"
        sides[name] = (
            "side_lohan.py",
            {
                **spec,
                "host": host,
                "update_mode": mode,
                "profile": str(work / reference.MACHINE),
                "activations": options.activations,
                "ssd": str(stores / str(len(sides))),
            },
        )
    return sides


def rows_of(results: dict[str, Child]) -> list[dict[str, Any]]:
    exact = results[CHECKPOINTED]["losses"]
    rows = []
    for name, child in results.items():
        checkpointing, apart = reference.speed(child, results[CHECKPOINTED])
        rows.append(
            {
                "side": name,
                "step s": median(child["step_s"]),
                "all steps": f"{min(child['step_s']):.2f} .. {max(child['step_s']):.2f}",
                "/ checkpointing": checkpointing,
                "rounds": apart,
                "/ in memory": reference.speed(child, results[WHOLE])[0],
                "peak GiB": child["peak_bytes"] / 2**30,
                **reference.first_steps(child),
                "loss first .. last": reference.loss_text(child["losses"]),
                "largest difference": max(
                    abs(a - b) for a, b in zip(child["losses"], exact, strict=True)
                ),
            }
        )
    return rows


def lane_rows(results: dict[str, Child]) -> list[dict[str, Any]]:
    return [{"side": name, **lanes_of(c)} for name, c in results.items() if "busy_s" in c]


def lanes_of(child: Child) -> dict[str, Any]:
    """Return the activity of the lanes over all measured steps."""
    busy: dict[str, float] = child["busy_s"]
    binding = max(busy, key=lambda lane: busy[lane])
    read, written = child["ssd_read_bytes"], child["ssd_written_bytes"]
    moved = (read + written) * len(child["step_s"])
    return {
        **{
            f"{LANES.get(lane, lane)} busy": f"{100 * s / child['window_s']:.0f}%"
            for lane, s in busy.items()
        },
        "binding": LANES.get(binding, binding),
        "read GB/step": read / 1e9,
        "written GB/step": written / 1e9,
        "ssd GB/s": moved / busy["ssd"] / 1e9 if busy.get("ssd") else None,
    }


if __name__ == "__main__":
    sys.exit(main())
