"""Forecast steps that log gradients instead of writing state, next to today's plans.

The log is a placement: backward appends the gradients of each group; the next forward reads the
base state and the gradients logged since, applies the updates in one pass, and uses the weights.
In every step one k-th of the groups writes the state that it has just computed (the fold). Weights
that are not kept in host memory until backward are written to a scratch region in forward.

The schedule is built from the operations of lohan.schedule, with these meanings:

    P  append a chunk of gradients to the log          G  read the gradients logged for a chunk
    S  read the base of a chunk, weights included      U  apply all logged updates in one pass
    W  write a fold, or the weights that backward      R  read those weights again
       has to read again                               C  commit, when all gradients are appended

    python benchmarks/gradient_log.py --models qwen3-32b --batches 16 --k 4 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lohan.errors import BudgetError
from lohan.model.plan import Plan, PlanOptions
from lohan.planner import presets
from lohan.planner.activations import levels
from lohan.planner.forecast import step_work
from lohan.planner.machine_plan import PlanProblem, PlanRequest, plan_for_machine, problem_of
from lohan.planner.memory import MemoryModel
from lohan.planner.planner import closed_form_plan
from lohan.schedule import phases
from lohan.schedule.actions import LANE_OF, Action, Op, Schedule, ScheduleSpec
from lohan.schedule.buffers import BufferState, empty_buffers
from lohan.schedule.simulate import ActionCosts, StepWork, simulate
from lohan.schedule.steps import ExecutionOrder, planned_order, spec_of
from lohan.util.units import GiB

STEPS = 3  # number of simulated steps; the last one is reported
FAR = 16  # only every sixteenth level of kept activations is tried
ARITHMETIC_SHARE = 0.05  # time of one more update in registers, relative to a whole AdamW update


@dataclass(frozen=True)
class Log:
    """A log of up to `k` gradients for each group."""

    spec: ScheduleSpec
    k: int

    def logged(self, group: int) -> int:
        """Return the number of gradients that the next forward applies to a group."""
        return group % self.k + 1

    def folds(self, group: int) -> bool:
        return self.logged(group) == self.k


class LogBuilder(phases.Builder):
    """Builds forward: weights come from the base and the log, not from a weight region."""

    log: Log

    def bring(self, group: int, upcoming: phases.Upcoming) -> None:
        if not self.spec.chunks[group]:
            return super().bring(group, upcoming)
        if self.slot_of(group) is None:
            free = [i for i, held in enumerate(self.slots) if held not in self.needed]
            slot = max(free, key=lambda i: upcoming.distance(self.slots[i]))
            self.slots[slot] = group
        return None

    def replay(self, group: int) -> None:
        """Read the base and the logged gradients of a group, and compute its weights."""
        slot, fold = self.held_slot(group), self.log.folds(group)
        for chunk in range(self.spec.chunks[group]):
            key = group, chunk
            while key not in self.read:
                self._fetch(self.queue[self.fetched])
                self.fetched += 1
            buffer = self.read.pop(key)
            at: tuple[int, ...] = (buffer, slot)
            if key in self.staged:  # Gradients of the resident group stay in memory.
                at = (buffer, slot, self.staged.pop(key))
            self.emit(Op.UPDATE, group, chunk, at)
            self.done += 1
            write = Action(Op.WRITE, group, chunk, (buffer, slot))
            if fold and buffer >= self.spec.ring and slot >= self.spec.slots:
                self.unwritten.append(write)  # Written during the following backward.
            elif fold or slot < self.spec.slots:
                self.emit_action(write)
            self.read_ahead()
        self.device = [None if held == group else held for held in self.device]


def forward(log: Log, buffers: BufferState, order: Sequence[int]) -> tuple[Schedule, BufferState]:
    spec = log.spec
    b = LogBuilder(spec, buffers, held_before=True)
    b.log = log
    trained = [group for group, count in enumerate(spec.chunks) if count]
    used = [group for site in order for group in spec.sites[site]]
    upcoming = phases.Upcoming(used, [g for site in reversed(order) for g in spec.sites[site]])
    left = dict.fromkeys(group for group in used if spec.chunks[group])
    unused = [group for group in trained if group not in left]
    b.queue = [(g, c) for g in (*unused, *left) for c in range(spec.chunks[g])]
    b.slots = [None] * len(b.slots)  # Weights of the step before.

    def replay_first(group: int) -> None:
        if group in left:
            del left[group]
            b.replay(group)

    for group in unused:
        b.bring(group, upcoming)
        b.replay(group)
    reached = phases._Reach(b, order, upcoming, release=True)
    for position, site in enumerate(order):
        reached.bring(position, then=replay_first)
        reached.load(position)
        groups = spec.sites[site]
        into, by = b.act_buffer(site), b.device_act_buffer(site)
        b.emit(Op.FORWARD, site, at=(*b.weights_of(groups), *into, *by))
        reached.passed(groups)
        b.offload_activations(site, into, by)
    b.behind.extend(b.unwritten)
    return b.result()


def backward(
    log: Log, buffers: BufferState, order: Sequence[int], unreached: Sequence[int]
) -> tuple[Schedule, BufferState]:
    """Return a backward that appends all gradients, writes the folds behind, and commits."""
    trained = [group for group, count in enumerate(log.spec.chunks) if count]
    made, buffers = phases.backward(
        log.spec,
        buffers,
        order,
        update_mode="optimized",
        deferred=trained,
        unreached=unreached,
    )
    b = phases.Builder(log.spec, buffers)
    b.emit(Op.END_STEP)
    end, buffers = b.result()
    return made + end, buffers


class LogCosts(ActionCosts):
    """The seconds of the actions of a logged step."""

    def __init__(self, log: Log, problem: PlanProblem, work: StepWork) -> None:
        machine = problem.rank_machine
        assert machine is not None
        super().__init__(machine, work)
        self._log, self._machine = log, machine
        self._cached = set(log.spec.host_cached_state)
        self._kept = set(log.spec.host_cached_weights)

    def moved(self, action: Action) -> tuple[float, float]:
        """Return the bytes that an action reads from SSD and writes to it."""
        layout, log, work = self._work.per_parameter, self._log, self._work
        kind, group, chunk = action.kind, action.index, action.chunk
        if kind in (Op.SPILL_ACTIVATIONS, Op.FETCH_ACTIVATIONS):
            size = work.out_bytes(group)
            return (0.0, size) if kind is Op.SPILL_ACTIVATIONS else (size, 0.0)
        if LANE_OF[kind] != "ssd" or kind is Op.END_STEP:
            return 0.0, 0.0
        count = work.groups[group] if chunk < 0 else work.chunk(group, chunk)
        if kind is Op.FETCH_GRADIENTS:
            return count * layout.gradient * self.applied(group, chunk), 0.0
        if kind is Op.READ_STATE:
            return count * (layout.state + layout.weight), 0.0
        if kind is Op.READ_WEIGHTS:
            return count * layout.weight, 0.0
        if kind is Op.SPILL_GRADIENTS:
            return 0.0, count * layout.gradient
        return 0.0, count * (layout.weight + (layout.state if log.folds(group) else 0.0))

    def applied(self, group: int, chunk: int) -> int:
        """Return the number of updates in one pass; cached state needs only the last one."""
        return 1 if (group, chunk) in self._cached else self._log.logged(group)

    def _seconds(self, action: Action) -> float:
        layout, machine = self._work.per_parameter, self._machine
        read, written = self.moved(action)
        if read or written:
            reading, writing = machine.ssd_mixed or machine.ssd_read, machine.ssd_write
            if action.kind is Op.READ_WEIGHTS:
                reading = machine.ssd_read
            alone = self._profile.action_s * self._work.actions(action.index, action.chunk)
            return alone + read / reading + written / (machine.ssd_mixed or writing)
        if action.kind is Op.UPDATE:
            count = self._work.chunk(action.index, action.chunk)
            applied = self.applied(action.index, action.chunk)
            # The state stays as it is on SSD unless it is folded or cached.
            stays = (action.index, action.chunk) in self._cached
            stored = layout.weight + layout.state
            kept = stored if stays or self._log.folds(action.index) else layout.weight
            moved = stored + applied * layout.gradient + kept
            share = moved / (2 * stored + layout.gradient) + ARITHMETIC_SHARE * (applied - 1)
            return share * layout.update * count / machine.adam
        return super()._seconds(action)


@dataclass(frozen=True)
class LogForecast:
    plan: Plan
    k: int
    step_s: float
    forward_s: float
    ssd_s: float
    read_bytes: float
    written_bytes: float


def forecast(problem: PlanProblem, plan: Plan, k: int) -> LogForecast:
    machine = problem.rank_machine
    assert machine is not None
    work = step_work(problem.blocks, problem.workload, plan, has_own_memory=machine.has_link)
    log = Log(spec_of(problem.blocks, plan), k)
    order: ExecutionOrder = planned_order(problem.blocks, plan, clipped=True)
    reached = {group for site in order.backward for group in log.spec.sites[site]}
    unreached = [group for group in range(len(log.spec.chunks)) if group not in reached]
    costs, buffers, made = LogCosts(log, problem, work), empty_buffers(log.spec), []
    for _ in range(STEPS):
        ahead, buffers = forward(log, buffers, order.forward)
        back, buffers = backward(log, buffers, order.backward, unreached)
        made += [ahead, back]
    timeline = simulate(made, costs.seconds, caller_updates=not machine.has_gpu)
    last = [action for phase in made[-2:] for action in phase]
    lanes = dict.fromkeys(set(LANE_OF.values()), 0.0)
    for action in last:
        lanes[action.lane] += costs.seconds(action)
    moved = [costs.moved(action) for action in last]
    return LogForecast(
        plan=plan,
        k=k,
        step_s=max(timeline.step_s, *lanes.values()),
        forward_s=timeline.forward_s,
        ssd_s=lanes["ssd"],
        read_bytes=sum(read for read, _ in moved),
        written_bytes=sum(written for _, written in moved),
    )


def plans(problem: PlanProblem, k: int) -> Iterator[Plan]:
    """Yield plans that spill all gradients and cache weights, then state.

    The staging buffers hold `k` gradients of a chunk, which is more than the ledger counts, so that
    the budget is lowered by the difference.
    """
    options = replace(problem.options, clip=1.0, spill_all=True)
    least = replace(problem, options=replace(options, activations="recompute"))
    plan = least.sized(closed_form_plan)
    staged = plan.ring * plan.chunk_params * (2 * k - 4) if k > 2 else 0
    host = problem.host_bytes - staged
    options = replace(options, micro_batch=plan.micro_batch, tiles=plan.tiles or "off")
    machine = problem.rank_machine
    assert machine is not None
    workload = problem.workload.in_tiles(plan.tiles)
    memory = MemoryModel.of(problem.blocks, plan, workload, has_own_memory=machine.has_link)
    for kept in list(levels(memory, workload))[::FAR]:
        chosen = replace(options, activations=kept or "recompute")
        try:
            yield replace(problem, options=chosen, host_bytes=host).sized(closed_form_plan)
        except BudgetError:
            return


def request_of(model: str, machine: str, batch: int, *, clip: float) -> PlanRequest:
    profile = presets.machine(machine)
    options = PlanOptions(dtype="bf16", clip=clip, can_rerun=True)
    return PlanRequest(
        model=presets.model(model),
        machine=profile,
        options=options,
        batch=batch,
        seq=1024,
        host=profile.host_bytes,
    )


def compare(model: str, machine: str, batch: int, ks: Sequence[int]) -> None:
    today = plan_for_machine(request_of(model, machine, batch, clip=1.0))
    assert today.forecast is not None
    plain = plan_for_machine(request_of(model, machine, batch, clip=0.0)).forecast
    assert plain is not None
    clipped = today.clipped or today.forecast
    name = f"{model} {machine} batch {batch}"
    print(
        f"{name:34} today {today.forecast.step_s:6.1f} s, clipped {clipped.step_s:6.1f} s, "
        f"without clip {plain.step_s:6.1f} s, {today.forecast.written_bytes / GiB:6.1f} GiB",
        flush=True,
    )
    problem = problem_of(request_of(model, machine, batch, clip=1.0))
    for k in ks:
        tried = [forecast(problem, plan, k) for plan in plans(problem, k)]
        best = min(tried, key=lambda one: one.step_s)
        share = best.written_bytes / today.forecast.written_bytes
        faster, faster_clipped = (s / best.step_s for s in (today.forecast.step_s, clipped.step_s))
        print(
            f"{'':26} k = {k:2}  log {best.step_s:6.1f} s ({faster:.2f}"
            f" and {faster_clipped:.2f} times as fast), forward {best.forward_s:.1f},"
            f" ssd {best.ssd_s:.1f}, written {best.written_bytes / GiB:.1f} GiB ({share:.2f}),"
            f" kept {best.plan.kept or 'inputs'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-14b", "qwen3-32b", "llama-3-70b"])
    parser.add_argument("--machines", nargs="+", default=["rtx4090"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--k", nargs="+", type=int, default=[4, 8])
    asked = parser.parse_args()
    for machine in asked.machines:
        for model in asked.models:
            for batch in asked.batches:
                compare(model, machine, batch, asked.k)


if __name__ == "__main__":
    main()
