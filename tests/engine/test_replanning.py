"""A run that measures itself: rates from spans, a new plan where it pays, the same numbers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig

from lohan.config import load_config
from lohan.engine import replanning as replan
from lohan.engine.context import PlanContext
from lohan.engine.profile import cache_file
from lohan.engine.replanning import COMPARED_STEP
from lohan.errors import ConfigError
from lohan.model.machine import Drive, Profile
from lohan.planner.forecast import profile_of_step
from lohan.schedule.simulate import BytesPerParameter, SiteWork, StepWork
from lohan.train import trainer
from lohan.util.trace import Span
from tests.support import process_hooks
from tests.support.models import attached, batches, save_model, small_model
from tests.support.training_runs import RecordingDisplay

BLOCK = SiteWork(forward_flops=100.0, recompute_flops=80.0, tokens=8)
HEAD = SiteWork(forward_flops=10.0, recompute_flops=0.0, tokens=8, head=True, at_once=True)
WORK = StepWork(
    sites=(BLOCK, BLOCK, HEAD),
    groups=(50, 50, 5),
    chunk_params=32,
    per_parameter=BytesPerParameter(weight=4, state=8, gradient=4),
)


def test_rates_come_from_the_spans():
    spans = [
        Span("compute", "F0", 0.0, 1.0),
        Span("compute", "F1", 1.0, 2.0),
        Span("compute", "F2", 2.0, 5.0),
        Span("compute", "B1", 5.0, 8.0),
        Span("compute", "B0", 8.0, 11.0),
        Span("optimizer", "U0.0", 11.0, 12.0),
        Span("optimizer", "U0.1", 12.0, 13.0),
        Span("ssd", "R0", 0.0, 2.0),
        Span("ssd", "W0.0", 1.0, 4.0),
    ]
    actual = profile_of_step(spans, WORK, host_bytes=10**9)
    assert actual is not None
    assert actual.flops_at(8) == pytest.approx(200 / 2)
    # 6 s of backward, 160 FLOPs of it repeated at 100 per second
    assert actual.backward_flops_at(8) == pytest.approx(400 / (6 - 1.6))
    assert actual.head_flops == pytest.approx(30 / 3)
    assert actual.adam == pytest.approx((32 + 18) / 2)
    # 50 weights read, 32 weights and their state written
    assert actual.ssd_read == actual.ssd_mixed == pytest.approx((50 * 4 + 32 * 12) / 4)


def test_measures_the_rate_between_ranks():
    """Each of two ranks receives the other's shard: 50 parameters, 4 bytes in each direction."""
    spans = [
        Span("compute", "F0", 0.0, 1.0),
        Span("compute", "B0", 1.0, 3.0),
        Span("optimizer", "U0.0", 3.0, 4.0),
        Span("net", "A0", 0.0, 1.0),
        Span("net", "X0", 2.0, 5.0),
    ]
    alone = profile_of_step(spans, WORK, host_bytes=1)
    actual = profile_of_step(spans, replace(WORK, world=2), host_bytes=1)
    assert actual is not None and alone is not None
    assert actual.net == alone.net == 0.0, "as fast as links that are not known"
    linked = [*spans, Span("h2d", "L0", 0.0, 1.0), Span("d2h", "D0", 2.0, 3.0)]
    for work, net in ((WORK, 0.0), (replace(WORK, world=2), 2 * 50 * 4 / 4)):
        actual = profile_of_step(linked, work, host_bytes=1, device_bytes=1)
        assert actual is not None and actual.net == pytest.approx(net)


