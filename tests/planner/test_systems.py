"""Policies as data: memory, overlap, and valid schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.errors import ConfigError
from lohan.planner import presets
from lohan.planner.systems import (
    POLICIES,
    Batch,
    PolicyCosts,
    block_work,
    chunk_sizes_of,
    fits,
    holds_on_ssd,
    on_device,
    order_of,
    policy,
    run,
    sites_of,
    spec_of,
    with_choices,
)
from lohan.schedule.actions import Action
from lohan.schedule.ops import Op
from lohan.schedule.simulate import StepWork
from lohan.schedule.steps import check_order, steps
from tests.support.generated_cases import SHAPE_DRIVE, machine_profile, model_shape

LOHAN = policy("lohan")


def shape_for(chosen, small, *, spilled=0.0, gpus=1):
    kept = tuple(frozenset(["a0"]) for _ in small.blocks)
    batch = Batch(tokens=4096, seq=1024, kept=kept, spilled=spilled)
    sites = sites_of(chosen, small, batch, gpus)
    return spec_of(
        chosen,
        small,
        chunk_sizes_of(small),
        sites,
        gpus=gpus,
        spill_gradients=chosen.gradients == "ssd",
    ), sites


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("head", [0, 10**5])
@pytest.mark.parametrize("spilled", [0.0, 0.5])
def test_every_policy_makes_a_sound_schedule(name, head, spilled):
    small = replace(model_shape(layers=4), head_parameters=head, tied=not head)
    spec, _ = shape_for(POLICIES[name], small, spilled=spilled)
    check_order(spec, order_of(spec, POLICIES[name].update_mode))


@pytest.mark.parametrize("mode", ["serial", "naive", "optimized"])
def test_every_way_of_offloading_gradients_is_sound(mode):
    chosen = replace(LOHAN, update_mode=mode)
    spec, _ = shape_for(chosen, model_shape(layers=4))
    check_order(spec, order_of(spec, mode))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs(name):
    roomy = machine_profile(device_bytes=10**12, device_rate=1e12)
    outcome = run(POLICIES[name], model_shape(), roomy, batch=4, seq=1024)
    assert outcome.feasible and outcome.reason == ""
    assert outcome.tokens_per_s == pytest.approx(4 * 1024 / outcome.step_s)
    assert 0 < outcome.lane_busy_s["compute"] <= outcome.step_s * 1.000001
    on_ssd = POLICIES[name].weights == "ssd" or POLICIES[name].state == "ssd"
    assert (outcome.lane_busy_s["ssd"] > 0) == (on_ssd or POLICIES[name].inputs == "ssd")


def test_modes_in_their_order_and_traffic_the_same():
    """13B on the paper's server: overlap only helps, and moves no byte less."""
    server, gpt = presets.machine("ratel-4090"), presets.model("gpt-13b")
    created = {
        mode: run(replace(LOHAN, update_mode=mode), gpt, server, batch=16, seq=1024)
        for mode in ("serial", "naive", "optimized")
    }
    assert created["serial"].step_s > created["naive"].step_s > created["optimized"].step_s
    busy = [outcome.lane_busy_s["ssd"] for outcome in created.values()]
    assert max(busy) == pytest.approx(min(busy), rel=0.02)


def test_ssd_bytes_of_a_step_are_those_of_the_paper():
    """2P + 2P read for compute, 12P read and 14P written by updates; nothing else."""
    small = model_shape(layers=40)
    spec, sites = shape_for(LOHAN, small)
    chunk_sizes = chunk_sizes_of(small)
    work = StepWork(
        sites=sites,
        groups=tuple(map(sum, chunk_sizes)),
        chunk_params=1,
        per_parameter=LOHAN.layout,
        chunk_sizes=chunk_sizes,
    )
    *_, last = steps(spec, order_of(spec, "optimized"), 3)
    count = {kind: 0.0 for kind in "RSW"}
    width = {"R": 2, "S": 12, "W": 14}
    for phase in last.values():
        for action in phase:
            if action.kind in count:
                whole = action.kind == "R"
                numel = (
                    work.groups[action.index] if whole else work.chunk(action.index, action.chunk)
                )
                count[action.kind] += width[action.kind] * numel
    total = sum(work.groups)
    assert count["S"] == 12 * total and count["W"] == 14 * total
    assert 3.5 * total <= count["R"] <= 4 * total  # what stays in its slot is not read again


