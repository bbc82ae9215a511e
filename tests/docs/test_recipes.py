"""The recipes in examples/recipes equal those that docs/cards_page.py generates."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lohan.config import field_of
from lohan.errors import ModelError
from lohan.train.language import check_packs
from tests.support.models import GROUPED_SIZES

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("cards_page", ROOT / "docs" / "cards_page.py")
assert SPEC is not None and SPEC.loader is not None
cards_page = sys.modules["cards_page"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cards_page)

MODELS = {model.preset: model for model in cards_page.MODELS}
FILES = [cards_page.name_of(MODELS[preset], card) for preset, card, _ in cards_page.CHOSEN]
QUICK = ("qwen3-0.6b-rtx3060-12gb.toml", "qwen3-8b-rtx4090.toml")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(chosen, marks=() if file in QUICK else pytest.mark.slow, id=file)
        for chosen, file in zip(cards_page.CHOSEN, FILES, strict=True)
    ],
)
def test_header_is_the_forecast_of_a_plan_that_fits(chosen):
    preset, card, batch = chosen
    file = cards_page.RECIPES / cards_page.name_of(MODELS[preset], card)
    assert file.read_text() == cards_page.recipe(MODELS[preset], card, batch)


HUB_CONFIGS = {
    "llama": LlamaConfig(**GROUPED_SIZES),
    "mistral": MistralConfig(**GROUPED_SIZES),
    "qwen3": Qwen3Config(**GROUPED_SIZES),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED_SIZES, moe_intermediate_size=24, num_experts=4),
    "gpt_oss": GptOssConfig(**GROUPED_SIZES, num_local_experts=4),
    # The checkpoints on the hub also have a vision tower.
    "gemma3_text": Gemma3Config(
        text_config={**GROUPED_SIZES, "sliding_window": 8},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
}


@pytest.mark.parametrize("kind", HUB_CONFIGS)
def test_recipes_pack_if_the_model_keeps_examples_apart(kind):
    presets = tomllib.loads((ROOT / "lohan" / "planner" / "models.toml").read_text())
    models = [m for m in MODELS.values() if presets[m.preset]["model_type"] == kind]
    assert models
    config = HUB_CONFIGS[kind]
    if kind == "gemma3_text":
        model = Gemma3ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    for each in models:
        if each.packs:
            check_packs(model)
        else:
            with pytest.raises(ModelError, match="train without --pack"):
                check_packs(model)


def test_every_recipe_is_made_and_has_settings_that_exist():
    assert sorted(path.name for path in cards_page.RECIPES.iterdir()) == sorted(FILES)
    for path in cards_page.RECIPES.iterdir():
        for section, entry in tomllib.loads(path.read_text()).items():
            keys = entry if isinstance(entry, dict) else {"": None}
            for key in keys:
                field_of(f"{section}.{key}".rstrip("."))
