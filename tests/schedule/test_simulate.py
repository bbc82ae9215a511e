"""The simulator follows the rules of the lanes, and both of its implementations agree."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from lohan.errors import LohanError
from lohan.schedule.actions import Action, from_text
from lohan.schedule.ops import Op
from lohan.schedule.simulate import BytesPerParameter, SiteWork, StepWork, simulate
from tests.support.generated_cases import chain_of, scheduled_runs

SECONDS = {"R": 2.0, "F": 3.0, "B": 4.0, "S": 1.0, "W": 1.0, "U": 5.0, "K": 1.5}


def seconds(action: Action) -> float:
    return SECONDS.get(action.kind, 0.0)


def spans(text: str, **options):
    timeline = simulate([from_text(text)], seconds, **options)
    return {span.name: (span.start_s, span.stop_s) for span in timeline.spans}


def test_reads_run_beside_compute_and_one_after_the_other():
    actual = spans("R0@0 F0@0(R0) R1@1 F1@1(R1)")
    assert actual == {"R0": (0, 2), "F0": (2, 5), "R1": (2, 4), "F1": (5, 8)}


def test_an_ssd_action_that_waits_holds_up_those_behind_it():
    actual = spans("R0@0 F0@0(R0) W0.0@0,0(F0) R1@1")
    assert actual["W0.0"] == (5, 6)
    assert actual["R1"] == (6, 8)  # submitted after the write, served after it


def test_updates_have_their_own_lane_or_share_the_callers():
    text = "R0@0 B0@0(R0) U0.0@0,0(B0) R1@1 B1@1(R1)"
    apart, shared = spans(text), spans(text, caller_updates=True)
    assert apart["B1"] == (6, 10) and apart["U0.0"] == (6, 11)
    assert shared["U0.0"] == (6, 11)
    assert shared["B1"] == (11, 15)


def test_a_phase_begins_when_the_compute_of_the_one_before_has_ended():
    first, second = from_text("R0@0 F0@0(R0)"), from_text("R1@1 F1@1(R1) E")
    timeline = simulate([first, second], seconds)
    actual = {span.name: span.start_s for span in timeline.spans}
    assert actual["R1"] == 5  # F0 has ended
    assert timeline.step_ends == (10,)
    after = simulate([first, from_text("S0.0@0"), second], seconds)
    assert {span.name: span.start_s for span in after.spans}["R1"] == 6


def test_reports_deadlock():
    with pytest.raises(LohanError, match="deadlocks at F0"):
        _lock_up()


def _lock_up() -> None:
    from lohan.schedule.simulate import _Shared

    simulation = _Shared(seconds)
    simulation._add(Action(Op.FORWARD, 0)).missing = 1
    simulation._step()


def test_the_trace_has_a_row_per_lane():
    timeline = simulate([from_text("R0@0 F0@0(R0) K0(F0)")], seconds)
    events = timeline.trace()["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {"ssd", "compute", "d2h"}
    assert {event["name"] for event in events if event["ph"] == "X"} == {"R0", "F0", "K0"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduled_runs())
def test_any_schedule_runs_in_the_order_of_its_waits(run):
    chain = chain_of(run)
    for shared in (False, True):
        timeline = simulate([chain], lambda action: 1.0, caller_updates=shared)
        assert len(timeline.spans) == len(chain)
        done: dict[str, list[float]] = {}
        starts: dict[str, list[float]] = {}
        for span in sorted(timeline.spans, key=lambda s: s.stop_s):
            done.setdefault(span.name, []).append(span.stop_s)
            starts.setdefault(span.name, []).append(span.start_s)
        seen: dict[str, int] = {}
        for action in chain:
            number = seen.get(action.name, 0)
            for other in action.waits:
                if other in seen:
                    assert done[other][seen[other] - 1] <= starts[action.name][number]
            seen[action.name] = number + 1
        for lane in ("compute", "optimizer", "h2d", "d2h", "ssd"):
            rows = sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start_s)
            assert all(a.stop_s <= b.start_s for a, b in pairwise(rows))


def work_of(**changes) -> StepWork:
    """Return the work of two sites with one group each, of which the second is smaller."""
    sites = tuple(
        SiteWork(forward_flops=1.0, recompute_flops=1.0, tokens=1.0, kept_bytes=kept)
        for kept in (100.0, 40.0)
    )
    layout = BytesPerParameter(weight=2.0, state=10.0, gradient=4.0)
    return StepWork(
        **{
            "sites": sites,
            "groups": (25, 7),
            "chunk_params": 10,
            "per_parameter": layout,
            **changes,
        }
    )


def test_last_chunk_of_a_group_has_the_remaining_parameters():
    work = work_of()
    assert [work.chunks(group) for group in (0, 1)] == [3, 1]
    assert [work.chunk(0, number) for number in range(3)] == [10, 10, 5]
    assert (work.chunk(1, 0), work.parameters(0, -1)) == (7, 25)


def test_slices_but_the_last_are_copied_beside_the_site_before():
    assert [work_of().over_link(site) for site in (0, 1)] == [100, 40]
    sliced = work_of(slices=4)
    assert [sliced.over_link(site) for site in (0, 1)] == [100 / 4 + 40 * 3 / 4, 40 / 4]


def test_counts_bytes_through_main_memory_of_parameters_and_activations():
    weights, work = from_text("R0@0 F0@0(R0)"), work_of()
    activations = from_text("R0@0 F0@0(R0) K0@0(F0)")
    read = work.bus_bytes([weights])
    assert read == 25 * Op.READ_WEIGHTS.bus(work.per_parameter) > 0
    assert work.bus_bytes([activations]) == read + 100
