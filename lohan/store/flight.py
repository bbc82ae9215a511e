"""What is under way, and what the step in flight has written so far.

Note [who may touch a chunk]
Every chunk of a slot is idle, being written once, or being read any number of times; what would
break that raises instead of racing. The store calls all of this under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lohan.errors import StoreError
from lohan.store.engine import Buffer
from lohan.store.extents import Extent, Layout
from lohan.store.volume import SCRATCH_SLOT, chunk_name

Kind = Literal["read", "write"]


@dataclass(frozen=True, eq=False)
class Ticket:
    """A read or write under way; wait for it once. Keeps the buffer alive."""

    kind: Kind
    extent: Extent
    slot: int
    buffer: Buffer
    crc: int | None  # of what is written; of what must be read, None when no check is due
    attempt: int
    engine_ticket: int


class Flight:
    """Reads and writes under way; chunks written for the next generation, with checksums."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._renewed = layout, layout.renewed
        self._busy: dict[tuple[int, int], int] = {}  # (slot, index) -> reads under way, -1: write
        self._tickets: set[Ticket] = set()
        self._written = np.zeros(len(layout.state), dtype=bool)
        self._scratch_written = np.zeros(len(layout.scratch), dtype=bool)
        self.sums = np.zeros(len(layout.state), dtype=np.uint32)
        self.touched = False  # the step has submitted a write
        self.attempt = 0  # counts discards: a write of an earlier attempt counts for nothing

    def found(self, sums: npt.NDArray[np.uint32]) -> None:
        """The store is a whole one: its fixed chunks are there."""
        self.sums[:] = sums
        self._written[self._renewed :] = True

    def reserve(self, kind: Kind, slot: int, extent: Extent) -> int:
        """Makes the chunk the caller's until `release`; returns the attempt that it belongs to.
        See Note [who may touch a chunk]."""
        users = self._busy.get((slot, extent.index), 0)
        if users < 0 or (kind == "write" and users):
            under_way = "a write" if users < 0 else f"{users} read(s)"
            raise StoreError(
                f"{kind} of {chunk_name(extent)} while {under_way} of it under way;"
                " wait for that first"
            )
        self._busy[slot, extent.index] = -1 if kind == "write" else users + 1
        if kind == "write":
            if extent.scratch:
                self._scratch_written[extent.index] = False
            else:
                self._written[extent.index] = False
                self.touched = True
        return self.attempt

    def release(self, kind: Kind, slot: int, extent: Extent) -> None:
        users = self._busy.pop((slot, extent.index))
        if kind == "read" and users > 1:
            self._busy[slot, extent.index] = users - 1

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)

    def claim(self, ticket: Ticket) -> None:
        """The caller will wait for it; nobody else may."""
        if ticket not in self._tickets:
            raise StoreError(
                f"{ticket.kind} of {chunk_name(ticket.extent)} has already been waited for"
            )
        self._tickets.discard(ticket)

    def claim_all(self) -> list[Ticket]:
        """Outstanding tickets that no other thread waits for."""
        claimed = list(self._tickets)
        self._tickets.clear()
        return claimed

    def is_written(self, extent: Extent) -> bool:
        """Written and waited for: in the step in flight, or for scratch in this process."""
        flags = self._scratch_written if extent.scratch else self._written
        return bool(flags[extent.index])

    def mark_written(self, ticket: Ticket) -> None:
        if ticket.extent.scratch:
            self._scratch_written[ticket.extent.index] = True
        elif ticket.attempt == self.attempt and ticket.crc is not None:
            self.sums[ticket.extent.index] = ticket.crc
            self._written[ticket.extent.index] = True

    def forget(self) -> None:
        """The next step starts: nothing is written but what is fixed."""
        self._written[: self._renewed] = False
        self.touched = False
        self.attempt += 1

    def check_idle(self) -> None:
        """No write is under way. Reads may be: they keep the slot they were submitted for."""
        for (slot, index), users in self._busy.items():
            if slot != SCRATCH_SLOT and users < 0:
                raise StoreError(
                    f"commit while a write of {chunk_name(self._layout.state[index])} is under"
                    " way; wait for it first"
                )

    def check_complete(self, generation: int) -> None:
        """Every chunk of the next generation is there."""
        written, total = int(np.count_nonzero(self._written)), len(self._layout.state)
        if written < total:
            missing = self._layout.state[int(np.argmin(self._written))]
            raise StoreError(
                f"commit of generation {generation}: {chunk_name(missing)} was not written"
                f" ({written} of {total} chunks are there); write it, or discard the step"
            )

    def keep_unwritten(self, sums: npt.NDArray[np.uint32]) -> None:
        """Chunks that were not written in place are what they were."""
        self.sums[:] = np.where(self._written, self.sums, sums)

    def check_untouched(self, generation: int) -> None:
        if self.touched:
            raise StoreError(
                f"commit of meta alone, but {np.count_nonzero(self._written[: self._renewed])} of"
                f" {self._renewed} chunks of generation {generation} are written;"
                " discard them or commit the generation"
            )
