"""A child of the step benchmarks: steps of LoHan through its API, as in `lohan train`.

A clipped step runs again if its gradients would go to SSD. If the settings leave activations to the
planner, the plan is made again after the first steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import reference
from children import tell
from common import peak_bytes


def main() -> None:
    tell(run(json.loads(sys.argv[1])))


class Measured:
    """Totals over the measured steps of all turns."""

    def __init__(self) -> None:
        self.at_s = self._window_s = self._flush_s = 0.0
        self._busy: Counter[str] = Counter()
        self._read = self._written = 0
        self._before: Any = None

    def begin(self, counters: Any) -> None:
        self.at_s, self._before = time.perf_counter(), counters

    def end(self, counters: Any, stop_s: float, busy: dict[str, float]) -> None:
        self._window_s += stop_s - self.at_s
        self._flush_s += time.perf_counter() - stop_s
        self._busy.update(busy)
        self._read += counters.bytes_read - self._before.bytes_read
        self._written += counters.bytes_written - self._before.bytes_written

    def report(self, steps: int) -> dict[str, Any]:
        return {
            "window_s": self._window_s,
            "flush_s": self._flush_s,
            "busy_s": {lane: seconds for lane, seconds in self._busy.items() if seconds},
            "ssd_read_bytes": self._read / steps,
            "ssd_written_bytes": self._written / steps,
        }


def run(spec: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run the steps and return their times and counters; `options` are passed to `attach`."""
    import torch

    import lohan
    from lohan.engine.replanning import Replanner
    from lohan.util.trace import Span, busy_s

    model = lohan.load(spec["model"], dtype=spec["dtype"]).train()
    with opened(spec, model, options) as session:
        trace = session.executor.trace
        spans: list[Span] = []
        done, replanner = Measured(), Replanner(session)
        counts: Counter[str] = Counter()
        plans, changes = [described(session.plan)], list[dict[str, Any]]()

        def step(ids: torch.Tensor) -> float:
            start_s = time.perf_counter()
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                if not session.must_run_again:
                    break
            counts.update(session.executor.clipping.counts)
            session.take_finished()
            new = trace.take_step()
            spans.extend(new)
            value, stop_s = float(loss.item()), time.perf_counter()
            # The graph of the loss refers to buffers of the plan, which another plan may replace.
            del loss
            text = replanner.after_step(new, step_s=stop_s - start_s)
            if text is not None:
                took_s = time.perf_counter() - stop_s
                changes.append({"after": session.step, "seconds": took_s, "said": text})
                plans.append(described(session.plan))
            return value

        def begin() -> None:
            spans.clear()
            done.begin(session.counters)

        def end() -> None:
            """End the measured steps of a turn.

            Work that `balanced` and clipping leave to the next step is counted: every
            measured step contains the rest of the previous one. Only the rest of the
            last step is not counted.
            """
            stop_s = time.perf_counter()
            after = session.counters
            session.flush()
            spans.extend(trace.take_step())
            done.end(after, stop_s, busy_s(spans, done.at_s, stop_s))

        result = reference.time_steps(spec, step, begin=begin, end=end)
        plan, context = session.plan, session.context
    if context.profile is not None:
        result["forecasts"] = forecasts(spec, context, plan)
    return {
        **result,
        "peak_bytes": peak_bytes(),
        **done.report(len(result["step_s"])),
        "speculated": counts["speculated"],
        "rolled_back": counts["rolled_back"],
        "clipped": counts["clipped"],
        "plans": plans,
        "changes": changes,
    }


def opened(spec: dict[str, Any], model: Any, options: dict[str, Any]) -> Any:
    """Attach the model with the settings of a spec and return the session."""
    import torch

    import lohan
    from lohan.model.machine import Profile
    from lohan.model.plan import Kept
    from lohan.util.files import checked
    from lohan.util.units import AUTO

    example = torch.empty((spec["batch"], spec["seq"]), dtype=torch.long, device="meta")
    Path(spec["ssd"]).mkdir(parents=True)
    optimizer = lohan.AdamW(
        lr=reference.LR,
        betas=reference.BETAS,
        eps=reference.EPS,
        weight_decay=reference.WEIGHT_DECAY,
    )
    wish = spec.get("activations", "holistic")
    budget = lohan.Budget(
        host=spec["host"],
        ssd=[spec["ssd"]],
        commit_every=spec.get("commit_every", AUTO),
        log_gradients=spec.get("log_gradients", AUTO),
    )
    return lohan.attach(
        model,
        optimizer=optimizer,
        budget=budget,
        batch={"input_ids": example},
        update_mode=spec["update_mode"],
        clip=spec["clip"],
        run_again=True,
        activations=wish if isinstance(wish, str) else checked(wish, Kept, "kept"),
        profile=Profile.read(Path(spec["profile"])) if "profile" in spec else None,
        **options,
    )


def forecasts(spec: dict[str, Any], context: Any, plan: Any) -> list[dict[str, Any]]:
    """Return forecasts of the plan on the machines of the spec, or on the one it was made for."""
    from lohan.model.machine import Profile

    machines = [Profile.read(Path(path)) for path in spec.get("profiles", [])]
    results = [
        context.forecast(one, plan, clipped=spec.get("clipped", False))
        for one in machines or [context.profile]
    ]
    return [{"step_s": one.step_s, "busy_s": one.busy_s} for one in results]


def described(plan: Any) -> dict[str, Any]:
    return {
        "micro_batch": plan.micro_batch,
        "chunk_params": plan.chunk_params,
        "weight_slots": plan.weight_slots,
        "window": plan.window,
        "ring": plan.ring,
        "grad_groups": plan.grad_groups,
        "deferred": len(plan.deferred),
        "spilled": len(plan.spilled_gradients),
        "host_cached_weights": len(plan.host_cached_weights),
        "host_cached_state": len(plan.host_cached_state),
        "kept": plan.kept_counts,
        "commit": [plan.commit.steps, plan.commit.seconds],
        "log_gradients": plan.log_gradients,
    }


if __name__ == "__main__":
    main()
