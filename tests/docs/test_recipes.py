"""The recipes in examples/recipes are what docs/cards_page.py makes of today's forecasts."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from lohan.config import field_of

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


def test_every_recipe_is_made_and_has_settings_that_exist():
    assert sorted(path.name for path in cards_page.RECIPES.iterdir()) == sorted(FILES)
    for path in cards_page.RECIPES.iterdir():
        for section, entry in tomllib.loads(path.read_text()).items():
            keys = entry if isinstance(entry, dict) else {"": None}
            for key in keys:
                field_of(f"{section}.{key}".rstrip("."))
