"""Speed and memory against DeepSpeed ZeRO-Infinity, both sides in alternating children.

    python benchmarks/vs_zero_infinity.py --peer-python ~/peer/bin/python [--host 1GiB] [--quick]

The peer keeps parameters and optimizer state on NVMe (stage 3, CPU accelerator). The better of its
two results, with and without pipelined optimizer swapping, counts. Checkpoint, batches and the
limit of the gradient norm are the same on both sides. The limit is LoHan's default unless --clip
sets others (0: no clipping). Norms of this model are 10 to 20, so a limit of 1 clips every step and
a limit of 100 none. Of several limits the peer gets the first, because it waits for the norm in any
case. The machine is profiled first, as `lohan profile` does it, and LoHan plans with this profile.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import reference
from children import alternate, run_child
from common import Report, has_deepspeed, median, note, parser_of, work_folder

NO_PEER = """\
{python} has no deepspeed, which is the other side of this comparison. Make an environment for it:

    python3 -m venv ~/peer
    ~/peer/bin/pip install torch transformers==5.22.0 deepspeed ninja
    apt install libaio-dev          # its NVMe I/O is compiled on first use, with g++

and name it: --peer-python ~/peer/bin/python"""
PIPELINES = (0, 1)
COMPILING_S = 1800.0
Child = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A setting of LoHan, and the speed relative to the peer that it should reach, by tokens."""

    host: str
    targets: dict[int, float]

    @property
    def name(self) -> str:
        return f"LoHan {self.host}"


SETTINGS = (
    Setting("1GiB", {64: 2.5, 256: 2.0, 1024: 1.4}),
    Setting("4GiB", {64: 2.8, 256: 2.1, 1024: 1.45}),
)


def main() -> int:
    options = parse()
    peer = options.peer_python
    if not has_deepspeed(peer):
        print(NO_PEER.format(python=peer), file=sys.stderr)
        return 2
    with work_folder(options.work, "vs") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model"))
        reference.profile_machine(options, work)
        first = {**reference.spec_of(options, work / "model", 64), "steps": 1, "warmup": 0}
        note("the peer's first run, which may compile its operators")
        tried = zero_infinity("peer", first, options, work, 0, deadline_s=COMPILING_S)
        limits = ", ".join(f"{limit:g}" for limit in options.clip)
        report.facts(
            {
                "peer": f"DeepSpeed {tried['deepspeed']} in {peer}",
                "settings": f"{options.rounds} rounds, each {options.warmup} steps of warm-up and "
                f"{options.steps} measured; batch {options.batch}, clipping at {limits}, "
                f"{options.threads} threads, OMP_WAIT_POLICY=PASSIVE",
            }
        )
        for tokens in options.tokens:
            note(f"{tokens} tokens")
            actual = alternate(sides_of(options, work, tokens), options.rounds)
            report.table(f"{tokens} tokens", rows_of(actual, tokens))
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    reference.add_options(parser)
    parser.set_defaults(steps=3, warmup=4)  # LoHan replans after three steps.
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has deepspeed")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    hosts = list(dict.fromkeys(setting.host for setting in SETTINGS))
    parser.add_argument("--host", nargs="+", choices=hosts, default=hosts, help="budgets of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clip", type=float, nargs="+", default=[1.0], help="limits of the norm; 0: none"
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def sides_of(
    options: argparse.Namespace, work: Path, tokens: int
) -> dict[str, Callable[[], Child]]:
    """Return all sides; the peer's two variants are between LoHan's, to share slow phases."""
    spec = reference.spec_of(options, work / "model", tokens)
    peers = [
        (name, partial(zero_infinity, name, spec, options, work, pipeline))
        for pipeline in PIPELINES
        for name in (f"ZeRO-Infinity, pipeline {pipeline}",)
    ]
    actual = [
        (f"{setting.name}, clip {clip:g}", partial(lohan, spec, options, work, setting, clip))
        for setting in SETTINGS
        for clip in options.clip
        if setting.host in options.host
        and (tokens in setting.targets or tokens not in SETTINGS[0].targets)
    ]
    return dict([peers[0], *actual[:1], peers[1], *actual[1:]])


def lohan(
    spec: Child, options: argparse.Namespace, work: Path, setting: Setting, clip: float
) -> Child:
    ssd = work / "ssd"
    settings = {
        **spec,
        "ssd": str(ssd),
        "host": setting.host,
        "update_mode": "balanced",
        "clip": clip,
        "activations": "holistic",
        "profile": str(work / reference.MACHINE),
    }
    try:
        child = run_child(
            "side_lohan.py", settings, threads=options.threads, deadline_s=options.deadline
        )
    finally:
        shutil.rmtree(ssd, ignore_errors=True)
    reference.show(f"{setting.name}, clip {clip:g}", child)
    return child


def zero_infinity(
    name: str,
    spec: Child,
    options: argparse.Namespace,
    work: Path,
    pipeline: int,
    *,
    deadline_s: float | None = None,
) -> Child:
    ssd = work / "peer"
    ssd.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        child = run_child(
            "side_zero_infinity.py",
            {**spec, "ssd": str(ssd), "pipeline": pipeline, "port": port, "clip": options.clip[0]},
            threads=options.threads,
            deadline_s=deadline_s or options.deadline,
            python=options.peer_python,
            extra={"DS_ACCELERATOR": "cpu", "PYTHONPATH": ""},
        )
    finally:
        shutil.rmtree(ssd, ignore_errors=True)
    reference.show(name, child)
    return child


def rows_of(results: dict[str, list[Child]], tokens: int) -> list[dict[str, Any]]:
    seconds = {name: median([median(c["step_s"]) for c in results[name]]) for name in results}
    peers = [name for name in results if name.startswith("ZeRO-Infinity")]
    best = min(peers, key=lambda name: seconds[name])
    targets = {setting.name: setting.targets.get(tokens) for setting in SETTINGS}
    of_setting = {name: name.rpartition(", clip")[0] for name in results}
    peak = {name: max(child["peak_bytes"] for child in results[name]) for name in results}
    rows = []
    for name in sorted(results, key=lambda name: name not in peers):
        losses = results[name][0]["losses"]
        row = {"side": name, "step s": seconds[name], "speed / peer": None, "rounds": None}
        row |= {"target": None, "reached": None, "clipped": None}
        if name not in peers:
            speed, target = seconds[best] / seconds[name], targets[of_setting[name]]
            clipped = sum(child["clipped"] for child in results[name])
            rounds = [
                min(median(results[peer][i]["step_s"]) for peer in peers) / median(child["step_s"])
                for i, child in enumerate(results[name])
            ]
            row |= {
                "speed / peer": speed,
                "rounds": f"{min(rounds):.2f} .. {max(rounds):.2f}",
                "target": target,
                "reached": None if target is None else "yes" if speed >= target else "no",
                "clipped": f"{clipped} of {sum(len(c['losses']) for c in results[name])}",
            }
        row |= {
            "peak GiB": peak[name] / 2**30,
            "memory / peer": peak[name] / peak[best],
            "loss first .. last": reference.loss_text(losses),
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
