"""`attach(plan=...)`: a plan is followed if it fits the run, and refused by name if it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lohan
from lohan.errors import BudgetError, ConfigError, LohanError
from lohan.model.plan import Plan
from lohan.util.units import Interval
from tests.support.models import attached, batches, small_model, stored_bytes

DATA = batches(3, batch=2, seq=12)


def run(place: Path, **options) -> tuple[list[float], dict[str, bytes], Plan]:
    losses = []
    with attached(small_model("llama"), place, **options) as session:
        for batch in DATA:
            loss = session.model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        return losses, stored_bytes(session), session.plan


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[list[float], dict[str, bytes], Plan]:
    return run(tmp_path_factory.mktemp("planned"), batch=DATA[0])


def changed(plan: Plan, **fields) -> Plan:
    """Return a plan that keeps nothing in memory, which the planner would not make."""
    empty_fields = {"host_cached_weights": (), "host_cached_state": (), "window": 0, "ring": 1}
    return replace(plan, **{**empty_fields, **fields})


@pytest.mark.parametrize("way", ["object", "json", "file", "output of lohan plan"])
def test_follows_given_plan_with_same_bits(way, planned, tmp_path):
    losses, stored, plan = planned
    other = changed(plan, update_mode="naive", kept=())
    given: object = other
    if way != "object":
        given = json.loads(json.dumps(other.to_json()))
    if way in ("file", "output of lohan plan"):
        text = json.dumps({"model": "m", "plan": given} if way != "file" else given)
        (tmp_path / "plan.json").write_text(text)
        given = tmp_path / "plan.json"
    result = run(tmp_path / "run", batch=DATA[0], plan=given)
    assert result[:2] == (losses, stored)
    followed = result[2]
    assert (followed.ring, followed.window, followed.update_mode) == (1, 0, "naive")
    assert not followed.host_cached_weights and followed.ledger != plan.ledger


def test_keeps_given_plan_when_asked_to_replan(planned, tmp_path):
    plan = changed(planned[2])
    with attached(small_model("llama"), tmp_path, batch=DATA[0], plan=plan) as session:
        for batch in batches(5, batch=2, seq=12):
            session.model(**batch).loss.backward()
            assert session.replan() is None
        assert session.plan.ring == 1


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({"dtype": "bf16"}, {}, "plan: dtype is bf16, this run has fp32; change one of them, or"),
        ({"clip": 2.0}, {}, "plan: clip is 2.0, this run has 0.0"),
        ({"world": 2}, {}, "plan: number of ranks is 2, this run has 1"),
        ({"micro_batch": 1}, {"micro_batch": 2}, "plan: micro_batch is 1, this run has 2"),
        ({"can_rerun": True}, {}, "and run_again is False; set run_again=True"),
        ({"commit": Interval(3)}, {"every": "step"}, "commit_every is 3 steps, this run has every"),
        ({"host_cached_weights": ("x",)}, {}, "host_cached_weights names 'x', and this model has"),
        ({"spilled_sites": ("y",)}, {}, "spilled_sites names 'y', and this model has no such blo"),
        ({"kept": (("z", 1),)}, {}, "kept names 'z', and this model has no such class of activ"),
        ({"kept": (("z", 1),)}, {"batch": None}, "attach has no batch; give batch="),
        ({"weight_slots": 0}, {}, "plan: weight_slots is 0, this model needs at least 1"),
        ({"ring": 0}, {}, "plan: ring is 0, this model needs at least 1"),
        ({"device_slots": 2}, {}, "device_slots is 2, and the device of this run computes in host"),
        ({"chunk_params": 0}, {}, "plan: chunk_params is 0; it must be at least 1"),
    ],
)
def test_refuses_plan_of_another_run_by_name(fields, options, words, planned, tmp_path):
    options = {"batch": DATA[0], **options}
    if every := options.pop("every", None):
        options["budget"] = lohan.Budget(host="64MiB", ssd=[tmp_path], commit_every=every)
    with pytest.raises(ConfigError) as refused:
        attached(small_model("llama"), tmp_path, plan=changed(planned[2], **fields), **options)
    assert words in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_refuses_chunk_that_does_not_exist(planned, tmp_path):
    plan = planned[2]
    key = plan.host_cached_state[0][0]
    wrong = changed(plan, host_cached_state=((key, 999),))
    with pytest.raises(ConfigError, match=f"has chunk 999 of group '{key}', which has 1 chunk of"):
        attached(small_model("llama"), tmp_path, batch=DATA[0], plan=wrong)


def test_refuses_plan_over_budget_with_both_numbers(planned, tmp_path):
    wrong = replace(planned[2], ring=10**6)
    words = r"host budget too small: the given plan needs [\d.]+ .iB, --host allows [\d.]+ .iB"
    with pytest.raises(BudgetError, match=words) as refused:
        attached(small_model("llama"), tmp_path, batch=DATA[0], plan=wrong)
    assert "largest: optimizer state ring" in str(refused.value)
    assert "leave the plan out" in str(refused.value)


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"plan": {"dtype": 3}}'])
def test_refuses_file_that_is_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(LohanError, match=r"plan\.json is not a plan"):
        attached(small_model("llama"), tmp_path / "run", plan=tmp_path / "plan.json")


def test_store_decides_chunks_of_resumed_run(planned, tmp_path):
    run(tmp_path, batch=DATA[0])
    wrong = changed(planned[2], chunk_params=planned[2].chunk_params // 2)
    with pytest.raises(ConfigError, match=r"plan: chunk_params is \d+, this run has \d+"):
        attached(small_model("llama"), tmp_path, batch=DATA[0], plan=wrong, resume=True)
    right = changed(planned[2])
    with attached(
        small_model("llama"), tmp_path, batch=DATA[0], plan=right, resume=True
    ) as session:
        assert session.step == len(DATA) and session.plan.ring == 1
        with torch.no_grad():
            session.model(**DATA[0])
