"""The state of a training with lohan.hf is never removed without being asked."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from lohan.store.admin import describe, list_stores
from tests.test_hf import SETTINGS, collate, examples
from tests.test_no_file_lost import tree
from tests.tiny_models import CONFIGS, VOCAB, save_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(folder, CONFIGS["llama"])
    return folder


def made(base: Path, out: Path, **options: Any) -> Any:
    args = TrainingArguments(str(out), **{**SETTINGS, "max_steps": 2})
    return lohan.hf.Trainer(
        model=lohan.load(base), args=args, train_dataset=examples(8, vocab=VOCAB),
        eval_dataset=examples(4, vocab=VOCAB, seed=2), data_collator=collate,
        lohan=lohan.hf.LohanArguments(host="64MiB", **options),
    )  # fmt: skip


def steps(place: Path) -> dict[str, int]:
    return {p.name: describe(p)["meta"]["progress"]["step"] for p in list_stores(place)}


@pytest.mark.parametrize("inside", [True, False])
def test_only_an_explicit_word_replaces_a_store(inside, base, tmp_path):
    drive = tmp_path / "out" if inside else tmp_path / "drive"
    options = {} if inside else {"ssd": (drive,)}
    made(base, tmp_path / "out", **options).train()
    gc.collect()
    before = steps(drive)
    assert list(before.values()) == [2]
    again = made(base, tmp_path / "out", **options)
    assert again.evaluate()["eval_loss"] > 0 and again.predict(examples(2, vocab=VOCAB)).metrics
    assert again.session is None and steps(drive) == before
    with pytest.raises(lohan.LohanError, match=r"at step 2; go on with .*overwrite=True"):
        again.train()
    assert steps(drive) == before
    made(base, tmp_path / "out", overwrite=True, **options).train()
    assert list(steps(drive).values()) == [2]


def test_a_copy_of_the_output_folder_leaves_the_originals_store(base, tmp_path):
    options = {"ssd": (tmp_path / "drive",)}
    made(base, tmp_path / "out", **options).train()
    gc.collect()
    before = tree(tmp_path / "drive")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with pytest.raises(lohan.LohanError, match="is a copy of"):
        made(base, tmp_path / "copy", **options)._stored()
    made(base, tmp_path / "copy", overwrite=True, **options).train()
    gc.collect()
    assert before.items() <= tree(tmp_path / "drive").items()
    assert list(steps(tmp_path / "drive").values()) == [2, 2]


def test_two_trainings_share_a_drive(base, tmp_path):
    for name in ("a", "b"):
        made(base, tmp_path / name, ssd=(tmp_path / "drive",)).train()
        gc.collect()
    assert list(steps(tmp_path / "drive").values()) == [2, 2]


def test_training_after_an_evaluation(base, tmp_path):
    """The numbers are those of a training alone."""
    plain, other = made(base, tmp_path / "plain"), made(base, tmp_path / "other")
    plain.train()
    other.evaluate()
    other.train()
    losses = [[r["loss"] for r in t.state.log_history if "loss" in r] for t in (plain, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
