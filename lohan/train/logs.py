"""What a run writes down about itself for `lohan report`, in RUN/journal.jsonl:

start      versions and machine, when a process begins or resumes the run
plan       the plan that is followed from a step on, with what it was predicted to do, if anything
measured   rates of the lanes after some steps with a plan and at the end, as a profile, and what
           the plan should do on such a machine
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lohan import __version__
from lohan.engine.session import Session
from lohan.model.machine import Profile
from lohan.planner.calibrate import profile_of_step
from lohan.planner.forecast import Forecast, forecast, workload
from lohan.train.run_folder import RunFolder, append_row
from lohan.util.system import total_memory_bytes
from lohan.util.trace import Span

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
SETTLED = 3  # steps with a plan: the first run on demand


class Journal:
    """Told of plans and steps; writes what is worth keeping."""

    def __init__(self, folder: RunFolder, session: Session) -> None:
        self._folder, self._session = folder, session
        self._plan = session.plan
        self._known = session.demand.profile  # the machine, as far as it is known
        self._origin = "the machine's profile"
        self._since = 0  # steps with the plan under way
        self._last: tuple[Mapping[str, Any], Sequence[Span]] | None = None

    def began(self, *, total: int) -> None:
        load = self._session.demand.load
        shape = None if load is None else {"batch": load.batch, "seq": load.seq}
        self._write(
            "start", time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            total=total, shape=shape, versions=versions(), machine=machine(),
            parameters=self._session.demand.blocks.parameters, ranks=self._session.plan.world,
        )  # fmt: skip
        self._planned()

    def follow(self) -> None:
        """Writes the plan down if it is another one than before."""
        if self._session.plan != self._plan:
            self._planned()

    def _planned(self) -> None:
        session = self._session
        self._plan, self._since = session.plan, 0
        made = None if self._known is None else self._forecast(self._known)
        self._write(
            "plan", host_bytes=session.host_bytes, plan=session.plan.to_json(),
            predicted=None if made is None else figures(made), origin=self._origin,
        )  # fmt: skip

    def after_step(self, row: Mapping[str, Any], spans: Sequence[Span]) -> None:
        self._since += 1
        self._last = (row, spans)
        if self._since == SETTLED:
            self._measured()

    def ended(self) -> None:
        if self._since > SETTLED:
            self._measured()

    def _measured(self) -> None:
        demand = self._session.demand
        if self._last is None or demand.load is None:
            return
        row, spans = self._last
        linked = demand.device.linked
        work = workload(demand.pieces, demand.load, self._session.plan, linked=linked)
        found = profile_of_step(
            spans, work, host_bytes=demand.host_bytes, device=demand.device.name,
            device_bytes=demand.device_bytes or 0,
            moved_bytes=row["ssd_read_bytes"] + row["ssd_written_bytes"],
        )  # fmt: skip
        if found is not None:
            self._known, self._origin = found, f"rates measured in step {row['step']}"
            made = self._forecast(found)
            predicted = None if made is None else figures(made)
            self._write("measured", profile=asdict(found), predicted=predicted)

    def _forecast(self, profile: Profile) -> Forecast | None:
        session, demand = self._session, self._session.demand
        if demand.load is None:
            return None
        durable = session.store.durability == "step"
        return forecast(profile, demand.pieces, demand.load, session.plan, write_pinned=durable)

    def _write(self, event: str, **what: Any) -> None:
        append_row(self._folder.journal, {"event": event, "step": self._session.step, **what})


class Unwritten:
    """The journal of ranks beside the first, which writes the run's."""

    def began(self, *, total: int) -> None:
        pass

    def follow(self) -> None:
        pass

    def after_step(self, row: Mapping[str, Any], spans: Sequence[Span]) -> None:
        pass

    def ended(self) -> None:
        pass


def figures(made: Forecast) -> dict[str, Any]:
    return {
        "step_s": made.step_s, "lane_s": made.busy_s, "tokens": made.tokens,
        "written_bytes": made.written_bytes,
    }  # fmt: skip


def versions() -> dict[str, str]:
    found = {"lohan": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    return {
        "node": platform.node(), "system": f"{platform.system()} {platform.release()}",
        "threads": torch.get_num_threads(), "memory_bytes": total_memory_bytes(),
    }  # fmt: skip
