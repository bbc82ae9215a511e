"""A store whose first directory was copied or moved never leads to the original's directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.errors import StoreError
from lohan.store.admin import describe, remove
from lohan.store.store import Store
from tests.support.stores import REGIONS, assert_holds, commit_next, file_names


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    dirs = [tmp_path / "a", tmp_path / "b"]
    with Store.create(dirs, REGIONS, engine="threads") as store:
        commit_next(store)
    return dirs


@pytest.mark.parametrize("use", [remove, describe, Store.open])
def test_copied_first_directory_is_refused(tmp_path: Path, dirs: list[Path], use) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dirs[0], copy)
    before = file_names(tmp_path)
    with pytest.raises(StoreError, match=r"copy is the first of 2 .* made as .*/a: .* name all 2"):
        use(copy)
    assert file_names(tmp_path) == before
    with Store.open(dirs[0]) as store:
        assert_holds(store, 0)


def test_a_copy_named_with_the_originals_other_directory_removes_nothing(
    tmp_path: Path, dirs: list[Path]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dirs[0], copy)
    before = file_names(tmp_path)
    with pytest.raises(StoreError, match=r"copy is a copy of .*/a, and .*/b belongs to that store"):
        remove([copy, dirs[1]])
    assert file_names(tmp_path) == before


def test_a_copy_named_in_full_is_a_store_of_its_own(tmp_path: Path, dirs: list[Path]) -> None:
    copies = [tmp_path / "c", tmp_path / "d"]
    for path, copy in zip(dirs, copies, strict=True):
        shutil.copytree(path, copy)
    with Store.open(copies) as store:
        commit_next(store)
        assert_holds(store, 1)
    result = CliRunner().invoke(app, ["store", "rm", "--yes", *map(str, copies)])
    assert result.exit_code == 0, result.output
    assert not any(copy.exists() for copy in copies)
    with Store.open(dirs[0]) as store:
        assert_holds(store, 0)


def test_a_moved_store_is_opened_by_all_its_directories(tmp_path: Path, dirs: list[Path]) -> None:
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in dirs]
    with pytest.raises(StoreError, match="name all 2 directories"):
        Store.open(moved[0])
    with Store.open(moved) as store:
        assert_holds(store, 0)


def test_another_name_of_the_same_place_is_no_move(tmp_path: Path, dirs: list[Path]) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with Store.open(tmp_path / "link" / "a") as store:
        assert_holds(store, 0)


def test_a_store_of_one_directory_moves_freely(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", REGIONS, engine="threads") as store:
        commit_next(store)
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    with Store.open(tmp_path / "t") as store:
        assert_holds(store, 0)
    remove(tmp_path / "t")
    with Store.open(tmp_path / "s") as store:
        assert_holds(store, 0)