def test_updates_on_the_device_replace_the_cpu():
    small = model_shape(layers=2)
    spec, _ = shape_for(policy("g10"), small)
    *_, last = steps(spec, order_of(spec, "serial"), 2)
    result = on_device(last["after backward"])
    assert not [a for a in result if a.kind == "U" or any(w[0] == "U" for w in a.waits)]
    assert [a.name for a in result if a.kind == "D"] == [
        "D" + a.name[1:] for a in last["after backward"] if a.kind == "U"
    ]


def test_recomputation_ends_with_what_backward_needs_unless_it_is_whole():
    block = model_shape().blocks[0]
    site = block_work(block, tokens=10, seq=1024)
    assert site.recompute_flops == 10 * (8e6 + 1e5) and site.forward_flops == 10 * block.flops
    whole = block_work(block, tokens=10, seq=1024, whole=True)
    assert whole.recompute_flops == whole.forward_flops
    kept = block_work(block, tokens=10, seq=1024, kept=["a0", "a1"], whole=True)
    assert kept.recompute_flops == kept.recompute_bytes == 0


def test_the_clock_adds_what_software_costs():
    small = model_shape(layers=2)
    spec, sites = shape_for(LOHAN, small)
    chunk_sizes = chunk_sizes_of(small)
    work = StepWork(
        sites=sites,
        groups=tuple(map(sum, chunk_sizes)),
        chunk_params=1,
        per_parameter=LOHAN.layout,
        chunk_sizes=chunk_sizes,
    )
    by_kind = {
        a.kind: a
        for p in steps(spec, order_of(spec, "optimized"), 1)
        for s in p.values()
        for a in s
    }
    plain = PolicyCosts(replace(LOHAN, op_s=0.0), machine_profile(), work)
    slow = PolicyCosts(replace(LOHAN, op_s=1.0), machine_profile(), work)
    for kind, extra in {
        "S": 1,
        "W": 1,
        "R": len(chunk_sizes[by_kind["R"].index]),
        "U": 0,
        "L": 0,
    }.items():
        more = slow.seconds(by_kind[kind]) - plain.seconds(by_kind[kind])
        assert more == pytest.approx(extra)
    limited = PolicyCosts(replace(LOHAN, op_s=0.0, io_rate=1e9), machine_profile(), work)
    assert limited.seconds(by_kind["W"]) == pytest.approx(2 * plain.seconds(by_kind["W"]))
    # Sums in host memory: 2 bytes of every GPU's gradient and 8 of the result, however many.
    update_s = plain.seconds(by_kind["U"])
    for gpus, read in ((1, 0), (2, 12), (4, 16)):
        clock = PolicyCosts(replace(LOHAN, sum_rate=1e9), machine_profile(gpus=gpus), work)
        assert clock.seconds(by_kind["U"]) == pytest.approx((1 + read) * update_s)
    # Compute waits for a share of what its own activations take over the link.
    waiting, smooth = (
        PolicyCosts(replace(LOHAN, stall=s), machine_profile(), work) for s in (0.5, 0.0)
    )
    for kind in (Op.FORWARD, Op.BACKWARD):
        block = Action(kind, 1)
        link_s = sites[1].kept_bytes / machine_profile().h2d
        assert waiting.seconds(block) - smooth.seconds(block) == pytest.approx(link_s / 2)


def test_activations_overflow_from_host_memory_to_ssd():
    gpt, server = presets.model("gpt-70b"), presets.machine("ratel-4090")
    small = run(LOHAN, gpt, replace(server, host_bytes=128 * 10**9), batch=32, seq=1024)
    large = run(LOHAN, gpt, server, batch=32, seq=1024)
    assert small.peak_bytes["host"] <= 128 * 10**9
    assert small.peak_bytes["ssd"] > large.peak_bytes["ssd"]
    only = with_choices(LOHAN, activations="static")
    refused = run(only, gpt, replace(server, host_bytes=100 * 10**9), batch=32, seq=1024)
    assert not refused.feasible and "host memory too small" in refused.reason


