"""Ranks that never start are noticed before a deadline, by name."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lohan.device import ranks
from lohan.device.ranks import join
from lohan.errors import RankError
from tests.support.ranks import free_port, rank_environment


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank 0 of 3 has waited 1 s at 127\.0\.0\.1:\d+ for rank 1, 2; read the output"),
        (
            1,
            r"rank 1 of 3 cannot reach the others at 127\.0\.0\.1:\d+ .* read the output of rank 0",
        ),
    ],
)
def test_missing_ranks_are_waited_for_until_deadline(
    rank: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 serves the store in which all meet, so without it the others find no store."""
    monkeypatch.setattr(ranks, "START_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(RankError, match=message):
        join(rank_environment(rank, 3, free_port()))
