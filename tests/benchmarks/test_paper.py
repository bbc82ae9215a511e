"""The reproduced results of the paper stay within fixed limits of the published ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lohan.errors import LohanError
from lohan.planner import presets
from lohan.planner.systems import fits, policy, run
from tests.support import HANG_S

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "paper"
DOCUMENT = FOLDER.parents[1] / "docs" / "paper.md"


@pytest.fixture(scope="module")
def points():
    sys.path.insert(0, str(FOLDER))
    try:
        import points as module

        yield list(module.points())
    finally:
        sys.path.remove(str(FOLDER))


def errors(points, chosen):
    actual = {f"{p.figure}, {p.series}, {p.at}": p.error for p in points if chosen(p)}
    return {name: error for name, error in actual.items() if error is not None}


def share_within(results, limit):
    return sum(abs(error) <= limit for error in results.values()) / len(results)


def test_lohan_is_within_10_percent_on_most_points_and_20_on_all(points):
    actual = errors(points, lambda p: p.policy == "lohan" and not p.series.startswith("lohan, "))
    assert len(actual) > 50
    assert share_within(actual, 0.1) >= 0.8, actual
    assert {name: error for name, error in actual.items() if abs(error) > 0.2} == {}


def test_dit_is_within_10_percent_from_a_card_full_to_far_beyond_it(points):
    actual = errors(points, lambda p: p.figure.startswith("DiT") and p.policy == "lohan")
    assert len(actual) == 6 and max(map(abs, actual.values())) < 0.1, actual


def test_four_gpus_are_within_20_percent(points):
    four = [p for p in points if p.figure.startswith("Four RTX 4090") and p.policy == "lohan"]
    actual = errors(four, lambda p: True)
    assert len(four) == 5 and len(actual) == 4  # a batch of 512 does not fit, there and here
    assert all(abs(error) <= 0.2 for error in actual.values()), actual


def test_one_compute_rate_fits_systems_not_used_to_derive_it(points):
    """One rate of forward and backward fits two systems that were not used to derive it."""
    peer = errors(points, lambda p: p.policy == "slideformer" and p.unit == "tokens/s")
    assert len(peer) == 2 and max(map(abs, peer.values())) < 0.05, peer
    large = errors(
        points,
        lambda p: (
            p.figure == "Throughput of GPT 13B by batch" and p.policy == "lohan" and p.at >= 64
        ),
    )
    assert len(large) == 2 and max(map(abs, large.values())) < 0.06, large


def test_least_time_is_at_few_swapped_bytes_as_published(points):
    curve = [p for p in points if p.over == "swapped_gib"]
    for value in ("published", "ours"):
        assert min(curve, key=lambda p: getattr(p, value)).at in (42, 48)
    assert max(abs(p.error) for p in curve) < 0.1


def test_two_gpus_take_about_as_long_as_four():
    """With equal rows per GPU, only the reads for sums in host memory differ."""
    model, machine = presets.model("gpt-13b"), presets.machine("ratel-4090")
    one, two, four = (
        run(policy("lohan"), model, replace(machine, gpus=gpus), batch=8 * gpus, seq=1024).step_s
        for gpus in (1, 2, 4)
    )
    assert 0.88 < two / four < 0.95 and 1.4 < two / one < 1.5


@pytest.mark.parametrize("host_gb", [256, 768])
def test_the_largest_model_is_the_same_on_a_card_of_16_gib(host_gb):
    """The limit is not memory: the next size has matrices of 4 GiB in fp32."""
    machine = replace(presets.machine("ratel-4080"), host_bytes=host_gb * 10**9)
    actual = {
        size: fits(policy("lohan"), presets.model(f"gpt-{size}b"), machine, batch=1, seq=1024)
        for size in (276, 412)
    }
    assert not actual[276].reason
    assert "4.00 GiB in fp32" in actual[412].reason and "smaller model" in actual[412].reason


@pytest.mark.parametrize("name", ["zero-infinity", "zero-offload"])
def test_peers_are_within_20_percent_on_most_points(points, name):
    actual = errors(points, lambda p: p.policy == name)
    assert len(actual) > 1 and share_within(actual, 0.2) >= 0.8, actual


def test_predicts_out_of_memory_and_largest_models_as_published(points):
    memory = [p for p in points if p.is_memory]
    assert len(memory) > 40
    assert [p for p in memory if not p.right] == []


def test_the_data_hold_every_published_figure(points):
    assert len(points) > 100
    assert {p.policy for p in points} == {
        "lohan",
        "slideformer",
        "zero-infinity",
        "zero-offload",
        "colossal-ai",
        "flashneuron",
        "fast-dit",
        "megatron",
    }


def test_the_script_prints_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    ended = subprocess.run(
        [
            sys.executable,
            str(FOLDER / "reproduce.py"),
            "--json",
            "--figure",
            "largest",
            "--plot",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    rows = json.loads(ended.stdout)
    assert rows[0]["figure"] == "Largest model by main memory, batch 1" and "error" in rows[0]
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn[-1] == "overview.png" and drawn[0].startswith("01-largest-model")


def test_document_holds_the_summary_of_all_points(points):
    import reproduce

    text = DOCUMENT.read_text(encoding="utf-8")
    assert reproduce.with_summary(text, points) == text, (
        "python benchmarks/paper/reproduce.py --docs docs/paper.md"
    )
    with pytest.raises(LohanError, match="end of summary"):
        reproduce.with_summary(text.replace("<!-- end of summary -->", ""), points)


def test_the_tables_say_how_far_apart_they_are(points):
    import reproduce

    lines = reproduce.summary(points)
    assert lines[-1].startswith("what fits: ") and any(line.startswith("lohan ") for line in lines)
    first = [point for point in points if point.figure == points[0].figure]
    text = "\n".join(reproduce.table(points[0].figure, first))
    assert "no room" in text and "batch 128" in text and " %" in text
