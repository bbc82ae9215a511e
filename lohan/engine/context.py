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
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.workload import BatchWorkload
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
    """The inputs of planning for an attached model: blocks, options, batch, machine and ranks."""

    blocks: Blocks
    options: PlanOptions
    workload: BatchWorkload | None
    host_bytes: int
    # the whole machine, not divided among ranks; None if it is not known
    profile: Profile | None = None
    device: Device = field(default_factory=CpuDevice)
    device_bytes: int | None = None  # None if the device has no memory of its own
    process_group: ProcessGroup = ALONE  # the ranks that share the state
    backend: Backend | None = None  # compiles the blocks; None if they are not compiled
    check: bool = False  # whether first calls are compared with plain ones
    log_room: int | None = None  # as in PlanProblem
    plan_is_given: bool = False  # whether the caller gave the plan, so that `replan` keeps it
    settings: ExitStack = field(default_factory=ExitStack)  # restores torch's settings at the end

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
            log_room=self.log_room,
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
        """The blocks with this rank's shard of every group."""
        return self.process_group.ranks.shards(self.blocks)
