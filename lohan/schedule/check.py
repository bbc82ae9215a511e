"""Validation of schedules.

Two properties are checked for every action, in the order of the schedule:

1. The serial order is correct: each action finds the expected contents in slots, in buffers and on
   SSD.
2. Lanes do not race: if two actions use the same resource and one of them writes it, the first must
   certainly have finished when the second starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn

from lohan.errors import LohanError
from lohan.schedule.actions import (
    DEVICE_BUFFERS,
    Action,
    BufferState,
    Schedule,
    ScheduleSpec,
    Use,
    effects_of,
)
from lohan.schedule.ops import (
    DEVICE_ACTIVATIONS,
    DEVICE_SLOT,
    HOST_ACTIVATIONS,
    SLOT,
    STAGING,
    STATE,
    WRITE,
    Op,
    Operation,
    Subject,
    parse_name,
)
from lohan.util.trace import LANES

# -- Vector clocks ---------------------------------------------------------------------------------
#
# A clock has one number per lane: how many actions of that lane have certainly finished. An action
# of the ssd lane starts when the previous one has started, an action of any other lane when the
# previous one has finished. The actions of a lane finish in order. If an action waits for another,
# everything that had finished before the other one finished has finished too.

COMPUTE = LANES.index("compute")
Clock = tuple[int, ...]


def join(first: Clock, second: Clock) -> Clock:
    return tuple(map(max, first, second))


def at_least(lane: int, number: int) -> Clock:
    return tuple(number if lane == other else 0 for other in range(len(LANES)))


def split_buffers(
    action: Action, spec: ScheduleSpec, buffers: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide the buffers that an action names into host buffers and device buffers."""
    if action.index in spec.offloaded:
        return buffers[:-1], buffers[-1:]
    return buffers, ()


# -- Check ----------------------------------------------------------------------------------------


def validate(
    schedule: Schedule,
    spec: ScheduleSpec,
    buffers: BufferState,
    *,
    whole: bool = False,
    by_interval: bool = False,
) -> None:
    """Raise a LohanError that names the token of the first invalid action.

    `buffers` is the state from which the schedule was built. With `whole`, the schedule starts at
    the beginning of a step, and it is an error if a group was not updated before the first C. For
    every later C, this is checked in any case. With `by_interval`, some steps end without a commit.
    Such a step writes either all or none of the chunks whose weights and state are cached.
    """
    clocks = _Clocks(spec, buffers)
    contents = _Contents(spec, buffers, clocks, whole=whole, by_interval=by_interval)
    for action in schedule:
        _check_form(action, spec)
        clocks.start(action)
        contents.check(action)
        clocks.check_races(action)


def _fail(action: Action, problem: str) -> NoReturn:
    raise LohanError(f"schedule: {action.token()}: {problem}")


def _check_form(action: Action, spec: ScheduleSpec) -> None:
    """Check that everything that the action names exists."""
    if not _exists(spec, action.kind, action.index, action.chunk):
        _fail(action, "there is no such site, group or chunk")
    for wait in action.waits:
        named = parse_name(wait)
        if named is None or not _exists(spec, *named):
            _fail(action, f"waits for {wait}, which no schedule of this spec has")
    kinds = action.kind.at(spec, action.index)
    least = sum(kind not in action.kind.optional for kind in kinds)
    if len(action.at) not in (least, len(kinds)):
        _fail(action, f"has {len(action.at)} slots and buffers, wants {len(kinds)}")
    for number, kind in zip(action.at, kinds, strict=False):
        if number >= _size(spec, kind):
            _fail(action, "names a slot or buffer that does not exist")


def _exists(spec: ScheduleSpec, kind: Operation, index: int, chunk: int) -> bool:
    if kind.subject is Subject.STEP:
        return index == chunk == -1
    if kind.subject is Subject.SITE:
        return 0 <= index < len(spec.sites) and chunk == -1
    if not 0 <= index < len(spec.chunks):
        return False
    return chunk == -1 if kind.subject is Subject.GROUP else 0 <= chunk < spec.chunks[index]


def _size(spec: ScheduleSpec, kind: str) -> int:
    """Return how many slots or buffers of a kind exist."""
    return {
        SLOT: spec.slots + len(spec.host_cached_weights),
        STATE: spec.ring + len(spec.host_cached_state),
        STAGING: spec.ring,
        DEVICE_SLOT: spec.device_slots,
        HOST_ACTIVATIONS: spec.act_buffers,
        DEVICE_ACTIVATIONS: DEVICE_BUFFERS,
    }[kind]


