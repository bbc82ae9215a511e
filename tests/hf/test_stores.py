"""The state of a training with lohan.hf is never removed without a request."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from lohan.errors import BudgetError
from lohan.store.admin import describe, list_stores
from tests.support.generated_cases import thinned
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model
from tests.support.stores import file_digests
from tests.support.trainer_scripts import TRAINER_SETTINGS, collate_padded, token_examples


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(folder, FAMILY_CONFIGS["llama"])
    return folder


def new_trainer(
    base: Path,
    out: Path,
    *,
    arguments: dict[str, Any] | None = None,
    model: Any = None,
    kind: type = lohan.hf.Trainer,
    **options: Any,
) -> Any:
    args = TrainingArguments(str(out), **{**TRAINER_SETTINGS, "max_steps": 2, **(arguments or {})})
    return kind(
        model=model or lohan.load(base),
        args=args,
        train_dataset=token_examples(8, vocab=FAMILY_VOCAB),
        eval_dataset=token_examples(4, vocab=FAMILY_VOCAB, seed=2),
        data_collator=collate_padded,
        lohan=lohan.hf.LohanArguments(**{"host": "64MiB", **options}),
    )


def steps(place: Path) -> dict[str, int]:
    return {p.name: describe(p)["meta"]["progress"]["step"] for p in list_stores(place)}


class Dies(lohan.hf.Trainer):
    """A Trainer whose process dies in its first step."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("inside", thinned([True, False], 0))
def test_second_training_in_a_folder_replaces_the_first_when_it_has_committed(
    inside, base, tmp_path, caplog
):
    drive = tmp_path / "out" if inside else tmp_path / "drive"
    options = {} if inside else {"ssd": (drive,)}
    new_trainer(base, tmp_path / "out", **options).train()
    gc.collect()
    before = steps(drive)
    assert list(before.values()) == [2]
    again = new_trainer(base, tmp_path / "out", **options)
    assert (
        again.evaluate()["eval_loss"] > 0
        and again.predict(token_examples(2, vocab=FAMILY_VOCAB)).metrics
    )
    assert again.session is None and steps(drive) == before
    with pytest.raises(BudgetError):  # a start that is refused replaces nothing
        new_trainer(base, tmp_path / "out", **options, host="10KiB").train()
    assert steps(drive) == before
    with pytest.raises(KeyboardInterrupt):
        new_trainer(base, tmp_path / "out", kind=Dies, **options).train()
    gc.collect()
    assert before.items() <= steps(drive).items()
    more = new_trainer(base, tmp_path / "out", arguments={"max_steps": 3}, **options)
    more.train(resume_from_checkpoint=True)  # the first training: its state was not lost
    assert more.state.global_step == more.session.step == 3
    del more
    gc.collect()
    caplog.clear()
    new_trainer(base, tmp_path / "out", **options).train()
    assert "holds the state of an earlier training" in caplog.text and "at step 3" in caplog.text
    gc.collect()
    after = steps(drive)
    assert list(after.values()) == [2] and not after.keys() & before.keys()


def test_second_training_leaves_the_model_of_the_first_its_weights(base, tmp_path):
    first = new_trainer(base, tmp_path / "out")
    first.train()
    learnt = {name: value.clone() for name, value in first.model.state_dict().items()}
    second = new_trainer(base, tmp_path / "out")
    second.train()
    assert len(steps(tmp_path / "out")) == 2
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, learnt[name])
    del first
    gc.collect()  # closes the session of the Trainer
    gc.collect()  # its model is gone
    assert list(steps(tmp_path / "out")) == [second.session.store.dirs[0].name]


SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


