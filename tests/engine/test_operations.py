"""A new operation is one row of the table of operations and one branch of the runner."""

from __future__ import annotations

import pytest

from lohan.engine.actions import SsdOperations
from lohan.errors import LohanError
from lohan.model.machine import Drive, Profile
from lohan.planner.forecast import profile_of_step
from lohan.schedule.actions import ScheduleSpec, Uses, effects_of, empty_buffers, from_text
from lohan.schedule.check import validate
from lohan.schedule.ops import OPERATIONS, READ, STATE, WHOLE, Operation, Subject
from lohan.schedule.simulate import ActionCosts, BytesPerParameter, SiteWork, StepWork, simulate
from lohan.util.trace import Span
from tests.support.delayed_runs import small_net
from tests.support.models import attached

SPEC = ScheduleSpec(sites=((0,),), chunks=(2,), slots=1, ring=1, window=1, grads=1)
WORK = StepWork(
    sites=(SiteWork(forward_flops=1.0, recompute_flops=0.0, tokens=1.0),),
    groups=(150,),
    chunk_params=100,
    per_parameter=BytesPerParameter(weight=4.0, state=8.0, gradient=4.0),
)
MACHINE = Profile(
    name="test",
    device="cpu",
    compute=((1.0, 1.0),),
    host_bytes=2**30,
    adam=100.0,
    drives=(Drive(name="d", read=400.0, write=100.0),),
    action_s=0.5,
)


@pytest.fixture(autouse=True)
def archive(monkeypatch: pytest.MonkeyPatch) -> Operation:
    """Add the operation Z, which reads a chunk's state from its buffer and writes it elsewhere."""
    row = Operation(
        "Z",
        "archive state chunk 1 of group 5 from ring buffer 0",
        lane="ssd",
        subject=Subject.CHUNK,
        at=(STATE,),
        effects=lambda index, chunk, at, spec: [((STATE, at[0]), READ, WHOLE)],
        moves=lambda work, index, chunk: work.parameters(index, chunk) * work.per_parameter.state,
        rate=lambda profile: profile.ssd_write,
        writes=True,
        bus=lambda layout: layout.state,
    )
    monkeypatch.setitem(OPERATIONS, "Z", row)
    return row


def test_new_operation_is_parsed(archive):
    (action,) = from_text("Z0.1@0(S0.1)")
    assert action.kind is archive and action.name == "Z0.1" and action.lane == "ssd"
    assert action.token() == "Z0.1@0(S0.1)" and archive.example == "Z5.1@0"


def test_waits_of_new_operation_follow_from_its_effects():
    uses, waits = Uses(), {}
    for action in from_text("S0.0@0 U0.0@0,0 Z0.0@0 S0.1@0 U0.1@0,0"):
        waits[action.name] = uses.waits_of(action, effects_of(action, SPEC))
    # The ssd lane starts an action before the previous one has finished.
    assert waits["Z0.0"] == ("U0.0",)
    assert waits["S0.1"] == ("Z0.0",)


def test_new_operation_is_validated():
    buffers = empty_buffers(SPEC)
    validate(from_text("S0.0@0 Z0.0@0(S0.0)"), SPEC, buffers)
    with pytest.raises(LohanError, match=r"uses state buffer 0 while S0\.0 may be in flight"):
        validate(from_text("S0.0@0 Z0.0@0"), SPEC, buffers)
    with pytest.raises(LohanError, match="a slot or buffer that does not exist"):
        validate(from_text("S0.0@0 Z0.0@1(S0.0)"), SPEC, buffers)
    with pytest.raises(LohanError, match="no such site, group or chunk"):
        validate(from_text("Z0.2@0"), SPEC, buffers)


def test_new_operation_is_priced_and_simulated():
    (action,) = from_text("Z0.1@0")
    costs = ActionCosts(MACHINE, WORK)
    assert costs.seconds(action) == pytest.approx(0.5 + 50 * 8 / 100)
    assert WORK.written(action) == 400 and WORK.bus_bytes([(action,)]) == 400
    phases = [from_text("F0@0 Z0.1@0(F0) E")]
    (span,) = (s for s in simulate(phases, costs.seconds).spans if s.name == "Z0.1")
    assert span.stop_s - span.start_s == pytest.approx(4.5)


def test_bytes_of_new_operation_count_in_a_measured_profile():
    busy = {"F0": "compute", "B0": "compute", "U0.0": "optimizer", "Z0.1": "ssd"}
    spans = [Span(lane, name, n, n + 1) for n, (name, lane) in enumerate(busy.items())]
    profile = profile_of_step(spans, WORK, host_bytes=2**30)
    assert profile is not None and profile.ssd_read == 400


def test_engine_runs_and_traces_new_operation_by_one_branch(archive, tmp_path, monkeypatch):
    seen = []

    def branch(ssd: SsdOperations, action):
        seen.append(action.token())
        yield ssd.ring.read(ssd.groups[action.index], action.chunk, action.at[0])

    monkeypatch.setitem(SsdOperations._RUN, "Z", branch)
    with attached(small_net("tied"), tmp_path) as session:
        lanes = session.executor.lanes
        lanes.enqueue(from_text("Z0.0@0"))
        lanes.wait_for("Z0.0")
        assert seen == ["Z0.0@0"]
        assert "Z0.0" in [span.name for span in session.executor.trace.take_step()]