class _Clocks:
    """The vector clocks of the lanes, and the last uses of every resource."""

    def __init__(self, spec: ScheduleSpec, buffers: BufferState) -> None:
        self.spec, self.uses = spec, buffers.uses.copy()
        counts, clocks = self.uses.counts, self.uses.clocks
        # The compute lane is the calling thread, so its earlier actions have finished when the
        # schedule is enqueued. On a device with its own memory, they may still be running.
        begun = at_least(COMPUTE, 0 if spec.device_slots else counts[COMPUTE])
        self.last_start = [join(begun, tuple(clocks[lane])) for lane in range(len(LANES))]
        self.last_done = [
            join(start, at_least(lane, counts[lane])) for lane, start in enumerate(self.last_start)
        ]
        # The clock at the finish of the latest action of each name.
        self.done = {name: tuple(use[3]) for name, use in self.uses.recorded().items()}
        self.now: Clock = (0,) * len(LANES)  # the clock at the start of the current action

    def start(self, action: Action) -> None:
        """Set the clocks at the start and at the finish of the action."""
        lane = LANES.index(action.lane)
        start = (self.last_start if action.lane == "ssd" else self.last_done)[lane]
        for wait in action.waits:
            # An action of an earlier schedule that is no longer a last use is not in `done`.
            if wait in self.done:
                start = join(start, self.done[wait])
        self.now = self.last_start[lane] = start
        done = join(start, join(self.last_done[lane], at_least(lane, self.uses.counts[lane] + 1)))
        self.last_done[lane] = self.done[action.name] = done

    def has_finished(self, use: Use) -> bool:
        """Return whether the action of `use` has certainly finished when the current one starts."""
        return self.now[use[0]] >= use[1]

    def finished(self, action: Action) -> Use:
        lane = LANES.index(action.lane)
        return lane, self.uses.counts[lane] + 1, action.name, []

    def check_races(self, action: Action) -> None:
        """Check that every earlier conflicting action has certainly finished."""
        missing = self.uses.missing(action, effects_of(action, self.spec), list(self.now))
        for (_, _, name, _), (resource, access, _) in missing.values():
            verb = "overwrites" if access is WRITE else "uses"
            _fail(action, f"{verb} {' '.join(map(str, resource))} while {name} may be in flight")


class _Activations:
    """The kept activations of sites, in host buffers, device buffers and on SSD."""

    def __init__(self, spec: ScheduleSpec, *, whole: bool) -> None:
        self.spec = spec
        self.from_start = whole  # whether the schedule relies on no earlier schedule
        # The site whose activations each buffer holds, or None.
        self.host: list[int | None] = [None] * spec.act_buffers
        self.device: list[int | None] = [None] * DEVICE_BUFFERS
        self.on_ssd: set[int] = set()  # sites

    def keep(self, action: Action, at: tuple[int, ...]) -> None:
        """Record that the forward of a site keeps its activations in the buffers `at`."""
        host, device = split_buffers(action, self.spec, at)
        for buffer in host:
            self.host[buffer] = action.index
        for buffer in device:
            self.device[buffer] = action.index

    def check_kept(self, action: Action, at: tuple[int, ...]) -> None:
        """Check that the buffers `at` hold the activations of the site."""
        host, device = split_buffers(action, self.spec, at)
        for buffer in host:
            self._check_site(action, "buffer", self.host[buffer])
        for buffer in device:
            self._check_site(action, "the device", self.device[buffer])

    def _check_site(self, action: Action, buffer: str, site: int | None) -> None:
        if site != action.index:
            _fail(action, f"{buffer} holds activations of {site}")

    def restore(self, action: Action) -> None:
        for buffer in action.at[:-1]:
            self._check_site(action, "buffer", self.host[buffer])
        self.device[action.at[-1]] = action.index

    def spill(self, action: Action) -> None:
        self._check_site(action, "buffer", self.host[action.at[0]])
        self.on_ssd.add(action.index)

    def fetch(self, action: Action) -> None:
        if self.from_start and action.index not in self.on_ssd:
            _fail(action, "these activations were not moved out")
        self.host[action.at[0]] = action.index


