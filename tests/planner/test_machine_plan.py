"""Plans for other machines fit, and name the bottleneck and changes that help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from lohan.cli.compare import outcome_of
from lohan.cli.plan import describe
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.optim import DEFAULT_KIND, StateKind
from lohan.planner import presets
from lohan.planner.activations import choose, levels
from lohan.planner.machine_plan import (
    PlanRequest,
    fits,
    largest,
    largest_batch,
    layout_of,
    load_of_shape,
    plan_for_machine,
    with_alternatives,
)
from lohan.planner.memory import CARD_OWNERS, MemoryModel
from lohan.planner.planner import PlanProblem, closed_form_plan
from lohan.schedule.simulate import lane_seconds
from lohan.schedule.steps import spec_of
from lohan.util.units import GiB, MiB, format_seconds
from tests.support import HANG_S
from tests.support.generated_cases import thinned

GB = 10**9


def request(
    model: str, machine: str, *, batch: int, host: int | None = None, **options
) -> PlanRequest:
    profile = presets.machine(machine)
    return PlanRequest(
        model=presets.model(model),
        machine=profile,
        batch=batch,
        seq=1024,
        options=PlanOptions(**{"dtype": "bf16", **options}),
        host=host or profile.host_bytes,
    )


@pytest.mark.parametrize(
    ("model", "machine", "batch", "host"),
    thinned(
        [
            ("gpt-13b", "ratel-4090", 32, None),
            ("gpt-175b", "ratel-4090", 16, 256 * GB),
            ("gpt-276b", "ratel-4090", 1, 256 * GB),
            ("llama-3-8b", "rtx3060-12gb", 8, None),
            ("qwen3-32b", "rtx4090", 4, None),
            ("dit-10b", "ratel-4090", 8, None),
        ],
        1,
        3,
        5,
    ),
)
def test_plans_fit_every_tier(model, machine, batch, host):
    plan_request = request(model, machine, batch=batch, host=host)
    machine_plan = plan_for_machine(plan_request)
    assert machine_plan.plan.tier_bytes("host") <= plan_request.host
    assert 0 < machine_plan.plan.tier_bytes("device") <= plan_request.machine.device_bytes
    assert machine_plan.plan.tier_bytes("ssd") <= sum(
        drive.bytes for drive in plan_request.machine.drives
    )
    busy = machine_plan.forecast.busy_s
    assert all(seconds <= machine_plan.forecast.step_s * 1.0001 for seconds in busy.values())
    assert machine_plan.without_binding_s <= machine_plan.forecast.step_s
    assert machine_plan.forecast.binding == max(busy, key=busy.get)
    text = "\n".join(describe(machine_plan, steps=100))
    assert f"{machine_plan.forecast.binding} binds" in text and "tokens/s per 1000 USD" in text


def test_a_card_keeps_some_of_its_memory_for_itself():
    """A preset's plan has the overhead of a run; page tables follow from the host budget."""
    plan_request = request("qwen3-8b", "rtx4090", batch=4, host=64 * GiB)
    machine_plan = plan_for_machine(plan_request)
    ledger = {e.owner: e.bytes for e in machine_plan.plan.ledger if e.tier == "device"}
    assert ledger["allocator rounding"] == int(0.05 * 24 * GiB)
    assert ledger["libraries and kernels"] == 512 * MiB
    assert ledger["page tables of pinned memory"] == 64 * GiB // 4096 * 8 == 128 * MiB
    assert sum(ledger.values()) <= 24 * GiB
    desk = replace(plan_request.machine, device="cpu", device_bytes=0, h2d=0.0, d2h=0.0)
    here = plan_for_machine(replace(plan_request, machine=desk, batch=1))
    assert not {e.owner for e in here.plan.ledger} & set(CARD_OWNERS)


def test_a_card_that_is_large_enough_is_named():
    """The overhead of a card grows with its memory."""
    plan_request = request("llama-3-8b", "rtx4090", batch=1, tiles="off")
    plan_request = replace(plan_request, seq=131072)
    with pytest.raises(BudgetError, match=r"raise --device-memory to [\d.]+ GiB") as refused:
        plan_for_machine(plan_request)
    enough = float(re.search(r"device-memory to ([\d.]+)", str(refused.value))[1]) + 0.01
    larger = replace(plan_request.machine, device_bytes=int(enough * GiB))
    assert fits(replace(plan_request, machine=larger))


