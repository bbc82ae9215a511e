"""Reads a whole store through one small buffer, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan.store.engine import aligned_buffer
from lohan.store.store import Store

PIECE = 2**24  # bytes


@dataclass(frozen=True)
class Finding:
    """A chunk of the committed generation that could not be confirmed."""

    key: str
    chunk: int
    path: Path
    offset: int
    nbytes: int
    problem: str


def verify(store: Store, *, progress: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Every chunk of the committed generation against its checksum."""
    findings: list[Finding] = []
    total, done = sum(extent.nbytes for extent in store.layout.state), 0
    buffer = aligned_buffer(min(PIECE, store.layout.largest_chunk))
    for extent in store.layout.state:
        place, problem = store.check(extent, buffer)
        if problem is not None:
            findings.append(
                Finding(extent.key, extent.chunk, place, extent.offset, extent.nbytes, problem)
            )
        done += extent.nbytes
        if progress is not None:
            progress(done, total)
    return findings
