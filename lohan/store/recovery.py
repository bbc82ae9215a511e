"""Two-phase commit: which commit the stores of all ranks agree on.

Every rank first prepares a commit by making its data, checksums and `manifest.prepared` durable.
For a logged step, it makes its gradients and `log.prepared` durable instead. After a barrier, each
rank renames its prepared file. If any rank has renamed its file, all ranks have therefore prepared
the commit. After a crash, the newest commit of any rank is the agreed one: ranks that have only
prepared it promote it, and commits prepared beyond it are dropped. The meta of such a store holds
the number of its last commit. The fold of a log changes no state, so each rank commits it by
itself, under the number of the last logged step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from lohan.errors import StoreError
from lohan.store.files import (
    LOG,
    LOG_PREPARED,
    MANIFEST,
    PREPARED,
    rename_durably,
    sync_directory,
)
from lohan.store.log import read_latest, read_log
from lohan.store.manifest import commit_number, read_manifest


@dataclass(frozen=True)
class CommitState:
    """The numbers of a store's committed and prepared commits; None if there is no such commit."""

    committed: int | None
    prepared: int | None


class Recovery(Enum):
    # The committed step is the agreed one; a prepared commit is dropped.
    KEEP = "keep"
    PROMOTE = "promote"  # The prepared commit becomes the committed one.


def commit_state_of(primary: Path) -> CommitState:
    """Return the commit state recorded in the primary directory of a store."""
    latest = read_latest(primary)
    prepared = _prepared(primary)
    return CommitState(
        None if latest is None else commit_number(latest), max(prepared.values(), default=None)
    )


def _prepared(primary: Path) -> dict[str, int]:
    """Return the numbers of the prepared commits of a store.

    The keys are the names that the prepared files get when they are committed.
    """
    manifest, prepared = read_manifest(primary), read_manifest(primary, name=PREPARED)
    numbers = {} if prepared is None else {MANIFEST: commit_number(prepared)}
    log = None if manifest is None else read_log(primary, name=LOG_PREPARED)
    if manifest is not None and log is not None and log.generation == manifest.generation:
        numbers[LOG] = commit_number(replace(manifest, meta=log.meta))
    return numbers


def recovery_actions(states: Sequence[CommitState]) -> tuple[Recovery, ...] | None:
    """Return the action that brings each rank to the agreed commit; None if no rank has committed.

    Raise StoreError if a rank has neither committed nor prepared the agreed commit.
    """
    committed = [s.committed for s in states if s.committed is not None]
    if not committed:
        return None
    newest = max(committed)
    actions = []
    for rank, state in enumerate(states):
        if state.committed == newest:
            actions.append(Recovery.KEEP)
        elif state.prepared == newest:
            actions.append(Recovery.PROMOTE)
        else:
            raise StoreError(
                f"rank {rank} of {len(states)} has commit {state.committed} and {state.prepared}"
                f" prepared, but another rank has commit {newest}:"
                " the stores do not belong to one step of one run; put back the stores that were"
                " exchanged, or start the run again"
            )
    return tuple(actions)


def apply_recovery(primary: Path, action: Recovery) -> None:
    """Bring the manifest and the log of a store to the agreed commit, durably."""
    if action is Recovery.PROMOTE:
        numbers = _prepared(primary)
        name = max(numbers, key=lambda name: numbers[name])
        rename_durably(primary / {MANIFEST: PREPARED, LOG: LOG_PREPARED}[name], primary / name)
    for name in (PREPARED, LOG_PREPARED):
        (primary / name).unlink(missing_ok=True)
    sync_directory(primary)