def test_held_gradients_go_where_there_is_room():
    gpt, server = presets.model("gpt-175b"), presets.machine("ratel-4090")
    serial = with_choices(LOHAN, update_mode="serial")
    assert holds_on_ssd(serial, gpt, replace(server, host_bytes=256 * 10**9), 8192)
    assert not holds_on_ssd(serial, gpt, replace(server, host_bytes=768 * 10**9), 8192)
    assert holds_on_ssd(policy("zero-infinity"), gpt, server, 8192)
    outcome = run(serial, gpt, replace(server, host_bytes=256 * 10**9), batch=8, seq=1024)
    assert outcome.feasible and outcome.peak_bytes["host"] <= 256 * 10**9


def test_infeasible_outcome_names_both_numbers():
    outcome = run(
        policy("zero-offload"),
        presets.model("gpt-13b"),
        presets.machine("ratel-4090"),
        batch=32,
        seq=1024,
    )
    assert not outcome.feasible and outcome.timeline is None
    assert outcome.to_json()["step_s"] is None
    words = r"zero-offload: device memory too small, .* GiB needed, 24.00 GiB available .*--batch"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(outcome.reason)


def test_a_smaller_batch_is_advised_only_where_it_helps():
    """The memory of the weights does not shrink with the batch."""
    gpt, server = presets.model("gpt-13b"), presets.machine("ratel-4090")
    poor = replace(server, host_bytes=64 * 10**9)
    for chosen, profile in ((policy("zero-offload"), server), (policy("zero-infinity"), poor)):
        outcome = run(chosen, gpt, profile, batch=32, seq=1024)
        one = run(chosen, gpt, profile, batch=1, seq=1024)
        assert not outcome.feasible
        assert one.feasible == ("lower --batch (now 32)" in outcome.reason), outcome.reason
        assert "--batch" not in one.reason
    assert outcome.reason.endswith("; raise --host")


def test_more_memory_never_hurts_and_more_batch_never_helps_to_fit():
    gpt, server = presets.model("gpt-30b"), presets.machine("ratel-4090")
    for chosen in POLICIES.values():
        fitting = [
            not fits(chosen, gpt, replace(server, host_bytes=gb * 10**9), batch=8, seq=1024).reason
            for gb in (64, 128, 256, 512, 1024)
        ]
        assert fitting == sorted(fitting)
        by_batch = [
            not fits(chosen, gpt, server, batch=b, seq=1024).reason for b in (1, 8, 64, 256)
        ]
        assert by_batch == sorted(by_batch, reverse=True)


def test_refuses_choices_that_a_policy_fixes():
    with pytest.raises(ConfigError, match="zero-infinity has update_mode serial, not naive"):
        with_choices(policy("zero-infinity"), update_mode="naive")
    assert with_choices(policy("zero-infinity"), update_mode="serial") == policy("zero-infinity")
    with pytest.raises(ConfigError, match="did you mean zero-infinity"):
        policy("zero-infinty")


@pytest.mark.parametrize(
    ("changes", "batch", "message"),
    [
        ({"device_bytes": 0}, 1, "plain has no GPU"),
        ({"gpus": 4}, 6, "does not divide by 4 GPUs"),
        ({}, 0, "must be positive"),
    ],
)
def test_refuses_unanswerable_simulations(changes, batch, message):
    with pytest.raises(ConfigError, match=message):
        run(LOHAN, model_shape(), machine_profile(**changes), batch=batch, seq=64)


def test_lohan_needs_drives_and_zero_offload_does_not():
    outcome = run(LOHAN, model_shape(), machine_profile(drives=()), batch=1, seq=64)
    assert not outcome.feasible and "ssd" in outcome.reason
    assert run(
        policy("zero-offload"), model_shape(), machine_profile(drives=()), batch=1, seq=64
    ).feasible


def test_full_drive_is_infeasible():
    full = machine_profile(drives=(replace(SHAPE_DRIVE, bytes=10**8),))
    assert "ssd" in run(LOHAN, model_shape(), full, batch=1, seq=64).reason
