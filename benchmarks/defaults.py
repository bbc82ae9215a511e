"""What the default settings cost: clipping on, below and above the limit, against no clipping.

    python benchmarks/defaults.py [--models-there qwen3-8b ...] [--sides clipping | commits | log]
        [--dtype bf16] [--batch-there 16]

A small and deep model on an emulated device in the proportions of a desktop (emulated.py says how),
main memory and the drives' life included: as large a share of state and gradients fits into it as
there. In fp32, gradients are twice as large as there: bf16 has the very proportions, where the CPU
multiplies it quickly. A limit that no norm reaches lets every update run in backward; one that
every norm exceeds makes every step wait for its norm. Commits and updates are as `lohan train` has
them without options; blocks are recomputed, as there, since what they could keep is next to nothing
here.
The forecast is the simulator's, from a profile made through the same device; "there" is what
`lohan plan` says of the large model on the desktop. With `--sides commits`: every step committed,
and only some of them. With `--sides log`: with and without a log of gradients, below and above the
limit; the measured steps are whole intervals between two writes of the full state.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import reference
from children import alternate
from common import Report, median, note, parser_of, work_folder
from emulated import SEQ, add_dtype, add_options, measure, measured_text, rates_text, slowed

SERVER = "rtx4090"
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3-70b")
NEVER, ALWAYS = 1e9, 1e-6  # limits of the norm that no step exceeds, and that every step exceeds
DEFAULT = "default, no step clipped"
SIDES = {
    "clipping": {
        DEFAULT: {"clip": NEVER},
        "default, every step clipped": {"clip": ALWAYS, "clipped": True},
        "--clip 0": {"clip": 0.0},
    },
    "commits": {
        DEFAULT: {"clip": NEVER},
        "--commit-every 2": {"clip": NEVER, "commit_every": 2},
        "--commit-every 4": {"clip": NEVER, "commit_every": 4},
        "--commit-every step": {"clip": NEVER, "commit_every": "step"},
    },
    "log": {
        "log, no step clipped": {"clip": NEVER, "log_gradients": "auto"},
        "log, every step clipped": {"clip": ALWAYS, "log_gradients": "auto"},
        "no log, every step clipped": {"clip": ALWAYS, "clipped": True, "log_gradients": "off"},
        "no log, no step clipped": {"clip": NEVER, "log_gradients": "off"},
    },
}  # of each table the last is what the others are compared with
Child = dict[str, Any]


def main() -> int:
    options = parse()
    with work_folder(options.work, "defaults") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "torch", "transformers")
        report.facts(reference.write_model(options, work / "model", dtype=options.dtype))
        for large in options.models_there:
            note(large)
            default, plain = (planned_there(large, clip, options) for clip in (1.0, 0.0))
            rates, options.host = proportions(options, work / "model", plain, default.plan)
            report.facts({"rates": rates_text(rates), "host": options.host})
            report.facts({"measured": measured_text(measure(options, work, rates))})
            sides = {
                name: partial(run_side, options, work, rates, name, settings)
                for name, settings in SIDES[options.sides].items()
            }
            actual = alternate(sides, options.rounds)
            title = f"{SERVER}, {large}, batch {options.batch_there}"
            report.table(title, rows_of(actual, ratios_there(options, large, default, plain)))
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(parser)
    add_dtype(parser)
    parser.set_defaults(
        batch_there=64,
        warmup=14,
        steps=4,
        seconds=4.0,
        hidden=256,
        layers=40,
        intermediate=640,
        heads=4,
    )
    parser.add_argument(
        "--models-there", nargs="+", default=MODELS, help="presets whose steps are copied"
    )
    parser.add_argument("--sides", choices=list(SIDES), default="clipping")
    parser.add_argument("--activations", default="recompute", help="as in `lohan train`")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the memory that state and gradients have there"
    )
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def planned_there(
    large: str, clip: float, options: argparse.Namespace, log: str | None = None
) -> Any:
    """Return the plan of the large model on the desktop, as `lohan plan` computes it."""
    from lohan.model.options import PlanOptions, with_log
    from lohan.planner import presets
    from lohan.planner.machine_plan import PlanRequest, plan_for_machine

    machine = presets.machine(SERVER)
    wished = PlanOptions(dtype="bf16", clip=clip, can_rerun=True, commit=None)
    if log is None:  # The memory is that of the plan without a log, on all sides of `--sides log`.
        log = "off" if options.sides == "log" else "auto"
    wished = with_log(wished, log, commit_every="auto")
    return plan_for_machine(
        PlanRequest(
            model=presets.model(large),
            machine=machine,
            options=wished,
            batch=options.batch_there,
            seq=SEQ,
            host=machine.host_bytes,
        )
    )


def ratios_there(
    options: argparse.Namespace, large: str, default: Any, plain: Any
) -> dict[str, float]:
    """Return the forecast speed of each side relative to the last one."""
    if options.sides == "log":
        logged, clipped = planned_there(large, 1.0, options, "auto"), default.clipped or default
        of_log = (logged.step_s, logged.step_s, clipped.step_s, default.step_s)
        return {
            name: default.step_s / step_s for name, step_s in zip(SIDES["log"], of_log, strict=True)
        }
    of_all = (default.forecast, default.clipped or default.forecast, plain.forecast)
    named = zip(SIDES["clipping"], of_all, strict=True)
    return {name: plain.step_s / one.step_s for name, one in named}


def proportions(
    options: argparse.Namespace, model: Path, reference_s: Any, plan: Any
) -> tuple[dict[str, float], str]:
    """Return the rates of the emulated device and the main memory for the small model.

    Main memory holds the same share of state and gradients as in the plan for the large model,
    and all activations, which are small here.
    """
    from lohan.planner import presets
    from lohan.planner.memory import INPUTS, KEPT

    smaller = presets.model(model).parameters / reference_s.parameters
    sites = reference_s.forecast.work.sites
    flops = sum(site.forward_flops + site.recompute_flops for site in sites)
    flops += sum(site.gradient_flops for site in sites if not site.no_backward)
    rates = slowed(
        options,
        reference_s.machine,
        flops=flops / reference_s.forecast.busy_s["compute"],
        step_s=reference_s.step_s,
        smaller=smaller,
    )
    others = sum(e.bytes for e in plan.ledger if e.tier == "host" and e.owner in (INPUTS, KEPT))
    room = (plan.tier_bytes("host") - others) * options.share * smaller
    inputs = (options.layers + 1) * options.tokens * options.hidden * 4
    return rates, f"{int((room + inputs) / 2**20)}MiB"


def run_side(
    options: argparse.Namespace, work: Path, rates: dict[str, float], name: str, settings: Child
) -> Child:
    spec = {
        **reference.spec_of(options, work / "model", options.tokens),
        **reference.WAY,
        **settings,
        "host": options.host,
        "ssd": str(work / "ssd"),
        "rates": rates,
        "profile": str(work / reference.MACHINE),
        "activations": options.activations,
        "device_memory": options.device_memory * 2**20,
    }
    return reference.run_side("side_emulated.py", options, spec, name)


def rows_of(
    children_of: dict[str, list[Child]], ratios_there: dict[str, float]
) -> list[dict[str, Any]]:
    *_, base = children_of.values()
    rows = []
    for name, children in children_of.items():
        pairs = zip(base, children, strict=True)
        ratios = [mean(one["step_s"]) / mean(child["step_s"]) for one, child in pairs]
        forecast_s = children[0]["forecasts"][0]["step_s"]
        promised = base[0]["forecasts"][0]["step_s"] / forecast_s
        rows.append(
            {
                "settings": name,
                "step s": mean(mean(child["step_s"]) for child in children),
                "speed / last": median(ratios),
                "rounds": f"{min(ratios):.2f} .. {max(ratios):.2f}",
                "forecast s": forecast_s,
                "forecast / last": promised,
                "there / last": ratios_there.get(name),
                "written MiB": children[0]["ssd_written_bytes"] / 2**20,
                "log K": children[0]["plans"][-1]["log_gradients"],
                "speculated": children[0]["speculated"],
                "rolled_back": children[0]["rolled_back"],
                **reference.first_steps(children[0]),
                "loss": reference.loss_text(children[0]["losses"]),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
