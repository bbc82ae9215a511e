"""Checkpoint names are mapped to model names, and initial values are read as float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from lohan.checkpoint.hf_folder import build_model
from lohan.checkpoint.safetensors import TensorFolder
from lohan.checkpoint.sources import FolderSource, ModuleSource, checkpoint_map, element_ranges
from lohan.errors import ModelError
from tests.support.models import FAMILY_CONFIGS, GROUPED_SIZES, family_logits, save_model


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the folder's file."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: t for name, t in tensors.items() if t is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def streamed_logits(folder: Path) -> torch.Tensor:
    """Return the logits of the meta model, filled from the folder in pieces."""
    model = build_model(folder, dtype=torch.float32).eval()
    tensors = TensorFolder(folder)
    source = FolderSource(tensors, checkpoint_map(model, tensors).parameters)
    values = {
        name: torch.cat([source.read_flat(name, *s) for s in element_ranges(p.numel(), most=100)])
        for name, p in model.named_parameters()
    }
    model.load_state_dict(
        {n: v.view(model.get_parameter(n).shape) for n, v in values.items()},
        assign=True,
        strict=False,
    )
    model.tie_weights()
    return family_logits(model)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_streamed_model_has_the_same_logits(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, FAMILY_CONFIGS[family])
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [("gpt2", "transformer.", ""), ("llama", "model.", ""), ("opt", "model.decoder.", "decoder.")],
)
def test_base_model_prefix_may_be_missing(tmp_path: Path, family: str, old: str, new: str) -> None:
    model = save_model(tmp_path, FAMILY_CONFIGS[family])
    rename(tmp_path, old, new)
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))
    assert torch.equal(
        family_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), family_logits(model)
    )


def test_extra_tensors_are_reported(tmp_path: Path) -> None:
    save_model(tmp_path, FAMILY_CONFIGS["gpt2"])
    rename(tmp_path, "transformer.", "")
    rewrite(tmp_path, {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "other": torch.ones(2)})
    actual = checkpoint_map(build_model(tmp_path, dtype=torch.float32), tmp_path)
    assert [name.rpartition("h.0.")[2] for name in actual.ignored] == ["attn.bias", "other"]
    assert actual.parameters["transformer.wte.weight"] == "wte.weight"
    assert actual.parameters["lm_head.weight"] == "wte.weight"
    assert not actual.buffers


def test_tied_weight_under_either_name(tmp_path: Path) -> None:
    model = save_model(tmp_path, FAMILY_CONFIGS["qwen2-tied"])
    embedding = model.get_input_embeddings().weight.detach().clone()
    rewrite(tmp_path, {"lm_head.weight": embedding})
    assert checkpoint_map(build_model(tmp_path, dtype=torch.float32), tmp_path).ignored == ()
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))
    rewrite(tmp_path, {"model.embed_tokens.weight": None})
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))
    rewrite(tmp_path, {"model.embed_tokens.weight": embedding + 1})
    with pytest.raises(ModelError, match=r'different values; set "tie_word_embeddings": false'):
        checkpoint_map(build_model(tmp_path, dtype=torch.float32), tmp_path)


def test_missing_tensors(tmp_path: Path) -> None:
    save_model(tmp_path, FAMILY_CONFIGS["llama"])
    rewrite(tmp_path, {"model.layers.1.mlp.up_proj.weight": None, "lm_head.weight": None})
    model = build_model(tmp_path, dtype=torch.float32)
    with pytest.raises(
        ModelError,
        match=rf"{tmp_path}: no tensor for parameter model\.layers\.1\.mlp\.up_proj\.weight "
        r"of LlamaForCausalLM, 2 of 21 missing; .*again",
    ):
        checkpoint_map(model, tmp_path)


def test_wrong_shape_and_dtype(tmp_path: Path) -> None:
    save_model(tmp_path, FAMILY_CONFIGS["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, {name: torch.zeros(3, 32)})
    model = build_model(tmp_path, dtype=torch.float32)
    with pytest.raises(ModelError, match=rf"{name} has shape \[3, 32\], .*has \[48, 32\]"):
        checkpoint_map(model, tmp_path)
    rewrite(tmp_path, {name: torch.zeros(48, 32, dtype=torch.int8)})
    with pytest.raises(ModelError, match=rf"{name} is torch\.int8.*unquantized"):
        checkpoint_map(model, tmp_path)


def test_experts_one_by_one_or_together(tmp_path: Path) -> None:
    config = MixtralConfig(**GROUPED_SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = save_model(tmp_path, config)
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))
    model.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(streamed_logits(tmp_path), family_logits(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9).to(dtype)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    piece = FolderSource(TensorFolder(tmp_path), {"v": "w"}).read_flat("v", 5, 60)
    assert piece.dtype == torch.float32
    assert torch.equal(piece, tensor.float().flatten()[5:60])


def test_module_source() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)).bfloat16()
    module[1].weight = torch.nn.Parameter(module[1].weight.detach().t().contiguous().t())
    source = ModuleSource(module)
    piece = source.read_flat("1.weight", 2, 11)
    assert piece.dtype == torch.float32
    assert torch.equal(piece, module[1].weight.float().flatten()[2:11])
    piece.zero_()
    assert module[1].weight.any()
    with pytest.raises(ModelError, match=r"parameter weight of Linear is on the meta device"):
        ModuleSource(torch.nn.Linear(2, 2, device="meta"))


def test_plain_module_from_a_folder(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    actual = checkpoint_map(module, tmp_path)
    assert list(actual.parameters) == [name for name, _ in module.named_parameters()]
    assert sorted(actual.buffers) == sorted(name for name, _ in module.named_buffers())
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert actual.ignored == ()
