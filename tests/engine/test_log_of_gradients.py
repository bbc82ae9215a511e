"""Steps that are committed by their gradients: the same bits as without a log, in every setting."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan
from lohan.checkpoint.resharding import reshard_to_world
from lohan.device.emulated import EmulatedDevice
from lohan.engine.logged import fold_log
from lohan.errors import ConfigError, StorageIOError, StoreError
from lohan.model.layout import RESIDENT, Blocks
from lohan.model.machine import Drive, Profile
from lohan.model.options import LOG_CHOICES
from lohan.model.plan import Plan
from lohan.planner.planner import make_plan
from lohan.store.admin import rewind, snapshot
from lohan.store.io_engine import open_engine
from lohan.store.store import Store
from lohan.util.units import Interval, MiB
from tests.support.delayed_runs import (
    CHUNK_PARAMS,
    PlanTuning,
    RunResult,
    memory_engine,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.faults import EngineFault, FaultyEngine
from tests.support.generated_cases import each_value, thinned
from tests.support.models import attached, stored_bytes
from tests.support.process_hooks import fixed_profile

STEPS = 9


@dataclass(frozen=True, kw_only=True)
class LoggedTuning(PlanTuning):
    """Settings with all weights or a share of them in memory, and a share of the state."""

    cached_state: float = 0.3
    cached_weights: float = 1.0

    def apply(self, plan: Plan, blocks: Blocks) -> Plan:
        tensor = super().apply(plan, blocks)
        keys = [group.key for group in blocks.groups if group.key != RESIDENT]
        weights = [
            key
            for i, key in enumerate(keys)
            if int((i + 1) * self.cached_weights) > int(i * self.cached_weights)
        ]
        chunks = [
            (g.key, c)
            for g in blocks.trained
            if g.resident or g.key in weights
            for c in range(-(-g.numel // CHUNK_PARAMS))
        ]
        state = [
            x
            for i, x in enumerate(chunks)
            if int((i + 1) * self.cached_state) > int(i * self.cached_state)
        ]
        if not plan.log_gradients:
            return tensor
        return replace(
            tensor,
            host_cached_weights=tuple(weights),
            host_cached_state=tuple(state),
            spilled_gradients=tuple(keys),
        )


def budget(place: Path, steps: int | str) -> lohan.Budget:
    return lohan.Budget(host="256MiB", ssd=[place], log_gradients=steps)


def same(logged: RunResult, expected: RunResult) -> None:
    """Compare two runs. A log always computes the norm."""
    norms = logged.norms if expected.norms[-1] is None else expected.norms
    logged.check(replace(expected, norms=norms))


def compare(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str = "tied",
    steps: int = STEPS,
    every: int = 3,
    tuning: LoggedTuning | None = None,
    data: list[dict[str, torch.Tensor]] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    **options: Any,
) -> None:
    """Compare a logged run with one without overlap and without a log."""
    tune_plans(monkeypatch, tuning or LoggedTuning())
    data = net_batches(steps, kind=kind, dtype=dtype) if data is None else data
    expected = train_with_delays(
        small_net(kind, dtype=dtype), data, tmp_path / "plain", overlap=False, **options
    )
    logged = train_with_delays(
        small_net(kind, dtype=dtype),
        data,
        tmp_path / "logged",
        seed=seed,
        budget=budget(tmp_path / "logged", every),
        **options,
    )
    same(logged, expected)


@pytest.mark.parametrize(("kind", "every"), each_value(["tied", "several", "llama"], [2, 5]))
def test_has_the_bits_of_a_run_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, every: int
) -> None:
    compare(tmp_path, monkeypatch, kind=kind, every=every)


@pytest.mark.parametrize(
    ("kind", "moments"),
    thinned(
        itertools.product((lohan.AdamW, lohan.SGD, lohan.Lion), ("fp32", "bf16", "int8")),
        *(0, 2, 4, 8),
    ),
)
def test_every_optimizer_and_moment_format_has_the_bits_of_a_run_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, moments: str
) -> None:
    optimizer = kind(lr=1e-2, weight_decay=0.1, moments=moments)
    compare(tmp_path, monkeypatch, kind="llama", dtype=torch.bfloat16, optimizer=optimizer, steps=7)


@pytest.mark.parametrize("cached_state", [0.0, 1.0])
def test_log_with_none_or_all_state_cached_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_state: float
) -> None:
    compare(tmp_path, monkeypatch, tuning=LoggedTuning(cached_state=cached_state))


@pytest.mark.parametrize(("kind", "cached_weights"), each_value(["tied", "several"], [0.0, 0.5]))
def test_weights_that_do_not_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cached_weights: float
) -> None:
    tuning = LoggedTuning(cached_weights=cached_weights)
    compare(tmp_path, monkeypatch, kind=kind, tuning=tuning, clip=0.5)


@pytest.mark.parametrize("clip", [1e-3, 0.5, 100.0])
def test_clipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    compare(tmp_path, monkeypatch, clip=clip)


def test_averaged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(tmp_path, monkeypatch, optimizer=lohan.AdamW(lr=1e-2, ema=0.9))


def test_blocks_without_a_gradient_in_some_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = net_batches(STEPS, skip={2: 1, 5: 0}, still={3: 2, 6: 3})
    compare(tmp_path, monkeypatch, kind="plain", data=dataset)


@pytest.mark.parametrize("seed", thinned(range(3), 0))
def test_delays_of_lanes_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    compare(tmp_path, monkeypatch, kind="several", seed=seed, tuning=LoggedTuning(own_thread=True))


@pytest.mark.parametrize("kind", ["several", "llama"])
def test_on_a_device_with_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Compared there with the same run without a log, since sums on a device differ."""
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(STEPS, kind=kind)
    runs = [
        train_with_delays(
            small_net(kind),
            dataset,
            tmp_path / str(every),
            clip=0.5,
            device=EmulatedDevice(64 * MiB),
            budget=budget(tmp_path / str(every), every),
        )
        for every in ("off", 3)
    ]
    runs[1].check(runs[0])