def half_frozen(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.0." not in name)
    return model


def assert_same_end(resumed: Any, whole: Any) -> None:
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_resumes_a_checkpoint_of_another_output_folder(base, tmp_path):
    saves = {**SAVES, "bf16": True}
    whole = new_trainer(base, tmp_path / "one", arguments=saves, model=half_frozen(base))
    whole.train()
    store = steps(tmp_path / "one")
    other = new_trainer(base, tmp_path / "two", arguments=saves, model=half_frozen(base))
    other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-1"))
    assert [row["step"] for row in other.state.log_history if "loss" in row] == [1, 2, 3]
    assert_same_end(other, whole)
    assert steps(tmp_path / "one") == store and not whole.session.closed
    again = new_trainer(
        base, tmp_path / "two", model=half_frozen(base), arguments={**saves, "max_steps": 4}
    )
    again.train(resume_from_checkpoint=True)
    assert again.session.step == again.state.global_step == 4


def test_resumes_the_training_that_the_checkpoint_is_of(base, tmp_path):
    """The checkpoints of a first training outlast its store, which a second one has replaced."""
    whole = new_trainer(base, tmp_path / "whole", arguments=SAVES)
    whole.train()
    new_trainer(base, tmp_path / "out", arguments={**SAVES, "max_steps": 2}).train()
    gc.collect()
    new_trainer(base, tmp_path / "out", arguments={"max_steps": 4, "learning_rate": 1e-2}).train()
    gc.collect()
    more = new_trainer(base, tmp_path / "out", arguments=SAVES)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 3
    assert_same_end(more, whole)


def test_torn_state_of_the_newest_checkpoint_blocks_no_resume(base, tmp_path):
    whole = new_trainer(base, tmp_path / "whole", arguments=SAVES)
    whole.train()
    new_trainer(base, tmp_path / "out", arguments={**SAVES, "max_steps": 2}).train()
    gc.collect()
    torn = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    torn.write_text(torn.read_text()[:99])
    more = new_trainer(base, tmp_path / "out", arguments=SAVES)
    with pytest.raises(lohan.LohanError, match=r"checkpoint-2.*cannot be read.*earlier checkpoint"):
        more.train(resume_from_checkpoint=str(torn.parent))
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 3
    assert_same_end(more, whole)


def test_a_copy_of_the_output_folder_leaves_the_originals_store(base, tmp_path):
    options = {"ssd": (tmp_path / "drive",)}
    new_trainer(base, tmp_path / "out", **options).train()
    gc.collect()
    before = file_digests(tmp_path / "drive")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with pytest.raises(lohan.LohanError, match="is a copy of"):
        new_trainer(base, tmp_path / "copy", **options)._stored()
    new_trainer(base, tmp_path / "copy", **options).train()
    gc.collect()
    assert before.items() <= file_digests(tmp_path / "drive").items()
    assert list(steps(tmp_path / "drive").values()) == [2, 2]


def test_two_trainings_share_a_drive(base, tmp_path):
    for name in ("a", "b"):
        new_trainer(base, tmp_path / name, ssd=(tmp_path / "drive",)).train()
        gc.collect()
    assert list(steps(tmp_path / "drive").values()) == [2, 2]


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_training_that_saved_no_checkpoint_goes_on(base, tmp_path):
    """The process died before or during its first checkpoint; its steps are in the store."""
    more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    whole = new_trainer(base, tmp_path / "whole", arguments=more)
    whole.train()
    stopped = new_trainer(base, tmp_path / "out", arguments=more)
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
    again = new_trainer(base, tmp_path / "out", arguments=more)
    again.train(resume_from_checkpoint=True)
    wanted, actual = (
        {r["step"]: (r["loss"], r["learning_rate"]) for r in t.state.log_history if "loss" in r}
        for t in (whole, again)
    )
    assert list(actual) == [4, 5, 6] and actual.items() <= wanted.items()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        new_trainer(base, tmp_path / "new").train(resume_from_checkpoint=True)


def test_training_after_an_evaluation(base, tmp_path):
    """The numbers are those of a training alone."""
    plain, other = new_trainer(base, tmp_path / "plain"), new_trainer(base, tmp_path / "other")
    plain.train()
    other.evaluate()
    other.train()
    losses = [[r["loss"] for r in t.state.log_history if "loss" in r] for t in (plain, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