@pytest.mark.parametrize(
    ("optimizer", "moments", "each"),
    thinned(
        [
            ("adamw", "bf16", 8),
            ("adamw", "int8", 6.25),
            ("lion", "fp32", 8),
            ("sgd", "int8", 5.125),
        ],
        3,
    ),
)
def test_compares_bytes_and_time_with_the_default_optimizer(optimizer, moments, each):
    """Disk, writes and time by the bytes of their table, next to the default."""
    plan_request = request("qwen3-32b", "rtx4090", batch=16, kind=StateKind(optimizer, moments))
    machine_plan = with_alternatives(plan_for_machine(plan_request))
    usual = machine_plan.default_plan
    assert usual is not None and usual.plan.kind == DEFAULT_KIND
    for plan, wanted in ((machine_plan.plan, each), (usual.plan, 12)):
        state = next(e.bytes for e in plan.ledger if e.owner == "weights and state x2")
        total = sum(group.numel for group in machine_plan.blocks.groups)
        assert state == pytest.approx(2 * wanted * total, rel=1e-3)
    written = machine_plan.forecast.written_bytes / usual.forecast.written_bytes
    assert written == pytest.approx(each / 12, rel=0.01)
    assert machine_plan.forecast.step_s < usual.forecast.step_s
    text = "\n".join(describe(machine_plan, steps=None))
    assert f"{optimizer} with {moments} moments: {each:g} bytes per parameter" in text
    assert "instead of       adamw with fp32 moments: " in text
    plain = plan_for_machine(request("qwen3-32b", "rtx4090", batch=16))
    assert plain.default_plan is None and "instead of" not in "\n".join(describe(plain, steps=None))
    assert plain.forecast.step_s == usual.forecast.step_s


def test_packed_base_shrinks_bytes_on_ssd():
    """A little more than a quarter of the base is stored, and read if it does not fit in memory."""
    plan_request = request("llama-3-70b", "rtx3090", batch=1, host=24 * GB)
    collected = {}
    for base in ("", "nf4"):
        machine_plan = plan_for_machine(
            replace(plan_request, model=replace(plan_request.model, lora=16, base=base))
        )
        lines = {
            entry.owner: entry.bytes for entry in machine_plan.plan.ledger if entry.tier == "ssd"
        }
        text = "\n".join(describe(machine_plan, steps=None))
        assert ("dequantised weights" in text) == bool(base)
        assert "the rest is only read" in text
        collected[base] = (
            lines["frozen weights"],
            machine_plan.forecast.busy_s["ssd"],
            machine_plan.forecast.step_s,
        )
    parameters = sum(block.parameters for block in plan_request.model.blocks)
    others = 2 * (plan_request.model.parameters - parameters)  # embedding and head
    for base, bits in (("", 16), ("nf4", 4.5)):
        assert collected[base][0] == pytest.approx(others + parameters * bits / 8, rel=0.01)
    assert (
        collected["nf4"][1] < 0.33 * collected[""][1]
        and collected["nf4"][2] < 0.6 * collected[""][2]
    )


def test_rounding_takes_the_cores_that_there_are():
    plan_request = request("llama-3-8b", "rtx4090", batch=8, kind=StateKind("adamw", "int8"))
    few = replace(plan_request, machine=replace(plan_request.machine, cores=1.0))
    busy = [plan_for_machine(q).forecast.busy_s["optimizer"] for q in (plan_request, few)]
    assert busy[1] > 2 * busy[0]


def test_the_schedule_that_is_simulated_is_the_one_that_runs():
    """The forecast's phases come from the passes that the executor calls, and pass its checks."""
    from lohan.schedule.actions import empty_buffers
    from lohan.schedule.check import validate

    plan_request = request("gpt-13b", "ratel-4090", batch=8)
    machine_plan = plan_for_machine(plan_request)
    shape = spec_of(layout_of(plan_request.model), machine_plan.plan)
    chain = tuple(action for phase in machine_plan.forecast.phases for action in phase)
    validate(chain, shape, empty_buffers(shape), whole=True)