def test_steps_of_several_backward_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(10, kind="tied")

    def run(place: Path, **options: Any) -> dict[str, bytes]:
        with attached(small_net("tied"), place, engine=memory_engine(), **options) as session:
            for step in range(5):
                with session.accumulate():
                    for batch in dataset[2 * step : 2 * step + 2]:
                        session.model(**batch).backward()
            assert session.step == 5
            return stored_bytes(session)

    logged = run(tmp_path / "a", budget=budget(tmp_path / "a", 2))
    assert logged == run(tmp_path / "b", overlap=False)


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the base are frozen and stream; those of the adapters are logged."""
    peft = pytest.importorskip("peft")
    dataset = net_batches(STEPS, kind="llama")

    def run(place: Path, **options: Any) -> dict[str, bytes]:
        torch.manual_seed(4)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(small_net("llama"), lora)
        with attached(model, place, engine=memory_engine(), **options) as session:
            for batch in dataset:
                session.model(**batch).loss.backward()
            return stored_bytes(session)

    logged = run(tmp_path / "a", budget=budget(tmp_path / "a", 4))
    assert logged == run(tmp_path / "b", overlap=False)


def test_skipped_steps_in_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(STEPS, kind="llama", dtype=torch.float16)
    overflow = {2: float("inf"), 5: float("nan")}

    def run(place: Path, **options: Any) -> RunResult:
        model = small_net("llama", dtype=torch.float16)
        return train_with_delays(
            model, dataset, place, scale=lambda step: overflow.get(step, 1.0), **options
        )

    expected = run(tmp_path / "plain", overlap=False)
    logged = run(tmp_path / "logged", budget=budget(tmp_path / "logged", 3))
    assert logged.progress.skipped_steps >= 2  # type: ignore[attr-defined]
    same(logged, expected)


@pytest.mark.parametrize("killed_after", thinned([1, 2, 3, 4, 6], 1, 2, 4))
def test_a_killed_run_resumes_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    """The files as they were at a moment are those of a process that was killed then."""
    tune_plans(monkeypatch, LoggedTuning())
    dataset, files = net_batches(STEPS, kind="tied"), dict[str, bytearray]()
    expected = train_with_delays(small_net("tied"), dataset, tmp_path / "plain", overlap=False)
    place, copy = tmp_path / "logged", tmp_path / "killed"
    engine = "threads"
    session = attached(small_net("tied"), place, budget=budget(place, 4), engine=engine)
    torch.manual_seed(11)
    for batch in dataset[:killed_after]:
        session.model(**batch).backward()
    session.flush()
    for path in sorted(place.rglob("*")):
        target = copy / path.relative_to(place)
        if path.is_dir():
            target.mkdir(parents=True)
        elif path.name != "lock":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    session.close()
    assert not files
    # Resumed with another interval, and then without a log.
    model = small_net("tied")
    with attached(model, copy, budget=budget(copy, 2), engine=engine, resume=True) as resumed:
        assert resumed.step == killed_after
        for batch in dataset[killed_after:7]:
            model(**batch).backward()
    with attached(small_net("tied"), copy, engine=engine, resume=True) as resumed:
        assert resumed.step == 7
        for batch in dataset[7:]:
            resumed.model(**batch).backward()
        assert stored_bytes(resumed) == expected.stored


@pytest.mark.parametrize("op", ["write", "sync"])
@pytest.mark.parametrize("appended", thinned([1, 2, 3, 4, 5], 1, 2))
def test_a_full_disk_during_append_or_fold_keeps_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, appended: int
) -> None:
    """Steps 3 and 6 are followed by a write of the full state, the others only append."""
    tune_plans(monkeypatch, LoggedTuning())
    dataset, place = net_batches(STEPS, kind="tied"), tmp_path / "logged"
    expected = train_with_delays(small_net("tied"), dataset, tmp_path / "plain", overlap=False)
    engine = FaultyEngine(open_engine("threads"))
    session = attached(small_net("tied"), place, budget=budget(place, 3), engine=engine)
    torch.manual_seed(11)
    for batch in dataset[:appended]:
        session.model(**batch).backward()
    session.flush()
    engine.faults = (EngineFault("enospc", op, engine.counts[op] + 1),)
    with pytest.raises(StorageIOError, match="ENOSPC"):
        for batch in dataset[appended:]:
            session.model(**batch).backward()
        session.flush()
    session.close(flush=False)
    model = small_net("tied")
    with attached(model, place, budget=budget(place, 3), engine="threads", resume=True) as session:
        assert session.step >= appended
        for batch in dataset[session.step :]:
            model(**batch).backward()
        assert stored_bytes(session) == expected.stored


def test_a_failed_step_loses_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(STEPS, kind="tied")
    expected = train_with_delays(small_net("tied"), dataset, tmp_path / "plain", overlap=False)
    place = tmp_path / "logged"
    options = {"budget": budget(place, 4), "engine": memory_engine()}
    with attached(small_net("tied"), place, **options) as session:
        torch.manual_seed(11)
        for step, batch in enumerate(dataset):
            if step in (2, 3, 6):
                with pytest.raises(RuntimeError, match="of the user"):

                    def fail(*_: Any) -> None:
                        raise RuntimeError("of the user")

                    handle = session.model.blocks[1].out.register_full_backward_pre_hook(fail)
                    state = torch.get_rng_state()
                    try:
                        session.model(**batch).backward()
                    finally:
                        handle.remove()
                torch.set_rng_state(state)
                assert session.step == step
            session.model(**batch).backward()
        assert stored_bytes(session) == expected.stored


def test_evaluation_and_reading_weights_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(STEPS, kind="tied")

    def run(place: Path, **options: Any) -> tuple[list[Any], dict[str, bytes]]:
        seen: list[Any] = []
        with attached(small_net("tied"), place, engine=memory_engine(), **options) as session:
            for batch in dataset:
                session.model(**batch).backward()
                with torch.no_grad():
                    seen.append(session.model(**dataset[0]).item())
                seen.append(session.weight("blocks.1.out.weight").sum().item())
                seen.append(session.weight("shift").sum().item())
            return seen, stored_bytes(session)

    assert run(tmp_path / "a", budget=budget(tmp_path / "a", 3)) == run(
        tmp_path / "b", overlap=False
    )


def test_writes_gradients_in_most_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step between two writes of the full state writes its gradients and nothing else."""
    tune_plans(monkeypatch, LoggedTuning(cached_state=0.0))
    place = tmp_path / "logged"
    with attached(
        small_net("tied"), place, budget=budget(place, 4), engine=memory_engine()
    ) as session:
        written = []
        for batch in net_batches(STEPS, kind="tied"):
            before = session.counters.bytes_written
            session.model(**batch).backward()
            session.flush()
            written.append(session.counters.bytes_written - before)
        full = max(written)
        assert sorted(written)[STEPS // 2] < 0.4 * full, written
        assert session.store.log is not None and session.store.log.live


def test_a_store_with_logged_steps_is_folded_by_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    dataset = net_batches(3, kind="tied")
    expected = train_with_delays(small_net("tied"), dataset, tmp_path / "plain", overlap=False)
    place = tmp_path / "logged"
    session = attached(small_net("tied"), place, budget=budget(place, 4), engine="threads")
    session.executor.steps.clock._steps = 10  # no more settling
    for batch in dataset:
        session.model(**batch).backward()
    session.flush()
    session.execution.stop()  # as a process that dies: nothing is folded
    session.store.close()
    dirs = place / "lohan-store"
    with Store.open(dirs, engine="threads", replays=True) as store:
        count = fold_log(store)
        assert count in (1, 2, 3) and store.meta["progress"]["step"] == 3
    assert not (dirs / "log.bin").exists()
    with attached(small_net("tied"), place, engine="threads", resume=True) as resumed:
        assert stored_bytes(resumed) == expected.stored


def left_live(place: Path, steps: int) -> dict[str, bytes]:
    """Leave a store whose log has steps, as a killed run does; return what they are to give."""
    dataset, at = net_batches(steps, kind="tied"), place / "logged"
    session = attached(small_net("tied"), at, budget=budget(at, 4), engine="threads")
    for batch in dataset:
        session.model(**batch).backward()
    session.flush()
    assert session.store.log is not None and session.store.log.live
    session.close(flush=False)
    expected = train_with_delays(small_net("tied"), dataset, place / "plain", overlap=False)
    return expected.stored


def test_weights_are_read_after_a_session_that_ended_without_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    place, batches = tmp_path / "logged", net_batches(4, kind="tied")
    model, plain = small_net("tied"), small_net("tied")
    session = attached(model, place, budget=budget(place, 4), engine="threads")
    with attached(plain, tmp_path / "plain", overlap=False) as expected:
        for batch in batches:
            model(**batch).backward()
            plain(**batch).backward()
        session.flush()
        assert session.store.log is not None and session.store.log.live
        session.close(flush=False)
        actual, wanted = model.state_dict(), plain.state_dict()
        assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items())
        assert expected.step == 4


