"""A resume that fails before its first step releases the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from lohan.errors import StorageIOError
from lohan.store.admin import find_snapshot
from lohan.store.manifest import read_manifest
from lohan.train import trainer
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs


def test_failed_resume_releases_its_locks(
    lohan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise StorageIOError("metrics.jsonl: cannot be written to")

    out = tmp_path / "run"
    constant = ("--schedule", "constant", "--no-export")
    begun = lohan(
        "train", *tiny_arguments(write_tiny_inputs(tmp_path), out, *constant, "--steps", 1)
    )
    assert begun.code == 0, begun.err
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "repair_logs", fails)
        failed = lohan("resume", out, "--steps", 2)
    assert failed.code == 2 and "cannot be written to" in failed.err
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(out) in target(fd)]
    resumed = lohan("resume", out, "--steps", 2)
    assert resumed.code == 0, resumed.err


def test_missing_snapshot_is_taken_on_resume(
    lohan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next process makes the snapshot before its first step."""
    out = tmp_path / "run"
    more = ("--set", "budget.snapshot_every=2", "--no-export")
    words = ("train", *tiny_arguments(write_tiny_inputs(tmp_path), out, *more))

    def dies(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "snapshot", dies)
        lohan(*words)
    assert not (out / "snapshots").exists()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "one_step", dies)
        ended = lohan("resume", out)
    assert "resuming after step 2" in ended.out, ended.err
    (place,) = (out / "snapshots").iterdir()
    assert read_manifest(find_snapshot(place)).meta["progress"]["step"] == 2


def target(fd: Path) -> str:
    """Return the target of a descriptor, which may be closed in the meantime."""
    try:
        name = str(fd.readlink())
    except OSError:
        return ""
    return name if name.endswith("lock") else ""
