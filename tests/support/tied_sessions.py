"""Sessions of one small model with tied weights, and what their stores hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lohan
from tests.support.delayed_runs import Tuning, data, net, tuned
from tests.support.small_models import attached, stored_bytes

STEPS = 5


def opened(place: Path, **options: Any) -> lohan.Session:
    place.mkdir(exist_ok=True)
    budget = lohan.Budget(host="256MiB", ssd=[place])
    return attached(net("tied"), place, budget=budget, **options)


def go_on(session: lohan.Session, until: int = STEPS) -> None:
    batches = data(until)
    while session.step < until:
        session.model(**batches[session.step]).backward()


def contents(session: lohan.Session) -> dict[str, bytes]:
    """Commit and return the stored bytes."""
    session.commit()
    return stored_bytes(session)


def finished(place: Path, steps: int = STEPS) -> dict[str, bytes]:
    """Return the contents after `steps` steps without overlap."""
    with pytest.MonkeyPatch.context() as patch:
        tuned(patch, Tuning())
        with opened(place, overlap=False) as session:
            go_on(session, until=steps)
            return contents(session)
