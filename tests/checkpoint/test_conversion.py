"""Experts that are separate in files and joined in memory are streamed in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

import lohan
from lohan.checkpoint import sources
from lohan.checkpoint.hf_folder import build_model
from lohan.checkpoint.safetensors import Assembly, Run, TensorFolder, runs_of
from lohan.checkpoint.sources import (
    FolderSource,
    Merger,
    Saved,
    assembled,
    checkpoint_map,
    saved_layout,
)
from lohan.errors import ModelError
from tests.support.architectures import architecture_model
from tests.support.models import (
    FAMILY_VOCAB,
    GROUPED_SIZES,
    attached,
    batches,
    family_logits,
    save_model,
)

EXPERTS = {
    "mixtral": MixtralConfig(**GROUPED_SIZES, num_local_experts=12, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **GROUPED_SIZES, moe_intermediate_size=24, num_experts=11, num_experts_per_tok=2
    ),
}


@pytest.fixture(params=EXPERTS)
def saved(request, tmp_path, monkeypatch) -> tuple[PreTrainedModel, Path]:
    """Save a model; only whole rows may be moved, as with weights of any size."""
    monkeypatch.setattr(sources, "MOST_ELEMENTS", 0)
    folder = tmp_path / "model"
    return save_model(folder, EXPERTS[request.param]), folder


def test_experts_are_put_together_piece_by_piece(saved):
    model, folder = saved
    tensors = TensorFolder(folder)
    assert any(".experts.11." in name or ".experts.10." in name for name in tensors.names())
    actual = checkpoint_map(build_model(folder, dtype=torch.float32), tensors)
    assert actual.ignored == ()
    source = FolderSource(tensors, actual.parameters)
    for name, parameter in model.named_parameters():
        flat, step = parameter.detach().reshape(-1), 1009  # a prime: pieces end inside of rows
        for start in range(0, len(flat), step):
            stop = min(start + step, len(flat))
            assert torch.equal(source.read_flat(name, start, stop), flat[start:stop]), name


def test_layout_is_that_of_save_pretrained(saved):
    model, folder = saved
    wanted = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    plan = Saved.of(model, {name: tuple(p.shape) for name, p in parameters.items()}, {})
    read = plan.reading(lambda name, a, b: parameters[name].detach().reshape(-1)[a:b])
    assert plan.tensors == {name: tuple(wanted[name].shape) for name in plan.tensors}
    assert plan.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        got = torch.cat([read(name, 0, 7), read(name, 7, tensor.numel())])
        assert torch.equal(got.view(tensor.shape), tensor), name


@pytest.mark.parametrize("kind", ["t5", "bert", "vit", "llava", "qwen-vl"])
def test_names_of_other_models_are_those_of_save_pretrained(kind, tmp_path):
    model = architecture_model(kind)
    model.save_pretrained(tmp_path)
    layout = saved_layout(model, {name: tuple(p.shape) for name, p in model.named_parameters()})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(layout)


def test_round_trip(saved, tmp_path):
    """A model trained out of core and exported has the same logits in plain transformers.

    The files have the names of the source folder.
    """
    _, folder = saved
    model = lohan.load(folder).train()
    data = batches(2, batch=2, seq=12, vocab=FAMILY_VOCAB)
    with attached(model, tmp_path / "state") as session:
        for batch in data:
            model(**batch).loss.backward()
        session.export(tmp_path / "direct")
        with torch.no_grad():
            wanted = model(input_ids=data[0]["input_ids"]).logits
        lohan.engine.export.export_store(session.store, tmp_path / "later", source_folder=folder)
    names = set(load_file(folder / "model.safetensors"))
    for item in ("direct", "later"):  # with the model at hand, and from the store alone
        assert set(load_file(tmp_path / item / "model.safetensors")) == names
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / item).eval()
        with torch.no_grad():
            assert torch.allclose(plain(data[0]["input_ids"]).logits, wanted, atol=1e-5)
    assert not torch.equal(family_logits(plain), family_logits(saved[0]))


def test_joins_adjacent_rows_into_longest_runs():
    rows = torch.tensor([4, 5, 0, 1, 2, 3, 6])
    assert runs_of(rows, 10, [("a", 3), ("b", 4)]) == (
        Run("b", 10, 20),
        Run("a", 0, 30),
        Run("b", 0, 10),
        Run("b", 30, 10),
    )
    with pytest.raises(AssertionError):
        Assembly((3, 10), (Run("a", 0, 20),))


def transpose(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"t": tensors["a"].t().contiguous()}


def test_a_rule_that_moves_elements_goes_element_by_element(monkeypatch):
    actual = assembled(transpose, {"a": (3, 4)}, {"t": (4, 3)})["t"]
    a = torch.randn(3, 4)
    assert torch.equal(actual.read(0, 12, lambda _, x, y: a.view(-1)[x:y]).view(4, 3), a.t())
    monkeypatch.setattr(sources, "MOST_ELEMENTS", 11)
    with pytest.raises(Exception, match="12 elements, 11 at most"):
        assembled(transpose, {"a": (3, 4)}, {"t": (4, 3)})


@pytest.mark.parametrize(
    "rule", [lambda t: {"t": t["a"] + 1}, lambda t: {"t": t["a"][:1].expand(3, -1)}]
)
def test_refuses_conversion_rule_that_changes_values(rule):
    with pytest.raises(Exception, match="exactly once"):
        assembled(rule, {"a": (3, 4)}, {"t": (3, 4)})


def test_rejects_unsupported_conversion_rule():
    class Doubling:
        def add_tensor(self, target, name, pattern, tensor):
            self.tensor = tensor

        def convert(self, target, model, config):
            return {target: 2 * self.tensor}

    with pytest.raises(ModelError, match=r"tensor w.*cannot be converted to W.*save_original_form"):
        Merger(Doubling(), {"w": "w"}).assemblies(torch.nn.Module(), "W", {"w": (2, 3)})


def test_tensors_that_are_saved_together_are_written_as_the_model_has_them(monkeypatch):
    """Tensors that can only be converted together are exported under the names of the model.

    In the folders of ERNIE 4.5 VL, experts for text and for images are one list, and
    transformers cannot convert one of them without the other.
    """

    def revert(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(tensors) == 1:
            raise ValueError(f"Expected others, found {list(tensors)}")
        return {"together": torch.cat([tensor.flatten() for tensor in tensors.values()])}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", revert)
    model = architecture_model("t5")
    shapes = {"text": (2, 3), "vision": (4, 3)}
    assert saved_layout(model, shapes) == {"text": "text", "vision": "vision"}
