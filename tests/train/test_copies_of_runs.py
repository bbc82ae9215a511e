"""Copies, overlapping folders and folders that appear late are handled.

What belongs to another run, or to the user, stays.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lohan.checkpoint.replacing import check_target, replacing, target_check
from lohan.errors import ModelError
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs
from tests.support.stores import file_digests


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


def short(inputs: Path, out: Path, *more: object) -> list[object]:
    return ["train", *tiny_arguments(inputs, out), "--steps", 2, *more]


def test_snapshots_are_not_in_the_place_of_the_store(lohan, inputs, tmp_path):
    place = tmp_path / "drive"
    more = ("--set", "budget.snapshot_every=1", "--set", f"budget.snapshot_dir={place}")
    ended = lohan(*short(inputs, tmp_path / "run", "--ssd", place, *more))
    assert ended.code == 2 and "where --ssd has the run's store" in ended.err
    assert not (tmp_path / "run").exists()


def test_the_store_of_a_copied_run_is_the_originals(lohan, inputs, tmp_path):
    run, drives = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    given = [word for drive in drives for word in ("--ssd", drive)]
    assert lohan(*short(inputs, run, *given, "--no-export")).code == 0
    before = file_digests(tmp_path)
    shutil.copytree(run, tmp_path / "copy")
    refused = lohan("store", "rm", tmp_path / "copy", "--yes")
    assert refused.code == 2 and "is a copy of the run" in refused.err
    (first,), (second,) = ([*drive.iterdir()] for drive in drives)
    shutil.copytree(first, tmp_path / "copied-first")
    refused = lohan("store", "rm", tmp_path / "copied-first", second, "--yes")
    assert refused.code == 2 and "is a copy of" in refused.err
    assert before.items() <= file_digests(tmp_path).items()
    # Moved, it goes on, and remembers where it is: a copy of it is a copy.
    run.rename(tmp_path / "moved")
    assert lohan("resume", tmp_path / "moved", "--steps", 3).code == 0
    shutil.copytree(tmp_path / "moved", tmp_path / "second-copy")
    shutil.rmtree(tmp_path / "copy")
    refused = lohan("resume", tmp_path / "second-copy", "--steps", 4)
    assert refused.code == 2 and "is a copy of the run" in refused.err


def test_an_export_does_not_replace_what_the_run_is_made_of(lohan, inputs, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(inputs / "model", base)
    words = ["train", *tiny_arguments(inputs, base / "run", "--model", base), "--steps", 2]
    assert lohan(*words, "--no-export").code == 0
    before = file_digests(tmp_path)
    refused = lohan("export", base / "run", "--out", base, "--overwrite")
    assert refused.code == 2 and "give another --out" in refused.err
    assert file_digests(tmp_path) == before


def test_a_lost_store_comes_back_from_its_snapshot(lohan, inputs, tmp_path):
    run = tmp_path / "run"
    more = ("--set", "budget.snapshot_every=1")
    assert lohan(*short(inputs, run, *more)).code == 0
    shutil.rmtree(run / "store")
    ended = lohan("resume", run, "--steps", 3)
    assert ended.code == 0 and "snapshot" in ended.out, ended.err


def test_keeps_files_that_appear_at_the_target_during_an_export(tmp_path):
    target = tmp_path / "model"
    check = target_check(target, overwrite=False, mark=None)
    with pytest.raises(ModelError, match="exists and holds 1 file"), replacing(target, check=check):
        target.mkdir()
        (target / "thesis.tex").touch()
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]
    with pytest.raises(ModelError):
        check_target(target, overwrite=True)
