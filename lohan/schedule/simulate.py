"""A simulator of schedules, and the cost of every action on a machine described by a profile.

The simulator follows the rules of engine/lanes.py. Every lane keeps its order. An action starts
when the actions that it waits for have finished. Actions of the ssd lane are submitted as soon as
they may start, and are served one after the other. If compute and updates share the cores
(`caller_updates`), an update runs between two compute actions as soon as it is ready, as it does on
the caller's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lohan.errors import LohanError
from lohan.model.machine import Profile
from lohan.schedule.actions import Action, Schedule
from lohan.schedule.ops import OPERATIONS, Op, Operation, Subject
from lohan.util.trace import LANES, Span, busy_s, chrome_trace


@dataclass(frozen=True)
class Timeline:
    """The simulated spans of all lanes, and the times at which backward of each step ended."""

    spans: tuple[Span, ...]
    step_ends: tuple[float, ...]  # seconds since the start of the simulation

    @property
    def step_s(self) -> float:
        """The seconds of the last step, from the end of one backward to the end of the next."""
        before = self.step_ends[-2] if len(self.step_ends) > 1 else 0.0
        return self.step_ends[-1] - before

    @property
    def forward_s(self) -> float:
        """The seconds from the start of the last step until its backward begins."""
        start = self.step_ends[-1] - self.step_s
        begins = (span.start_s for span in self.spans if span.name[0] == Op.BACKWARD)
        return min((at for at in begins if at >= start), default=start) - start

    def busy_s(self) -> dict[str, float]:
        """Return the busy seconds of each lane in the last step."""
        stop = self.step_ends[-1]
        return busy_s(self.spans, stop - self.step_s, stop)

    def trace(self) -> dict[str, Any]:
        """Return the spans in the trace format of Chrome and Perfetto."""
        return chrome_trace(list(self.spans))


@dataclass(slots=True)
class _Task:
    """An action that is queued in the simulator."""

    action: Action
    missing: int = 0  # number of tasks that it waits for and that were not simulated yet
    ready_s: float = 0.0  # when the last task that it waits for finishes
    waiting: list[_Task] = field(default_factory=list)  # tasks that wait for this one
    finish_s: float = 0.0


def simulate(
    phases: Iterable[Schedule], seconds: Callable[[Action], float], *, caller_updates: bool = False
) -> Timeline:
    """Return the timeline of consecutive phases.

    As in the executor, a phase is enqueued when the compute actions of the previous phase have
    finished or, if it has none, when all of its actions have. `seconds` returns the duration of an
    action.
    """
    if caller_updates:
        return _Shared(seconds).run(phases)
    return _in_order(phases, seconds)


def _in_order(phases: Iterable[Schedule], seconds: Callable[[Action], float]) -> Timeline:
    """Return the timeline of phases if no lanes share a thread.

    No action waits for a later one, so one pass in the order of the schedule is enough.
    """
    free = dict.fromkeys(LANES, 0.0)  # when each lane can start its next action
    finished: dict[str, float] = {}
    durations: dict[str, float] = {}  # seconds of an action by name, the same in every step
    spans, end = list[Span](), Op.BACKWARD_DONE
    ends: list[float] = []
    # The loop below runs once per action, so attribute lookups are moved out of it.
    when, took, span_of = finished.get, durations.get, tuple.__new__
    served_s = floor_s = 0.0
    for phase in phases:
        compute_s = last_s = floor_s
        computes = False
        for action in phase:
            kind, _, _, _, waits, name = action
            lane = kind.lane
            start_s = free[lane]
            if floor_s > start_s:
                start_s = floor_s
            for other in waits:
                if when(other, 0.0) > start_s:
                    start_s = finished[other]
            took_s = took(name)
            if took_s is None:
                took_s = durations[name] = seconds(action)
            if lane == "ssd":  # Actions are submitted in order and served one after the other.
                free[lane] = start_s
                if served_s > start_s:
                    start_s = served_s
                stop_s = served_s = start_s + took_s
            else:
                stop_s = free[lane] = start_s + took_s
                if lane == "compute":
                    compute_s, computes = stop_s, True
            finished[name] = stop_s
            if stop_s > last_s:
                last_s = stop_s
            if took_s:
                spans.append(span_of(Span, (lane, name, start_s, stop_s)))
            if kind is end:
                ends.append(stop_s)
        floor_s = compute_s if computes else last_s
    return Timeline(tuple(spans), tuple(ends))


class _Shared:
    """A simulator for compute and updates that take turns on one thread.

    Their order depends on the times at which they become ready, so it needs an event queue.
    """

    def __init__(self, seconds: Callable[[Action], float]) -> None:
        self._seconds = seconds
        self._queues: dict[str, deque[_Task]] = {lane: deque() for lane in LANES}
        self._free = dict.fromkeys(LANES, 0.0)  # when each lane can start its next action
        self._served_s = 0.0  # when the drives have served all submitted actions
        self._latest: dict[str, _Task] = {}  # the latest task of each name
        self._spans: list[Span] = []
        self._ends: list[float] = []

    def run(self, phases: Iterable[Schedule]) -> Timeline:
        remaining, before = 0, list[_Task]()
        for phase in phases:
            tasks = [self._add(action) for action in phase]
            first = {task.action.lane: task for task in reversed(tasks)}
            for task, other in product(first.values(), before):
                task.missing += 1
                other.waiting.append(task)
            compute = [task for task in tasks if task.action.lane == "compute"]
            before = compute[-1:] or tasks or before
            remaining += len(tasks)
        for _ in range(remaining):
            self._step()
        return Timeline(tuple(self._spans), tuple(self._ends))

    def _add(self, action: Action) -> _Task:
        task = _Task(action)
        for name in action.waits:
            other = self._latest.get(name)
            if other is not None:
                task.missing += 1
                other.waiting.append(task)
        self._latest[action.name] = task
        self._queues[action.lane].append(task)
        return task

    def _step(self) -> None:
        """Start the action with the earliest possible start among the heads of all lanes.

        An action whose predecessors have not all been started cannot start earlier than this one.
        """
        best: tuple[float, int, str] | None = None
        for rank, lane in enumerate(_PRIORITY):
            queue = self._queues[lane]
            if queue and not queue[0].missing:
                start = max(self._free[lane], queue[0].ready_s)
                if best is None or (start, rank) < best[:2]:
                    best = (start, rank, lane)
        if best is None:
            stuck = [queue[0].action.token() for queue in self._queues.values() if queue]
            raise LohanError(f"the schedule deadlocks at {' '.join(stuck)}")
        self._start(best[2], best[0])

    def _start(self, lane: str, start_s: float) -> None:
        task = self._queues[lane].popleft()
        took_s = self._seconds(task.action)
        if lane == "ssd":
            begun_s = max(start_s, self._served_s)
            task.finish_s = self._served_s = begun_s + took_s
            self._free[lane] = start_s
        else:
            begun_s = start_s
            task.finish_s = self._free[lane] = start_s + took_s
            if lane in ("compute", "optimizer"):
                self._free["compute"] = self._free["optimizer"] = task.finish_s
        if took_s:
            self._spans.append(Span(lane, task.action.name, begun_s, task.finish_s))
        if task.action.kind == Op.BACKWARD_DONE:
            self._ends.append(task.finish_s)
        for other in task.waiting:
            other.missing -= 1
            other.ready_s = max(other.ready_s, task.finish_s)


# The order of lanes whose actions can start at the same time: a ready update runs before compute.
_PRIORITY = ("optimizer", "compute", "ssd", "h2d", "d2h", "net")


# -- The cost of a step on a machine: seconds of every action, and closed forms per lane -----------
#
# Pure functions of a profile and a `StepWork`. The simulator uses the seconds of single actions.
# The planner uses the closed form of the paper, in which a phase lasts as long as its busiest lane,
# extended by the terms that the paper leaves out: CPU updates, state cached in host memory, updates
# deferred to the next forward, head and embedding, and micro-batches.


@dataclass(frozen=True, kw_only=True)
class SiteWork:
    """The compute of one call of a site, and the activations that leave the device and the host."""

    forward_flops: float
    recompute_flops: float  # FLOPs of recomputation in backward
    tokens: float  # number of tokens in one matrix product
    slices: int = 1  # number of times that the launching thread runs the block in a pass
    # Bytes that operations on activations, other than matrix products, move through device memory.
    forward_bytes: float = 0.0
    recompute_bytes: float = 0.0
    # Bytes of activations that cross the link to the device, in each direction.
    kept_bytes: float = 0.0
    out_bytes: float = 0.0  # bytes of activations that are written to SSD and read back
    # Bytes through device memory to sum the weight gradients of tiles and slices, and for the norm.
    summed_bytes: float = 0.0
    # Bytes through device memory to dequantise weights, in forward and again in backward.
    dequantised_bytes: float = 0.0
    trained: float = 1.0  # share of the parameters that require a gradient
    head: bool = False
    no_backward: bool = False  # whether no gradient reaches the site
    at_once: bool = False  # whether gradients are computed in forward, slice by slice (the head)

    def forward_s(self, profile: Profile) -> float:
        forward_s = self._seconds(profile, self.forward_flops, self.forward_bytes)
        if self.at_once:
            return forward_s + self._gradient_s(profile)
        return max(forward_s, self._launch_s(profile.forward_launch_s))

    def backward_s(self, profile: Profile) -> float:
        if self.at_once or self.no_backward:
            return 0.0
        recompute_s = self._seconds(profile, self.recompute_flops, self.recompute_bytes)
        computed_s = recompute_s + self._gradient_s(profile)
        return max(computed_s, self._launch_s(profile.backward_launch_s))

    def _launch_s(self, slice_s: float) -> float:
        return self.slices * slice_s if self.forward_flops else 0.0

    def _seconds(self, profile: Profile, flops: float, activations: float) -> float:
        rate = profile.head_flops if self.head else 0.0
        flops_s = flops / (rate or profile.flops_at(self.tokens))
        touched_s = activation_s(profile, activations) + memory_s(profile, self.dequantised_bytes)
        return flops_s + touched_s

    def _gradient_s(self, profile: Profile) -> float:
        rate = profile.head_flops if self.head else 0.0
        flops_s = self.gradient_flops / (rate or profile.backward_flops_at(self.tokens))
        activations_s = activation_s(profile, 2 * self.forward_bytes)
        return flops_s + activations_s + memory_s(profile, self.summed_bytes)

    @property
    def gradient_flops(self) -> float:
        """The FLOPs of gradients: those of forward once for inputs, and once for weights."""
        return (1 + self.trained) * self.forward_flops


# Bytes through device memory to dequantise one value: codes, indices, fp32 twice, 16 bits.
DEQUANTISING = 24
# Bytes through device memory to add one weight gradient of a tile or slice to the sum: 16 bits are
# written and read, fp32 is read and written.
SUM_BYTES = 12
# Bytes through device memory per 16-bit element of an activation: written once, read twice.
TOUCHED = 6


def memory_s(profile: Profile, touched: float) -> float:
    """Return the seconds to move `touched` bytes through device memory, or 0 if not known."""
    return touched / profile.device_rate if profile.device_rate else 0.0


def activation_s(profile: Profile, touched: float) -> float:
    """Return the seconds to move activations through device memory.

    The result is 0 if the profile's FLOP/s were measured with a whole block, because that
    measurement includes the time. The FLOP/s of a preset are those of matrix products alone.
    """
    return 0.0 if profile.block_width else memory_s(profile, touched)


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes per parameter of weights, optimizer state and gradients, and the cost of an update."""

    weight: float
    state: float  # bytes that an update reads and writes
    gradient: float  # bytes over the link, and to SSD and back if gradients are spilled
    update: float = 1.0  # time of an update, as a multiple of that of AdamW
    rounding_s: float = 0.0  # seconds of one core per parameter, a lower bound of an update