@pytest.mark.parametrize("batch", thinned([8, 16], 0))
def test_faster_than_the_paper_where_it_counts(batch):
    profile, model = presets.machine("ratel-4090"), presets.model("gpt-13b")
    speeds = {
        name: outcome_of(name, model, profile, batch=batch, seq=1024).tokens_per_s
        for name in ("auto", "lohan", "zero-offload")
    }
    assert speeds["auto"] >= 1.2 * speeds["lohan"]
    assert speeds["auto"] > speeds["zero-offload"]


def never_slower(model, machine, batch):
    shape, profile = presets.model(model), presets.machine(machine)
    auto, paper = (
        outcome_of(name, shape, profile, batch=batch, seq=1024) for name in ("auto", "lohan")
    )
    assert auto.feasible or not paper.feasible, auto.reason
    if paper.feasible:
        assert auto.tokens_per_s >= paper.tokens_per_s


# Where compute binds, all that is left to differ is the wait at the turn.
@pytest.mark.parametrize(
    ("model", "machine", "batch"),
    thinned(
        [
            ("gpt-6b", "ratel-4090", 64),
            ("gpt-6b", "ratel-4090", 128),
            ("gpt-13b", "ratel-4090", 128),
            ("dit-10b", "ratel-4090", 128),
            ("gpt-13b", "ratel-3090", 64),
            # Here the device has just enough memory for what is in flight.
            ("gpt-70b", "ratel-4080", 32),
            ("gpt-135b", "ratel-4090", 32),
            ("gpt-175b", "ratel-3090", 16),
            # And here for slices with which it is at its fastest, no halves of the batch.
            ("gpt-70b", "ratel-4080", 24),
        ],
        0,
        8,
    ),
)
def test_never_slower_than_the_paper(model, machine, batch):
    never_slower(model, machine, batch)


GPTS = ("gpt-6b", "gpt-13b", "gpt-30b", "gpt-70b", "gpt-135b", "gpt-175b")
MACHINES = ("ratel-4090", "ratel-4080", "ratel-3090", "rtx4090")
BATCHES = (1, 4, 8, 16, 32, 64, 128)
GRID = list(product((*GPTS, "dit-10b", "llama-3-8b"), MACHINES, BATCHES))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "machine", "batch"), GRID)
def test_never_slower_than_the_paper_long_form(model, machine, batch):
    never_slower(model, machine, batch)


def test_rejects_drives_with_room_for_one_generation():
    profile, model = presets.machine("ratel-4090").with_drives(1), presets.model("gpt-175b")
    result = outcome_of("auto", model, profile, batch=4, seq=1024)
    assert not result.feasible and "SSD space too small" in result.reason
    with pytest.raises(BudgetError, match="SSD space too small"):
        plan_for_machine(replace(request("gpt-175b", "ratel-4090", batch=4), machine=profile))


def with_room(plan_request, count, each):
    """Return the request with `count` drives that have room for `each` bytes."""
    machine = plan_request.machine.with_drives(count)
    drives = tuple(replace(drive, bytes=each) for drive in machine.drives)
    return replace(plan_request, machine=replace(machine, drives=drives))


def test_activations_that_drives_have_no_room_for_are_not_kept():
    slow = Profile(
        name="desk",
        device="cpu",
        compute=((1.0, 1e11),),
        host_bytes=16 * GB,
        adam=1.5e9,
        drives=(Drive(name="d", read=5e9, write=5e9),),
    )
    plan_request = replace(request("llama-3-8b", "rtx4090", batch=8, host=16 * GB), machine=slow)
    plenty = plan_for_machine(with_room(plan_request, 1, 10**15))
    needed = plenty.plan.tier_bytes("ssd")
    assert plenty.plan.kept and plenty.plan.spilled_sites and not plenty.scarce
    less = plan_for_machine(with_room(plan_request, 1, needed - 1))
    assert less.scarce and not less.plan.kept and less.plan.tier_bytes("ssd") < needed
    assert "the drives have no room for more" in "\n".join(describe(less, steps=None))


def test_advised_number_of_drives_is_enough():
    plan_request = request("llama-3-8b", "rtx4090", batch=64, host=24 * GB)
    with pytest.raises(BudgetError, match=r"fits with \d+ drives") as refused:
        plan_for_machine(with_room(plan_request, 3, 45 * GB))
    assert "and 3 drives can hold" in str(refused.value)
    enough = int(re.search(r"(\d+) drives like the first", str(refused.value))[1])
    assert (
        enough > 3
        and plan_for_machine(with_room(plan_request, enough, 45 * GB)).forecast.step_s > 0
    )
    with pytest.raises(BudgetError):
        plan_for_machine(with_room(plan_request, enough - 1, 45 * GB))


