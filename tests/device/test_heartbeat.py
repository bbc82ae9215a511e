"""A rank is lost after a number of own checks without a new beat, not after seconds."""

from __future__ import annotations

from lohan.device.ranks import LOST_AFTER_BEATS, MissedBeats


def test_rank_that_stops_counting_is_lost_after_some_checks():
    watch = MissedBeats(3)
    for look in range(LOST_AFTER_BEATS):
        assert watch.count([look, 7, look // 3]) == []
    assert watch.count([LOST_AFTER_BEATS, 7, LOST_AFTER_BEATS // 3]) == [1]


def test_ranks_that_were_all_suspended_miss_no_beat():
    watch = MissedBeats(2)
    for _ in range(LOST_AFTER_BEATS):
        watch.count([5, 5])
    assert watch.count([6, 6]) == []


def test_beat_resets_the_count_of_missed_beats():
    watch = MissedBeats(2)
    for _ in range(LOST_AFTER_BEATS):
        watch.count([0, 0])
    assert watch.count([1, 1]) == []
    for look in range(LOST_AFTER_BEATS - 1):
        assert watch.count([look + 2, 1]) == []
    assert watch.count([99, 1]) == [1]
