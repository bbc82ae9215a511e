"""Forecast steps that log gradients, next to those of the default plans.

    python benchmarks/gradient_log.py --models qwen3-32b --batches 16 --k 4 8

Clipped steps of a logged run take as long as others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lohan.errors import BudgetError
from lohan.model.options import PlanOptions, with_log
from lohan.planner import presets
from lohan.planner.machine_plan import MachinePlan, PlanRequest, plan_for_machine
from lohan.util.units import GiB


def planned(model: str, machine: str, batch: int, k: int) -> MachinePlan:
    """Return the plan of a run, with a log if `k` is not 0."""
    profile = presets.machine(machine)
    options = PlanOptions(dtype="bf16", clip=1.0, can_rerun=True)
    if k:
        options = with_log(options, k, commit_every="step")
    request = PlanRequest(
        model=presets.model(model),
        machine=profile,
        options=options,
        batch=batch,
        seq=1024,
        host=profile.host_bytes,
    )
    return plan_for_machine(request)


def compare(model: str, machine: str, batch: int, ks: Sequence[int]) -> None:
    usual = planned(model, machine, batch, 0)
    assert usual.forecast is not None
    step_s, written = usual.forecast.step_s, usual.forecast.written_bytes
    clipped_s = (usual.clipped or usual.forecast).step_s
    print(
        f"{model} {machine} batch {batch}: {step_s:.1f} s, clipped {clipped_s:.1f} s, "
        f"{written / GiB:.1f} GiB",
        flush=True,
    )
    for k in ks:
        try:
            logged = planned(model, machine, batch, k).forecast
        except BudgetError as refused:
            print(f"  k = {k}: {refused}", flush=True)
            continue
        assert logged is not None
        print(
            f"  k = {k}: {logged.step_s:.1f} s ({step_s / logged.step_s:.2f} and "
            f"{clipped_s / logged.step_s:.2f} times as fast), {logged.written_bytes / GiB:.1f} GiB "
            f"({logged.written_bytes / written:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-14b", "qwen3-32b", "llama-3-70b"])
    parser.add_argument("--machines", nargs="+", default=["rtx4090"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--k", nargs="+", type=int, default=[4, 8])
    options = parser.parse_args()
    for machine in options.machines:
        for model in options.models:
            for batch in options.batches:
                compare(model, machine, batch, options.k)


if __name__ == "__main__":
    main()