class _Gradients:
    """The gradients of groups, from backward to the update."""

    def __init__(self, spec: ScheduleSpec, clocks: _Clocks, *, whole: bool) -> None:
        self.spec, self.clocks = spec, clocks
        self.from_start = whole  # whether the schedule relies on no earlier schedule
        self.held: set[int] = set()  # groups with complete gradients that are still to be updated
        self.on_ssd: set[tuple[int, int]] = set()  # chunks of held gradients
        # The chunk whose held or logged gradients each staging buffer holds, or None.
        self.staged: list[tuple[int, int] | None] = [None] * spec.ring
        self.since_forward: set[int] = set()  # groups updated since the last F
        # The latest action (B, X or D) that wrote the gradients of each group in this backward.
        self.last_written: dict[int, Use] = {}
        self.backward_end: Use | None = None  # the latest E

    def begin_forward(self, action: Action) -> None:
        for group in self.spec.sites[action.index]:
            if group in self.held:
                _fail(action, f"the weights of group {group} are not updated yet")
        self.since_forward.clear()

    def compute(self, action: Action) -> None:
        """Check that backward may still add to the gradients of the groups of a site."""
        for group in self.spec.sites[action.index]:
            if group in self.since_forward or group in self.held:
                _fail(action, f"group {group} was handed over before its last use")
            self.last_written[group] = self.clocks.finished(action)

    def move(self, action: Action) -> None:
        self.check_complete(action)
        self.last_written[action.index] = self.clocks.finished(action)

    def end_backward(self, action: Action) -> None:
        self.backward_end = self.clocks.finished(action)
        self.last_written.clear()
        self.since_forward.clear()

    def hold(self, action: Action) -> None:
        self.check_complete(action)
        self.held.add(action.index)

    def check_complete(self, action: Action) -> None:
        """Check that the gradients are complete: after the last B of the group, or after E."""
        source = self.last_written.get(action.index, self.backward_end)
        if source is not None and not self.clocks.has_finished(source):
            _fail(action, f"the gradients of {source[2]} may not be there yet")

    def check_in_memory(self, action: Action) -> None:
        """Check that the update of a chunk finds its held gradients in memory.

        Gradients that were spilled to SSD must be in the staging buffer that the update names.
        """
        key = (action.index, action.chunk)
        if key in self.on_ssd and (len(action.at) < 3 or self.staged[action.at[2]] != key):
            _fail(action, "its held gradients are on SSD and in no staging buffer")

    def consume(self, action: Action) -> None:
        """Record that a chunk was updated with its gradients."""
        self.on_ssd.discard((action.index, action.chunk))
        self.since_forward.add(action.index)
        if action.chunk == self.spec.chunks[action.index] - 1:
            self.held.discard(action.index)

    def spill(self, action: Action) -> None:
        if action.index not in self.held:
            _fail(action, "these gradients are not held")
        self.on_ssd.add((action.index, action.chunk))
        self.staged[action.at[0]] = None

    def fetch(self, action: Action) -> None:
        if self.from_start and (action.index, action.chunk) not in self.on_ssd:
            _fail(action, "these gradients were not put away")
        self.staged[action.at[0]] = (action.index, action.chunk)

    def commit_log(self, action: Action) -> None:
        if not self.spec.log:
            _fail(action, "there is no log of gradients")
        if self.backward_end is not None and not self.clocks.has_finished(self.backward_end):
            _fail(action, "backward may not have ended")
        missing = {
            (group, chunk)
            for group in self.spec.spilled_gradients
            for chunk in range(self.spec.chunks[group])
        } - self.on_ssd
        if missing and self.from_start:
            group, chunk = min(missing)
            _fail(action, f"the gradients of group {group} chunk {chunk} are not appended")


