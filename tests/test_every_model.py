"""Tiny models of transformers' classes are trained as in memory, and docs/models.md says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lohan.capture.tested import TESTED
from tests.every_model import MAPPINGS, classes, row_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "key",
    ["causal/gemma4_text", "causal/lfm2_moe", "causal/mamba2", "masked/ibert",
     "text to text/marian"],
)  # fmt: skip
def test_a_few_classes_are_exact(key, tmp_path):
    """Keys and values shared by layers, convolutions and experts, state spaces; buffers made like
    parameters and blocks that decide by values in training; positions that no checkpoint has."""
    row = row_of(*key.split("/"), tmp_path)
    assert (row.status, row.reason) == ("exact", "")


def test_the_table_is_what_the_page_says():
    text = (ROOT / "docs/models.md").read_text()
    exact = set(re.findall(r"^\| `(\w+)` \| exact", text, re.M))
    assert exact <= TESTED
    assert len(exact) > 150
    assert not re.search(r"^\| `\w+` \| wrong", text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAPPINGS)
def test_every_class(kind):
    from docs.models_sweep import sweep

    rows = list(sweep([(kind, model_type) for model_type in classes(kind)], jobs=1))
    by_status: dict[str, list[str]] = {}
    for row in rows:
        by_status.setdefault(row["status"], []).append(row["name"])
    assert not by_status.get("wrong"), by_status
    good = len(by_status.get("exact", [])) + len(by_status.get("nothing kept", []))
    bad = len(by_status.get("refused", [])) + len(by_status.get("error", []))
    assert good >= 0.9 * (good + bad), by_status
