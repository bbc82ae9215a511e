"""Seconds per step: LoHan against PyTorch with everything in memory, in alternating children.

    python benchmarks/step.py [--tokens 64 256 1024] [--host 1GiB] [--grad-offload optimized serial]

Every side is a process of its own with the same threads, starting from the same checkpoint and
taking the same batches: losses must agree. Files go to a folder under --work and are removed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import reference
from common import Report, alternate, median, note, parser_of, run_child, work_folder

CHECKPOINTED, WHOLE = "PyTorch in memory, checkpointing", "PyTorch in memory"
GRAD_MODES = ("serial", "naive", "optimized", "balanced")
LANES = {"gpu": "compute", "cpu": "adam"}  # as a machine without a GPU would call them
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
            found = alternate(sides_of(options, work, tokens), options.rounds)
            report.table(f"{tokens} tokens", rows_of(found))
            report.table(f"{tokens} tokens, lanes", lane_rows(found))
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--host", nargs="+", default=["1GiB"])
    parser.add_argument("--grad-offload", nargs="+", choices=GRAD_MODES, default=["balanced"])
    parser.add_argument("--durability", nargs="+", default=["step"])
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--activations", default="recompute", help="as in `lohan train`")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def settings_text(options: argparse.Namespace) -> str:
    return (
        f"{options.rounds} rounds, each {options.warmup} steps of warm-up and {options.steps} "
        f"measured; batch {options.batch}, clip {options.clip:g}, {options.threads} threads, "
        f"activations {options.activations}, OMP_WAIT_POLICY=PASSIVE"
    )


def sides_of(
    options: argparse.Namespace, work: Path, tokens: int
) -> dict[str, Callable[[], Child]]:
    spec = {**reference.spec_of(options, work / "model", tokens), "clip": options.clip}
    limits = {"threads": options.threads, "deadline_s": options.deadline}
    sides: dict[str, Callable[[], Child]] = {}
    for name, checkpointing in ((CHECKPOINTED, True), (WHOLE, False)):
        sides[name] = partial(in_memory, name, {**spec, "checkpointing": checkpointing}, limits)
    for host, mode, durability in product(options.host, options.grad_offload, options.durability):
        name = f"LoHan {host}, {mode}"
        name += f", {durability}" if options.durability != ["step"] else ""
        own = {
            **spec, "host": host, "grad_offload": mode, "durability": durability,
            "profile": str(work / reference.MACHINE), "activations": options.activations,
        }  # fmt: skip
        sides[name] = partial(out_of_core, name, own, work / "ssd", limits)
    return sides


def in_memory(name: str, spec: Child, limits: dict[str, Any]) -> Child:
    child = run_child("side_torch.py", spec, **limits)
    reference.show(name, child)
    return child


def out_of_core(name: str, spec: Child, ssd: Path, limits: dict[str, Any]) -> Child:
    try:
        child = run_child("side_lohan.py", {**spec, "ssd": str(ssd)}, **limits)
    finally:
        shutil.rmtree(ssd, ignore_errors=True)
    reference.show(name, child)
    return child


def rows_of(found: dict[str, list[Child]]) -> list[dict[str, Any]]:
    seconds = {name: median([median(c["step_s"]) for c in found[name]]) for name in found}
    exact = found[CHECKPOINTED][0]["losses"]
    rows = []
    for name, children in found.items():
        losses = children[0]["losses"]
        steps = [step_s for child in children for step_s in child["step_s"]]
        rows.append(
            {
                "side": name,
                "step s": seconds[name],
                "all steps": f"{min(steps):.2f} .. {max(steps):.2f}",
                "/ checkpointing": seconds[name] / seconds[CHECKPOINTED],
                "/ in memory": seconds[name] / seconds[WHOLE],
                "peak GiB": max(child["peak_bytes"] for child in children) / 2**30,
                "loss first .. last": reference.loss_text(losses),
                "largest difference": max(abs(a - b) for a, b in zip(losses, exact, strict=True)),
            }
        )
    return rows


def lane_rows(found: dict[str, list[Child]]) -> list[dict[str, Any]]:
    own = {name: children for name, children in found.items() if "busy_s" in children[0]}
    return [{"side": name, **lanes_of(children)} for name, children in own.items()]


def lanes_of(children: list[Child]) -> dict[str, Any]:
    """What the lanes did in all measured steps together."""
    window_s = sum(child["window_s"] for child in children)
    busy: dict[str, float] = {}
    for child in children:
        for lane, lane_s in child["busy_s"].items():
            busy[lane] = busy.get(lane, 0.0) + lane_s
    binding = max(busy, key=lambda lane: busy[lane])
    read, written = children[0]["ssd_read_bytes"], children[0]["ssd_written_bytes"]
    moved = sum((c["ssd_read_bytes"] + c["ssd_written_bytes"]) * len(c["step_s"]) for c in children)
    return {
        **{
            f"{LANES.get(lane, lane)} busy": f"{100 * s / window_s:.0f}%"
            for lane, s in busy.items()
        },
        "binding": LANES.get(binding, binding),
        "read GB/step": read / 1e9,
        "written GB/step": written / 1e9,
        "ssd GB/s": moved / busy["ssd"] / 1e9 if busy.get("ssd") else None,
    }


if __name__ == "__main__":
    sys.exit(main())
