"""The actions of a schedule and their text form.

A schedule is a sequence of tokens, one per action. A token has the form
`KIND INDEX [.CHUNK] [@BUFFER,...] [(WAIT,...)]`, written without blanks. KIND is the letter of an
operation (ops.py), INDEX a site or a group, CHUNK a state chunk of the group, BUFFER a slot or
buffer, and WAIT the name of an action that must finish before this one starts. The name of an
action is the beginning of its token, up to the @.

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
from typing import NamedTuple, Self

from lohan.errors import LohanError
from lohan.schedule.ops import OPERATIONS, Operation

_TOKEN = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?(?:@([\d,]+))?(?:\(([^)]*)\))?")


class _Fields(NamedTuple):
    kind: Operation
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
        kind: Operation,
        index: int = -1,
        chunk: int = -1,
        at: tuple[int, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> Self:
        return tuple.__new__(cls, (kind, index, chunk, at, waits, kind.of(index, chunk)))

    def waiting_for(self, waits: tuple[str, ...]) -> Action:
        """Return the same action with the given waits."""
        kind, index, chunk, at, _, name = self
        return tuple.__new__(Action, (kind, index, chunk, at, waits, name))

    @property
    def lane(self) -> str:
        return self.kind.lane

    def token(self) -> str:
        at = "@" + ",".join(map(str, self.at)) if self.at else ""
        return self.name + at + (f"({','.join(self.waits)})" if self.waits else "")


def parse_token(token: str) -> Action:
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] not in OPERATIONS:
        raise LohanError(f"{token!r} is not a schedule token; they look like S5.1@0(W4.0)")
    kind, index, chunk, at, waits = match.groups()
    return Action(
        OPERATIONS[kind],
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