def test_a_killed_run_is_resharded_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    expected = left_live(tmp_path, 4)

    def folders(rank: int) -> list[Path]:
        return [tmp_path / "logged"]

    with pytest.raises(StoreError, match="not all steps are in the weights"):
        reshard_to_world(folders, "lohan-store", 2)
    for world in (2, 1):
        reshard_to_world(folders, "lohan-store", world, fold=fold_log)
    place = tmp_path / "logged"
    with attached(small_net("tied"), place, engine="threads", resume=True) as resumed:
        assert resumed.step == 4 and stored_bytes(resumed) == expected


def test_a_snapshot_is_of_the_last_step_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, LoggedTuning())
    place, copy, batches = tmp_path / "logged", tmp_path / "copy", net_batches(6, kind="tied")
    session = attached(small_net("tied"), place, budget=budget(place, 4), engine="threads")
    for batch in batches[:4]:
        session.model(**batch).backward()
    session.flush()
    with pytest.raises(StoreError, match=r"would lack \d steps? .* call session.commit"):
        snapshot(session.store, copy)
    expected = stored_bytes(session)
    snapshot(session.store, copy)
    for batch in batches[4:]:
        session.model(**batch).backward()
    session.flush()
    assert session.store.log is not None and session.store.log.live
    session.close(flush=False)
    # A return to the snapshot drops the logged steps, which are later.
    with Store.open(place / "lohan-store", engine="threads", replays=True) as store:
        rewind(store, copy)
    with attached(small_net("tied"), place, engine="threads", resume=True) as resumed:
        assert resumed.step == 4 and stored_bytes(resumed) == expected


