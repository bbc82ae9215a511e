"""Data of the datasets package gives the examples that the same rows give as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lohan.data import Dataset, prepare
from lohan.errors import DataError

datasets = pytest.importorskip("datasets", reason="tables need: pip install datasets")

ROWS = [{"input_ids": [3 + (n * i) % 40 for i in range(1, 5 + n % 7)]} for n in range(40)]
ROWS[0]["labels"] = [-100, -100, *ROWS[0]["input_ids"][2:]]  # others have none: null in a table


def prepared(source: Path, cache: Path) -> Dataset:
    return prepare(source, model_dir=source.parent, cache_dir=cache, seq=16, vocab_size=64)


def contents(dataset: Dataset) -> list[list[int]]:
    batches = [dataset.batch(step, 4) for step in range(10)]
    return [batch[name].tolist() for batch in batches for name in ("input_ids", "labels")]


@pytest.mark.parametrize("kind", ["folder", "splits", "parquet", "arrow"])
def test_the_same_examples_as_json_lines(kind, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    table = datasets.Dataset.from_list(ROWS)
    source = tmp_path / "table"
    if kind == "folder":
        table.save_to_disk(str(source))
    elif kind == "splits":
        datasets.DatasetDict({"test": table.select([0]), "train": table}).save_to_disk(str(source))
    elif kind == "parquet":
        source = tmp_path / "rows.parquet"
        table.to_parquet(str(source))
    else:
        table.save_to_disk(str(source))
        source = next(source.glob("*.arrow"))
    expected = prepared(tmp_path / "rows.jsonl", tmp_path / "a")
    actual = prepared(source, tmp_path / "b")
    assert contents(actual) == contents(expected)
    assert actual.summary.examples == expected.summary.examples == 40


def test_other_rows_are_other_data(tmp_path):
    for rows in (ROWS, ROWS[:20]):
        place = tmp_path / str(len(rows))
        datasets.Dataset.from_list(rows).save_to_disk(str(place))
        assert prepared(place, tmp_path / "cache").summary.examples == len(rows)


def test_rejects_broken_tables(tmp_path):
    broken = tmp_path / "rows.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as a table: "):
        prepared(broken, tmp_path / "cache")
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"one": table, "two": table}).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(DataError, match="has the splits one, two and no 'train'"):
        prepared(tmp_path / "dict", tmp_path / "cache")
    datasets.Dataset.from_list([{"input_ids": None}]).to_parquet(str(tmp_path / "none.parquet"))
    with pytest.raises(DataError, match=r"none\.parquet, row 1: "):
        prepared(tmp_path / "none.parquet", tmp_path / "cache")
