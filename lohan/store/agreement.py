"""Which commit the stores of all ranks agree on: a commit in two phases, and what is left of it.

Every rank prepares a commit (data, checksums and `manifest.prepared` durable), all meet, and each
renames its prepared manifest. So a rank that has renamed proves that all had prepared. After a
crash the newest committed one counts: ranks that have it prepared promote it, what is prepared
beyond it is dropped. Commits of such stores are numbered in their meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lohan.errors import StoreError
from lohan.store.files import MANIFEST, PREPARED, rename_durably, sync_directory
from lohan.store.manifest import Manifest, commit_number, read_manifest


@dataclass(frozen=True)
class Standing:
    """The numbers of a store's committed and prepared commits, None where there is none."""

    committed: int | None
    prepared: int | None


class Move(Enum):
    KEEP = "keep"  # the committed manifest is the agreed one; a prepared one is dropped
    PROMOTE = "promote"  # the prepared manifest becomes the committed one


def standing_of(primary: Path) -> Standing:
    """What the small files of a store's first directory say."""
    return Standing(_number(read_manifest(primary)), _number(read_manifest(primary, name=PREPARED)))


def agreed_moves(standings: Sequence[Standing]) -> tuple[Move, ...] | None:
    """What every rank does to stand at the agreed commit; None: nothing was ever committed."""
    committed = [s.committed for s in standings if s.committed is not None]
    if not committed:
        return None
    newest = max(committed)
    moves = []
    for rank, standing in enumerate(standings):
        if standing.committed == newest:
            moves.append(Move.KEEP)
        elif standing.prepared == newest:
            moves.append(Move.PROMOTE)
        else:
            raise StoreError(
                f"rank {rank} of {len(standings)} has commit {_said(standing.committed)} and"
                f" {_said(standing.prepared)} prepared, but another rank has commit {newest}:"
                " their stores are not of one moment of one run; put back the stores that were"
                " exchanged, or start the run again"
            )
    return tuple(moves)


def make_move(primary: Path, move: Move) -> None:
    """Brings the small files of a store to the agreed commit, durably."""
    prepared = primary / PREPARED
    if move is Move.PROMOTE:
        rename_durably(prepared, primary / MANIFEST)
        return
    if prepared.exists():
        prepared.unlink()
    sync_directory(primary)


def _number(manifest: Manifest | None) -> int | None:
    return None if manifest is None else commit_number(manifest)


def _said(number: int | None) -> str:
    return "none" if number is None else str(number)
