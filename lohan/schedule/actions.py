"""The actions of a schedule and their text form.

A schedule is a sequence of tokens, one per action. A token has the form
`KIND INDEX [.CHUNK] [@BUFFER,...] [(WAIT,...)]`, written without blanks. Actions on compute and on
memory that the CPU can access:

    F3@0        compute    run forward of site 3, with its weights in slot 0
    B3@1        compute    run backward of site 3
    E           compute    end backward (BACKWARD_DONE); actions that need all gradients wait for E
    R5@2        ssd        read the weights of group 5 into slot 2
    S5.1@0      ssd        read state chunk 1 of group 5 into ring buffer 0
    U5.1@0,2    optimizer  update that chunk in ring buffer 0, and its weights in slot 2
    W5.1@0,2    ssd        write the state and the weights of that chunk
    H5          optimizer  sum the squares of the gradients of group 5, for the gradient norm
    P5.1@0      ssd        spill chunk 1 of the held gradients of group 5 through staging buffer 0
    G5.1@1      ssd        fetch it into staging buffer 1; the update is then U5.1@0,2,1
    O3@1        ssd        spill the kept activations of site 3 from activation buffer 1
    I3@0        ssd        fetch them into activation buffer 0
    C           ssd        end the step (END_STEP): commit it or, between two commits, only count it

If the device has its own memory, F and B name device slots, and there are four more actions:

    L5@2,0      h2d        load the weights of group 5 from slot 2 into device slot 0
    V3@1        h2d        restore the offloaded activations of site 3 to device buffer 1
    K3@1        d2h        offload the activations of site 3 from device buffer 1 to host memory
    D5          d2h        copy the gradients of group 5 to host memory

If several ranks share the state, host memory and SSD hold only the shards of the local rank, while
the device holds whole groups. There are two more actions:

    A5@0        net        all-gather the weights of group 5 in device slot 0, after L5; F and B
                           wait for it
    X5          net        reduce-scatter the gradients of group 5: each rank gets the sum of its
                           shard

Executing the actions one after the other, in the order of the schedule, is always valid. Lanes
execute it concurrently: each lane keeps the order of its own actions, and an action waits for the
actions named in parentheses. A name refers to the most recently enqueued action of that name, which
may belong to an earlier schedule, so that the end of one phase overlaps with the start of the next.
No action waits for a later one, so a schedule cannot deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

from lohan.errors import LohanError


class Op(StrEnum):
    """The operation of an action. The value is its letter in the text form."""

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
    "compute": "FBE",
    "ssd": "RSWPGOIC",
    "optimizer": "UH",
    "h2d": "LV",
    "d2h": "KD",
    "net": "AX",
}
LANE_OF = {Op(letter): lane for lane, letters in OPS_OF_LANE.items() for letter in letters}
_TOKEN = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?(?:@([\d,]+))?(?:\(([^)]*)\))?")


class _Fields(NamedTuple):
    kind: Op
    # The site or group, or -1. The field hides tuple.index(), which is not needed here.
    index: int  # type: ignore[assignment]
    chunk: int  # -1 if the operation does not act on a single chunk
    at: tuple[int, ...]  # slots and buffers
    waits: tuple[str, ...]  # names of the actions that must finish before this one starts
    name: str  # the name by which other actions wait for this one, such as "U5.1"


class Action(_Fields):
    """One action of a schedule. It is a tuple, because large models have very many actions."""

    __slots__ = ()

    def __new__(
        cls,
        kind: Op,
        index: int = -1,
        chunk: int = -1,
        at: tuple[int, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> Self:
        name: str = kind
        if chunk >= 0:
            name = kind + f"{index}.{chunk}"
        elif index >= 0:
            name = kind + str(index)
        return tuple.__new__(cls, (kind, index, chunk, at, waits, name))

    def waiting_for(self, waits: tuple[str, ...]) -> Action:
        """Return the same action with the given waits."""
        kind, index, chunk, at, _, name = self
        return tuple.__new__(Action, (kind, index, chunk, at, waits, name))

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


# -- The model and the plan as a schedule sees them ------------------------------------------------


DEVICE_BUFFERS = 2  # number of sites whose kept activations are being copied from or to the device


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The properties of the model and the plan that determine a schedule.

    Weight slots numbered `slots` and above, and ring buffers numbered `ring` and above, are a cache
    in host memory. Each of them holds the same group or the same chunk for the whole run.
    """

    sites: tuple[tuple[int, ...], ...]  # groups of each site
    chunks: tuple[int, ...]  # state chunks of each group; 0 if it is frozen and never updated
    slots: int  # weight slots in host memory, without the cache
    ring: int  # buffers for state chunks, without the cache; also the number of staging buffers
    window: int  # number of sites whose weights are read ahead
    grads: int  # number of groups whose gradients may wait in host memory for their update
    host_cached_weights: tuple[int, ...] = ()  # group of each cache slot
    host_cached_state: tuple[tuple[int, int], ...] = ()  # (group, chunk) of each cache buffer
    write_through: bool = True  # whether cached weights and state are written in every step
    # Groups whose held gradients are spilled to SSD.
    spilled_gradients: frozenset[int] = frozenset()
    # Sites whose kept activations are spilled to SSD.
    spilled_sites: frozenset[int] = frozenset()
    act_buffers: int = 2  # host buffers for activations in flight from or to SSD
    device_slots: int = 0  # weight slots on the device; 0 if compute works in host memory
    device_grads: int = 2  # number of groups whose gradients are on the device at a time
    # Whether the gradients of the first group of backward leave the device before others are made.
    head_alone: bool = False
    offloaded: frozenset[int] = frozenset()  # sites whose activations are offloaded to the host
    net: bool = False  # whether ranks gather weights and reduce gradients on the device