@pytest.mark.parametrize("ask", [plan_for_machine, largest_batch])
def test_a_machine_without_drives_is_refused(ask):
    plan_request = request("llama-3-8b", "rtx4090", batch=8)
    with pytest.raises(ConfigError, match="has no drive; take a machine with one"):
        ask(replace(plan_request, machine=replace(plan_request.machine, drives=())))


@pytest.mark.slow
def test_faster_than_the_paper_with_a_large_model():
    profile = replace(presets.machine("ratel-4090"), host_bytes=256 * GB)
    model = presets.model("gpt-175b")
    auto, paper = (
        outcome_of(name, model, profile, batch=16, seq=1024) for name in ("auto", "lohan")
    )
    assert auto.tokens_per_s >= 1.2 * paper.tokens_per_s


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_choice_is_the_best_of_all(clip):
    """No other choice of activations is faster by the planner's own price."""
    plan_request = request("gpt-6b", "rtx4090", batch=16, clip=clip)
    workload = load_of_shape(plan_request.model, batch=16, seq=1024, dtype="bf16")
    plan = closed_form_plan(
        PlanProblem(
            layout_of(plan_request.model),
            replace(plan_request.options, activations="recompute"),
            host_bytes=plan_request.host,
            workload=workload,
            profile=plan_request.machine,
        )
    )
    memory = MemoryModel(
        layout_of(plan_request.model), "bf16", workload, plan.micro_batch, has_own_memory=True
    )
    bare = replace(plan, host_cached_weights=(), host_cached_state=(), deferred=())

    def price(kept):
        return choose(
            plan_request.machine, memory, workload, bare, limit=plan_request.host, kept=kept
        ).step_s

    best = price(None)
    every = [price(kept) for kept in levels(memory, workload)]
    assert best <= min(every) * 1.0001
    assert max(every) > 1.02 * best  # the choice matters here


def test_fewer_bytes_are_written_when_asked():
    plan_request = request("gpt-13b", "rtx4090", batch=8, clip=1.0)
    fast = plan_for_machine(plan_request)
    sparing = plan_for_machine(
        replace(plan_request, options=replace(plan_request.options, minimise="writes"))
    )
    assert sparing.forecast.written_bytes <= fast.forecast.written_bytes


def test_a_refusal_names_changes_that_are_enough():
    plan_request = request("llama-3-70b", "rtx3060-12gb", batch=64)
    with pytest.raises(BudgetError) as refused:
        plan_for_machine(plan_request)
    text = str(refused.value)
    assert "budget too small" in text and "fits with" in text
    batch = int(text.split("fits with --batch ")[1].split(",")[0].split(";")[0])
    assert fits(replace(plan_request, batch=batch)) and not fits(
        replace(plan_request, batch=batch + 1)
    )


def test_searches_find_the_largest_size_that_fits():
    assert [largest(lambda n: n <= 13, limit) for limit in (5, 13, 100)] == [5, 13, 13]
    assert largest(lambda n: False, 100) == 0
    plan_request = request("gpt-13b", "ratel-4080", batch=1)
    most = largest_batch(plan_request)
    assert fits(replace(plan_request, batch=most)) and not fits(
        replace(plan_request, batch=most + 1)
    )


def test_closed_form_has_the_papers_terms():
    """Forward and backward traffic of the paper's table, from bytes to seconds."""
    from lohan.schedule.simulate import Traffic

    machine = presets.machine("ratel-4090")
    p = 1e9
    result = Traffic(
        forward_s=1.0,
        backward_s=3.0,
        weights=2 * p,
        weights_read=2 * p,
        kept=5e9,
        out=1e9,
        gradients=2 * p,
        state_read=12 * p,
        state_written=14 * p,
        held=0.0,
        updated=p,
    )
    forward, backward = lane_seconds(machine, result)
    read, write = machine.ssd_read, machine.ssd_write
    assert forward["ssd"] == pytest.approx(2 * p / read + 1e9 / write)
    assert backward["ssd"] == pytest.approx((14 * p + 1e9) / read + 14 * p / write)
    assert forward["d2h"] == pytest.approx(5e9 / machine.d2h)
    assert backward["h2d"] == pytest.approx((2 * p + 5e9) / machine.h2d)
    assert backward["optimizer"] == pytest.approx(p / machine.adam)


