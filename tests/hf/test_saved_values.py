"""lohan.hf saves weights that a training does not change with the values as given."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")

import peft

import lohan.hf
from lohan.errors import ModelError
from lohan.model.state import exact_key
from tests.support.models import adapted, attached, batches, small_model
from tests.support.trainer_scripts import run_trainer, saved_weights


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


def is_frozen(name: str) -> bool:
    return ".layers.0." in name


def half_frozen() -> Any:
    model = small_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    return model


def test_bf16_training_saves_frozen_weights_unrounded(tmp_path):
    model = half_frozen()
    before = values(model)
    frozen = {name: value for name, value in before.items() if is_frozen(name)}
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, model=model, bf16=True, max_steps=2)
    trainer.save_model()
    saved = saved_weights(tmp_path)
    assert_equal_bits(saved, frozen)
    assert_equal_bits(model.state_dict(), frozen)
    name = next(name for name in before if not is_frozen(name))
    assert not torch.equal(saved[name], before[name])


def test_bf16_training_merges_adapters_into_unrounded_weights(tmp_path):
    base = values(small_model("llama"))
    model = adapted(small_model("llama"))
    trainer = run_trainer(lohan.hf.Trainer, tmp_path / "one", model=model, bf16=True, max_steps=2)
    again = run_trainer(
        lohan.hf.Trainer, tmp_path / "two", model=trainer.model, bf16=True, max_steps=1
    )
    learnt = again.model.state_dict()
    prefix = "base_model.model."
    plain = {name.replace(".base_layer", ""): value for name, value in learnt.items()}
    names = {name: name for name in base if prefix + name in plain}
    assert_equal_bits({name: plain[prefix + name] for name in names}, base)
    unloaded = again.model.merge_and_unload()
    merged = unloaded.state_dict()
    layer = prefix + "model.layers.1.mlp.up_proj."
    a, b = (learnt[f"{layer}lora_{x}.default.weight"] for x in "AB")
    expected = base["model.layers.1.mlp.up_proj.weight"] + 4 * (b @ a)  # alpha 16, rank 4
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], expected)
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(merged[norm], base[norm])
    ids = torch.arange(8)[None]
    in_memory = copy.deepcopy(unloaded)
    with torch.no_grad():
        actual, expected = unloaded(input_ids=ids).logits, in_memory(input_ids=ids).logits
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=0.02)
    with pytest.raises(ModelError, match=r"is what merge_and_unload returned.*deepcopy"):
        run_trainer(lohan.hf.Trainer, tmp_path / "three", model=unloaded, max_steps=1)


def test_vera_adapter_is_saved_with_its_projection(tmp_path):
    config = peft.VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(7)
    model = peft.get_peft_model(small_model("llama"), config)
    projection = model.base_model.vera_A["default"].clone()
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, model=model, max_steps=1)
    trainer.save_model()
    again = peft.PeftModel.from_pretrained(small_model("llama"), tmp_path)
    assert torch.equal(again.base_model.vera_A["default"], projection)
    learnt = {k: v for k, v in model.state_dict().items() if "vera_lambda" in k}
    assert_equal_bits(again.state_dict(), learnt)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_own_loop_exports_frozen_weights_unrounded(dtype, tmp_path):
    model = half_frozen()
    frozen = {name: value for name, value in values(model).items() if is_frozen(name)}
    with attached(model, tmp_path, dtype=dtype) as session:
        for batch in batches(1, batch=2, seq=8):
            model(**batch).loss.backward()
        session.export(tmp_path / "out", dtype="fp32")
    assert_equal_bits(saved_weights(tmp_path / "out"), frozen)


def test_values_that_bf16_represents_take_no_room_for_a_remainder(tmp_path):
    model = half_frozen()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    with attached(model, tmp_path, dtype="bf16") as session:
        groups = [group for group in session.context.blocks.groups if group.frozen]
        regions = {region.key for region in session.store.layout.regions}
    assert groups and not regions & {exact_key(group) for group in groups}


class OwnSave(LlamaForCausalLM):
    """A model that writes a file of its own beside its weights."""

    def save_pretrained(self, folder, **named):
        super().save_pretrained(folder, **named)
        (Path(folder) / "own.txt").write_text("mine")


class OwnStateDict(LlamaForCausalLM):
    def state_dict(self, *args, **named):
        return {name: 2 * value for name, value in super().state_dict(*args, **named).items()}


def doubled_by_hook(module: Any, state_dict: dict[str, Any], *_: Any) -> None:
    for name in state_dict:
        state_dict[name] = 2 * state_dict[name]


@pytest.mark.parametrize("change", ["save_pretrained", "state_dict", "hook", "instance"])
def test_code_of_a_model_that_takes_part_in_saving_is_honoured(change, tmp_path):
    model, factor = small_model("llama"), 1 if change == "save_pretrained" else 2
    if change == "hook":
        model._register_state_dict_hook(doubled_by_hook)
    elif change == "instance":
        plain = model.state_dict
        model.state_dict = lambda: {name: 2 * value for name, value in plain().items()}
    else:
        model.__class__ = OwnSave if change == "save_pretrained" else OwnStateDict
    trainer = run_trainer(lohan.hf.Trainer, tmp_path / "run", model=model, max_steps=1)
    trainer.save_model(str(tmp_path / "trainer"))
    model.save_pretrained(tmp_path / "model")
    for folder in (tmp_path / "trainer", tmp_path / "model"):
        saved = saved_weights(folder)
        assert all(torch.equal(saved[name], factor * p) for name, p in model.named_parameters())
        assert (folder / "own.txt").exists() == (change == "save_pretrained")
