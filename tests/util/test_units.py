"""Byte sizes and intervals: what people write, what is printed, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.util.units import (
    EVERY_STEP,
    GiB,
    Interval,
    KiB,
    MiB,
    TiB,
    align_up,
    counted,
    format_bytes,
    format_bytes_up,
    parse_bytes,
    parse_interval,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * GiB),
        ("8 gib", 8 * GiB),
        ("1.5g", 3 * GiB // 2),
        ("256 GB", 256 * 10**9),
        (".5MiB", MiB // 2),
        ("2TiB", 2 * TiB),
        (" 4k ", 4 * KiB),
        ("1700", 1700),
        ("17b", 17),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
    ],
)
def test_parses_sizes(text: str | int | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 XiB", "8GiB!", "-1GiB", "1e9", "0", 0, -5, "nan", True, 2**63, 10**400]
)
def test_rejects_text_that_is_no_size(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"^--host: .*8GiB"):
        parse_bytes(text, name="--host")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * GiB // 2, "1.50 GiB"),
        (-MiB, "-1.00 MiB"),
        (5 * TiB, "5.00 TiB"),
    ],
)
def test_formats_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_printed_size_reads_back_within_its_two_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.005)


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("row",), "0 rows"),
        (1, ("row",), "1 row"),
        (2000, ("row",), "2,000 rows"),
        (1, ("class", "classes"), "1 class"),
        (2, ("class", "classes"), "2 classes"),
    ],
)
def test_counts_in_singular_and_plural(count: int, words: tuple[str, ...], text: str) -> None:
    assert counted(count, *words) == text


@given(st.integers(0, 2**50), st.integers(1, 2**20))
def test_align_up_is_the_next_multiple(value: int, multiple: int) -> None:
    aligned = align_up(value, multiple)
    assert aligned % multiple == 0
    assert value <= aligned < value + multiple


@given(st.integers(1, 2**50))
def test_sizes_that_must_be_enough_are_rounded_up(count: int) -> None:
    shown = format_bytes_up(count)
    assert count <= parse_bytes(shown) <= count * 1.02 + 1


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("step", EVERY_STEP),
        ("1", EVERY_STEP),
        (7, Interval(7)),
        ("20 steps", Interval(20)),
        ("90s", Interval(0, 90.0)),
        ("10min", Interval(0, 600.0)),
        ("1.5 h", Interval(0, 5400.0)),
        ("auto", None),
    ],
)
def test_parses_intervals(text: str | int, means: Interval | None) -> None:
    assert parse_interval(text, name="x") == means


@pytest.mark.parametrize("text", ["0", "-3", "1.5 steps", "never", "", "10 minutes", True])
def test_rejects_text_that_is_no_interval(text: str) -> None:
    with pytest.raises(ConfigError, match=r"commit_every: got .*wants step, a number of steps"):
        parse_interval(text, name="commit_every")


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (EVERY_STEP, "1 step"),
        (Interval(20), "20 steps"),
        (Interval(0, 90.0), "1 min 30 s"),
        (Interval(7, 90.0), "7 steps or 1 min 30 s"),
    ],
)
def test_prints_intervals(interval: Interval, text: str) -> None:
    assert str(interval) == text