class _Contents:
    """The contents of slots, buffers and SSD if actions run one after the other.

    This class itself checks weights and state. Activations and gradients have their own classes.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        buffers: BufferState,
        clocks: _Clocks,
        *,
        whole: bool,
        by_interval: bool,
    ) -> None:
        self.spec, self.clocks, self.by_interval = spec, clocks, by_interval
        self.activations = _Activations(spec, whole=whole)
        self.gradients = _Gradients(spec, clocks, whole=whole)
        self.whole_step = whole  # whether the schedule contains the beginning of the current step
        # The group or the (group, chunk) that each slot and ring buffer holds, or None.
        self.slots: list[int | None] = [*buffers.slots, *spec.host_cached_weights]
        self.ring: list[tuple[int, int] | None] = [*[None] * spec.ring, *spec.host_cached_state]
        self.device_slots: list[int | None] = list(buffers.device)
        # Device slots that hold all shards of their group, after A.
        self.gathered = {i for i, held in enumerate(buffers.device) if held is not None}
        # Chunks that were updated in memory and are outdated on SSD.
        self.unwritten = {(a.index, a.chunk) for a in buffers.behind if a.kind == Op.WRITE}
        # Chunks whose weights are outdated on SSD. A log can restore their state.
        self.unwritten_weights = set(self.unwritten)
        self.replayed: set[int] = set()  # groups in slots with the weights of their last full state
        self.updated: set[tuple[int, int]] = set()  # chunks updated since the last C
        self.step_end: Use | None = None  # the latest C
        self.last_update: Use | None = None  # the latest U of this step

    # -- the serial order -------------------------------------------------------------------------

    def check(self, action: Action) -> None:
        """Check that an action finds the contents it needs, and record the contents after it."""
        check = self._CONTENT.get(action.kind)
        if check is not None:
            check(self, action)

    def _forward(self, action: Action) -> None:
        self._check_weights(action)
        self.gradients.begin_forward(action)
        self.activations.keep(action, action.at[len(self.spec.sites[action.index]) :])

    def _backward(self, action: Action) -> None:
        self._check_weights(action)
        self.gradients.compute(action)
        self.activations.check_kept(action, action.at[len(self.spec.sites[action.index]) :])

    def _offload_activations(self, action: Action) -> None:
        self.activations.check_kept(action, action.at)

    def _check_weights(self, action: Action) -> None:
        """Check that the weights of all groups of the site are complete and up to date."""
        slots = self.device_slots if self.spec.device_slots else self.slots
        for group, slot in zip(self.spec.sites[action.index], action.at, strict=False):
            if slots[slot] != group:
                _fail(action, f"slot {slot} holds group {slots[slot]}, not {group}")
            if group in self.replayed:
                _fail(action, f"the logged gradients of group {group} are not applied yet")
            if self.spec.net and slot not in self.gathered:
                _fail(action, f"slot {slot} holds a shard of group {group}, not all of it")

    def _load(self, action: Action) -> None:
        slot, device_slot = action.at
        self._check_slot(action, slot)
        self.device_slots[device_slot] = action.index
        self.gathered.discard(device_slot)

    def _all_gather(self, action: Action) -> None:
        slot = action.at[0]
        if self.device_slots[slot] != action.index:
            _fail(action, f"slot {slot} holds group {self.device_slots[slot]}")
        self.gathered.add(slot)

    def _read_weights(self, action: Action) -> None:
        group = action.index
        self._fill_slot(action)
        if any(number == group for number, _ in self.unwritten_weights):
            _fail(action, "the newest weights are not written yet")
        self.replayed.discard(group)

    def _read_base_weights(self, action: Action) -> None:
        self._check_base(action)
        self._fill_slot(action)
        self.replayed.add(action.index)

    def _fill_slot(self, action: Action) -> None:
        if action.at[0] >= self.spec.slots:
            _fail(action, f"slot {action.at[0]} belongs to the host cache")
        self.slots[action.at[0]] = action.index

    def _check_slot(self, action: Action, slot: int) -> None:
        if self.slots[slot] != action.index:
            _fail(action, f"slot {slot} holds group {self.slots[slot]}")

    def _check_base(self, action: Action) -> None:
        """Check that the last full state, which the action reads, is committed."""
        if not self.spec.log:
            _fail(action, "there is no log of gradients")
        if self.step_end is not None and not self.clocks.has_finished(self.step_end):
            _fail(action, "C may not have committed the last full state yet")

    def _read_state(self, action: Action) -> None:
        if (action.index, action.chunk) in self.unwritten and not self.spec.log:
            _fail(action, "the newest state is not written yet")
        self._fill_ring(action)

    def _read_base(self, action: Action) -> None:
        self._check_base(action)
        self._check_slot(action, action.at[1])
        self._fill_ring(action)

    def _fill_ring(self, action: Action) -> None:
        buffer = action.at[0]
        if buffer >= self.spec.ring:
            _fail(action, f"ring buffer {buffer} belongs to the host cache")
        self.ring[buffer] = (action.index, action.chunk)

    def _update(self, action: Action) -> None:
        key = (action.index, action.chunk)
        self.gradients.check_complete(action)
        self._check_chunk(action)
        if key in self.updated:
            _fail(action, "is updated a second time in this step")
        self.gradients.check_in_memory(action)
        if self.spec.log and action.index not in self.spec.host_cached_weights:
            if action.index not in self.replayed:
                _fail(action, "its slot does not hold the weights of the last full state")
            if key in self.spec.host_cached_state:
                _fail(action, "its state is cached, and its weights are not")
        self.updated.add(key)
        self.unwritten.add(key)
        self.unwritten_weights.add(key)
        self.last_update = self.clocks.finished(action)
        self.gradients.consume(action)
        self.device_slots = [None if held == action.index else held for held in self.device_slots]
        if action.chunk == self.spec.chunks[action.index] - 1:
            self.replayed.discard(action.index)

    def _write(self, action: Action) -> None:
        self._check_chunk(action)
        self._check_new(action)
        self.unwritten.discard((action.index, action.chunk))
        self.unwritten_weights.discard((action.index, action.chunk))

    def _write_weights(self, action: Action) -> None:
        self._check_slot(action, action.at[0])
        self._check_new(action)
        self.unwritten_weights.discard((action.index, action.chunk))

    def _check_new(self, action: Action) -> None:
        """Check that the chunk was updated and not yet written, and that a generation is open."""
        if (action.index, action.chunk) not in self.unwritten:
            _fail(action, "there is nothing new to write")
        if self.step_end is not None and not self.clocks.has_finished(self.step_end):
            _fail(action, "would write into the generation that C is committing")

    def _check_chunk(self, action: Action) -> None:
        """Check that the state and the weights of the chunk are in the named buffer and slot."""
        buffer, slot = action.at[:2]
        if self.ring[buffer] != (action.index, action.chunk):
            _fail(action, f"ring buffer {buffer} holds {self.ring[buffer]}")
        self._check_slot(action, slot)

    def _end_step(self, action: Action) -> None:
        stays = {k for k in self.spec.host_cached_state if k[0] in self.spec.host_cached_weights}
        if self.spec.log:  # The last full state and the log give those of all chunks.
            stays = {(g, c) for g, count in enumerate(self.spec.chunks) for c in range(count)}
        lost = self.unwritten
        # The updates of a step that began in an earlier schedule are not all known.
        if self.by_interval and (stays <= self.unwritten or not self.whole_step):
            lost = self.unwritten - stays
        if lost:
            group, chunk = min(lost)
            _fail(action, f"{Op.UPDATE.of(group, chunk)} is not written yet")
        everything = {(g, c) for g, n in enumerate(self.spec.chunks) for c in range(n)}
        if self.whole_step and self.updated != everything:
            group, chunk = min(everything - self.updated)
            _fail(action, f"group {group} chunk {chunk} was not updated in this step")
        if self.last_update is not None and not self.clocks.has_finished(self.last_update):
            _fail(action, f"{self.last_update[2]} may still be in flight")
        self.last_update = None
        self.unwritten.clear()
        self.updated.clear()
        self.whole_step = True
        self.step_end = self.clocks.finished(action)

    _CONTENT: ClassVar[dict[str, Callable[[_Contents, Action], None]]] = {
        Op.FORWARD: _forward,
        Op.BACKWARD: _backward,
        Op.LOAD_WEIGHTS: _load,
        Op.ALL_GATHER: _all_gather,
        Op.REDUCE_SCATTER: lambda contents, a: contents.gradients.move(a),
        Op.OFFLOAD_GRADIENTS: lambda contents, a: contents.gradients.move(a),
        Op.OFFLOAD_ACTIVATIONS: _offload_activations,
        Op.RESTORE_ACTIVATIONS: lambda contents, a: contents.activations.restore(a),
        Op.SPILL_ACTIVATIONS: lambda contents, a: contents.activations.spill(a),
        Op.FETCH_ACTIVATIONS: lambda contents, a: contents.activations.fetch(a),
        Op.BACKWARD_DONE: lambda contents, a: contents.gradients.end_backward(a),
        Op.READ_WEIGHTS: _read_weights,
        Op.READ_STATE: _read_state,
        Op.READ_BASE_WEIGHTS: _read_base_weights,
        Op.READ_BASE: _read_base,
        Op.SUM_SQUARES: lambda contents, a: contents.gradients.hold(a),
        Op.UPDATE: _update,
        Op.WRITE: _write,
        Op.WRITE_WEIGHTS: _write_weights,
        Op.SPILL_GRADIENTS: lambda contents, a: contents.gradients.spill(a),
        Op.FETCH_GRADIENTS: lambda contents, a: contents.gradients.fetch(a),
        Op.FETCH_LOGGED: lambda contents, a: contents.gradients.fetch(a),
        Op.COMMIT_LOG: lambda contents, a: contents.gradients.commit_log(a),
        Op.END_STEP: _end_step,
    }
