"""A damaged cache file is refused by name when it is opened; so is data that is mostly dropped."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lohan.config import load_config
from lohan.data import open_dataset, prepare
from lohan.data.dataset import open_fields, write_fields
from lohan.data.images import open_records, write_records
from lohan.errors import DataError
from lohan.train.language import tokenised
from lohan.train.preference import read_reference, write_reference
from lohan.train.task import DataRequest
from lohan.util.settings import Source

ROWS = [{"input_ids": [1 + i, 2, 3, 4]} for i in range(24)]
LONG = [{"input_ids": [1] * 12 + [2], "labels": [-100] * 12 + [2]}] * 22 + ROWS[:2]


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def cached(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    source = folder / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    prepare(source, model_dir=folder, cache_dir=folder / "cache", seq=8, vocab_size=40)
    return folder / "cache"


@pytest.mark.parametrize("name", ["tokens.bin", "labels.bin", "offsets.npy"])
def test_flipped_bit_in_token_cache_is_refused_by_name(name: str, tmp_path: Path) -> None:
    cache = cached(tmp_path)
    assert open_dataset(cache, seed=0) is not None
    flip(cache / name, -8)
    with pytest.raises(DataError, match=rf"{name}: damaged: its checksum is .*; remove .*cache"):
        open_dataset(cache, seed=0)
    assert open_dataset(cache, seed=0, verified=False) is not None


def test_changed_number_in_meta_is_refused(tmp_path: Path) -> None:
    cache = cached(tmp_path)
    meta = (cache / "meta.json").read_text()
    (cache / "meta.json").write_text(meta.replace('"seq": 8', '"seq": 9'))
    with pytest.raises(DataError, match=r"meta\.json: damaged"):
        open_dataset(cache, seed=0)


def test_cached_ids_are_checked_against_vocabulary(tmp_path: Path) -> None:
    cache = cached(tmp_path)
    assert open_dataset(cache, seed=0, vocab_size=25) is not None
    with pytest.raises(DataError, match=r"tokens\.bin: token 24 is outside .* vocabulary of 24"):
        open_dataset(cache, seed=0, vocab_size=24)


def test_flipped_bit_in_fields_and_records_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": np.arange(5)}] * 3
    write_fields(tmp_path / "f", [(Source(Path("a")), rows)], about=lambda: {}, show=lambda _: {})
    write_records(tmp_path / "r", [("a", {"latent": np.ones(4, np.float32)})], seed=0, about={})
    flip(tmp_path / "f" / "input_ids.bin", 0)
    flip(tmp_path / "r" / "latent.bin", 0)
    with pytest.raises(DataError, match=r"input_ids\.bin: damaged"):
        open_fields(tmp_path / "f", seed=0, collate=lambda rows: {})
    with pytest.raises(DataError, match=r"latent\.bin: damaged"):
        open_records(tmp_path / "r", seed=0)


@pytest.mark.parametrize("offset", [-20, -1, 90])
def test_flipped_bit_in_reference_is_refused(offset: int, tmp_path: Path) -> None:
    file = tmp_path / "reference.npy"
    logps = np.arange(10, dtype=np.float32).reshape(5, 2)
    write_reference(file, logps)
    assert (read_reference(file, 5) == logps).all()
    flip(file, offset)
    with pytest.raises(DataError, match=r"reference\.npy: damaged: its checksum"):
        read_reference(file, 5)


def test_refuses_data_of_which_most_is_dropped(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, LONG)))
    model = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=40))

    def request(**settings: Any) -> DataRequest:
        given = {"model": str(tmp_path), "data": [str(source)], "out": "o", "train.seq": 8}
        return DataRequest(
            sources=[Source(source)],
            cache=tmp_path / "cache",
            option="--data",
            resume=False,
            config=load_config(None, overrides={**given, **settings}),
            progress=lambda *_: None,
        )

    with pytest.raises(DataError, match=r"22 of 24 examples would be dropped, more than 10%.*"):
        tokenised(request(), model)
    with pytest.raises(DataError, match=r"raise --seq, or .* --max-dropped 0\.92"):
        tokenised(request(), model)
    assert len(tokenised(request(**{"train.max_dropped": 0.92}), model)) == 2
