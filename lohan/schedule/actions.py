"""The alphabet of schedules: one token per action, `KIND INDEX [.CHUNK] [@BUFFER,...] [(WAIT,...)]`
without blanks.

    F3@0        compute    forward of site 3, its weights in slot 0
    B3@1        compute    backward of site 3
    E           compute    backward is done (BACKWARD_DONE); what waits for all gradients waits here
    R5@2        ssd        read the weights of group 5 into slot 2
    S5.1@0      ssd        read state chunk 1 of group 5 into ring buffer 0
    U5.1@0,2    optimizer  update that chunk; its weights lie in slot 2
    W5.1@0,2    ssd        write its state and weights
    H5          optimizer  sum the squares of the gradients of group 5, for a norm
    P5.1@0      ssd        spill chunk 1 of held gradients through staging buffer 0
    G5.1@1      ssd        fetch it into staging buffer 1; its update is U5.1@0,2,1
    O3@1        ssd        spill the kept activations of site 3 from activation buffer 1
    I3@0        ssd        fetch them into activation buffer 0
    C           ssd        the step has ended (END_STEP): it is committed or, between two commits,
                           only counted

Where the device has a memory of its own, F and B name device slots, and there are also

    L5@2,0      h2d        load the weights of group 5 from slot 2 into device slot 0
    V3@1        h2d        restore the offloaded activations of site 3 to device buffer 1
    K3@1        d2h        offload the activations of site 3 from device buffer 1 to host memory
    D5          d2h        gradients of group 5 to host memory

Where several ranks share the state, host slots and everything behind them hold a rank's own shards;
the device holds whole groups, and there are also

    A5@0        net        all ranks gather the weights of group 5 in device slot 0, after L5; F
                           and B wait for it
    X5          net        all ranks exchange gradients of group 5: each has the sum of its shard

The order of a schedule is a valid order to run everything one after the other: that is the plain
form. Lanes keep the order among their own actions and wait for the names in parentheses; a name
refers to the action of that name enqueued last, also by an earlier schedule, so tails of one phase
overlap with the next. Nothing waits for something later, so no schedule can lock up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from lohan.errors import LohanError
from lohan.util.files import json_key


class Op(StrEnum):
    """What an action does; its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_DONE = "E"
    READ_WEIGHTS = "R"
    READ_STATE = "S"
    WRITE = "W"
    SPILL_GRADIENTS = "P"
    FETCH_GRADIENTS = "G"
    SPILL_ACTIVATIONS = "O"
    FETCH_ACTIVATIONS = "I"
    END_STEP = "C"
    UPDATE = "U"
    SUM_SQUARES = "H"
    LOAD_WEIGHTS = "L"
    RESTORE_ACTIVATIONS = "V"
    OFFLOAD_ACTIVATIONS = "K"
    OFFLOAD_GRADIENTS = "D"
    ALL_GATHER = "A"
    REDUCE_SCATTER = "X"


OPS_OF_LANE = {
    "compute": "FBE", "ssd": "RSWPGOIC", "optimizer": "UH", "h2d": "LV", "d2h": "KD", "net": "AX",
}  # fmt: skip
LANE_OF = {Op(letter): lane for lane, letters in OPS_OF_LANE.items() for letter in letters}
_TOKEN = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?(?:@([\d,]+))?(?:\(([^)]*)\))?")


class _Fields(NamedTuple):
    kind: Op
    index: int  # type: ignore[assignment]  # no one looks for it in the tuple
    chunk: int
    at: tuple[int, ...]
    waits: tuple[str, ...]
    name: str  # what others wait for


