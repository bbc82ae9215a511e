"""`lohan doctor --gpu` handles processes that fail, compares figures with a card's, and reports.

The checks themselves run on software CUDA (tests/softcuda/check_commands.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lohan.planner.presets import gpu_of
from lohan.tools import gpu_checks, self_test
from lohan.tools.self_test import Bound, Checked, checked, compared, describe, expected
from tests.support.training_runs import assert_refused

CARD = "NVIDIA GeForce RTX 4090"
SLOT = {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16"}


# -- processes ------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(self_test, "MODULE", "tests.tools.ends")
    for name, check in gpu_checks.CHECKS.items():
        late = 0.5 if name == "block" else 60
        monkeypatch.setitem(gpu_checks.CHECKS, name, replace(check, deadline_s=late))


def test_a_check_that_crashes_hangs_or_exits_hides_nothing(ends, tmp_path):
    crashed = checked("matmul", CARD, tmp_path)
    assert crashed.state == "crashed" and "SIGSEGV" in crashed.error
    assert crashed.again is not None and crashed.again["state"] == "ok"
    lines = describe(crashed, "lohan doctor --gpu")
    assert "CUDA_LAUNCH_BLOCKING=1: ok" in lines[1]
    assert lines[-1].endswith("lohan doctor --gpu --check matmul")
    late = checked("block", CARD, tmp_path)
    assert late.state == "timed out" and "no answer within" in late.error and late.again is None
    left = checked("links", CARD, tmp_path)
    assert left.state == "crashed" and "exit code 3" in left.error
    fine = checked("optimizer", CARD, tmp_path)
    assert fine.state == "ok" and fine.figures[0].ok is True
    collected = [crashed, late, left, fine]
    assert not self_test.passed(collected) and "3 of 4 checks failed" in self_test.summary(
        collected
    )
    text = self_test.report(collected, "cuda")
    assert str(Path.home()) not in text and "says something of ~" in text
    loaded = json.loads(text)
    assert [each["state"] for each in loaded["checks"]] == [each.state for each in collected]
    assert loaded["checks"][3]["figures"][0]["value"] == 2e9 and not loaded["passed"]


# -- expectations ---------------------------------------------------------------------------------


def test_expects_rates_of_the_preset_and_the_slot():
    result = expected(CARD, SLOT)
    assert result["matmul"].least == pytest.approx(150e12, rel=0.01)
    assert result["block_forward"].least == pytest.approx(120e12, rel=0.01)
    assert result["h2d"].least == pytest.approx(24e9, rel=0.01)
    assert result["both_ways"].least == pytest.approx(40e9, rel=0.01)
    assert result["free_bytes"].least == pytest.approx(23 * 2**30, rel=0.01)
    assert result["adam"].least == 1.8e9 and result["adam_beside_copies"].least == 1.0e9
    other = expected("NVIDIA TITAN V", {})
    assert "matmul" not in other and "h2d" not in other and "pin_rate" in other
    assert gpu_of("NVIDIA A100 80GB PCIe")["device"] == "A100 80GB"
    assert gpu_of("AMD Radeon") is None


def test_figures_are_compared_on_real_devices_only():
    figures = {"h2d": 11e9, "reserved_of_planned": 1.2, "seconds": 3.0}
    slow = compared(figures, CARD, SLOT)
    assert [figure.ok for figure in slow] == [False, False, None]
    assert "11 GB/s (>= 2" in str(slow[0]) and "(<= 1.05)" in str(slow[1])
    assert "nothing to compare with" in str(slow[2])
    for none in ("software CUDA 0", "trial"):
        assert {f.note for f in compared(figures, none, SLOT)} == {"not a real device"}


def test_slow_check_gives_advice_and_does_not_fail(tmp_path):
    def run(*_, **__):
        return {"state": "ok", "card": CARD, "figures": {"h2d": 6e9}, "facts": SLOT}

    slow = checked("links", "cuda", tmp_path, run=run)
    assert slow.state == "slow" and any("slot is narrow" in line for line in describe(slow, "x"))
    assert self_test.passed([slow]) and "slower than such a card" in self_test.summary([slow])
    assert Bound(least=2.0).holds(2.0) and not Bound(most=2.0).holds(2.1)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Run the checks in this process."""

    def run(name, device, folder, **_):
        return gpu_checks.run_here(name, device, folder)

    defaults = {**self_test.checked.__kwdefaults__, "run": run}
    monkeypatch.setattr(self_test.checked, "__kwdefaults__", defaults)
    monkeypatch.setattr(self_test.self_test, "__kwdefaults__", defaults)


def test_without_a_device_only_the_first_check_runs(here, lohan, tmp_path):
    file = tmp_path / "report.json"
    ended = lohan("doctor", "--gpu", "--ssd", tmp_path, "-o", file)
    assert ended.code == 1 and "torch finds no accelerator" in ended.out, ended
    assert "1 of 1 checks failed: device" in ended.out and "again:" in ended.out
    assert json.loads(file.read_text())["report"] == self_test.REPORT
    assert lohan("doctor", "--gpu", "--ssd", tmp_path, "-o", file).code == 1  # its own: replaced


def test_options_that_do_not_fit(lohan, tmp_path):
    assert_refused(lohan("doctor", "--check", "links"), r"--check: belongs to `lohan doctor --gpu`")
    assert_refused(
        lohan("doctor", "--gpu", "--check", "x"), r"--check x: there is no such check.*links"
    )
    assert_refused(lohan("doctor", "--gpu", "--ssd", tmp_path / "no"), r"no such folder")
    assert_refused(
        lohan("doctor", "--gpu", "--device", "emulated"), r"checks a GPU; leave --device out"
    )
    foreign = tmp_path / "mine.json"
    foreign.write_text("{}")
    assert_refused(lohan("doctor", "--gpu", "--ssd", tmp_path, "-o", foreign), r"left unchanged")
    assert foreign.read_text() == "{}"


def test_every_check_says_what_it_is_about():
    page = (Path(__file__).parents[2] / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == list(gpu_checks.CHECKS)
    assert all(check.about and check.deadline_s <= 1800 for check in gpu_checks.CHECKS.values())
    assert Checked("links", "ok").lines(5, "") == ["ok        links"]
