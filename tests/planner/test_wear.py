"""Wear is reported in rated lives and money, with alternatives that write less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.cli.plan import describe, to_json
from lohan.model.machine import Drive
from lohan.model.options import PlanOptions
from lohan.optim import StateKind
from lohan.planner import presets, wear
from lohan.planner.machine_plan import PlanRequest, plan_for_machine, with_alternatives
from lohan.planner.wear import (
    Alternative,
    describe_wear,
    format_lives,
    format_usd,
    wear_lines,
    wear_of,
    written_per_step,
)
from lohan.util.drives import DriveFacts, Health
from lohan.util.units import Interval

DRIVES = (
    Drive(name="a", read=1.0, write=1.0, endurance_bytes=1e15, usd=100.0),
    Drive(name="b", read=1.0, write=1.0, endurance_bytes=2e15, usd=300.0),
)


def plan_request(
    model: str = "llama-3-8b", *, batch: int = 16, host: int = 0, **options
) -> PlanRequest:
    machine = presets.machine("rtx4090")
    options = PlanOptions(**{"dtype": "bf16", "clip": 1.0, "can_rerun": True, **options})
    return PlanRequest(
        model=presets.model(model),
        machine=machine,
        options=options,
        batch=batch,
        seq=1024,
        host=host or machine.host_bytes,
    )


def test_wear_is_that_of_each_drive_at_its_own_price():
    taken = wear_of(DRIVES, 1e15)  # half of it to each: 0.5 and 0.25 of their lives
    assert (taken.lives, taken.usd) == (0.5, 0.5 * 100 + 0.25 * 300)
    assert taken.times(10).lives == 5 and taken.times(10).usd == 10 * taken.usd
    unknown = wear_of([replace(d, endurance_bytes=0.0) for d in DRIVES], 1e15)
    assert (unknown.lives, unknown.usd) == (0, 0)
    assert describe_wear(unknown) == "909.49 TiB written"
    assert "4.4 times the rated life of the drives, 1,100 USD" in describe_wear(taken.times(8.8))


def test_rated_life_comes_from_the_log_of_the_drive(monkeypatch, tmp_path):
    facts = {
        "a": DriveFacts("nvme0n1", "X", False, Health(20, 10**14), 2 * 10**12),
        "b": DriveFacts("nvme1n1", "X", False, Health(0, 10**12), 2 * 10**12),
    }
    actual = {tmp_path / name: [one] for name, one in facts.items()} | {tmp_path: [facts["a"]]}
    monkeypatch.setattr(wear, "drives_of", lambda place: actual.get(place, []))
    drives = wear.drives_at([tmp_path / "a", tmp_path / "b", tmp_path])
    assert [drive.endurance_bytes for drive in drives] == [5e14, 1.2e15]
    assert [drive.usd for drive in drives] == pytest.approx([160, 160])
    (unseen,) = wear.drives_at([tmp_path / "c"])
    assert unseen.endurance_bytes == 6e14


@pytest.mark.parametrize(
    ("lives", "text"),
    [
        (1e-5, "less than a thousandth of"),
        (0.0042, "0.0042 of"),
        (0.16, "0.16 of"),
        (1.0, "1.0 times"),
        (4.4, "4.4 times"),
        (1234.5, "1,234 times"),
    ],
)
def test_rated_lives_in_plain_numbers(lives, text):
    assert format_lives(lives) == text


def test_money():
    assert [format_usd(usd) for usd in (0.001, 0.5, 12.4, 1234.5)] == [
        "less than a cent",
        "0.50 USD",
        "12 USD",
        "1,234 USD",
    ]


def test_wear_is_in_rated_lives_without_percentages():
    lines = wear_lines(DRIVES, 1e12, steps=8800)
    assert lines[1].startswith("8,800 steps: ") and "4.4 times the rated life" in lines[1]
    assert not any("%" in line for line in lines)


def test_negligible_wear_is_not_reported():
    """A run of a minute does not ask for a cheaper drive."""
    other = Alternative("--moments int8", 1.0, 5e5, "rounded moments")
    assert wear_lines(DRIVES[:1], 1e6, steps=20, instead=[other]) == ["976.56 KiB written per step"]
    reported = wear_lines(DRIVES[:1], 1e6, steps=10**8, instead=[other])  # 0.1 of its life
    assert len(reported) == 3 and "rated life" in reported[0] and "10 USD" in reported[1]
    unknown = [replace(DRIVES[0], endurance_bytes=0.0)]
    assert len(wear_lines(unknown, 1e6, steps=20, instead=[other])) == 3, "not known is not nothing"


def test_alternatives_are_what_the_options_would_give():
    """Each is the plan that one gets with the option, to the byte."""
    request = plan_request()
    machine_plan = with_alternatives(plan_for_machine(request))
    actual = {other.option: other for other in machine_plan.instead}
    assert {"--moments int8", "--commit-every 15min"} <= set(actual)
    changes = {
        "--moments int8": {"kind": StateKind("adamw", "int8")},
        "--commit-every 15min": {"commit": Interval(0, 900.0)},
    }
    for option, changed in changes.items():
        then = plan_for_machine(plan_request(**changed)).forecast
        other = actual[option]
        assert (other.written_bytes, other.step_s) == (then.written_bytes, then.step_s)
    written = [other.written_bytes for other in machine_plan.instead]
    assert written == sorted(written) and max(written) < machine_plan.forecast.written_bytes
    text = "\n".join(describe(machine_plan, steps=500))
    assert "\nwith --moments int8 " in text and "500 steps: " in text and " USD; " in text
    reported = to_json(machine_plan, steps=500, schedule=False)
    assert [row["option"] for row in reported["instead"]] == [
        other.option for other in machine_plan.instead
    ]
    taken = wear_of(request.machine.drives, machine_plan.forecast.written_bytes)
    assert reported["drive_usd_per_step"] == taken.usd > 0


def test_activations_on_ssd_can_be_kept_off_it():
    request = plan_request("qwen3-32b", batch=64, micro_batch=16, kind=StateKind("adamw", "int8"))
    machine_plan = with_alternatives(plan_for_machine(request))
    assert machine_plan.plan.spilled_sites
    options = {other.option.split()[0] for other in machine_plan.instead}
    assert {"--activations", "--host"} <= options and "--moments" not in options


def test_cheapest_plan_costs_at_most_fastest_and_sparing():
    """Its cost, including wear, is at most that of the fastest and of the sparing plan."""
    request = plan_request("qwen3-32b", batch=64, micro_batch=16, kind=StateKind("adamw", "int8"))
    machine = request.machine

    def usd(minimise):
        options = replace(request.options, minimise=minimise)
        forecast = plan_for_machine(replace(request, options=options)).forecast
        worn = wear_of(machine.drives, forecast.written_bytes).usd
        assert worn == pytest.approx(forecast.written_bytes * machine.usd_per_written_byte)
        return forecast.step_s * machine.usd_per_s + worn

    cost, fast, sparing = map(usd, ("cost", "time", "writes"))
    assert cost < 0.9 * fast and cost <= sparing


def test_a_machine_without_prices_has_no_cheapest_plan():
    words = "plan --model llama-3-8b --machine dgx-a100 --batch 8 --minimise cost"
    ended = CliRunner().invoke(app, words.split())
    assert ended.exit_code and "--minimise writes" in str(ended.exception)


def test_written_bytes_of_a_step_equal_the_forecast():
    machine_plan = plan_for_machine(plan_request())
    written = written_per_step(
        machine_plan.blocks, machine_plan.workload, machine_plan.plan, has_own_memory=True
    )
    assert written == machine_plan.forecast.written_bytes


def test_a_plan_prices_what_it_plans_with():
    """Drives and memory that the preset does not have are paid for."""
    machine = presets.machine("rtx4090")
    assert machine.with_drives(4).usd == machine.usd + 2 * machine.drives[0].usd
    assert machine.with_host(256 * 10**9).usd == machine.usd + 128 * machine.memory_usd
    assert machine.with_host(64 * 10**9).usd == machine.usd  # it is there, used or not
    words = "plan --model llama-3-8b --machine rtx4090 --batch 4 --ssds 4 --host 256GB"
    reported = CliRunner().invoke(app, words.split()).stdout
    price = machine.usd + 2 * machine.drives[0].usd + 128 * machine.memory_usd
    assert f"(machine: {price:,.0f} USD)" in reported
    assert "GPU 1,600 USD, 4 drives 640 USD, the rest 1,884 USD" in reported


def test_presets_show_memory_drives_and_prices():
    lines = CliRunner().invoke(app, ["presets"]).stdout.splitlines()
    row = next(line.split() for line in lines if line.split()[:1] == ["rtx4090"])
    assert " ".join(row) == (
        "rtx4090 RTX 4090 24.00 GiB 128 GB 2 x 2 TB, 160 USD 1.2 PB each 3,420"
    )


@pytest.mark.slow
def test_suggests_more_host_memory_when_it_writes_less():
    request = plan_request("qwen3-14b", batch=64, commit=None)
    machine_plan = with_alternatives(plan_for_machine(request))
    (more,) = (other for other in machine_plan.instead if other.option.startswith("--host"))
    assert more.written_bytes < 0.5 * machine_plan.forecast.written_bytes
    assert more.option == "--host 238.42GiB"
