"""Measure a small model on an emulated device, in every update mode, and simulate it.

    python benchmarks/emulated.py [--batch-there 16] [--seconds 8]

The device has the proportions of the paper's server. Compute, link, drives and updates are slowed
so that each takes as large a share of a step as it does there for a 13B model at --batch-there.
Rates are those of the machine preset times one factor, which --seconds sets. Compute is slower
still by the ratio of tokens, and with --dtype fp32 the link is twice as fast, since weights and
gradients have twice the bytes. Bytes, gradients and updates are real. The simulator uses a profile
that was measured through the same device.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import reference
from children import alternate, run_child
from common import Report, median, note, parser_of, work_folder

MODES = ("serial", "naive", "optimized", "balanced")
SERVER, MODEL, SEQ = "ratel-4090", "gpt-13b", 1024
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "emulated") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model", dtype=options.dtype))
        rates = scaled_rates(options, work / "model")
        report.facts({"rates": rates_text(rates)})
        note("profiling the emulated device")
        actual = measure(options, work, rates)
        report.facts({"measured": measured_text(actual)})
        sides = {mode: partial(run_mode, options, work, rates, mode) for mode in options.modes}
        result = alternate(sides, options.rounds)
        rows = [row(mode, result[mode]) for mode in options.modes]
        report.table(f"{SERVER}, {MODEL}, batch {options.batch_there}, scaled down", rows)
        report.facts({"order": order_text(rows)})
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(parser)
    add_dtype(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a small model on an emulated device."""
    reference.add_options(parser)
    parser.set_defaults(
        hidden=384,
        layers=12,
        intermediate=1024,
        vocabulary=2048,
        heads=6,
        batch=4,
        steps=3,
        warmup=3,
        threads=1,
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--host", default="80MiB", help="main memory")
    parser.add_argument("--device-memory", type=int, default=512, help="MiB of the device")
    parser.add_argument("--batch-there", type=int, default=16, help="of the step that is copied")
    parser.add_argument("--seconds", type=float, default=8.0, help="about, of a step")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of weights and gradients; bf16, as there, where this CPU multiplies it quickly",
    )


def scaled_rates(options: argparse.Namespace, model: Path) -> dict[str, float]:
    """Return the rates of the server, slowed so that a step takes about --seconds."""
    from lohan.planner import presets
    from lohan.planner.systems import policy, run

    machine, large = presets.machine(SERVER), presets.model(MODEL)
    reference_run = run(policy("lohan"), large, machine, batch=options.batch_there, seq=SEQ)
    most, ahead = machine.compute[-1]
    flops = 4 / (1 / ahead + 3 / machine.backward_flops_at(most))
    smaller = presets.model(model).parameters / large.parameters
    return slowed(options, machine, flops=flops, step_s=reference_run.step_s, smaller=smaller)


def slowed(
    options: argparse.Namespace, machine: Any, *, flops: float, step_s: float, smaller: float
) -> dict[str, float]:
    """Return the rates of a machine, slowed for a smaller model and a step of --seconds.

    `flops` is the rate that the machine reaches in a step, `step_s` the duration of that step,
    and `smaller` the ratio of parameters.
    """
    factor = smaller * step_s / options.seconds
    tokens = options.tokens / (options.batch_there * SEQ)
    return {
        "flops": flops * factor * tokens,
        "link": machine.h2d
        * factor
        * (1 if getattr(options, "dtype", "") == "bf16" else 2),  # 16 bit there
        "read": machine.ssd_read * factor,
        "write": machine.ssd_write * factor,
        "adam": machine.adam * factor,
        # Bytes that its drives are rated for: worn as fast as there.
        "endurance": sum(drive.endurance_bytes for drive in machine.drives) * factor,
    }


def rates_text(rates: dict[str, float]) -> str:
    return (
        f"compute {rates['flops'] / 1e9:.1f} GFLOP/s, link {rates['link'] / 1e6:.0f} MB/s each "
        f"way, drives {rates['read'] / 1e6:.0f} MB/s read and {rates['write'] / 1e6:.0f} MB/s "
        f"write, updates {rates['adam'] / 1e6:.1f} M parameters/s"
    )


def measured_text(result: Child) -> str:
    return (
        f"compute {result['flops'] / 1e9:.1f} GFLOP/s forward and "
        f"{result['backward_flops'] / 1e9:.1f} backward, link {result['h2d'] / 1e6:.0f} and "
        f"{result['d2h'] / 1e6:.0f} MB/s; not slowed down: drive {result['drive_read'] / 1e6:.0f} "
        f"and {result['drive_write'] / 1e6:.0f} MB/s, updates {result['adam'] / 1e6:.0f} M "
        "parameters/s"
    )


def measure(options: argparse.Namespace, work: Path, rates: dict[str, float]) -> Child:
    spec = {
        "rates": rates,
        "device_memory": options.device_memory * 2**20,
        "ssd": str(work),
        "out": str(work / reference.MACHINE),
        "tokens": options.tokens,
        **{name: getattr(options, name) for name in reference.SHAPE},
    }
    return run_child("side_emulated.py", spec, threads=options.threads, deadline_s=options.deadline)


def run_mode(
    options: argparse.Namespace,
    work: Path,
    rates: dict[str, float],
    mode: str,
    activations: Any = "recompute",
) -> Child:
    spec = {
        **reference.spec_of(options, work / "model", options.tokens),
        **reference.WAY,
        "update_mode": mode,
        "host": options.host,
        "ssd": str(work / "ssd"),
        "rates": rates,
        "profile": str(work / reference.MACHINE),
        "activations": activations,
        "device_memory": options.device_memory * 2**20,
    }
    return reference.run_side("side_emulated.py", options, spec, mode)


def row(mode: str, children: list[Child]) -> dict[str, Any]:
    measured = median([median(child["step_s"]) for child in children])
    result = children[0]["forecasts"][0]
    predicted, shares = result["step_s"], result["busy_s"].items()
    return {
        "updates": mode,
        "measured s": measured,
        "predicted s": predicted,
        "predicted / measured": predicted / measured,
        "loss": reference.loss_text(children[0]["losses"]),
        **{f"{lane} busy": f"{100 * busy / predicted:.0f}%" for lane, busy in shares if busy},
    }


def order_text(rows: list[dict[str, Any]]) -> str:
    """Describe whether each mode is at least as fast as the one before it, within noise."""
    times = [item["measured s"] for item in rows]
    slower = [
        f"{rows[i + 1]['updates']} is slower than {rows[i]['updates']}"
        for i in range(len(times) - 1)
        if times[i + 1] > times[i] * 1.02
    ]
    return "; ".join(slower) or "as in the paper: each is at least as fast as the one above it"


if __name__ == "__main__":
    sys.exit(main())
