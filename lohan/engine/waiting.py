"""Completing several transfers."""

from __future__ import annotations

from collections.abc import Sequence

from lohan.errors import LohanError
from lohan.store.flight import Ticket
from lohan.store.store import Store


def wait_all(store: Store, tickets: Sequence[Ticket]) -> None:
    """Completes every ticket, also behind one that failed: their buffers will be used again."""
    failed: LohanError | None = None
    for ticket in tickets:
        try:
            store.wait(ticket)
        except LohanError as error:
            failed = failed or error
    if failed is not None:
        raise failed
