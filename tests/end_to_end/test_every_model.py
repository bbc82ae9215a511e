"""Tiny models of transformers' classes train as in memory; docs/models.md lists them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import transformers

from docs.models_sweep import BY_TESTS, RESULTS, checked_classes, page_of, read_results, sweep
from lohan.engine import context
from tests.support.every_model import (
    MAPPINGS,
    Compare,
    batches_for,
    build,
    classes,
    in_memory,
    moved_by_an_ulp,
    row_of,
)
from tests.support.generated_cases import thinned

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "key",
    thinned(
        [
            "causal/gemma4_text",
            "causal/lfm2_moe",
            "causal/mamba2",
            "masked/ibert",
            "text to text/marian",
            "image-text/qwen3_vl",
            "image-text/llava_next",
            "image-text/smolvlm",
        ],
        1,
        3,
    ),
)
def test_a_sample_of_model_classes_is_exact(key, tmp_path):
    """A few unusual classes are exact.

    They have keys and values shared by layers, convolutions and experts, or state spaces;
    buffers created like parameters, and blocks that decide by values in training; positions
    that no checkpoint has; images whose lengths Python reads, and a tower that is reached; a
    tower whose second-to-last hidden states are used; images that are inspected before they are
    used.
    """
    row = row_of(*key.split("/"), tmp_path)
    assert (row.status, row.reason, row.idle) == ("exact", "", "")


def test_reports_a_wrong_gradient_where_the_exact_one_is_zero():
    """A key's bias has a gradient of zero in exact arithmetic, 1e-11 here; the largest is 0.3."""
    model = build("masked", "bert")
    compare = Compare(model, batches_for("masked", model))
    run = in_memory(moved_by_an_ulp(model, 99), compare.data, compare.eps)
    assert compare.problem("again", run) == ""
    name = "bert.encoder.layer.0.attention.self.key.bias"
    assert float(run.moments[name].abs().max()) < 1e-10
    run.moments[name][3] += 1e-9
    assert f"gradient of {name} is 1.0e-09 from fp64" in compare.problem("again", run)


def test_reports_blocks_that_backward_does_not_reach(tmp_path, monkeypatch):
    """The same model without images: exact, and not tested."""
    monkeypatch.setattr("tests.support.every_model.vision_config", lambda config: None)
    row = row_of("image-text", "llava", tmp_path)
    assert (row.status, row.idle) == ("exact", "model.vision_tower.encoder.layers")
    assert not checked_classes({"one": asdict(row)})
    assert checked_classes({"one": {**asdict(row), "idle": ""}}) == {row.name}


def test_results_equal_the_table_of_the_page():
    text = (ROOT / "docs/models.md").read_text()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("the page is of another transformers")
    rows = read_results(RESULTS)
    assert page_of(rows) == text
    assert checked_classes(rows) | set(BY_TESTS) == context.tested_classes()
    assert len(context.tested_classes()) > 400
    assert not [key for key, row in rows.items() if row["status"] in ("wrong", "error")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAPPINGS)
def test_every_model_class_is_exact_or_refused(kind):
    rows = list(sweep([(kind, model_type) for model_type in classes(kind)], jobs=1))
    by_status: dict[str, list[str]] = {}
    for row in rows:
        by_status.setdefault(row["status"], []).append(row["name"])
    assert not {"wrong", "error", "not done"} & by_status.keys(), by_status
    good = len(by_status.get("exact", [])) + len(by_status.get("nothing kept", []))
    assert good >= 0.9 * (good + len(by_status.get("refused", []))), by_status
