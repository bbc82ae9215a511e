"""The table of operations: everything that the package knows about each kind of action.

An operation has one row. The parser, the validator, the derivation of waits, the simulator, the
byte counts, the profile measured by a run, the engine and docs/design.md read the table. A new
operation is a row here and a branch in engine/actions.py.

An operation that reads what an earlier one writes, or writes what an earlier one reads or writes,
waits for it (actions.py). A resource is a slot, a buffer, a region on SSD, the gradients of a
group, or a fact such as the end of backward. Its name is a tuple. Some resources have parts, the
chunks of a group: two operations on different chunks of a slot do not conflict, but each of them
conflicts with an operation on the whole slot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from lohan.model.machine import Profile
    from lohan.schedule.actions import ScheduleSpec
    from lohan.schedule.simulate import BytesPerParameter, StepWork

# -- Resources and effects -------------------------------------------------------------------------


class Access(Enum):
    """How an operation uses a resource."""

    READ = "read"
    WRITE = "write"
    # Ordered after all earlier writes, but later writes do not wait for it. It is used for facts
    # that every step establishes again, such as the end of backward.
    AFTER = "after"


Resource = tuple[str | int, ...]
# One use of a resource: the resource, the access, and the number of the chunk, or WHOLE.
Effect = tuple[Resource, Access, int]
WHOLE = -1

READ, WRITE, AFTER = Access.READ, Access.WRITE, Access.AFTER
BACKWARD_END: Resource = ("end of backward",)
GENERATION: Resource = ("open generation",)
UPDATES: Resource = ("updates",)
SQUARES: Resource = ("squares",)
LOG_SEGMENT: Resource = ("log segment",)

# Kinds of slots and buffers, which an action names by number after the @ of its token.
SLOT, STATE, STAGING = "slot", "state buffer", "staging buffer"
DEVICE_SLOT, DEVICE_ACTIVATIONS = "device slot", "device activations"
HOST_ACTIVATIONS = "activation buffer"


# -- Rows ------------------------------------------------------------------------------------------


class Subject(Enum):
    """The subject of an operation. The value is an example of how a token names it."""

    SITE = "3"
    GROUP = "5"
    CHUNK = "5.1"
    STEP = ""


At = tuple[int, ...]
Effects = Callable[[int, int, At, "ScheduleSpec"], list[Effect]]


class Operation(str):
    """A row of the table. As a string, it is the letter of the operation."""

    __slots__ = (
        *("at", "bus", "effects", "example", "lane", "moves"),
        *("optional", "seconds", "subject", "text", "label", "writes"),
    )

    label: str  # a name of a few words, that of the row in `Op`
    text: str  # what the operation does, for the documentation
    example: str  # a token without waits
    lane: str
    subject: Subject
    # Returns the effects of an action, given its index, chunk, slots and buffers, and the spec.
    effects: Effects
    # Returns the kinds of slots and buffers that an action on a site names, given the site.
    at: Callable[[ScheduleSpec, int], tuple[str, ...]]
    # The kinds of slots and buffers that an action may leave out.
    optional: tuple[str, ...]
    # Returns the bytes that an action moves on its lane, given its index and its chunk or -1.
    moves: Callable[[StepWork, int, int], float] | None
    writes: bool  # whether these bytes are written to SSD
    # Returns the seconds of an action without the overhead of starting it.
    seconds: Callable[[Profile, StepWork, int, int], float]
    # Returns the bytes per parameter that move through main memory.
    bus: Callable[[BytesPerParameter], float] | None

    def __new__(
        cls,
        letter: str,
        text: str,
        *,
        lane: str,
        subject: Subject,
        effects: Effects,
        at: Sequence[str] | Callable[[ScheduleSpec, int], tuple[str, ...]] = (),
        optional: tuple[str, ...] = (),
        moves: Callable[[StepWork, int, int], float] | None = None,
        rate: Callable[[Profile], float] | None = None,
        seconds: Callable[[Profile, StepWork, int, int], float] | None = None,
        bus: Callable[[BytesPerParameter], float] | None = None,
        writes: bool = False,
    ) -> Self:
        self = super().__new__(cls, letter)
        self.label = ""
        self.text, self.lane, self.subject, self.effects = text, lane, subject, effects
        kinds = () if callable(at) else tuple(at)
        self.at = at if callable(at) else lambda spec, site: kinds
        numbers = "0" if callable(at) else ",".join(map(str, range(len(kinds))))
        self.example = letter + subject.value + (f"@{numbers}" if numbers else "")
        self.optional, self.moves, self.bus, self.writes = optional, moves, bus, writes
        if seconds is None and moves is not None and rate is not None:
            amount, speed = moves, rate
            self.seconds = lambda profile, work, index, chunk: (
                amount(work, index, chunk) / speed(profile)
            )
        else:
            self.seconds = seconds or (lambda profile, work, index, chunk: 0.0)
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.label = name.replace("_", " ").lower()

    def of(self, index: int = -1, chunk: int = -1) -> str:
        """Return the name of an action: the letter, the site or group, and the chunk."""
        if chunk >= 0:
            return f"{self!s}{index}.{chunk}"
        return f"{self!s}{index}" if index >= 0 else str(self)

    @property
    def starts(self) -> bool:
        """True if a lane starts the action, which then has the fixed cost of one action."""
        return self.lane != "compute" and self.subject is not Subject.STEP


def _per_parameter(size: Callable[[BytesPerParameter], float]) -> Any:
    """Return a `moves` function for actions that move `size` bytes per parameter."""
    return lambda work, index, chunk: work.parameters(index, chunk) * size(work.per_parameter)


def _among_ranks(size: Callable[[BytesPerParameter], float]) -> Any:
    """Return a `moves` function for the bytes that a rank exchanges with all others.

    `size` is the number of bytes per parameter.
    """
    return lambda work, index, chunk: (
        work.parameters(index, chunk) * ((work.world - 1) * size(work.per_parameter))
    )


def _mixed_read(profile: Profile) -> float:
    return profile.ssd_mixed or profile.ssd_read


def _mixed_write(profile: Profile) -> float:
    return profile.ssd_mixed or profile.ssd_write


LOGGED_S = 0.45e-9  # seconds of one core for one AdamW update of a parameter in registers


def _update_s(profile: Profile, work: StepWork, index: int, chunk: int) -> float:
    layout = work.per_parameter
    # Several logged updates are one pass over memory, so their arithmetic can take longer.
    core_s = max(1.0, work.logged) * layout.rounding_s + work.logged * layout.update * LOGGED_S
    each_s = max(layout.update / profile.adam, core_s / profile.cores)
    return work.parameters(index, chunk) * each_s


# -- Operations whose effects depend on the spec ---------------------------------------------------


def _compute_at(spec: ScheduleSpec, site: int) -> tuple[str, ...]:
    weights = DEVICE_SLOT if spec.device_slots else SLOT
    return (weights,) * len(spec.sites[site]) + _activations_at(spec, site)


def _activations_at(spec: ScheduleSpec, site: int) -> tuple[str, ...]:
    host = (HOST_ACTIVATIONS,) if site in spec.spilled_sites else ()
    return host + ((DEVICE_ACTIVATIONS,) if site in spec.offloaded else ())


def _weights_read(index: int, at: At, spec: ScheduleSpec) -> list[Effect]:
    kind = DEVICE_SLOT if spec.device_slots else SLOT
    return [((kind, slot), READ, WHOLE) for slot in at[: len(spec.sites[index])]]


def _forward(index: int, chunk: int, at: At, spec: ScheduleSpec) -> list[Effect]:
    effects, buffers = _weights_read(index, at, spec), at[len(spec.sites[index]) :]
    if buffers:
        # The host buffer of a site that is offloaded and spilled is written by K, not by F.
        offloaded = index in spec.offloaded
        kind = DEVICE_ACTIVATIONS if offloaded else HOST_ACTIVATIONS
        effects.append(((kind, buffers[-1] if offloaded else buffers[0]), WRITE, WHOLE))
    return effects


def _backward(index: int, chunk: int, at: At, spec: ScheduleSpec) -> list[Effect]:
    effects, buffers = _weights_read(index, at, spec), at[len(spec.sites[index]) :]
    if buffers and index in spec.offloaded:
        effects.append(((DEVICE_ACTIVATIONS, buffers[-1]), READ, WHOLE))
        if len(buffers) > 1:
            effects.append(((HOST_ACTIVATIONS, buffers[0]), READ, WHOLE))
    elif buffers:
        effects.append(((HOST_ACTIVATIONS, buffers[0]), READ, WHOLE))
    gradients = "device gradients" if spec.device_slots else "gradients"
    effects += [
        ((gradients, group), WRITE, WHOLE) for group in spec.sites[index] if spec.chunks[group]
    ]
    return effects


def _update(index: int, chunk: int, at: At, spec: ScheduleSpec) -> list[Effect]:
    staged = [((STAGING, buffer), READ, WHOLE) for buffer in at[2:]]
    return [
        (BACKWARD_END, AFTER, WHOLE),
        (("gradients", index), WRITE, chunk),  # The last chunk frees them.
        ((STATE, at[0]), WRITE, WHOLE),
        ((SLOT, at[1]), WRITE, chunk),
        *staged,
        (UPDATES, WRITE, WHOLE),
    ]


def _host_copy(index: int, at: At) -> Resource:
    """Return the resource in host memory that holds the offloaded activations of a site."""
    return (HOST_ACTIVATIONS, at[0]) if len(at) > 1 else ("activations", index)


# -- The table -------------------------------------------------------------------------------------


class Op:
    """The table of all operations. The caller's thread runs F, B and E; lanes run the others."""

    FORWARD = Operation(
        "F",
        "forward of site 3, with its weights in slot 0",
        lane="compute",
        subject=Subject.SITE,
        at=_compute_at,
        optional=(HOST_ACTIVATIONS, DEVICE_ACTIVATIONS),  # Without training, none are kept.
        effects=_forward,
        seconds=lambda profile, work, site, chunk: work.sites[site].forward_s(profile),
    )
    BACKWARD = Operation(
        "B",
        "backward of site 3",
        lane="compute",
        subject=Subject.SITE,
        at=_compute_at,
        effects=_backward,
        seconds=lambda profile, work, site, chunk: work.sites[site].backward_s(profile),
    )
    BACKWARD_DONE = Operation(
        "E",
        "end backward; actions that need all gradients wait for it",
        lane="compute",
        subject=Subject.STEP,
        effects=lambda index, chunk, at, spec: [(BACKWARD_END, WRITE, WHOLE)],
    )
    READ_WEIGHTS = Operation(
        "R",
        "read the weights of group 5 into slot 0",
        lane="ssd",
        subject=Subject.GROUP,
        at=(SLOT,),
        effects=lambda index, chunk, at, spec: [
            ((SLOT, at[0]), WRITE, WHOLE),
            (("group on SSD", index), READ, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.weight),
        rate=lambda profile: profile.ssd_read,
        bus=lambda layout: layout.weight,
    )
    READ_BASE_WEIGHTS = Operation(
        "T",
        "read the weights of the last full state of group 5 into slot 0; logged gradients are "
        "applied to them",
        lane="ssd",
        subject=Subject.GROUP,
        at=(SLOT,),
        effects=lambda index, chunk, at, spec: [
            ((SLOT, at[0]), WRITE, WHOLE),
            (("group on SSD", index), READ, WHOLE),
            (GENERATION, AFTER, WHOLE),  # The last full state is the committed generation.
        ],
        moves=_per_parameter(lambda layout: layout.weight),
        rate=lambda profile: profile.ssd_read,
        bus=lambda layout: layout.weight,
    )
    READ_STATE = Operation(
        "S",
        "read state chunk 1 of group 5 into ring buffer 0",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STATE,),
        effects=lambda index, chunk, at, spec: [
            ((STATE, at[0]), WRITE, WHOLE),
            (("group on SSD", index), READ, chunk),
        ],
        moves=_per_parameter(lambda layout: layout.state),
        rate=_mixed_read,
        bus=lambda layout: layout.state,
    )
    READ_BASE = Operation(
        "Q",
        "read the last full state of state chunk 1 of group 5 into ring buffer 0, and its weights "
        "into slot 1; logged gradients are applied to it",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STATE, SLOT),
        effects=lambda index, chunk, at, spec: [
            ((STATE, at[0]), WRITE, WHOLE),
            ((SLOT, at[1]), WRITE, chunk),
            (("group on SSD", index), READ, chunk),
            (GENERATION, AFTER, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.state + layout.weight),
        rate=_mixed_read,
        bus=lambda layout: layout.state + layout.weight,
    )
    UPDATE = Operation(
        "U",
        "update that chunk in ring buffer 0, and its weights in slot 1; held gradients that were "
        "fetched are in staging buffer 2",
        lane="optimizer",
        subject=Subject.CHUNK,
        at=(STATE, SLOT, STAGING),
        optional=(STAGING,),
        effects=_update,
        seconds=_update_s,
        bus=lambda layout: 2 * (layout.weight + layout.state) + layout.gradient,
    )
    WRITE = Operation(
        "W",
        "write the state and the weights of that chunk",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STATE, SLOT),
        effects=lambda index, chunk, at, spec: [
            ((STATE, at[0]), READ, WHOLE),
            ((SLOT, at[1]), READ, chunk),
            (("group on SSD", index), WRITE, chunk),
            (GENERATION, AFTER, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.state + layout.weight),
        rate=_mixed_write,
        writes=True,
        bus=lambda layout: layout.weight + layout.state,
    )
    WRITE_WEIGHTS = Operation(
        "Y",
        "write the weights of that chunk in slot 0 for the passes that follow; the log has the "
        "rest of its update",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(SLOT,),
        effects=lambda index, chunk, at, spec: [
            ((SLOT, at[0]), READ, chunk),
            (("group on SSD", index), WRITE, chunk),
            (GENERATION, AFTER, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.weight),
        rate=_mixed_write,
        writes=True,
        bus=lambda layout: layout.weight,
    )
    SUM_SQUARES = Operation(
        "H",
        "sum the squares of the gradients of group 5, for the gradient norm",
        lane="optimizer",
        subject=Subject.GROUP,
        effects=lambda index, chunk, at, spec: [
            (BACKWARD_END, AFTER, WHOLE),
            (("gradients", index), READ, WHOLE),
            (SQUARES, WRITE, WHOLE),
        ],
        # No seconds are counted: on a device, the time of backward includes the sum, and on a CPU,
        # the sum directly follows backward.
    )
    SPILL_GRADIENTS = Operation(
        "P",
        "spill chunk 1 of the held gradients of group 5 through staging buffer 0, to the log if "
        "there is one",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STAGING,),
        effects=lambda index, chunk, at, spec: [
            (("gradients", index), WRITE, chunk),  # The last chunk frees them.
            ((STAGING, at[0]), WRITE, WHOLE),
            (("gradients on SSD", index, chunk), WRITE, WHOLE),
            *([(LOG_SEGMENT, READ, WHOLE)] if spec.log else []),
        ],
        moves=_per_parameter(lambda layout: layout.gradient),
        rate=_mixed_write,
        writes=True,
        bus=lambda layout: 3 * layout.gradient,  # packed into a staging buffer, then written
    )
    FETCH_GRADIENTS = Operation(
        "G",
        "fetch it into staging buffer 0",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STAGING,),
        effects=lambda index, chunk, at, spec: [
            ((STAGING, at[0]), WRITE, WHOLE),
            (("gradients on SSD", index, chunk), READ, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.gradient),
        rate=_mixed_read,
        bus=lambda layout: layout.gradient,
    )
    FETCH_LOGGED = Operation(
        "N",
        "fetch the gradients logged for that chunk since its last full state into staging buffer 0",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STAGING,),
        effects=lambda index, chunk, at, spec: [
            ((STAGING, at[0]), WRITE, WHOLE),
            (("gradients on SSD", index, chunk), READ, WHOLE),
        ],
        moves=lambda work, index, chunk: (
            work.parameters(index, chunk) * work.per_parameter.gradient * work.logged
        ),
        rate=_mixed_read,
        bus=lambda layout: layout.gradient,
    )
    SPILL_ACTIVATIONS = Operation(
        "O",
        "spill the kept activations of site 3 from activation buffer 0",
        lane="ssd",
        subject=Subject.SITE,
        at=(HOST_ACTIVATIONS,),
        effects=lambda index, chunk, at, spec: [
            ((HOST_ACTIVATIONS, at[0]), READ, WHOLE),
            (("activations on SSD", index), WRITE, WHOLE),
        ],
        moves=lambda work, site, chunk: work.out_bytes(site),
        rate=_mixed_write,
        writes=True,
    )
    FETCH_ACTIVATIONS = Operation(
        "I",
        "fetch them into activation buffer 0",
        lane="ssd",
        subject=Subject.SITE,
        at=(HOST_ACTIVATIONS,),
        effects=lambda index, chunk, at, spec: [
            (("activations on SSD", index), READ, WHOLE),
            ((HOST_ACTIVATIONS, at[0]), WRITE, WHOLE),
        ],
        moves=lambda work, site, chunk: work.out_bytes(site),
        rate=_mixed_read,
    )
    END_STEP = Operation(
        "C",
        "end the step: commit it or, between two commits, only count it",
        lane="ssd",
        subject=Subject.STEP,
        effects=lambda index, chunk, at, spec: [
            (BACKWARD_END, AFTER, WHOLE),
            (UPDATES, AFTER, WHOLE),
            (GENERATION, WRITE, WHOLE),
        ],
        seconds=lambda profile, work, index, chunk: profile.commit_s,
    )
    COMMIT_LOG = Operation(
        "J",
        "commit the step in the log, whose gradients are appended",
        lane="ssd",
        subject=Subject.STEP,
        effects=lambda index, chunk, at, spec: [
            (BACKWARD_END, AFTER, WHOLE),
            (LOG_SEGMENT, WRITE, WHOLE),
        ],
        seconds=lambda profile, work, index, chunk: profile.commit_s,
    )
    # Operations on a device with its own memory:
    LOAD_WEIGHTS = Operation(
        "L",
        "load the weights of group 5 from slot 0 into device slot 1",
        lane="h2d",
        subject=Subject.GROUP,
        at=(SLOT, DEVICE_SLOT),
        effects=lambda index, chunk, at, spec: [
            ((SLOT, at[0]), READ, WHOLE),
            ((DEVICE_SLOT, at[1]), WRITE, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.weight),
        rate=lambda profile: profile.h2d,
        bus=lambda layout: layout.weight,
    )
    RESTORE_ACTIVATIONS = Operation(
        "V",
        "restore the offloaded activations of site 3 to device buffer 0",
        lane="h2d",
        subject=Subject.SITE,
        at=_activations_at,
        effects=lambda index, chunk, at, spec: [
            (_host_copy(index, at), READ, WHOLE),
            ((DEVICE_ACTIVATIONS, at[-1]), WRITE, WHOLE),
        ],
        moves=lambda work, site, chunk: work.over_link(site),
        rate=lambda profile: profile.h2d,
    )
    OFFLOAD_ACTIVATIONS = Operation(
        "K",
        "offload the activations of site 3 from device buffer 0 to host memory",
        lane="d2h",
        subject=Subject.SITE,
        at=_activations_at,
        effects=lambda index, chunk, at, spec: [
            ((DEVICE_ACTIVATIONS, at[-1]), READ, WHOLE),
            (_host_copy(index, at), WRITE, WHOLE),
        ],
        moves=lambda work, site, chunk: work.over_link(site),
        rate=lambda profile: profile.d2h,
    )
    OFFLOAD_GRADIENTS = Operation(
        "D",
        "copy the gradients of group 5 to host memory",
        lane="d2h",
        subject=Subject.GROUP,
        effects=lambda index, chunk, at, spec: [
            (("device gradients", index), READ, WHOLE),
            (("gradients", index), WRITE, WHOLE),
        ],
        moves=_per_parameter(lambda layout: layout.gradient),
        rate=lambda profile: profile.d2h,
        bus=lambda layout: layout.gradient,
    )
    # Operations of several ranks, which share the state. Host memory and SSD hold the shards of the
    # local rank.
    ALL_GATHER = Operation(
        "A",
        "all-gather the weights of group 5 in device slot 0",
        lane="net",
        subject=Subject.GROUP,
        at=(DEVICE_SLOT,),
        effects=lambda index, chunk, at, spec: [((DEVICE_SLOT, at[0]), WRITE, WHOLE)],
        moves=_among_ranks(lambda layout: layout.weight),
        rate=lambda profile: profile.net_rate,
    )
    REDUCE_SCATTER = Operation(
        "X",
        "reduce-scatter the gradients of group 5: each rank gets the sum of its shard",
        lane="net",
        subject=Subject.GROUP,
        effects=lambda index, chunk, at, spec: [(("device gradients", index), WRITE, WHOLE)],
        moves=_among_ranks(lambda layout: layout.gradient),
        rate=lambda profile: profile.net_rate,
    )


OPERATIONS: dict[str, Operation] = {
    str(row): row for row in vars(Op).values() if isinstance(row, Operation)
}


_NAME = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?")


def parse_name(name: str) -> tuple[Operation, int, int] | None:
    """Return the operation, index and chunk of an action's name; None if the name is invalid."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in OPERATIONS:
        return None
    return OPERATIONS[match[1]], int(match[2] or -1), int(match[3] or -1)


def table() -> list[str]:
    """Return the table of operations in Markdown, as docs/design.md shows it."""
    lines = ["| token | lane | operation |", "|---|---|---|"]
    lines += [f"| `{row.example}` | {row.lane} | {row.text} |" for row in OPERATIONS.values()]
    return lines
