"""Kept activations, their placement and replanning change no bit of the result."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import lohan
from lohan.capture import recompute
from lohan.capture.blocks import cut
from lohan.engine.context import workload_of
from lohan.errors import BudgetError
from lohan.model.options import PlanOptions
from lohan.planner.activations import HOST_ONLY
from lohan.planner.planner import PlanProblem, closed_form_plan
from tests.support.delayed_runs import (
    KEPT_SEQ,
    KEPT_STEPS,
    SLOW_PROFILE,
    budget_that_spills,
    folder_fixture,  # noqa: F401 - a fixture
    kept_batch,
    train_with_kept_activations,
)
from tests.support.generated_cases import pairwise
from tests.support.models import attached, batches, small_model


@pytest.fixture(scope="module")
def recomputed(folder, tmp_path_factory):
    """Return losses and state of a run that keeps nothing, once per micro-batch and clip."""

    @functools.cache
    def run(micro_batch, clip):
        want, plan, moved = train_with_kept_activations(
            folder,
            tmp_path_factory.mktemp("recomputed") / "ssd",
            activations="recompute",
            overlap=False,
            micro_batch=micro_batch,
            clip=clip,
        )
        assert not plan.kept and not moved
        return want

    return run


@pytest.mark.parametrize(
    ("micro_batch", "clip", "tight", "overlap"),
    pairwise([None, 1, 3], [0.0, 0.5], [False, True], [True, False]),
)
def test_keeping_and_spilling_activations_change_no_bit(
    folder, recomputed, tmp_path, micro_batch, clip, tight, overlap
):
    want = recomputed(micro_batch, clip)
    host = budget_that_spills(folder, micro_batch, clip, overlap) if tight else "64MiB"
    got, plan, moved = train_with_kept_activations(
        folder,
        tmp_path / "ssd",
        activations="all",
        overlap=overlap,
        delays=int(tight),
        host=host,
        micro_batch=micro_batch,
        clip=clip,
    )
    assert plan.kept
    assert got[0] == want[0]
    if tight:
        assert plan.spilled_sites and moved
        assert not list(tmp_path.glob("ssd/*activations*"))
    else:
        assert got == want and not moved


RIVALS = ("static", "capuchin", "checkmate", "g10", "holistic")


def same_by(policy: str, tier: str, micro_batch: int, seed: int, folder: Path, place: Path) -> None:
    """Compare a policy with randomly delayed lanes with a run without overlap."""
    if policy == "checkmate":
        pytest.importorskip("scipy")
    # Policies that know no SSD send block inputs there, and only if memory cannot hold them.
    seq = KEPT_SEQ * 6 if tier == "ssd" and policy in HOST_ONLY else KEPT_SEQ
    host = "64MiB"
    if tier == "ssd":
        host = budget_that_spills(folder, micro_batch, 0.0, policy=policy, seq=seq)
    options = {"micro_batch": micro_batch, "host": host, "seq": seq}
    want, _, _ = train_with_kept_activations(
        folder, place / "plain", activations="recompute", overlap=False, **options
    )
    got, plan, moved = train_with_kept_activations(
        folder, place / "kept", activations=policy, profile=SLOW_PROFILE, delays=seed, **options
    )
    assert bool(plan.kept) is (policy != "static") or (tier == "ssd" and policy in HOST_ONLY)
    assert bool(moved) is (tier == "ssd" or policy == "g10")
    assert got[0] == want[0]


CASES = list(product(RIVALS, ("host", "ssd"), (1, 2, 3, 4)))


# Every policy, both tiers and every micro-batch, though not all of them together.
@pytest.mark.parametrize(
    ("policy", "tier", "micro_batch"),
    [case for n, case in enumerate(CASES) if n % 8 == 3 * (n // 8) % 8],
)
def test_no_policy_changes_a_bit(policy, tier, micro_batch, folder, tmp_path):
    same_by(policy, tier, micro_batch, 11, folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("policy", "tier", "micro_batch"), CASES)
def test_no_policy_changes_a_bit_long_form(policy, tier, micro_batch, seed, folder, tmp_path):
    same_by(policy, tier, micro_batch, seed, folder, tmp_path)


def test_a_batch_longer_than_planned_keeps_nothing(tmp_path, monkeypatch):
    """The plan has no room for its activations; the numbers are the same."""
    kept: list[int] = []  # slices in each step
    run_and_save = recompute.run_and_save

    def counted(*given):
        kept[-1] += 1
        return run_and_save(*given)

    monkeypatch.setattr(recompute, "run_and_save", counted)
    rows, collected = batches(5, batch=4, seq=96), []
    sizes = ((4, 24), (4, 32), (4, 24), (4, 20), (1, 96))  # the last has the tokens of the first
    ids = [row["input_ids"][:m, :n] for row, (m, n) in zip(rows, sizes, strict=True)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in ids]
    for activations in ("all", "recompute"):
        model = small_model("llama")
        model.set_attn_implementation("eager")  # scores grow with the square of the length
        with attached(
            model, tmp_path / activations, batch=data[0], activations=activations
        ) as session:
            for batch in data:
                kept.append(0)
                loss = model(**batch).loss
                loss.backward()
                collected.append(loss.item())
            session.flush()
    assert collected[:5] == collected[5:]
    blocks = kept[0]
    assert blocks > 0 and kept == [blocks, 0, blocks, blocks, 0, *[0] * 5]


def test_block_inputs_beyond_the_budget_go_to_ssd(folder, tmp_path):
    """The budget holds less than the block inputs: they are moved out, with the same result."""
    want, plan, _ = train_with_kept_activations(
        folder, tmp_path / "plain", activations="recompute", overlap=False, seq=KEPT_SEQ * 6
    )
    held = {entry.owner: entry.bytes for entry in plan.ledger}
    model = lohan.load(folder).train()
    blocks = cut(model)
    workload = workload_of(model, blocks, {"input_ids": kept_batch(model, KEPT_SEQ * 6).to("meta")})
    smallest = closed_form_plan(
        PlanProblem(
            blocks,
            PlanOptions(dtype="fp32", activations="recompute"),
            host_bytes=2**26,
            workload=workload,
        )
    )
    sizes = range(smallest.tier_bytes("host"), 0, -50_000)
    for size in sizes:
        try:
            tight = closed_form_plan(
                PlanProblem(
                    blocks,
                    PlanOptions(dtype="fp32", activations="recompute", micro_batch=4),
                    host_bytes=size,
                    workload=workload,
                )
            )
        except BudgetError:
            break
        if tight.spilled_sites:
            got, plan, moved = train_with_kept_activations(
                folder,
                tmp_path / "tight",
                host=f"{size}b",
                activations="recompute",
                micro_batch=4,
                seq=KEPT_SEQ * 6,
            )
            assert got[0] == pytest.approx(want[0], rel=1e-6)
            hidden = 4 * KEPT_SEQ * 6 * 64 * 4  # what takes a gradient; masks and positions stay
            assert moved == KEPT_STEPS * len(plan.spilled_sites) * hidden
            inputs = sum(e.bytes for e in plan.ledger if e.owner == "block inputs")
            assert inputs < held["block inputs"]
            return
    pytest.fail("no budget made block inputs move")


def test_following_another_plan_changes_nothing(folder, tmp_path):
    want, _, _ = train_with_kept_activations(
        folder, tmp_path / "plain", activations="recompute", overlap=False
    )
    other = {}

    def without(session):
        other["plan"] = replace(session.plan, kept=())
        session.follow(other["plan"])

    got, plan, _ = train_with_kept_activations(
        folder, tmp_path / "kept", activations="all", between=without
    )
    assert got == want
    assert plan == other["plan"]


def test_a_second_forward_before_backward_is_not_mixed_up(folder, tmp_path):
    """Two calls of each block wait for backward at once, with one place on SSD each."""

    def run(name: str, **options) -> list[float]:
        model = lohan.load(folder).train()
        ids = kept_batch(model)
        (tmp_path / name).mkdir()
        losses = []
        with lohan.attach(
            model,
            optimizer=lohan.AdamW(lr=1e-2),
            batch={"input_ids": ids},
            budget=lohan.Budget(ssd=[tmp_path / name], host=options.pop("host", "64MiB")),
            **options,
        ) as session:
            for _ in range(KEPT_STEPS):
                first = model(input_ids=ids, labels=ids).loss
                second = model(input_ids=ids.flip(1), labels=ids.flip(1)).loss
                (first + second).backward()
                losses.append(first.item() + second.item())
            if "activations" in options and options["activations"] == "all":
                assert session.executor.runner.activation_spill is not None
        return losses

    want = run("plain", activations="recompute", overlap=False)
    assert run("moved", activations="all", host=budget_that_spills(folder, None, 0.0)) == want


def test_a_plan_that_cannot_be_followed_leaves_the_old_one(folder, tmp_path):
    want, _, _ = train_with_kept_activations(
        folder, tmp_path / "plain", activations="recompute", overlap=False
    )
    seen = {}

    def refused(session):
        seen["plan"] = session.plan
        with pytest.raises(BudgetError, match="optimizer state ring"):
            session.follow(replace(session.plan, ring=10**6))

    got, plan, _ = train_with_kept_activations(
        folder, tmp_path / "kept", activations="all", between=refused
    )
    assert got == want
    assert plan == seen["plan"]
