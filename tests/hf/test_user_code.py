"""User code around a Trainer works as in transformers.

It has its own training_step, callbacks that read, freeze and change parameters, and hooks, and it
uses the model after training.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan.hf
from lohan.errors import ConfigError, LohanError, ModelError
from tests.support.models import batches, small_model
from tests.support.trainer_scripts import assert_same_log, logged_values, run_trainer, saved_weights

HEAD, NORM = "lm_head.weight", "model.norm.weight"
INNER = "model.layers.1.mlp.up_proj.weight"


def with_own_step(kind: type) -> type:
    """Return a Trainer class with the training_step of transformers' documentation."""

    class OwnStep(kind):  # type: ignore[misc, valid-type]
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    return OwnStep


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}]
)
def test_an_own_training_step_trains(changes, tmp_path):
    changes = {**changes, "max_steps": 3}
    reference = run_trainer(with_own_step(transformers.Trainer), tmp_path / "theirs", **changes)
    actual = run_trainer(with_own_step(lohan.hf.Trainer), tmp_path / "ours", **changes)
    assert actual.session.step == 3
    assert_same_log(actual, reference)
    for trainer in (actual, reference):
        trainer.save_model()
    expected, result = saved_weights(tmp_path / "theirs"), saved_weights(tmp_path / "ours")
    assert max((expected[n] - result[n]).abs().max().item() for n in expected) < 2e-5


class Lost(lohan.hf.Trainer):
    """A training_step that never calls the model."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return torch.zeros(())


class Twice(lohan.hf.Trainer):
    """A training_step with two gradients per step, as in adversarial training."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        for _ in range(2):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
        return loss.detach()