def bus_bytes(layout: BytesPerParameter) -> dict[Operation, float]:
    """Return the bytes per parameter that each operation moves through main memory.

    Checksums are computed while the data of an update is in the CPU cache, and squares are summed
    on the device, so neither adds bytes.
    """
    return {kind: kind.bus(layout) for kind in OPERATIONS.values() if kind.bus is not None}


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The amount of work of one step. Groups and sites are numbered as in the schedule spec."""

    sites: tuple[SiteWork, ...]
    groups: tuple[int, ...]  # parameters of each group
    chunk_params: int
    per_parameter: BytesPerParameter
    chunk_sizes: tuple[tuple[int, ...], ...] = ()  # in parameters, if chunks are not of equal size
    # True if a chunk stands for several real ones, each with the overhead of an action.
    joined: bool = False
    slices: int = 1  # number of micro-batches
    world: int = 1  # number of ranks; with several, groups are the shards of one rank
    logged: float = 0.0  # gradients that a log holds for a chunk when it is updated, on average

    def chunk(self, group: int, number: int) -> int:
        if self.chunk_sizes:
            return self.chunk_sizes[group][number]
        return min(self.chunk_params, self.groups[group] - number * self.chunk_params)

    def parameters(self, group: int, chunk: int) -> int:
        """Return the number of parameters in a chunk or, if `chunk` is -1, in the whole group."""
        return self.groups[group] if chunk < 0 else self.chunk(group, chunk)

    def chunks(self, group: int) -> int:
        if self.chunk_sizes:
            return len(self.chunk_sizes[group])
        return -(-self.groups[group] // self.chunk_params)

    def actions(self, group: int, number: int) -> int:
        """Return the number of real actions that chunk `number` of a group represents.

        The number is above 1 if a rough forecast has joined chunks.
        """
        return -(-self.chunk(group, number) // self.chunk_params) if self.joined else 1

    def out_bytes(self, site: int) -> float:
        return self.sites[site].out_bytes

    def over_link(self, site: int) -> float:
        """Return the bytes of activations that are attributed to K or V of a site.

        K offloads activations, and V restores them. Slices are copied during the compute of their
        own site. Only the last slice to leave, or the first to return, is copied between two sites.
        That slice is counted with its own site and the other slices with the site before it.
        """
        own_bytes = self.sites[site].kept_bytes
        after = self.sites[site + 1].kept_bytes if site + 1 < len(self.sites) else 0.0
        return own_bytes / self.slices + after * (self.slices - 1) / self.slices

    def bus_bytes(self, phases: Iterable[Schedule]) -> float:
        """Return the bytes that these phases move through main memory.

        The device is assumed to have its own memory.
        """
        each, moved = bus_bytes(self.per_parameter), 0.0
        parameters = dict.fromkeys(each, 0)
        for phase in phases:
            for kind, index, chunk, _, _, _ in phase:
                if kind in parameters:
                    parameters[kind] += self.parameters(index, chunk)
                elif kind.subject is Subject.SITE and kind.moves is not None:
                    moved += kind.moves(self, index, chunk)
        return moved + sum(each[kind] * count for kind, count in parameters.items())

    def written(self, action: Action) -> float:
        """Return the bytes that an action writes to SSD."""
        kind = action.kind
        if not kind.writes or kind.moves is None:
            return 0.0
        return kind.moves(self, action.index, action.chunk)


class ActionCosts:
    """The seconds that each action takes in the schedules of one workload on one machine."""

    def __init__(
        self, profile: Profile, work: StepWork, *, lost: Mapping[str, float] | None = None
    ) -> None:
        """Initialize the costs.

        `lost` is the share of its speed that each action loses to concurrent actions, by name.
        """
        self.profile, self.work, self._lost = profile, work, lost or {}
        self.cached_s: dict[str, float] = {}  # seconds by name, the same in every step
        # Seconds by kind and chunk size. All chunks of a size take equally long.
        self._cached_s: dict[tuple[Operation, int], float] = {}

    def seconds(self, action: Action) -> float:
        seconds = self.cached_s.get(action.name)
        if seconds is None:
            seconds = self._seconds(action)
            if self._lost:
                seconds /= 1.0 - self._lost.get(action.name, 0.0)
            self.cached_s[action.name] = seconds
        return seconds

    def _seconds(self, action: Action) -> float:
        kind, chunk = action.kind, action.chunk
        if not kind.starts:
            return self._moving_s(action)
        if chunk < 0:
            return self.profile.action_s + self._moving_s(action)
        key = kind, self.work.chunk(action.index, chunk)
        cached_s = self._cached_s.get(key)
        if cached_s is None:
            count = self.work.actions(action.index, chunk)
            cached_s = count * self.profile.action_s + self._moving_s(action)
            self._cached_s[key] = cached_s
        return cached_s

    def _moving_s(self, action: Action) -> float:
        """Return the seconds that an action needs to move its data, or for its arithmetic."""
        return action.kind.seconds(self.profile, self.work, action.index, action.chunk)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The totals that one step moves and computes. Attributes are in bytes unless noted."""

    forward_s: float  # seconds of compute
    backward_s: float  # seconds of compute
    weights: float  # over the link, in each phase
    weights_read: float  # from SSD, in each phase
    kept: float  # activations over the link, in each direction
    out: float  # activations to SSD and back
    gradients: float  # over the link
    state_read: float  # from SSD
    state_written: float  # to SSD, including weights
    held: float  # gradients written to SSD and read back
    updated: float  # parameters, multiplied by the cost of an update relative to AdamW
    rounding_s: float = 0.0  # seconds of one core to round the moments
    deferred: float = 0.0  # share of the updates that run in forward
    # Seconds of the head, part of `forward_s`. The head runs after all blocks, so it begins after
    # the last offload of activations.
    head_s: float = 0.0
    gathered: float = 0.0  # weights from other ranks, in each phase
    reduced: float = 0.0  # gradients to other ranks
    update_bytes: float = 0.0  # through main memory, by updates
    alone: bool = False  # whether gradients of one block leave the device before the next backward