@pytest.mark.parametrize(("steps", "commit"), [(3, 10), (-1, 1)])
def test_refuses_a_given_plan_whose_intervals_differ(
    tmp_path: Path, steps: int, commit: int
) -> None:
    with attached(small_net("plain"), tmp_path / "a", budget=budget(tmp_path / "a", 3)) as session:
        plan = replace(session.plan, log_gradients=steps, commit=Interval(commit))
    with pytest.raises(ConfigError, match=f"log_gradients is {steps}, and commit is"):
        attached(
            small_net("plain"), tmp_path / "b", budget=budget(tmp_path / "b", "auto"), plan=plan
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": False}, "it needs overlap"),
        ({"update_mode": "serial"}, "update_mode is 'serial'; choose optimized or balanced"),
        ({"commit_every": 10}, "it commits every step, but commit_every is 10"),
        ({"log_gradients": 1}, "log_gradients is 1; it must be auto, off, or the number of steps"),
        ({"log_gradients": "some"}, "log_gradients is 'some'; it must be auto"),
    ],
)
def test_refuses_what_does_not_go_with_a_log(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    given = {"log_gradients": 4, "host": "256MiB", "ssd": [tmp_path]}
    given |= {k: options.pop(k) for k in ("commit_every", "log_gradients") if k in options}
    with pytest.raises(ConfigError, match=words):
        attached(small_net("plain"), tmp_path, budget=lohan.Budget(**given), **options)


SLOW_WRITES = Profile(
    name="slow writes",
    device="cpu",
    compute=((1.0, 1e12),),
    backward=((1.0, 1e12),),
    head_flops=1e12,
    host_bytes=2**34,
    adam=1e10,
    drives=(Drive(name="slow writes", read=1e8, write=1e7, bytes=10**12),),
)


def test_the_planner_keeps_its_choice_when_a_run_replans_and_chooses_again_when_it_resumes(
    tmp_path: Path,
) -> None:
    data, place = net_batches(7, kind="llama"), tmp_path / "logged"
    shared = {"clip": 0.5, "batch": data[0], "engine": memory_engine(), "micro_batch": 1}

    def trained(session: lohan.Session, batches: list[dict[str, torch.Tensor]]) -> None:
        for batch in batches:
            session.model(**batch).loss.backward()

    def chosen(setting: str) -> dict[str, Any]:
        small = lohan.Budget(host="500KiB", ssd=[place], log_gradients=setting)
        return {**shared, "budget": small, "profile": SLOW_WRITES}

    with attached(small_net("llama"), place, **chosen("auto")) as session:
        steps = session.plan.log_gradients
        assert steps in LOG_CHOICES
        trained(session, data[:3])
        problem = session.context.problem(
            session.context.options.fixed_by(session.plan), profile=fixed_profile()
        )
        session.follow(replace(make_plan(problem).plan, window=0))
        assert session.plan.log_gradients == steps
        trained(session, data[3:5])
    with attached(small_net("llama"), place, resume=True, **chosen("auto")) as session:
        assert session.plan.log_gradients in LOG_CHOICES
        head_tokens = session.plan.head_tokens
        trained(session, data[5:])
        logged = stored_bytes(session)
    with attached(small_net("llama"), tmp_path / "plain", overlap=False, **shared) as session:
        assert session.plan.head_tokens == head_tokens
        trained(session, data)
        assert stored_bytes(session) == logged
