"""CRC-32C: known vectors, every length around the lane sizes, any cut of the data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _core


def slow_crc32c(data: bytes, seed: int = 0) -> int:
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


@pytest.fixture(params=["plain", "best"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select a variant of the checksum; the plain instruction set selects the plain one."""
    before = _core.isa()
    _core.set_isa("plain" if request.param == "plain" else _core.supported_isas()[-1])
    yield request.param
    _core.set_isa(before)


VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (b"\x00" * 32, 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(isa: str, data: bytes, expected: int) -> None:
    assert _core.crc32c(data) == expected


@given(data=st.binary(max_size=2000), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_equals_the_slow_form(data: bytes, seed: int) -> None:
    assert _core.crc32c(data, seed) == slow_crc32c(data, seed)


def test_variants_agree_around_the_lane_sizes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 80_000, dtype=np.uint8)
    before = _core.isa()
    sizes = [3 * 256, 3 * 8192, 6 * 8192, 3 * 8192 + 3 * 256]
    try:
        for size in [s + d for s in sizes for d in range(-9, 10)]:
            for start in (0, 1, 7):
                part = data[start : start + size]
                _core.set_isa("plain")
                plain = _core.crc32c(part)
                _core.set_isa(_core.supported_isas()[-1])
                assert _core.crc32c(part) == plain
    finally:
        _core.set_isa(before)


@given(cut=st.integers(0, 60_000))
@settings(max_examples=30, deadline=None)
def test_seed_continues_a_checksum(cut: int) -> None:
    data = np.arange(60_000, dtype=np.uint32).astype(np.uint8)
    assert _core.crc32c(data[cut:], _core.crc32c(data[:cut])) == _core.crc32c(data)


def test_accepts_what_holds_contiguous_bytes() -> None:
    data = np.arange(256, dtype=np.uint8)
    expected = slow_crc32c(data.tobytes())
    assert _core.crc32c(torch.from_numpy(data.copy())) == expected
    assert _core.crc32c(memoryview(data.tobytes())) == expected
    assert _core.crc32c(data.view(np.float32)) == expected
    data.flags.writeable = False
    assert _core.crc32c(data) == expected
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        _core.crc32c(data[::2])
    with pytest.raises(TypeError, match="buffer"):
        _core.crc32c("text")
    with pytest.raises(TypeError, match="buffer must have dtype uint8"):
        _core.crc32c(torch.zeros(4))


@given(data=st.data(), size=st.integers(0, 70_000))
@settings(max_examples=60, deadline=None)
def test_checksum_uses_given_checksums_of_parts(data: st.DataObject, size: int) -> None:
    """Any cut into parts whose checksums are known and gaps that are read gives the same."""
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=12)))
    pairs = list(itertools.pairwise(cuts))[:: data.draw(st.sampled_from((1, 2)))]
    parts = [(begin, end, _core.crc32c(raw[begin:end])) for begin, end in pairs]
    assert _core.crc32c_around(raw, parts) == _core.crc32c(raw)
    longest = max(parts, key=lambda part: part[1] - part[0], default=None)
    if longest is not None and longest[1] > longest[0]:  # its bytes are not looked at
        other = raw.copy()
        other[longest[0]] ^= 1
        assert _core.crc32c_around(other, parts) == _core.crc32c(raw) != _core.crc32c(other)


@pytest.mark.parametrize("parts", [[(8, 4, 0)], [(0, 8, 0), (4, 12, 0)], [(0, 17, 0)]])
def test_refuses_overlapping_or_unordered_parts(parts: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="in order, apart and inside the buffer of 16 bytes"):
        _core.crc32c_around(np.zeros(16, dtype=np.uint8), parts)
