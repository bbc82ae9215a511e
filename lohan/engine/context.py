"""The model, machine and budget that an attached model is planned for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from lohan.device.base import CpuDevice, Device
from lohan.device.choose import Backend
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan, PlanOptions
from lohan.planner.forecast import (
    Forecast,
    Simulator,
    profile_of_step,
    step_work,
)
from lohan.planner.planner import PlanProblem
from lohan.util.trace import Span


@dataclass(frozen=True)
class PlanContext:
    """What an attached model is planned for and runs on."""

    blocks: Blocks
    options: PlanOptions
    workload: BatchWorkload | None
    host_bytes: int
    profile: Profile | None = None  # of the machine, where it was known; not divided among ranks
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # its memory's, if it has one of its own
    process_group: ProcessGroup = ALONE  # the ranks that share the state
    backend: Backend | None = None  # by which blocks are compiled
    check: bool = False  # compare first calls with plain ones
    plan_is_given: bool = False  # by the caller, so that `replan` keeps it
    settings: ExitStack = field(default_factory=ExitStack)  # restores torch's when a session ends

    def forecast(self, profile: Profile, plan: Plan, *, clipped: bool = False) -> Forecast:
        """Forecast a step of a plan on a machine. The batch must be known."""
        assert self.workload is not None
        return Simulator(profile, self.shards, self.workload).forecast(plan, clipped=clipped)

    def problem(self, options: PlanOptions, *, profile: Profile | None) -> PlanProblem:
        """Return the problem of another plan of this rank."""
        return PlanProblem(
            self.shards,
            options,
            host_bytes=self.host_bytes,
            workload=self.workload,
            profile=profile,
            device_bytes=self.device_bytes,
        )

    def measured(self, spans: Sequence[Span], plan: Plan) -> Profile | None:
        """Return the machine as measured by a step of this plan on this rank."""
        assert self.workload is not None
        work = step_work(
            self.shards, self.workload, plan, has_own_memory=self.device.has_own_memory
        )
        return profile_of_step(
            spans,
            work,
            host_bytes=self.host_bytes,
            device=self.device.name,
            device_bytes=self.device_bytes or 0,
            unified=not self.device.has_own_memory and not self.device.computes_on_cores,
        )

    def workload_for(self, plan: Plan) -> BatchWorkload | None:
        """Return the batch in the tiles of a plan."""
        return None if self.workload is None else self.workload.in_tiles(plan.tiles)

    @property
    def shards(self) -> Blocks:
        """What of every group is a rank's."""
        return self.process_group.ranks.shards(self.blocks)
