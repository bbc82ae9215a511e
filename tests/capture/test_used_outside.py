"""Parts and parameters used outside their block are found, and nothing else."""

from __future__ import annotations

import pytest
import torch

from lohan.capture.blocks import Outside, cut, cut_for, site_names, used_outside
from lohan.checkpoint.hf_folder import build_from_config
from tests.support.architectures import Plain, architecture_batches, architecture_model
from tests.support.models import FAMILY_CONFIGS


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_language_models_are_cut_the_same_with_and_without_a_batch(family):
    """Plans, runs and resumed runs therefore agree, whether or not they have a batch."""
    model = build_from_config(FAMILY_CONFIGS[family], dtype=torch.float32)
    batch = {"input_ids": torch.empty((2, 8), dtype=torch.long, device="meta")}
    assert cut_for(model, batch) == cut(model)


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        ("", Outside()),
        ("module", Outside(modules=("blocks.1.linear",))),
        ("parameter", Outside(parameters=("entry.weight",))),
    ],
)
def test_finds_parts_and_parameters_used_outside_their_block(outside, expected):
    model = Plain(outside=outside)
    assert used_outside(model, site_names(model), Plain.data(1)[0]) == expected
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_dit_calls_a_part_of_its_first_block():
    pytest.importorskip("diffusers")
    model = architecture_model("dit")
    blocks = cut_for(model, architecture_batches("dit", 1)[0])
    (part,) = (s for s in blocks.sites if s.name.startswith("model.transformer_blocks.0."))
    assert part.name == "model.transformer_blocks.0.norm1.emb"
    assert part.groups == ("model.transformer_blocks.0",)
    assert len(blocks.groups) == len(cut(model).groups)
