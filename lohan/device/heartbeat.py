"""A sign of life of every rank, for those that vanish without a word.

A process that ends closes its connections, and the others know at once. A machine that loses power
or its network does not. So every rank counts upwards at the meeting place, and looks at the counts
of the others. Patience is counted in own beats: ranks that were all stopped and go on together miss
nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any

from lohan.model.shards import Ranks

BEAT_S = 2.0
SILENT = 12  # own beats in which another did not beat once
DIGITS = 20  # more than a count of beats ever has


class Heartbeat:
    """A thread from its making until `stop`. A rank that has fallen silent ends this process: the
    calls that wait for it cannot be called back."""

    def __init__(self, ranks: Ranks, host: str, port: int, run: str) -> None:
        import torch.distributed

        self._ranks, self._run = ranks, run
        self._place: Any = torch.distributed.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=BEAT_S * SILENT)
        )
        self._done = threading.Event()
        self._watch = Watch(ranks.world)
        self._beat(0)
        self._heard = 0  # the last own beat after which it has heard of all
        for run_on in (self._live, self._guard):
            threading.Thread(target=run_on, name="lohan-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _beat(self, number: int) -> None:
        self._place.set(self._key(self._ranks.rank), str(number))

    def _key(self, rank: int) -> str:
        return f"lohan/{self._run}/{rank}"

    def _live(self) -> None:
        number = 0
        while not self._done.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
                keys = [self._key(rank) for rank in range(self._ranks.world)]
                found = self._place.multi_get(keys)
            except RuntimeError:  # the meeting place itself does not answer: see `_guard`
                continue
            try:
                counts = [count_of(value) for value in found]
            except ValueError as error:
                self._end(f"the ranks' meeting place holds {error}; another program writes to it")
                return
            self._heard = number
            silent = [rank for rank in self._watch.look(counts) if rank != self._ranks.rank]
            if silent and not self._done.is_set():
                self._end_for(silent)

    def _guard(self) -> None:
        """Counts beats in which the meeting place was not heard of. A call to it that fails may
        take a minute to say so: torch looks up the names in its C++ stack first."""
        heard = missed = 0
        while not self._done.wait(BEAT_S):
            heard, missed = self._heard, missed + 1 if self._heard == heard else 0
            if missed >= SILENT and not self._ranks.first:
                self._end_for([0])

    def _end_for(self, silent: list[int]) -> None:
        names = ", ".join(f"rank {rank}" for rank in silent)
        self._end(f"{names} gave no sign of life for {BEAT_S * SILENT:.0f} s")

    def _end(self, why: str) -> None:
        sys.stderr.write(
            f"lohan: {why}, so rank {self._ranks.rank} stops too; all steps that were committed "
            "are safe: resume the run with all its ranks\n"
        )
        sys.stderr.flush()
        os._exit(2)


def count_of(value: bytes) -> int:
    """The beat that a rank has written; ValueError if no rank has."""
    text = bytes(value[:DIGITS])
    if len(value) >= DIGITS or not text.isdigit():
        raise ValueError(f"{text!r} where a rank's heartbeat should be")
    return int(text)


class Watch:
    """Who has not counted on for how many looks."""

    def __init__(self, world: int) -> None:
        self._counts, self._same = [-1] * world, [0] * world

    def look(self, counts: list[int]) -> list[int]:
        """The ranks that are silent."""
        for rank, count in enumerate(counts):
            self._same[rank] = 0 if count != self._counts[rank] else self._same[rank] + 1
            self._counts[rank] = count
        return [rank for rank, looks in enumerate(self._same) if looks >= SILENT]