LaneSeconds = dict[str, float]


def lane_seconds(profile: Profile, t: Traffic) -> tuple[LaneSeconds, LaneSeconds]:
    """Return the busy seconds per lane in forward and in backward."""
    read, write = profile.ssd_read, profile.ssd_write
    state_s = 0.0
    if t.state_read or t.state_written:
        mixed = profile.ssd_mixed
        state_s = t.state_read / (mixed or read) + t.state_written / (mixed or write)
    update_s, d = max(t.updated / profile.adam, t.rounding_s / profile.cores), t.deferred
    link = profile.has_link
    forward = {
        "compute": t.forward_s,
        "h2d": t.weights / profile.h2d if link else 0.0,
        "d2h": t.kept / profile.d2h if link else 0.0,
        "net": t.gathered / profile.net_rate,
        "ssd": _seconds_at(t.weights_read, read) + _seconds_at(t.out, write) + d * state_s,
        "optimizer": d * update_s,
    }
    backward = {
        "compute": t.backward_s + (t.gradients / profile.d2h if link and t.alone else 0.0),
        "h2d": (t.weights + t.kept) / profile.h2d if link else 0.0,
        "d2h": t.gradients / profile.d2h if link else 0.0,
        "net": (t.gathered + t.reduced) / profile.net_rate,
        "ssd": _seconds_at(t.weights_read, read)
        + _seconds_at(t.out, read)
        + (1 - d) * state_s
        + _seconds_at(t.held, write)
        + _seconds_at(t.held, read),
        "optimizer": (1 - d) * update_s,
    }
    if link and profile.host_rate:
        updates = t.state_read + t.state_written + t.update_bytes
        ahead = t.weights + t.weights_read + t.kept + t.out + d * updates
        backward_bytes = t.weights + t.weights_read + t.kept + t.out + t.gradients + 4 * t.held
        forward["bus"] = ahead / profile.host_rate
        backward["bus"] = (backward_bytes + (1 - d) * updates) / profile.host_rate
    return forward, backward


def _seconds_at(amount: float, rate: float) -> float:
    return amount / rate if amount else 0.0


def phase_s(profile: Profile, lanes: Mapping[str, float]) -> float:
    """Return the seconds of a phase, which lasts as long as its busiest lane."""
    return max(*lanes.values(), shared_s(profile, lanes))


def shared_s(profile: Profile, lanes: Mapping[str, float]) -> float:
    """Return the total seconds of lanes that share one resource.

    Without a GPU, compute and updates share the cores. If GPUs are connected only by their links to
    host memory, transfers between ranks share these links.
    """
    if not profile.has_gpu:
        return lanes["compute"] + lanes["optimizer"]
    if not profile.net_over_links:
        return 0.0
    return max(lanes["h2d"], lanes["d2h"]) + lanes.get("net", 0.0)


def step_s(profile: Profile, t: Traffic) -> float:
    forward, backward = lane_seconds(profile, t)
    forward_s = max(phase_s(profile, forward), forward["d2h"] + t.head_s)
    return forward_s + phase_s(profile, backward)