def test_seconds_for_people():
    assert [format_seconds(s) for s in (0.1234, 95, 7300, 1e6)] == [
        "0.123 s",
        "1 min 35 s",
        "2 h 1 min",
        "11.6 days",
    ]


def test_commands_answer_in_json(lohan):
    common = ("--model", "gpt-6b", "--machine", "ratel-4090", "--json")
    plan = json.loads(lohan("plan", *common, "--batch", 8, "--steps", 10).out)
    assert plan["fits"] and plan["total_s"] == pytest.approx(10 * plan["step_s"])
    assert set(plan["lane_busy_s"]) == {"compute", "h2d", "d2h", "ssd", "optimizer", "net"}
    loaded = json.loads(lohan("simulate", *common, "--policy", "lohan", "--batch", 8).out)
    assert loaded["feasible"] and loaded["tokens_per_s"] > 0
    refused = json.loads(lohan("simulate", *common, "--policy", "zero-offload", "--batch", 64).out)
    assert not refused["feasible"] and "device memory" in refused["reason"]
    no = json.loads(lohan("plan", *common, "--host", "1GB", "--batch", 8).out)
    assert not no["fits"] and "host budget too small" in no["reason"]


def test_plan_of_a_large_model_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['lohan', 'plan', '--model', 'gpt-175b', '--machine', "
        "'ratel-4090', '--host', '256GB', '--batch', '16']; from lohan.cli import main as cli\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'imported'"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == 0, ended.stderr
    assert "tokens/s" in ended.stdout


def test_compare_and_presets_and_bad_names(lohan):
    result = lohan("compare", "--model", "gpt-1.55b", "--machine", "ratel-4090", "--batch", "8,32")
    assert "zero-infinity" in result.out and "batch 32" in result.out
    names = lohan("presets").out
    assert "ratel-4090" in names and "llama-3-8b" in names and "zero-offload" in names
    wrong = lohan("plan", "--model", "gpt-13b", "--machine", "ratel-4099")
    assert wrong.code == 2 and "ratel-4090" in wrong.err
    several = lohan("compare", "--model", "gpt-13b", "--machine", "ratel-4090", "--batch", "8,x")
    assert several.code == 2 and "--batch" in several.err


def test_a_sequence_longer_than_the_device_fits_in_tiles():
    """A block whose work is twice the device runs in the largest tiles that fit.

    A sequence that fits without tiles has none.
    """
    plan_request = replace(request("llama-3-8b", "rtx4090", batch=1), seq=131072)
    with pytest.raises(BudgetError, match="device budget too small"):
        plan_for_machine(replace(plan_request, options=replace(plan_request.options, tiles="off")))
    machine_plan = plan_for_machine(plan_request)
    assert machine_plan.plan.tiles == 8192
    assert machine_plan.plan.tier_bytes("device") <= machine_plan.machine.device_bytes
    text = "\n".join(describe(machine_plan, steps=0, schedule=False, classes=True))
    assert "tiles of 8,192 tokens" in text
    assert "attention" in text and "gate" not in text  # what is inside a tile cannot be kept
    short = replace(plan_request, seq=8192)
    assert plan_for_machine(short).plan.tiles == 0
    smaller = plan_for_machine(
        replace(plan_request, options=replace(plan_request.options, tiles=512))
    )
    assert smaller.plan.tiles == 512
    work = {
        tiles: load_of_shape(
            plan_request.model, batch=1, seq=131072, dtype="bf16", tiles=tiles
        ).measure(1)
        for tiles in (8192, 512)
    }
    tile = plan_request.model.blocks[0].in_tiles().tile_elements * 2 * (8192 - 512)
    assert work[8192].peak_bytes - work[512].peak_bytes >= tile


def test_tiles_repeat_what_was_repeated_without_them():
    block = presets.model("llama-3-8b").blocks[0]
    tiled = block.in_tiles()
    assert tiled.flops_at(4096) == block.flops_at(4096)
    assert tiled.recompute_flops_at(4096) == pytest.approx(block.recompute_flops_at(4096))
    everything = [part.name for part in tiled.activations]
    assert tiled.recompute_flops_at(4096, everything) == tiled.tile_flops > 0
    assert tiled.elements + tiled.tile_elements == pytest.approx(block.elements)
