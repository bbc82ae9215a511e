"""The state of a training with lohan.hf is never removed without being asked."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from lohan.errors import BudgetError
from lohan.store.admin import describe, list_stores
from tests.test_hf import SETTINGS, collate, examples
from tests.test_no_file_lost import tree
from tests.tiny_models import CONFIGS, VOCAB, save_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(folder, CONFIGS["llama"])
    return folder


def made(
    base: Path, out: Path, *, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:  # fmt: skip
    args = TrainingArguments(str(out), **{**SETTINGS, "max_steps": 2, **(arguments or {})})
    return lohan.hf.Trainer(
        model=lohan.load(base), args=args, train_dataset=examples(8, vocab=VOCAB),
        eval_dataset=examples(4, vocab=VOCAB, seed=2), data_collator=collate,
        lohan=lohan.hf.LohanArguments(**{"host": "64MiB", **options}),
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
    with pytest.raises(BudgetError):  # a start that is refused replaces nothing
        made(base, tmp_path / "out", overwrite=True, **options, host="10KiB").train()
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


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_training_that_saved_no_checkpoint_goes_on(base, tmp_path):
    """It died before its first one, or while it saved that: its steps are in the store."""
    more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    whole = made(base, tmp_path / "whole", arguments=more)
    whole.train()
    stopped = made(base, tmp_path / "out", arguments=more)
    stopped.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    del stopped
    gc.collect()
    assert list(steps(tmp_path / "out").values()) == [3]
    for name, text in (("checkpoint-3", None), ("checkpoint-2", '{"global_st')):
        (tmp_path / "out" / name).mkdir()
        if text is not None:
            (tmp_path / "out" / name / "trainer_state.json").write_text(text)
    again = made(base, tmp_path / "out", arguments=more)
    again.train(resume_from_checkpoint=True)
    wanted, found = (
        {r["step"]: (r["loss"], r["learning_rate"]) for r in t.state.log_history if "loss" in r}
        for t in (whole, again)
    )
    assert list(found) == [4, 5, 6] and found.items() <= wanted.items()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        made(base, tmp_path / "new").train(resume_from_checkpoint=True)


def test_training_after_an_evaluation(base, tmp_path):
    """The numbers are those of a training alone."""
    plain, other = made(base, tmp_path / "plain"), made(base, tmp_path / "other")
    plain.train()
    other.evaluate()
    other.train()
    losses = [[r["loss"] for r in t.state.log_history if "loss" in r] for t in (plain, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
