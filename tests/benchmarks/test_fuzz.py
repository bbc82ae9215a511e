"""The short form of benchmarks/fuzz.py: every kind of file, changed a few hundred times."""

from __future__ import annotations

from pathlib import Path

from benchmarks import fuzz


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    tallies = fuzz.fuzz(tmp_path, inputs=740, seed=0)
    actual = {name: dict(tally.findings) for name, tally in tallies.items() if not tally.clean}
    assert actual == {}
    assert all(tally.refused for name, tally in tallies.items() if name != "lock")


def test_the_tally_tells_a_traceback_from_a_refusal() -> None:
    def read(data: bytes) -> None:
        if data:
            raise KeyError("x")

    tally, messages = fuzz.Tally(), []
    for data in (b"", b"x"):
        fuzz.try_one(fuzz.Kind("x", [b"x"], read), data, tally, messages.append)
    assert (tally.inputs, tally.accepted, tally.tracebacks, tally.clean) == (2, 1, 1, False)
    assert "KeyError" in messages[0]
