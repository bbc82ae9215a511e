"""`lohan plan` shows the plan and the schedule that a run with the same settings would have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan
from lohan.cli import main
from lohan.config import UPDATE_MODES, load_config
from lohan.engine.lanes import Lanes
from lohan.engine.replanning import Replanner
from lohan.model.machine import Drive, Profile
from lohan.model.plan import Plan
from lohan.planner.machine_plan import MachinePlan
from lohan.schedule.actions import Schedule, from_text
from lohan.tools.plan_run import plan_traced
from lohan.train import inputs
from lohan.train.run_folder import RunFolder
from lohan.util.display import Display
from tests.support.forked_commands import Ended
from tests.support.generated_cases import pairwise
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model

TIGHT, ROOMY = "500KiB", "100MiB"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        save_model(folder / name, FAMILY_CONFIGS[name])
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lohan", "plan", *map(str, args)])
        try:
            main.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


def planned(model: Path, **settings: Any) -> MachinePlan:
    given = {f"train.{key}": value for key, value in settings.items() if key != "host"}
    given |= {"model": model, "data": ".", "out": ".", "budget.host": settings["host"]}
    return plan_traced(load_config(None, overrides=given))


def test_ledger_and_choices(models: Path, run: Any) -> None:
    ended = run("--model", models / "llama", "--host", TIGHT, "--batch", 2, "--seq", 16)
    assert ended.code == 0 and ended.err == ""
    lines = ended.out.splitlines()
    total = next(line for line in lines if line.split()[:2] == ["host", "total"])
    assert total.endswith("of 500.00 KiB")
    assert any(line.split()[:2] == ["ssd", "total"] for line in lines)
    names = ["micro-batch", "weight slots", "state ring", "updates", "held gradients"]
    for name in [*names, "cached weights", "cached state"]:
        assert any(line.startswith(name) for line in lines), name
    assert "in backward; above norm 1 updated again; they wait if over" in ended.out
    assert "forward" not in {line.split(",")[0] for line in lines}


def test_compares_bytes_with_those_of_the_default_optimizer(models: Path, run: Any) -> None:
    given = ("--model", models / "llama", "--host", ROOMY, "--batch", 2, "--seq", 16)
    ended = run(*given, "--optimizer", "lion", "--moments", "int8")
    lines = {line[:16].strip(): line[17:] for line in ended.out.splitlines()}
    assert lines["optimizer"] == "lion with int8 moments: 5.125 bytes per parameter and copy on SSD"
    assert lines["instead of"].startswith("adamw with fp32 moments: ")
    usual = json.loads(run(*given, "--json").out)
    other = json.loads(run(*given, "--optimizer", "lion", "--moments", "int8", "--json").out)
    assert (usual["bytes_per_parameter"], other["bytes_per_parameter"]) == (12, 5.125)
    on_ssd = sum(e["bytes"] for e in usual["plan"]["ledger"] if e["tier"] == "ssd")
    assert "usual" not in usual and other["usual"]["ssd_bytes"] == on_ssd
    assert Plan.from_json(other["plan"]).kind.optimizer == "lion"


def test_activations_are_those_of_the_settings(models: Path, run: Any) -> None:
    model = models / "llama"
    kept = planned(model, host=ROOMY, batch=2, seq=16, activations="all").plan.kept
    assert (
        kept and not planned(model, host=ROOMY, batch=2, seq=16, activations="recompute").plan.kept
    )
    far = ("--model", "qwen3-0.6b", "--machine", "rtx4090", "--batch", 4, "--seq", 64)
    assert "the rest is recomputed" in run(*far, "--activations", "recompute").out


def test_schedule_in_text_and_json_is_the_same(models: Path, run: Any) -> None:
    args = ("--model", models / "llama", "--host", TIGHT, "--batch", 2, "--seq", 16, "--schedule")
    lines = run(*args).out.splitlines()
    printed = json.loads(run(*args, "--json").out)
    plan = Plan.from_json(printed["plan"])
    assert plan.clip == 1.0 and plan.tier_bytes("host") <= printed["host_budget_bytes"]
    phases = printed["schedule"]["phases"]
    assert list(phases) == ["forward", "backward"]
    for name, text in phases.items():
        count = len(from_text(text))
        start = lines.index(f"{name}, {count} actions") + 1
        assert " ".join(" ".join(lines[start:]).split()).startswith(text)
    assert max(len(line.replace(str(models), "models")) for line in lines) <= 100


def test_too_small_a_budget(models: Path, run: Any) -> None:
    ended = run("--model", models / "llama", "--host", "10KiB", "--batch", 2, "--seq", 16)
    assert ended.code == 2 and ended.out == ""
    assert "host budget too small" in ended.err and "raise --host to" in ended.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "model: not given"),
        (("--model", "nowhere"), "nowhere"),
        (("--model", "nowhere", "--batch", 2, "--micro-batch", 4), "micro_batch"),
        (("--model", "nowhere", "--update-mode", "eager"), "one of serial, naive"),
    ],
)
def test_wrong_input(run: Any, args: tuple[object, ...], message: str) -> None:
    ended = run(*args)
    assert ended.code == 2 and message in ended.err and "Traceback" not in ended.err


def steps_of(model: Path, place: Path, *, host: str, **settings: Any) -> tuple[Plan, list[Any]]:
    """Plan and schedules of a real run, step by step."""
    created: list[Schedule] = []
    steps: list[list[Schedule]] = []
    enqueue = Lanes.enqueue

    def record(self: Lanes, schedule: Schedule, context: Any = None) -> None:
        created.append(schedule)
        enqueue(self, schedule, context)

    batch = torch.randint(0, FAMILY_VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "enqueue", record)
        trained = lohan.load(model).train()
        with lohan.attach(
            trained,
            optimizer=lohan.AdamW(),
            budget=lohan.Budget(host=host, ssd=[place]),
            batch={"input_ids": batch.to("meta")},
            run_again=True,
            **settings,
        ) as session:
            for _ in range(5):
                trained(input_ids=batch, labels=batch).loss.backward()
                steps.append(created[:])
                created.clear()
            plan = session.plan
    return plan, steps


@pytest.mark.parametrize(
    ("family", "mode", "clip", "host"),
    pairwise(["llama", "gpt2"], UPDATE_MODES, [0.0, 1e9], [TIGHT, ROOMY]),  # no step is clipped
)
def test_plan_equals_the_schedule_of_a_run(
    models: Path, tmp_path: Path, family: str, mode: str, clip: float, host: str
) -> None:
    settings: dict[str, Any] = {"clip": clip, "update_mode": mode, "host": host}
    shown = planned(models / family, batch=2, seq=16, **settings)
    plan, steps = steps_of(models / family, tmp_path, **settings)
    assert plan == shown.plan
    # A step's backward ends with the next forward being scheduled.
    done = [action.name for schedule in steps[-1] for action in schedule]
    phases = [shown.phases.get(name, ()) for name in ("backward", "after backward", "forward")]
    assert done == [action.name for phase in phases for action in phase]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_plain_plan_equals_the_schedule_of_a_run(models: Path, tmp_path: Path, clip: float) -> None:
    settings: dict[str, Any] = {"clip": clip, "overlap": False, "host": TIGHT}
    shown = planned(models / "gpt2", batch=2, seq=16, **settings)
    plan, steps = steps_of(models / "gpt2", tmp_path, **settings)
    assert plan == shown.plan
    done = [action.name for schedule in steps[-1] for action in schedule]
    phases = [shown.phases.get(name, ()) for name in ("forward", "backward", "after backward")]
    assert done == [action.name for phase in phases for action in phase]


@pytest.mark.parametrize("host", [TIGHT, ROOMY])
def test_on_a_known_machine_it_is_what_training_does(
    models: Path, tmp_path: Path, host: str
) -> None:
    """`lohan plan` and the session of `lohan train`, with the defaults of both."""
    drive = Drive(name="d", read=2e8, write=1e8, bytes=10**11, endurance_bytes=6e13)
    machine = Profile(
        name="desk",
        device="cpu",
        compute=((1.0, 2e10),),
        host_bytes=2**34,
        adam=2e8,
        drives=(drive,),
    )
    data = tmp_path / "data.jsonl"
    rows = ({"input_ids": [(7 * n + i) % FAMILY_VOCAB for i in range(16)]} for n in range(4))
    data.write_text("\n".join(map(json.dumps, rows)))
    config = load_config(
        None,
        overrides={
            "model": models / "llama",
            "data": data,
            "out": tmp_path / "run",
            "train.batch": 2,
            "train.seq": 16,
            "train.steps": 2,
            "budget.host": host,
        },
    )
    shown = plan_traced(config, machine)
    display = Display()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "cached_profile_of", lambda places, budget: machine)
        folder = RunFolder(config.out)
        folder.path.mkdir()
        opened = inputs.open_inputs(folder, config, display)
        session = inputs.open_session(folder, config, opened, display, resume=False)
    with session:
        assert session.plan == shown.plan and session.plan.clip > 0
        promised = Replanner(session)._promised
    assert promised is not None and shown.forecast is not None
    assert promised.step_s == shown.forecast.step_s