class Plainly(lohan.hf.Trainer):
    """A training_step that calls backward of the loss instead of the accelerator's."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "message", "changes"),
    [
        (Lost, "Lost: no step was taken for this optimizer step", {}),
        (Twice, "Twice.training_step called backward again", {}),
        (Plainly, "Plainly: 2 steps were taken for one", {"gradient_accumulation_steps": 2}),
    ],
)
def test_an_own_training_step_that_cannot_train_is_refused(kind, message, changes, tmp_path):
    with pytest.raises(ModelError, match=message):
        run_trainer(kind, tmp_path, max_steps=1, **changes)


class Watches(TrainerCallback):
    """A callback that logs norms, freezes after the first step and unfreezes after the third."""

    def __init__(self) -> None:
        self.log: list[float] = []

    def on_step_end(self, args, state, control, model=None, **_):
        for name in (HEAD, NORM, "model.layers.1.mlp.up_proj.weight"):
            self.log.append(model.get_parameter(name).norm().item())
        model.model.layers[1].requires_grad_(state.global_step == 3)
        model.get_parameter(NORM).requires_grad_(state.global_step == 3)


class Penalised:
    def compute_loss(self, model, inputs, **named):
        loss = super().compute_loss(model, inputs, **named)  # type: ignore[misc]
        return loss + 0.1 * model.get_parameter(HEAD).norm()


def test_callbacks_read_and_freeze_and_a_loss_depends_on_a_weight(tmp_path):
    def run(kind: type) -> tuple[Any, Watches]:
        model, seen = small_model("llama"), Watches()
        model.lm_head.weight.register_hook(lambda grad: grad * 2)
        penalised = type("Penalised", (Penalised, kind), {})
        return run_trainer(
            penalised, tmp_path / kind.__module__, model=model, callbacks=[seen], max_steps=5
        ), seen

    (reference, expected), (actual, item) = run(transformers.Trainer), run(lohan.hf.Trainer)
    assert_same_log(actual, reference)
    assert item.log == pytest.approx(expected.log, rel=1e-5)


class Changes(TrainerCallback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        model.changed_args = args
        self.change(model)


def halve(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def set_gradient(model: Any) -> None:
    model.lm_head.weight.grad = torch.zeros(131, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halve, "the gradient of .* is read after backward.*register_hook"),
        (set_gradient, r"the gradient of lm_head\.weight is set.*register_hook"),
        (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), "max_grad_norm"),
        (lambda m: setattr(m.changed_args, "max_grad_norm", 2.0), "max_grad_norm is 2.0, and was"),
        (
            lambda m: setattr(m.changed_args, "gradient_accumulation_steps", 2),
            "gradient_accumulation_steps is 2, and was 1",
        ),
        (lambda m: m.lm_head.weight.data.mul_(2), r"lm_head\.weight is changed in memory"),
        (lambda m: m.resize_token_embeddings(140), "resize_token_embeddings: the embeddings of"),
    ],
)
def test_changes_that_come_too_late_are_refused(change, message, tmp_path):
    with pytest.raises((ModelError, ConfigError), match=message):
        run_trainer(lohan.hf.Trainer, tmp_path, callbacks=[Changes(change)], max_steps=2)


class Unclipped(lohan.hf.Trainer):
    def _clip_grad_norm(self, model):
        return None


class LogsNorm(lohan.hf.Trainer):
    def _clip_grad_norm(self, model):
        self.last_norm = super()._clip_grad_norm(model)
        return self.last_norm


def test_clipping_of_a_subclass_is_refused_unless_it_is_that_of_the_trainer(tmp_path):
    with pytest.raises(ConfigError, match=r"Unclipped\._clip_grad_norm does not call super"):
        run_trainer(Unclipped, tmp_path / "a", max_steps=2, max_grad_norm=0.1)
    assert run_trainer(Unclipped, tmp_path / "b", max_steps=2, max_grad_norm=0).session.step == 2
    trainer = run_trainer(LogsNorm, tmp_path / "c", max_steps=2, max_grad_norm=0.1)
    assert trainer.last_norm == logged_values(trainer, "grad_norm")[-1]


class DoublesWhenSaving:
    """Saves a state_dict of its own, as subclasses do that leave weights out or rename them."""

    def _save(self, output_dir=None, state_dict=None):
        doubled = {name: 2 * value for name, value in self.model.state_dict().items()}
        super()._save(output_dir, state_dict=doubled)  # type: ignore[misc]


def test_state_dict_that_a_subclass_saves_is_written(tmp_path):
    kind = type("DoublesWhenSaving", (DoublesWhenSaving, lohan.hf.Trainer), {})
    trainer = run_trainer(kind, tmp_path, max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    saved = saved_weights(tmp_path / "saved")
    assert torch.equal(saved[HEAD], 2 * trainer.model.get_parameter(HEAD).detach())


def test_freezing_for_a_second_training_is_honoured(tmp_path):
    ended = []
    for kind in (transformers.Trainer, lohan.hf.Trainer):
        out = tmp_path / kind.__module__
        trainer = run_trainer(kind, out, max_steps=2)
        trainer.model.model.layers[1].requires_grad_(False)
        before = trainer.model.get_parameter(INNER).detach().clone()
        trainer.train()
        trainer.save_model(str(out))
        ended.append((trainer, saved_weights(out)))
        assert torch.equal(ended[-1][1][INNER], before)
    (expected, wanted), (actual, result) = ended
    assert_same_log(actual, expected)
    assert max((wanted[n] - result[n]).abs().max().item() for n in wanted) < 2e-5


def test_another_model_for_a_second_training_is_refused(tmp_path):
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, max_steps=1)
    trainer.model = trainer.model_wrapped = small_model("llama", seed=4)
    with pytest.raises(ConfigError, match=r"trainer\.model was replaced by another Llama.*new Tra"):
        trainer.train()


def test_unfreezing_for_a_second_training_is_refused(tmp_path):
    model = small_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, model=model, max_steps=1)
    model.requires_grad_(True)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight was frozen when"):
        trainer.train()


def test_after_training_the_model_no_longer_trains_by_itself(tmp_path, monkeypatch):
    """Gradients are ordinary, a torch optimizer is refused, and train() can continue."""
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, max_steps=2)
    model, data = trainer.model, batches(1, batch=2, seq=8)[0]
    plain = copy.deepcopy(model)
    before = trainer.evaluate()["eval_loss"]
    for each in (model, plain):
        each(**data).loss.backward()
    assert trainer.session.step == 2
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(actual.grad, expected.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match=r"AdamW\.step\(\) would not update model\.embed_tokens"):
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert trainer.evaluate()["eval_loss"] == before
    monkeypatch.setattr("lohan.engine.user_code.host_memory_bytes", lambda: 1000)
    with pytest.raises(LohanError, match=r"keeps all gradients in memory: they take .*1000 B"):
        model(**data).loss.backward()
    trainer.train()
    assert trainer.session.step == 4
    assert len(logged_values(trainer, "loss")) == 2


def test_weights_loaded_after_training_are_evaluated_and_saved(tmp_path):
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, max_steps=1)
    other = small_model("llama", seed=3)
    expected = transformers.Trainer(
        model=other,
        args=trainer.args,
        eval_dataset=trainer.eval_dataset,
        data_collator=trainer.data_collator,
    ).evaluate()["eval_loss"]
    trainer.model.load_state_dict(other.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    actual = saved_weights(tmp_path / "saved")
    assert all(torch.equal(p, actual[name]) for name, p in other.named_parameters())
