"""A child of the activation benchmark: plans and their forecasts, without training.

It plans with several policies, or with increasing bytes of kept activations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from children import tell


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    import torch

    import lohan
    from lohan.capture.blocks import cut
    from lohan.engine.context import workload_of
    from lohan.errors import LohanError
    from lohan.model.machine import Profile
    from lohan.model.options import PlanOptions
    from lohan.model.plan import Kept, Plan
    from lohan.planner.activations import levels
    from lohan.planner.forecast import Simulator
    from lohan.planner.memory import MemoryModel
    from lohan.planner.planner import PlanProblem, make_plan
    from lohan.util.units import parse_bytes

    machine = Profile.read(Path(spec["profile"]))
    model = lohan.load(spec["model"]).train()
    blocks = cut(model)
    ids = torch.empty((spec["batch"], spec["seq"]), dtype=torch.long, device="meta")
    workload = workload_of(model, blocks, {"input_ids": ids})

    def plan_of(wish: str | Kept) -> Plan:
        options = PlanOptions(
            dtype="fp32",
            update_mode=spec["update_mode"],
            clip=spec["clip"],
            activations=wish,
        )
        host = parse_bytes(spec["host"], name="host")
        return make_plan(
            PlanProblem(blocks, options, host_bytes=host, workload=workload, profile=machine)
        ).plan

    simulator = Simulator(machine, blocks, workload)

    def row(wish: str | Kept) -> dict[str, Any]:
        try:
            plan = plan_of(wish)
        except LohanError as refused:
            return {"refused": str(refused)}
        item = simulator.forecast(plan)
        memory = MemoryModel(blocks, plan.dtype, workload, plan.micro_batch)
        kept = sum(memory.site_bytes(plan, name) for name in memory.sizes.names)
        return {
            "kept": plan.kept,
            "moved_out": len(plan.spilled_sites),
            "swapped_bytes": kept,
            "ssd_bytes": sum(plan.spilled_site_bytes),
            "forecast_s": item.step_s,
            "busy_s": item.busy_s,
            "binding": item.binding,
            "same": repr(plan),
        }

    actual = {name: row(name) for name in spec["policies"]}
    curve = []
    if spec["curve"]:
        memory = MemoryModel(blocks, "fp32", workload, plan_of("recompute").micro_batch)
        curve = [row(kept) for kept in levels(memory, workload)]
    tell({"policies": actual, "curve": [item for item in curve if "refused" not in item]})


if __name__ == "__main__":
    main()
