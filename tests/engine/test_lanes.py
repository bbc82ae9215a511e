"""Lanes: order, waits, errors on every lane, deadlines, and no thread left behind."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lohan.device.base import CpuDevice
from lohan.engine.lanes import DeviceClock, Lanes
from lohan.errors import LohanError
from lohan.schedule.actions import Action, from_text
from lohan.util.trace import Trace

# Two steps' worth of everything, with waits across lanes.
TEXT = (
    "R0@0 R1@1 F0@0(R0) S0.0@0 F1@1(R1) B1@1 S1.0@1 U1.0@1,1(B1,S1.0) W1.0@1,1(U1.0) B0@0 "
    "U0.0@0,0(B0,S0.0) W0.0@0,0(U0.0) E C(E,W0.0) R1@0(W1.0,W0.0) F1@0(R1)"
)


class Recorder:
    """A runner that only records which thread started and ended each action."""

    def __init__(self, *, seed: int | None = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.threads: set[str] = set()
        self.scalars: list[Any] = []
        self.fail: dict[tuple[str, str], BaseException] = {}  # (verb, name) -> error
        self.hold = threading.Event()  # `gate` waits for it
        self.gate = ""
        self._draw = random.Random(seed) if seed is not None else None

    def note(self, verb: str, action: Action) -> None:
        if self._draw is not None:
            time.sleep(self._draw.choice((0, 0, 0.001, 0.003)))
        if action.name == self.gate:
            assert self.hold.wait(30)
        self.threads.add(threading.current_thread().name)
        self.events.append((verb, action.name))
        if (verb, action.name) in self.fail:
            raise self.fail[verb, action.name]

    def submit(self, action: Action) -> Any:
        self.note("start", action)
        return [action.name]

    def complete(self, action: Action, handle: Any) -> None:
        self.note("complete", action)
        assert handle == [action.name]

    def run(self, action: Action, scalars: Any) -> None:
        self.scalars.append(scalars)
        self.note("start", action)
        self.note("complete", action)


@pytest.fixture
def make():
    created: list[Lanes] = []

    def lanes(
        runner: Recorder, *, way: str = "threads", stall_s: float = 30.0, **options: Any
    ) -> Lanes:
        """Create lanes; `way` selects the thread of updates, or no overlap."""
        created.append(
            Lanes(
                runner,
                overlap=way != "plain",
                stall_s=stall_s,
                updates_on_caller=way == "caller",
                **{"trace": Trace(keep=True), **options},
            )
        )
        return created[-1]

    yield lanes
    for one in created:
        one.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lohan-")]


def drive(lanes: Lanes, runner: Recorder, text: str, scalars: Any = None) -> None:
    """Act as the caller: run every compute action in turn."""
    schedule = from_text(text)
    lanes.enqueue(schedule, scalars)
    for action in schedule:
        if action.lane == "compute":
            assert lanes.expected() == action.name
            assert lanes.begin(action.name) == action
            runner.note("start", action)
            runner.note("complete", action)
            lanes.end()
    lanes.drain()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["threads", "caller"])
def test_actions_run_in_lane_order_and_after_their_waits(way, seed, make):
    runner = Recorder(seed=seed)
    drive(make(runner, way=way), runner, TEXT)
    seen: dict[tuple[str, str], list[int]] = {}
    for number, event in enumerate(runner.events):
        seen.setdefault(event, []).append(number)
    count: dict[str, int] = {}
    done: dict[str, int] = {}  # name -> when its latest occurrence in the schedule ended
    last: dict[tuple[str, str], int] = {}
    for action in from_text(TEXT):
        turn = count.get(action.name, 0)
        count[action.name] = turn + 1
        start, end = (seen[verb, action.name][turn] for verb in ("start", "complete"))
        for wait in action.waits:
            assert done[wait] < start, f"{action.token()} did not wait for {wait}"
        for verb, at in (("start", start), ("complete", end)):
            assert last.get((action.lane, verb), -1) < at, f"{action.token()}: {verb} out of order"
            last[action.lane, verb] = at
        done[action.name] = end
    verbs = [verb for verb, name in runner.events if name[0] == "U"]
    assert verbs == ["start", "complete"] * 2  # the optimizer lane does one thing at a time


def test_several_in_flight_on_the_ssd_lane(make):
    """The second read is submitted while the first is in flight; both complete in order."""
    runner = Recorder()
    lanes = make(runner)
    started = threading.Event()

    def complete(action: Action, handle: Any) -> None:
        if action.name == "R0":
            assert started.wait(30), "R1 was not submitted while R0 was in flight"
        runner.note("complete", action)

    def start(action: Action) -> Any:
        if action.name == "R1":
            started.set()
        return [action.name]

    runner.complete, runner.submit = complete, start  # type: ignore[method-assign]
    lanes.enqueue(from_text("R0@0 R1@1"))
    lanes.drain()
    assert runner.events == [("complete", "R0"), ("complete", "R1")]


def test_update_and_read_are_in_flight_at_once(make):
    """An update and a read wait for each other to have begun: both are in flight at once."""
    runner = Recorder()
    both = threading.Barrier(2)
    runner.note = lambda verb, action: verb == "start" and both.wait(30)  # type: ignore[assignment]
    lanes = make(runner)
    lanes.enqueue(from_text("U0.0@0,0 R1@1"))
    lanes.drain()


def test_updates_on_the_callers_thread_run_between_blocks_and_during_waits(make):
    """Updates run between two blocks and during waits, while reads and writes continue."""
    runner = Recorder()
    lanes = make(runner, way="caller")
    seen: list[str] = []
    run = runner.run

    def on_caller(action: Action, scalars: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(action.name)
        run(action, scalars)

    runner.run = on_caller  # type: ignore[method-assign]
    lanes.enqueue(from_text("F0@0 U0.0@0,0(F0) U1.0@0,1 W0.0@0,0(U0.0) F1@1(W0.0) U1.1@0,1(F1)"))
    lanes.begin("F0")
    lanes.end()
    assert seen == []
    lanes.begin("F1")  # which waits for a write, which waits for an update
    assert seen == ["U0.0", "U1.0"] and ("complete", "W0.0") in runner.events
    lanes.end()
    lanes.wait_for("U1.1")
    assert seen == ["U0.0", "U1.0", "U1.1"]


def test_wait_refers_to_the_latest_earlier_action_of_its_name(make):
    runner = Recorder()
    lanes = make(runner)
    drive(lanes, runner, "R0@0 F0@0(R0)")
    runner.gate = "R0"
    lanes.enqueue(from_text("F0@0(R0) R0@1 F0@1(R0)"))
    lanes.begin("F0")  # its R0 is the one of the schedule before
    lanes.end()
    assert runner.events.count(("complete", "R0")) == 1
    runner.hold.set()
    lanes.begin("F0")
    assert runner.events.count(("complete", "R0")) == 2
    lanes.end()


def test_every_action_gets_the_context_of_its_own_schedule(make):
    runner = Recorder()
    lanes = make(runner)
    lanes.enqueue(from_text("U0.0@0,0 U0.1@0,0"), "first")
    lanes.enqueue(from_text("U1.0@0,0"), "second")
    lanes.drain()
    assert runner.scalars == ["first", "first", "second"]


def test_without_overlap_everything_runs_in_schedule_order_on_the_callers_thread(make):
    runner = Recorder()
    drive(make(runner, way="plain"), runner, TEXT)
    assert runner.threads == {threading.current_thread().name}
    names = [action.name for action in from_text(TEXT)]
    assert runner.events == [(v, name) for name in names for v in ("start", "complete")]


WAYS = ["threads", "caller", "plain"]


@pytest.mark.parametrize("way", WAYS)
def test_wait_for_completes_one_action_and_drain_the_rest(way, make):
    runner = Recorder()
    lanes = make(runner, way=way)
    lanes.enqueue(from_text("R0@0 S0.0@0 F0@0(R0) U0.0@0,0(F0,S0.0) W0.0@0,0(U0.0)"))
    lanes.wait_for("R0", "nobody")
    assert ("complete", "R0") in runner.events
    assert ("start", "U0.0") not in runner.events
    lanes.drain()  # F0 passes without being done
    assert runner.events[-1] == ("complete", "W0.0")
    assert lanes.expected() is None


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("verb", "token", "lane"),
    [
        ("start", "S1.0@1", "ssd"),
        ("complete", "S1.0@1", "ssd"),
        ("start", "U1.0@1,1(B1,S1.0)", "optimizer"),
        ("complete", "W1.0@1,1(U1.0)", "ssd"),
    ],
)
def test_an_error_on_any_lane_stops_the_step(verb, token, lane, way, make):
    runner = Recorder()
    lanes = make(runner, way=way)
    name = from_text(token)[0].name
    error = runner.fail[verb, name] = OSError("the drive is gone")
    with pytest.raises(OSError, match="the drive is gone") as raised:
        drive(lanes, runner, TEXT)
    assert raised.value is error
    (note,) = error.__notes__
    assert note.startswith(f"lane {lane}, action {token}; finished before it: ")
    before = note.split(": ")[1].split(" ")
    tokens = TEXT.split(" ")
    assert set(before) <= {"nothing", *tokens} - {token}
    assert len(before) <= 10
    assert ("start", "C") not in runner.events
    if way != "plain":
        with pytest.raises(OSError, match="the drive is gone"):
            lanes.wait_for("C")
    with pytest.raises(OSError, match="the drive is gone"):
        lanes.enqueue(from_text("R0@0"))
    with pytest.raises(OSError, match="the drive is gone"):
        lanes.drain()

    runner.fail.clear()
    lanes.reset()
    assert lanes.expected() is None
    runner.events.clear()
    drive(lanes, runner, TEXT)
    assert {event for event in runner.events if event[0] == "complete"} == {
        ("complete", action.name) for action in from_text(TEXT)
    }
    assert len(error.__notes__) == 1


def test_note_lists_the_ten_actions_before_the_error(make):
    runner = Recorder()
    lanes = make(runner)
    runner.fail["complete", "R12"] = OSError("no")
    lanes.enqueue(from_text(" ".join(f"R{i}@{i}" for i in range(14))))
    with pytest.raises(OSError) as raised:
        lanes.drain()
    note = raised.value.__notes__[0]
    assert note.endswith("before it: " + " ".join(f"R{i}@{i}" for i in range(2, 12)))


def test_failure_completes_actions_in_flight_and_commits_nothing(make):
    """Actions in flight complete after a failure, and nothing is committed."""
    runner = Recorder()
    lanes = make(runner)
    runner.gate = "R0"
    reached = threading.Event()
    original = runner.submit

    def start(action: Action) -> Any:
        if action.name == "C":
            reached.set()
            return []
        return [action.name] if action.name == "R0" else original(action)

    runner.submit = start  # type: ignore[method-assign]
    runner.fail["complete", "R1"] = OSError("no")
    lanes.enqueue(from_text("R0@0 R1@1 R2@2 C"))
    assert reached.wait(30)
    runner.hold.set()
    with pytest.raises(OSError, match="no"):
        lanes.drain()
    lanes.reset()
    completed = [name for verb, name in runner.events if verb == "complete"]
    assert completed == ["R0", "R1", "R2"]


def test_lane_that_fails_to_start_raises(make):
    """A device that its thread cannot use: at its first action, not after a stall."""
    runner = Recorder()
    device = CpuDevice()

    def refuse(lane: str) -> None:
        if lane == "ssd":
            raise RuntimeError(f"no device for {lane}")

    device.enter = refuse  # type: ignore[method-assign]
    lanes = make(runner, device=device)
    with pytest.raises(RuntimeError, match="no device for ssd"):
        drive(lanes, runner, TEXT)
    lanes.reset()


def test_first_error_is_the_reported_one(make):
    runner = Recorder()
    lanes = make(runner)
    runner.fail["complete", "R0"] = OSError("first")
    runner.fail["complete", "R1"] = OSError("second")
    lanes.enqueue(from_text("R0@0 R1@1"))
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            lanes.drain()
    lanes.reset()
    lanes.drain()


def test_reset_without_an_error_aborts_the_step(make):
    """A caller that is interrupted: what waits for it is dropped."""
    runner = Recorder()
    lanes = make(runner)
    lanes.enqueue(from_text("R0@0 F0@0(R0) U0.0@0,0(F0) W0.0@0,0(U0.0)"))
    lanes.begin("F0")
    lanes.reset()
    assert lanes.expected() is None
    lanes.drain()
    assert ("start", "U0.0") not in runner.events


def test_a_lane_that_hangs_is_named(make):
    runner = Recorder()
    lanes = make(runner)
    runner.gate = "R1"
    lanes.enqueue(from_text("R0@0 R1@1 F1@1(R0,R1)"))
    lanes.wait_for("R0")
    lanes.stall_s = 0.3
    with pytest.raises(LohanError) as raised:
        lanes.begin("F1")
    message = str(raised.value)
    assert "F1 waits for R1" in message and "check the drive" in message
    assert raised.value.__notes__[0].startswith("lane ssd, action R1@1; finished before it: R0@0")
    with pytest.raises(LohanError, match="F1 waits for R1"):
        lanes.wait_for("R1")
    runner.hold.set()
    lanes.stall_s = 30.0
    lanes.reset()
    lanes.enqueue(from_text("R1@1 F1@1(R1)"))
    lanes.begin("F1")
    lanes.end()


def test_a_device_that_keeps_time_says_when_it_computed(make, monkeypatch):
    """Work began after it was given and has ended by now; between both its own clock counts."""
    now = 100.0
    monkeypatch.setattr("lohan.engine.lanes.time", SimpleNamespace(perf_counter=lambda: now))
    device = SimpleNamespace(elapsed_s=lambda first, last: last - first)
    clock = DeviceClock(device)
    assert clock.at(5.0, not_before_s=90.0) == 100.0  # seen late: it was passed at 97
    now = 101.0
    assert clock.at(7.0, not_before_s=100.0) == 101.0  # two seconds later cannot be
    now = 200.0
    assert clock.at(9.0, not_before_s=101.0) == 103.0  # as long as the device says
    assert clock.at(10.0, not_before_s=150.0) == 150.0  # not before it was given
    assert clock.at(12.5, not_before_s=150.0) == 152.5


def test_slow_progress_is_not_a_hang(make, monkeypatch):
    """Each read takes most of the deadline by the lanes' clock; all of them together several."""
    runner, now = Recorder(), 0.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr("lohan.engine.lanes.time", clock)
    lanes = make(runner, stall_s=1.0)

    def complete(action: Action, handle: Any) -> None:
        nonlocal now
        now += 0.9
        time.sleep(0.25)  # so that the caller looks at the clock

    runner.complete = complete  # type: ignore[method-assign]
    lanes.enqueue(from_text(" ".join(f"R{i}@{i}" for i in range(5)) + " F0@0(R4)"))
    lanes.begin("F0")
    lanes.end()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["threads", "caller"])