class Action(_Fields):
    """A tuple, as schedules of large models have many of them."""

    __slots__ = ()

    def __new__(
        cls, kind: Op, index: int = -1, chunk: int = -1, at: tuple[int, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> Self:  # fmt: skip
        name: str = kind
        if chunk >= 0:
            name = kind + f"{index}.{chunk}"
        elif index >= 0:
            name = kind + str(index)
        return tuple.__new__(cls, (kind, index, chunk, at, waits, name))

    def waiting_for(self, waits: tuple[str, ...]) -> Action:
        """The same, after other actions."""
        return Action(self.kind, self.index, self.chunk, self.at, waits)

    @property
    def lane(self) -> str:
        return LANE_OF[self.kind]

    def token(self) -> str:
        at = "@" + ",".join(map(str, self.at)) if self.at else ""
        return self.name + at + (f"({','.join(self.waits)})" if self.waits else "")


def parse_token(token: str) -> Action:
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] not in LANE_OF:
        raise LohanError(f"{token!r} is not a schedule token; they look like S5.1@0(W4.0)")
    kind, index, chunk, at, waits = match.groups()
    return Action(
        Op(kind),
        int(index) if index else -1,
        int(chunk) if chunk else -1,
        tuple(map(int, at.split(","))) if at else (),
        tuple(waits.split(",")) if waits else (),
    )


Schedule = tuple[Action, ...]


def to_text(schedule: Iterable[Action]) -> str:
    return " ".join(action.token() for action in schedule)


def from_text(text: str) -> Schedule:
    return tuple(parse_token(token) for token in text.split())


# -- What a schedule must know of model and plan, and what lies in slots and buffers ---------------


DEVICE_BUFFERS = 2  # sites whose kept activations are in flight from or to the device


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """What a schedule must know of model and plan. Slots and ring buffers from `slots` and `ring`
    upwards are a cache in host memory: one group, one chunk each, for the whole run."""

    sites: tuple[tuple[int, ...], ...]  # groups of each site
    chunks: tuple[int, ...]  # state chunks of each group; 0: frozen, its weights are only read
    slots: int
    ring: int
    window: int  # sites whose weights are read ahead
    grads: int  # groups whose gradients may wait for their update
    host_cached_weights: tuple[int, ...] = ()  # group of each slot of the cache
    host_cached_state: tuple[tuple[int, int], ...] = ()  # (group, chunk) of each of its buffers
    write_through: bool = True  # what is cached is written to SSD in every step
    # Groups whose held gradients go to SSD.
    spilled_gradients: frozenset[int] = field(default=frozenset(), metadata=json_key("spilled"))
    # Sites whose kept activations go to SSD.
    spilled_sites: frozenset[int] = field(default=frozenset(), metadata=json_key("moved_out"))
    act_buffers: int = 2  # host buffers for activations in flight from or to SSD
    device_slots: int = 0  # 0: compute reads host memory, there is no link
    device_grads: int = 2  # groups whose gradients are on the device at a time
    head_alone: bool = False  # those of the first group of backward leave before others are made
    offloaded: frozenset[int] = frozenset()  # sites whose activations are offloaded
    net: bool = False  # ranks gather weights on the device and exchange gradients there
    clips_groups: bool = False  # an update needs the norm of its group's gradients
    # Where all updates wait for forward: groups whose update there makes weights only. It is made a
    # second time in the backward after it, from the same state, and written then.
    updated_twice: frozenset[int] = field(default=frozenset(), metadata=json_key("made_again"))


OverwriteAfter = tuple[tuple[str, ...], ...]  # after which actions each buffer may be overwritten


@dataclass(frozen=True)
class SlotState:
    """Slots, by the group that each holds."""

    held: tuple[int | None, ...]
    overwrite_after: OverwriteAfter


@dataclass(frozen=True)
class RingState:
    """Buffers that are taken in turn."""

    overwrite_after: OverwriteAfter
    next: int = 0


@dataclass(frozen=True)
class BufferState:
    """What slots and buffers hold between two schedules."""

    slots: SlotState  # weights in host memory
    device: SlotState  # and on the device
    ring: RingState  # optimizer state
    stage: RingState  # held gradients in flight from or to SSD
    acts: RingState  # activations in flight from or to SSD
    device_acts: RingState  # and from or to the device
    # Writes that a forward leaves to the backward after it, and the end of the step behind them.
    behind: tuple[Action, ...] = ()
    # (group, chunk) whose update has made weights and is yet to be made a second time, and written.
    second_updates: tuple[tuple[int, int], ...] = ()


def empty_buffers(spec: ScheduleSpec) -> BufferState:
    slots, device = (
        SlotState((None,) * count, ((),) * count) for count in (spec.slots, spec.device_slots)
    )
    ring, act = RingState(((),) * spec.ring), RingState(((),) * spec.act_buffers)
    return BufferState(slots, device, ring, ring, act, RingState(((),) * DEVICE_BUFFERS))