def test_replans_while_only_the_head_is_trained(tmp_path):
    """No block has a backward then, so none of them can be measured."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
    )
    model = BertForSequenceClassification(config).train()
    model.bert.requires_grad_(False)
    batch = {"input_ids": torch.arange(32).view(4, 8), "labels": torch.tensor([0, 1, 2, 0])}
    with attached(model, tmp_path, batch=batch) as session:
        for _ in range(COMPARED_STEP + 1):
            model(**batch).loss.backward()
            session.replan()
        assert session.step == COMPARED_STEP + 1


def test_step_without_updates_yields_no_profile():
    spans = [Span("compute", "F0", 0.0, 1.0), Span("compute", "B0", 1.0, 2.0)]
    assert profile_of_step(spans, WORK, host_bytes=1) is None


def test_lanes_are_compared_one_by_one():
    predicted = {"compute": 2.0, "ssd": 1.0, "optimizer": 0.01, "h2d": 0.0}
    measured = {"compute": 2.3, "ssd": 1.3, "optimizer": 0.05, "h2d": 0.0}
    actual = replan.surprises(predicted, measured, step_s=3.0)
    assert actual == "ssd was busy for 1.3 s of a step, 1 s were predicted"
    assert replan.surprises(predicted, {**measured, "ssd": 1.1}, step_s=3.0) == ""
    both = replan.surprises(predicted, {**measured, "compute": 1.0}, step_s=3.0)
    assert both.startswith("compute was busy for 1 s of a step, 2 s were predicted; ssd was busy")


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, object]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        use_cache=False,
        tie_word_embeddings=False,
    )
    save_model(tmp_path / "model", config, seed=3)
    rows = [{"input_ids": [(7 * i + j * j) % 300 for j in range(48)]} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": tmp_path / "model",
        "data": tmp_path / "data.jsonl",
        "budget.host": "64MiB",
        "train.steps": 8,
        "train.batch": 3,
        "train.lr": 1e-2,
        "output.export": False,
    }


def train(inputs: dict[str, object], out: Path, **changes: object) -> tuple[list[float], list[str]]:
    losses, planned, _ = watched(inputs, out, **changes)
    return losses, planned


def watched(
    inputs: dict[str, object], out: Path, **changes: object
) -> tuple[list[float], list[str], list[str]]:
    """Return losses, notes about new plans, and all notes."""
    given = {**inputs, "out": out, **{f"train.{key}": value for key, value in changes.items()}}
    shown = RecordingDisplay()
    trainer.train(load_config(None, overrides=given), shown)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    planned = [note for note in shown.notes if "new plan" in note]
    return [row["loss"] for row in rows], planned, shown.notes


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_planning_anew_changes_speed_only(inputs, tmp_path, monkeypatch, clip):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    want, _ = train(inputs, tmp_path / "plain", clip=clip, activations="recompute", overlap=False)
    monkeypatch.setattr(replan, "REPLAN_SPEEDUP", 0.0)  # any other plan is worth it
    machine_plan = replan.make_plan

    def other(problem):
        """Plan as for a machine with slow compute, which would keep activations."""
        return machine_plan(replace(problem, options=replace(problem.options, activations="all")))

    monkeypatch.setattr(replan, "make_plan", other)
    got, notes = train(inputs, tmp_path / "replanned", clip=clip)
    assert got == want
    assert notes and notes[0].startswith(f"after step {COMPARED_STEP}: measured the first steps")
    assert "activations kept instead of recomputed" in notes[0]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_user_loop_replans_by_calling_session_replan(accumulated, tmp_path, monkeypatch):
    """A user loop replans by calling `Session.replan` after each step.

    This works also if a step is several calls, with evaluations between them, which do not
    count.
    """
    data, losses, messages = batches(5, batch=2, seq=16), {}, []
    seen: list[Any] = []  # spans of each look
    measured = PlanContext.measured
    monkeypatch.setattr(
        PlanContext, "measured", lambda *given: seen.append(given[1]) or measured(*given)
    )
    for overlap in (False, True):
        if overlap:
            for name in ("make_plan", "REPLAN_SPEEDUP"):  # put back at the end
                monkeypatch.setattr(replan, name, getattr(replan, name))
            process_hooks.replan_at_once()
        model, run_losses = small_model("llama"), losses.setdefault(overlap, [])
        with attached(
            model, tmp_path / str(overlap), batch=data[0], activations="holistic", overlap=overlap
        ) as session:
            for number, batch in enumerate(data):
                with session.accumulate() if accumulated > 1 else nullcontext():
                    for _ in range(accumulated):
                        loss = model(**batch).loss
                        loss.backward()
                run_losses.append(loss.item())
                del loss
                for _ in range(number):
                    with torch.no_grad():
                        model(**batch)
                if overlap:
                    messages.append(session.replan())
            assert bool(session.plan.kept) is overlap
    assert losses[True] == losses[False]
    assert [number for number, words in enumerate(messages, 1) if words] == [3], messages
    assert messages[2].startswith("measured the first steps; a new plan should make steps")
    names = [span.name for span in seen[0] if span.lane == "compute"]
    assert {names.count(name) for name in names} == {1}
    assert any(name[0] == "F" for name in names) and any(name[0] == "B" for name in names)


def test_a_plan_file_says_what_is_kept(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    want, _ = train(inputs, tmp_path / "plain", activations="recompute")
    file = tmp_path / "plan.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is not a plan"):
        train(inputs, tmp_path / "bad", activations=str(file))
    from lohan.model.plan import Plan

    plan = Plan(
        dtype="fp32",
        micro_batch=None,
        chunk_params=1,
        head_tokens=1,
        weight_slots=1,
        kept=(("mm v_proj", 4),),
    )
    file.write_text(json.dumps({"plan": plan.to_json()}))
    got, _ = train(inputs, tmp_path / "kept", activations=str(file))
    assert got == want


def test_a_known_machine_keeps_activations_from_the_first_step(inputs, tmp_path, monkeypatch):
    """A profile of the drive, as `lohan profile` leaves it, of a machine that computes slowly."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    want, _, shown = watched(inputs, tmp_path / "unknown")
    assert not [note for note in shown if "kept activations" in note]
    drive = Drive(name="fast", read=1e11, write=1e11, mixed=1e11)
    slow = Profile(
        name="slow",
        device="cpu",
        compute=((1.0, 1e6),),
        host_bytes=2**30,
        adam=1e12,
        drives=(drive,),
    )
    file = cache_file([tmp_path])
    file.parent.mkdir(parents=True)
    file.write_text(slow.to_toml())
    got, _, shown = watched(inputs, tmp_path / "known")
    assert [note for note in shown if "kept activations" in note]
    assert got == want
    # The machine is not what its profile says, and the run tells which lane and by how much. What
    # later steps say depends on how busy this machine is.
    actual = next(note for note in shown if "were predicted" in note)
    assert actual.startswith(f"after step {COMPARED_STEP}: ")
    compute = next(part for part in actual.split("; ") if "compute was busy for " in part)
    measured, predicted = (float(compute.split(" s ")[i].split()[-1]) for i in (0, 1))
    assert 0 < measured < predicted / 100