def test_cancel_drops_actions_after_the_next_compute(way, seed, make):
    """All actions before the cancelled B0 are done; of the others, at most reads."""
    before = "S1.0@0 B1@1 U1.0@0,1(B1,S1.0) S0.0@1 W1.0@0,1(U1.0)"
    beyond = "B0@0 R2@1(W1.0) U0.0@1,0(B0,S0.0) R3@0(B0) W0.0@1,0(U0.0) E C(E)"
    runner = Recorder(seed=seed)
    lanes = make(runner, way=way)
    lanes.enqueue(from_text(f"{before} {beyond}"))
    lanes.begin("B1")
    lanes.end()
    lanes.cancel_queued()
    done = [name for verb, name in runner.events if verb == "complete"]
    assert sorted({*done} - {"R2"}) == ["S0.0", "S1.0", "U1.0", "W1.0"]
    assert lanes.expected() is None
    runner.events.clear()
    drive(lanes, runner, "R0@0 B0@0(R0) S0.0@1 U0.0@1,0(B0,S0.0) W0.0@1,0(U0.0) E C(E)")
    done = [name for verb, name in runner.events if verb == "complete"]
    assert sorted(done) == ["B0", "C", "E", "R0", "S0.0", "U0.0", "W0.0"]


def test_error_during_a_roll_back_is_reported(make):
    runner = Recorder()
    runner.fail["complete", "W1.0"] = ValueError("torn")
    lanes = make(runner, way="caller")
    lanes.enqueue(from_text("B1@1 U1.0@0,1(B1) W1.0@0,1(U1.0) B0@0 U0.0@0,0(B0) E"))
    lanes.begin("B1")
    lanes.end()
    with pytest.raises(ValueError, match="torn"):
        lanes.cancel_queued()
    lanes.reset()
    runner.fail.clear()
    drive(lanes, runner, TEXT)


def test_close_leaves_no_thread_even_with_work_queued():
    runner = Recorder()
    lanes = Lanes(runner, overlap=True, trace=Trace(), stall_s=30.0)
    lanes.enqueue(from_text("F0@0 U0.0@0,0(F0) W0.0@0,0(U0.0) R0@0"))
    names = {t.name for t in threading.enumerate() if t.name.startswith("lohan-")}
    assert names == {"lohan-ssd", "lohan-done", "lohan-optimizer"}
    lanes.close()
    lanes.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lohan-")]


def test_every_action_leaves_a_span(make):
    runner = Recorder()
    trace = Trace(keep=True)
    drive(make(runner, trace=trace), runner, TEXT)
    spans = trace.take_step()
    assert sorted((s.lane, s.name) for s in spans) == sorted(
        (a.lane, a.name) for a in from_text(TEXT)
    )
    assert all(span.stop_s >= span.start_s for span in spans)
