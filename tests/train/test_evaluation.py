"""Evaluation in a run: the right numbers, and training does not notice it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import lohan
from lohan.config import load_config
from lohan.data import open_dataset
from lohan.engine.lanes import Lanes
from lohan.train import trainer
from lohan.train.evaluation import Evaluation, History, evaluate
from lohan.train.language import CausalLM
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.models import attached, batches, small_model
from tests.support.training_runs import (
    EVALUATED_STEPS,
    RecordingDisplay,
    evaluated_inputs_fixture,  # noqa: F401 - a fixture
    exported_bytes,
    run_evaluated,
    worsening_settings,
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"train__clip": 1.0}, marks=pytest.mark.slow),
        {"train__clip": 0.0},
        pytest.param({"train__clip": 0.0, "train__overlap": False}, marks=pytest.mark.slow),
        pytest.param(
            {"train__dtype": "bf16", "train__update_mode": "serial"}, marks=pytest.mark.slow
        ),
        {"train__activations": "all", "train__clip": 1.0},
        {"budget__device": "emulated", "budget__device_memory": "1MiB"},
    ],
    ids=["clip", "balanced", "plain", "serial-bf16", "kept", "device"],
)
def test_a_run_with_evaluation_has_the_bits_of_one_without(settings, inputs, tmp_path):
    run_evaluated(inputs, tmp_path / "without", **settings)
    run_evaluated(
        inputs, tmp_path / "with", eval__data=inputs / "held.jsonl", eval__every=1, **settings
    )
    assert exported_bytes(tmp_path / "with" / "model") == exported_bytes(
        tmp_path / "without" / "model"
    )
    logs = [step_rows(RunFolder(tmp_path / name)) for name in ("with", "without")]
    losses = [[(row["step"], row["loss"], row.get("grad_norm")) for row in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == EVALUATED_STEPS
    assert len(eval_rows(RunFolder(tmp_path / "with"))) == EVALUATED_STEPS


def test_loss_is_the_mean_over_all_tokens(inputs, tmp_path):
    """Against plain transformers, example by example, with the weights of the last step."""
    shown = run_evaluated(inputs, tmp_path / "run", eval__data=inputs / "held.jsonl", eval__every=4)
    rows = eval_rows(RunFolder(tmp_path / "run"))
    assert [row["step"] for row in rows] == [4, EVALUATED_STEPS]
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    held = open_dataset(tmp_path / "run" / "eval-data", seed=0)
    assert held is not None
    total, tokens = 0.0, 0
    with torch.no_grad():
        for index in range(len(held)):
            ids, labels = (torch.from_numpy(x).long()[None] for x in held.example(index))
            total += float(net(input_ids=ids, labels=labels).loss) * (labels.shape[1] - 1)
            tokens += labels.shape[1] - 1
    assert rows[-1]["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert rows[-1]["eval_tokens"] == tokens
    assert rows[-1]["eval_perplexity"] == pytest.approx(2.718281828 ** (total / tokens), rel=1e-4)
    assert any(f"evaluation after step {EVALUATED_STEPS}: loss " in note for note in shown.notes)


def test_rows_of_steps_leave_evaluation_out(inputs, tmp_path):
    """An evaluation is slow and reads much; the step after it is not."""
    run_evaluated(inputs, tmp_path / "run", eval__data=inputs / "held.jsonl", eval__every=1)
    run_evaluated(inputs, tmp_path / "plain")
    read = [
        [row["ssd_read_bytes"] for row in step_rows(RunFolder(tmp_path / name))]
        for name in ("run", "plain")
    ]
    # What was scheduled ahead is read, then read again: at most the weights once more.
    parameters = sum(
        t.numel() for t in AutoModelForCausalLM.from_pretrained(inputs / "model").parameters()
    )
    assert all(a <= b + 4 * parameters + 2**17 for a, b in zip(*read, strict=True))
    assert sum(read[0]) < 2 * sum(read[1])


def test_split_holds_examples_back(inputs, tmp_path):
    shown = run_evaluated(
        inputs, tmp_path / "run", eval__split=0.3, train__epochs=1.0, train__steps=None
    )
    assert "evaluation on 3 examples" in shown.notes
    whole = open_dataset(tmp_path / "run" / "data", seed=0)
    assert whole is not None
    train, held = whole.split(0.3)
    assert (len(train), len(held)) == (6, 3)
    assert sorted([*train.rows.members, *held.rows.members]) == list(range(9))
    seen = [i for step in range(3) for i in train.indices(step, 2)]
    tokens = {tuple(train._examples(i)[0][0]) for i in seen}
    assert tokens.isdisjoint({tuple(held._examples(i)[0][0]) for i in range(3)})
    again = open_dataset(tmp_path / "run" / "data", seed=1)
    assert again is not None
    assert list(again.split(0.3)[1].rows.members) != list(held.rows.members)
    # An epoch of six examples, two at a time, and an evaluation at its end.
    assert [row["step"] for row in eval_rows(RunFolder(tmp_path / "run"))] == [3]


def test_a_known_pass_is_scheduled_as_a_whole(tmp_path, monkeypatch):
    """From the second pass on weights are read ahead of the blocks that need them."""
    model, created = small_model("llama"), []
    enqueue = Lanes.enqueue

    def watched(self, schedule, context=None):
        created.append([action.name for action in schedule])
        enqueue(self, schedule, context)

    monkeypatch.setattr(Lanes, "enqueue", watched)
    data = batches(1, batch=2, seq=16)[0]
    budget = lohan.Budget(host="1500KiB", ssd=[tmp_path])
    with attached(model, tmp_path, budget=budget) as session, torch.no_grad():
        assert len(session.plan.host_cached_weights) < 5 and session.plan.window > 0
        first = model(**data).loss
        assert all(sum(name[0] == "F" for name in names) == 1 for names in created)
        created.clear()
        assert torch.equal(model(**data).loss, first)
        (names,) = created
    sites = [name for name in names if name[0] == "F"]
    assert len(sites) == 5
    reads = [i for i, name in enumerate(names) if name[0] == "R"]
    assert any(
        i < names.index(site) for i in reads for site in sites[:-1] if names[i][1:] != site[1:]
    )


def test_blocks_run_in_slices_without_gradients_too(tmp_path):
    model, calls = small_model("llama"), []
    model.model.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: calls.append(args[0].shape[0])
    )
    data = batches(1, batch=5, seq=16)[0]
    with attached(model, tmp_path, micro_batch=2, batch=data), torch.no_grad():
        loss = model(**data).loss
    assert calls[-3:] == [2, 2, 1]
    assert torch.isfinite(loss)


def test_evaluation_mode_and_random_state_are_put_back(tmp_path):
    model = small_model("gpt2")
    model.transformer.h[0].eval()
    before, flags = torch.get_rng_state(), [m.training for m in model.modules()]

    class Rows:
        def __len__(self):
            return 2

        def passes(self, batch):
            assert not model.training and not torch.is_grad_enabled()
            torch.rand(3)
            yield from batches(2, batch=batch, seq=8)

    result = evaluate(model, Rows(), batch=1, task=CausalLM())  # type: ignore[arg-type]
    assert isinstance(result, Evaluation) and result.tokens == 2 * 6
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == flags
    assert evaluate(model, Rows(), batch=1, task=CausalLM(), stop=lambda: True) is None  # type: ignore[arg-type]


def test_history_finds_the_best_step() -> None:
    rows = [{"step": n, "eval_loss": loss} for n, loss in enumerate([3.0, 2.0, 2.5, 2.0], 1)]
    actual = History.of(rows)
    assert (actual.best, actual.best_step, actual.since_best) == (2.0, 2, 2)
    assert actual.steps == {1, 2, 3, 4}
    assert not actual.improves(2.0) and not actual.improves(float("nan")) and actual.improves(1.9)


# -- early stop and the best model ----------------------------------------------------------------


def test_early_stop_and_best_export(inputs, tmp_path):
    shown, out = RecordingDisplay(), tmp_path / "run"
    outcome = trainer.train(load_config(None, overrides=worsening_settings(inputs, out)), shown)
    assert outcome.step < 12 and outcome.exported and not outcome.stopped
    rows = eval_rows(RunFolder(out))
    actual = History.of(rows)
    assert actual.since_best == 3 and outcome.step == actual.best_step + 3
    assert any("stopping early" in note for note in shown.notes)
    best = AutoModelForCausalLM.from_pretrained(out / "best").eval()
    held = open_dataset(out / "eval-data", seed=0)
    assert held is not None
    again = evaluate(best, held, batch=2, task=CausalLM())
    assert again is not None and again.loss == pytest.approx(actual.best, rel=1e-5)
    assert exported_bytes(out / "best") != exported_bytes(out / "model")
    shown = RecordingDisplay()
    resumed = trainer.resume(RunFolder(out), shown)
    assert resumed.step == outcome.step and eval_rows(RunFolder(out)) == rows
    assert any(f"has stopped early, at step {outcome.step} of 12;" in n for n in shown.notes)
    assert any(note == f"fine-tuned model: {out / 'model'}" for note in shown.notes)
    longer = (out / "run.toml").read_text().replace("early_stop = 3", "early_stop = 4")
    (out / "run.toml").write_text(longer)
    assert trainer.resume(RunFolder(out), RecordingDisplay()).step == outcome.step + 1
