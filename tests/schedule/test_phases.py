"""Schedules: their text form, their actions for small specs, and the absence of races."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings

from lohan.errors import LohanError
from lohan.schedule.actions import (
    Action,
    ScheduleSpec,
    empty_buffers,
    from_text,
    parse_token,
    to_text,
)
from lohan.schedule.check import validate
from lohan.schedule.ops import Op
from lohan.schedule.phases import (
    Upcoming,
    backward,
    finish_step,
    forward,
    one_backward,
    updates,
)
from tests.support.generated_cases import (
    ScheduledRun,
    ScheduledStep,
    chain_of,
    placed_step,
    scheduled_runs,
)

# -- text -----------------------------------------------------------------------------------------


def test_tokens_print_and_parse():
    action = Action(Op.UPDATE, 5, 1, at=(0, 2, 1), waits=("H5", "E", "S5.1"))
    assert action.token() == "U5.1@0,2,1(H5,E,S5.1)"
    assert (action.name, action.lane) == ("U5.1", "optimizer")
    assert parse_token(action.token()) == action
    text = "F3@0 B3@1(R3) E R5@2(W5.0,W5.1) S5.1@0 H5(B3) P5.1@0(H5) G5.1@1(P5.1) W5.1@0,2(U5.1) C"
    assert to_text(from_text(text)) == text
    lanes = [action.lane for action in from_text(text)]
    assert lanes == [*["compute"] * 3, "ssd", "ssd", "optimizer", *["ssd"] * 4]


@pytest.mark.parametrize(
    "token", ["", "Z3", "f3", "F3@", "F3@a", "F3(", "F3()x", "S5.@0", "3F", "F-1", "F3 @0"]
)
def test_bad_tokens_are_refused(token):
    with pytest.raises(LohanError, match="is not a schedule token"):
        parse_token(token)


# -- small specs, token by token -----------------------------------------------------------------

TWO = ScheduleSpec(sites=((0,), (1,)), chunks=(1, 1), slots=2, ring=2, window=1, grads=1)
TIGHT = replace(TWO, slots=1, ring=1)
TIED = ScheduleSpec(  # the first group is used twice and has two chunks, the third is resident
    sites=((0,), (1,), (0,)),
    chunks=(2, 1, 1),
    slots=1,
    ring=1,
    window=1,
    grads=1,
    host_cached_weights=(2,),
    host_cached_state=((2, 0),),
)
SPILLED = replace(TWO, chunks=(2, 1), spilled_gradients=frozenset({0}))


def test_forward_prefetches_only_into_free_slots():
    schedule, buffers = forward(TWO, empty_buffers(TWO), (0, 1))
    assert to_text(schedule) == "R0@0 R1@1 F0@0(R0) F1@1(R1)"
    assert buffers.slots == (0, 1)
    schedule, _ = forward(TIGHT, empty_buffers(TIGHT), (0, 1))
    assert to_text(schedule) == "R0@0 F0@0(R0) R1@0(F0) F1@0(R1)"


# mode, groups whose update waits, backward, and the forward after it
MODES = [
    (
        "serial",
        (0, 1),
        "B1@1 H1(B1) B0@0 H0(B0) E",
        "S0.0@0 U0.0@0,0(E,S0.0) W0.0@0,0(U0.0) S1.0@1 U1.0@1,1(S1.0) W1.0@1,1(U1.0) C",
    ),
    (
        "naive",
        (),
        "B1@1 S1.0@0 U1.0@0,1(B1,S1.0) W1.0@0,1(U1.0) "
        "B0@0(U1.0) S0.0@1(W1.0) U0.0@1,0(B0,S0.0) W0.0@1,0(U0.0) E C(E)",
        "F0@0(U0.0) F1@1",
    ),
    (
        "optimized",
        (),
        "S1.0@0 B1@1 U1.0@0,1(B1,S1.0) W1.0@0,1(U1.0) "
        "S0.0@1 B0@0(U1.0) U0.0@1,0(B0,S0.0) W0.0@1,0(U0.0) E C(E)",
        "F0@0(U0.0) F1@1",
    ),
    (
        "balanced",
        (1,),
        "S0.0@0 B1@1 H1(B1) B0@0 U0.0@0,0(B0,S0.0) W0.0@0,0(U0.0) E",
        "S1.0@1 U1.0@1,1(E,S1.0) W1.0@1,1(U1.0) C F0@0(U0.0) F1@1(U1.0)",
    ),
]


@pytest.mark.parametrize(("mode", "deferred", "back", "after"), MODES)
def test_no_update_mode_reads_weights_again_that_are_still_in_a_slot(mode, deferred, back, after):
    """Everything is still in its slot at the turn, so nothing is read again in any of them."""
    _, buffers = forward(TWO, empty_buffers(TWO), (0, 1))
    schedule, buffers = backward(TWO, buffers, (1, 0), placed_step(TWO, mode, deferred))
    assert to_text(schedule) == back
    order = () if mode == "serial" else (0, 1)
    schedule, _ = forward(TWO, buffers, order, placed_step(TWO, mode, deferred))
    assert to_text(schedule) == after


def test_a_commit_on_demand_waits_for_updates_that_nothing_writes():
    """Everything is in memory, so the update in an earlier schedule has no write."""
    state = ((0, 0), (0, 1))
    spec = replace(ONE, host_cached_weights=(0,), host_cached_state=state)
    uncommitted = placed_step(spec, commits=False)
    _, buffers = updates(spec, empty_buffers(spec), (0,), uncommitted)
    schedule, _ = updates(spec, buffers, (), uncommitted, end=True)
    assert to_text(schedule) == "E C(E,U0.1)"


def test_tied_weights_are_updated_after_their_last_use():
    schedule, buffers = forward(TIED, empty_buffers(TIED), (0, 1, 2))
    assert to_text(schedule) == ("R0@0 F0@0(R0) R1@0(F0) F1@0(R1) R0@0(F1) F2@0(R0)")
    schedule, buffers = backward(TIED, buffers, (2, 1, 0), placed_step(TIED), unreached=(2,))
    assert to_text(schedule) == (
        "S1.0@0 B2@0 R1@0(B2) B1@0(R1) U1.0@0,0(B1) W1.0@0,0(U1.0) "
        "S0.0@0(W1.0) R0@0 B0@0(R0) U0.0@0,0(B0) "
        "W0.0@0,0(U0.0) S0.1@0(W0.0) U0.1@0,0(S0.1) W0.1@0,0(U0.1) "
        "E U2.0@1,1(E) W2.0@1,1(U2.0) C"
    )


def test_held_gradients_go_through_staging_buffers():
    _, buffers = forward(SPILLED, empty_buffers(SPILLED), (0, 1))
    schedule, buffers = backward(SPILLED, buffers, (1, 0), placed_step(SPILLED, late=(0, 1)))
    assert to_text(schedule) == "B1@1 H1(B1) B0@0 H0(B0) P0.0@0(H0) P0.1@1 E"
    schedule, _ = forward(SPILLED, buffers, (0, 1), placed_step(SPILLED, late=(0, 1)))
    assert to_text(schedule) == (
        "G0.0@0(P0.0) S0.0@0 U0.0@0,0,0(E,S0.0) W0.0@0,0(U0.0) "
        "G0.1@1 S0.1@1 U0.1@1,0,1(S0.1) W0.1@1,0(U0.1) "
        "S1.0@0 U1.0@0,1(S1.0) W1.0@0,1(U1.0) C F0@0(U0.1) F1@1(U1.0)"
    )


def test_state_in_memory_is_written_beside_the_next_backward():
    """This holds if all updates wait and a backward follows; otherwise it is written at once."""
    spec = replace(SPILLED, chunks=(1, 1), host_cached_weights=(0,), host_cached_state=((0, 0),))
    _, buffers = forward(spec, empty_buffers(spec), (0, 1))
    _, before = backward(spec, buffers, (1, 0), placed_step(spec, late=(0, 1)))
    schedule, buffers = forward(spec, before, (0, 1), placed_step(spec, late=(0, 1)))
    names = [action.name for action in schedule if action.lane != "optimizer"]
    assert names == ["G0.0", "S1.0", "W1.0", "F0", "F1"]
    assert to_text(buffers.behind) == "W0.0@2,2 C"
    schedule, then = backward(spec, buffers, (1, 0), placed_step(spec, late=(0, 1)))
    names = [action.name for action in schedule if action.lane != "optimizer"]
    assert names == ["B1", "W0.0", "B0", "P0.0", "C", "E"] and not then.behind
    for phase, rest in (
        (backward(spec, buffers, (1, 0), placed_step(spec, speculates=True)), "S1.0"),
        (one_backward(spec, buffers, 1), "B1"),
        (forward(spec, buffers, (0, 1), training=False), "F0"),
    ):
        assert [action.name for action in phase[0]][:3] == ["W0.0", "C", rest]
    schedule, _ = finish_step(spec, before, placed_step(spec, late=(0, 1)))
    assert [action.name for action in schedule][-2:] == ["W0.0", "C"]
    schedule, _ = forward(spec, before, (0, 1), placed_step(spec, late=(0,)))
    assert [action.name for action in schedule if action.kind in "WCF"] == ["W0.0", "C", "F0", "F1"]


def test_updates_that_do_not_wait_for_the_norm():
    _, buffers = forward(TWO, empty_buffers(TWO), (0, 1))
    schedule, buffers = backward(TWO, buffers, (1, 0), placed_step(TWO, speculates=True))
    assert to_text(schedule) == (
        "S1.0@0 B1@1 H1(B1) U1.0@0,1(S1.0) W1.0@0,1(U1.0) S0.0@1 B0@0 "
        "H0(B0) U0.0@1,0(S0.0) W0.0@1,0(U0.0) E(H0)"
    )
    schedule, _ = forward(TWO, buffers, (0, 1), placed_step(TWO, speculates=True))
    assert to_text(schedule) == "C(E) F0@0(U0.0) F1@1"


def test_state_in_memory_is_written_only_where_steps_are_durable():
    cached = replace(TWO, host_cached_weights=(1,), host_cached_state=((1, 0),))
    for commits, wanted in (
        (True, "U1.0@2,2(B1) W1.0@2,2(U1.0) C(E)"),
        (False, "U1.0@2,2(B1) C(E,U1.0)"),
    ):
        schedule, _ = backward(
            cached, empty_buffers(cached), (1,), placed_step(cached, commits=commits)
        )
        assert to_text(schedule).replace(" E", "") == f"B1@2 {wanted}"


def test_schedules_single_blocks_on_demand():
    _, buffers = forward(TWO, empty_buffers(TWO), (0, 1))
    schedule, buffers = one_backward(TWO, buffers, 1)
    assert to_text(schedule) == "B1@1"
    schedule, buffers = updates(TWO, buffers, (1,), placed_step(TWO))
    assert to_text(schedule) == "S1.0@0 U1.0@0,1(B1,S1.0) W1.0@0,1(U1.0)"
    schedule, _ = updates(TWO, buffers, (0,), placed_step(TWO), end=True)
    assert to_text(schedule) == "E S0.0@1 U0.0@1,0(E,S0.0) W0.0@1,0(U0.0) C"


@pytest.mark.parametrize(("head_alone", "waits"), [(False, [(), ("D2",)]), (True, [("D2",), ()])])
def test_gradients_of_the_head_leave_the_device_alone(head_alone, waits):
    """Only those of the first group; the others have `device_grads` rooms in any case."""
    spec = replace(
        TWO,
        sites=((0,), (1,), (2,)),
        chunks=(1, 1, 1),
        slots=3,
        grads=3,
        device_slots=3,
        head_alone=head_alone,
    )
    _, buffers = forward(spec, empty_buffers(spec), (0, 1, 2))
    schedule, _ = backward(spec, buffers, (2, 1, 0), placed_step(spec, "naive"))
    actual = [action.waits for action in schedule if action.kind == "B"]
    assert [set(w) & {"D0", "D1", "D2"} for w in actual[1:]] == [set(w) for w in waits]


@pytest.mark.parametrize("window", [0, 2])
def test_site_of_several_groups_is_read_ahead_only_if_all_fit(window):
    """Two slots, a site of two groups: read ahead only what fits whole."""
    spec = replace(TWO, sites=((0, 1), (0,), (2, 0)), chunks=(1, 1, 1), window=window)
    schedule, _ = forward(spec, empty_buffers(spec), (0, 1, 2, 0))
    assert [a.name for a in schedule if a.kind == "F"] == ["F0", "F1", "F2", "F0"]
    backward(spec, empty_buffers(spec), (2, 1, 0), placed_step(spec))
    with pytest.raises(LohanError, match="1 weight slots cannot hold the 2 groups of one block"):
        forward(replace(spec, slots=1), empty_buffers(replace(spec, slots=1)), (0,))
    with pytest.raises(LohanError, match="1 weight slots cannot hold the 2 groups of one block"):
        one_backward(replace(spec, slots=1), empty_buffers(replace(spec, slots=1)), 0)


def test_table_of_uses_does_not_grow_with_the_steps():
    """A group that stays in its slot for the whole run is used in every step."""
    buffers = empty_buffers(TWO)
    sizes = []
    for _ in range(4):
        _, buffers = forward(TWO, buffers, (0, 1))
        _, buffers = backward(TWO, buffers, (1, 0), placed_step(TWO))
        sizes.append(len(buffers.uses.recorded()))
    assert len(set(sizes[1:])) == 1


# -- the check ------------------------------------------------------------------------------------

STEP = (
    "R0@0 R1@1 F0@0(R0) F1@1(R1) S1.0@0 B1@1(R1) U1.0@0,1(B1,R1,S1.0) W1.0@0,1(U1.0,C) S0.0@1 "
    "B0@0(R0) U0.0@1,0(B0,R0,S0.0) W0.0@1,0(U0.0,C) E C(E)"
)
HELD = (
    "R0@0 F0@0(R0) B0@0(R0) H0(B0) P0.0@0(H0) P0.1@1(H0) E S0.0@0 G0.0@0(P0.0) "
    "U0.0@0,0,0(H0,E,S0.0,G0.0) W0.0@0,0(U0.0,C) G0.1@1(P0.1) S0.1@1 "
    "U0.1@1,0,1(H0,E,S0.1,G0.1) W0.1@1,0(U0.1,C) C"
)
ONE = ScheduleSpec(
    sites=((0,),), chunks=(2,), slots=2, ring=2, window=0, grads=1, spilled_gradients=frozenset({0})
)


def test_accepts_correct_schedules():
    validate(from_text(STEP), TWO, empty_buffers(TWO), whole=True)
    validate(from_text(HELD), ONE, empty_buffers(ONE), whole=True)


@pytest.mark.parametrize(
    ("text", "spec", "change", "problem"),
    [
        # what it waits for
        (STEP, TWO, ("F0@0(R0)", "F0@0"), "F0@0: uses slot 0 while R0 may be in flight"),
        (
            STEP,
            TWO,
            ("U1.0@0,1(B1,R1,S1.0)", "U1.0@0,1(B1,R1)"),
            "U1.0@0,1(B1,R1): overwrites state buffer 0 while S1.0 may be in flight",
        ),
        (STEP, TWO, ("U1.0@0,1(B1,", "U1.0@0,1(F1,"), "the gradients of B1 may not be there yet"),
        (
            STEP,
            TWO,
            ("W1.0@0,1(U1.0,C)", "W1.0@0,1(C)"),
            "W1.0@0,1(C): uses state buffer 0 while U1.0 may be in flight",
        ),
        (STEP, TWO, (" C(E)", " C(E) S1.0@1"), "overwrites state buffer 1 while W0.0"),
        (STEP, TWO, (" C(E)", " C(E) S0.0@0"), "uses group on SSD 0 while W0.0 may be"),
        (STEP, TWO, (" C(E)", " C(E) R0@1(W1.0)"), "uses group on SSD 0 while W0.0 may be"),
        (STEP, TWO, (" C(E)", " C(E) R1@0(W1.0,F0)"), "overwrites slot 0 while W0.0 may be"),
        (STEP, TWO, ("S0.0@1 B0", "S0.0@0(S1.0) B0"), "overwrites state buffer 0 while"),
        (HELD, ONE, ("G0.0@0(P0.0)", "G0.0@0"), "overwrites staging buffer 0 while P0.0"),
        (HELD, ONE, ("S0.0,G0.0)", "S0.0)"), "uses staging buffer 0 while G0.0 may be in flight"),
        (HELD, ONE, ("P0.1@1(H0)", "P0.1@0(H0)"), "overwrites staging buffer 0 while P0.0"),
        # what it finds
        (STEP, TWO, ("F1@1(R1)", "F1@0(R1)"), "F1@0(R1): slot 0 holds group 0, not 1"),
        (STEP, TWO, (" S0.0@1", ""), "ring buffer 1 holds None"),
        (STEP, TWO, ("R1@1 ", ""), "slot 1 holds group None, not 1"),
        (STEP, TWO, ("W0.0@1,0(U0.0,C)", ""), "C(E): U0.0 is not written yet"),
        (
            STEP,
            TWO,
            ("U0.0@1,0(B0,R0,S0.0) W0.0@1,0(U0.0,C)", ""),
            "C(E): group 0 chunk 0 was not updated in this step",
        ),
        (STEP, TWO, (" E ", " U0.0@1,0(B0,W0.0) E "), "is updated a second time in this step"),
        (STEP, TWO, (" W1.0@0,1(U1.0,C)", " R1@0(U1.0,F0)"), "newest weights are not written yet"),
        (STEP, TWO, (" W1.0@0,1(U1.0,C)", " S1.0@1(U1.0)"), "newest state is not written yet"),
        (STEP, TWO, (" E ", " W0.0@1,0(W0.0) E "), "there is nothing new to write"),
        (STEP, TWO, (" E ", " B1@1(U1.0) E "), "group 1 was handed over before its last use"),
        (STEP, TWO, ("U1.0@0,1(B1,R1,S1.0)", "U1.0@0,1(R1,S1.0)"), "may not be there yet"),
        (HELD, ONE, (" E ", " E F0@0 "), "the weights of group 0 are not updated yet"),
        (HELD, ONE, ("H0(B0) ", ""), "P0.0@0(H0): these gradients are not held"),
        (HELD, ONE, (" P0.1@1(H0)", ""), "G0.1@1(P0.1): these gradients were not put away"),
        (HELD, ONE, ("U0.0@0,0,0(", "U0.0@0,0("), "in no staging buffer"),
        # what there is
        (STEP, TWO, ("R0@0 ", "R7@0 "), "R7@0: there is no such site, group or chunk"),
        (STEP, TWO, ("S1.0@0 ", "S1.3@0 "), "there is no such site, group or chunk"),
        (STEP, TWO, ("R0@0 ", "R0@5 "), "names a slot or buffer that does not exist"),
        (STEP, TWO, ("R0@0 ", "R0 "), "R0: has 0 slots and buffers, wants 1"),
        (STEP, TWO, ("F0@0(R0)", "F0@0(R0,R9)"), "waits for R9, which no schedule"),
        (STEP, TWO, ("F0@0(R0)", "F0@0(R0,here)"), "waits for here, which no schedule"),
    ],
)
def test_names_the_action_that_makes_a_schedule_wrong(text, spec, change, problem):
    assert change[0] in text
    with pytest.raises(LohanError) as raised:
        schedule = from_text(text.replace(change[0], change[1], 1))
        validate(schedule, spec, empty_buffers(spec), whole=True)
    assert problem in str(raised.value) and str(raised.value).startswith("schedule: ")


def test_a_write_waits_for_the_commit_before_it():
    """A write of the second step waits for the commit of the first.

    Otherwise it would enter the generation that is being committed. A state read between them
    would show that the commit is over; with the state in memory there is none.
    """
    spec = replace(TWO, host_cached_state=((0, 0), (1, 0)))
    step = (
        "F0@0(R0,U0.0) F1@1(R1,U1.0) B1@1 U1.0@3,1(B1,W1.0) W1.0@3,1(U1.0,C) B0@0 "
        "U0.0@2,0(B0,W0.0) W0.0@2,0(U0.0,C) E C(E)"
    )
    validate(from_text(f"R0@0 R1@1 {step} {step}"), spec, empty_buffers(spec), whole=True)
    early = step.replace("W1.0@3,1(U1.0,C)", "W1.0@3,1(U1.0)")
    with pytest.raises(LohanError, match="into the generation that C is committing"):
        validate(from_text(f"R0@0 R1@1 {step} {early}"), spec, empty_buffers(spec), whole=True)


def test_validates_against_the_buffers_of_earlier_schedules():
    """A schedule alone, with the table that it was made from."""
    _, buffers = forward(TIGHT, empty_buffers(TIGHT), (0, 1))
    _, buffers = backward(TIGHT, buffers, (1, 0), placed_step(TIGHT))
    schedule, _ = forward(TIGHT, buffers, (1,))
    assert to_text(schedule) == "R1@0(W0.0) F1@0(R1)"
    validate(schedule, TIGHT, buffers)
    early = tuple(
        action.waiting_for(tuple(w for w in action.waits if w != "W0.0")) for action in schedule
    )
    with pytest.raises(LohanError, match=r"overwrites slot 0 while W0\.0 may be in flight"):
        validate(early, TIGHT, buffers)


# -- any shape ------------------------------------------------------------------------------------


def commit_between_spill_and_fetch() -> ScheduledRun:
    """Return a run whose commit is in the backward that fetches what forward has spilled."""
    spec = ScheduleSpec(
        sites=((0,),) * 4,
        chunks=(1, 2),
        slots=1,
        ring=1,
        window=0,
        grads=1,
        host_cached_weights=(1,),
        host_cached_state=((1, 1),),
        spilled_sites=frozenset({3}),
        act_buffers=1,
    )
    first = ScheduledStep(order=(0,), back=(0,), ahead=False, evaluated=(), speculates=False)
    last = ScheduledStep(
        order=(2, 3, 0), back=(0, 3, 2), ahead=True, evaluated=(), speculates=False
    )
    return ScheduledRun(spec, "naive", (0, 1), (first, first, last))


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduled_runs())
@example(commit_between_spill_and_fetch())
def test_random_schedules_are_valid(run):
    chain = chain_of(run)
    validate(chain, run.spec, empty_buffers(run.spec), whole=True, by_interval=not run.commits)
    assert from_text(to_text(chain)) == chain
    assert sum(action.kind == "C" for action in chain) == 3


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduled_runs())
def test_random_schedules_are_valid_long_form(run):
    interval = not run.commits
    validate(chain_of(run), run.spec, empty_buffers(run.spec), whole=True, by_interval=interval)


def test_upcoming_returns_the_distance_to_the_next_use():
    """The result equals a search in the list of remaining uses, also for groups used twice."""
    used, then = [0, 1, 2, 0, 3], [3, 0, 2, 1, 0]
    upcoming = Upcoming(used, then)
    for position in range(len(used) + 1):
        left, all_left = used[position:], used[position:] + then
        for group in (*range(4), 9):
            for rest, also in ((left, False), (all_left, True)):
                expected = rest.index(group) if group in rest else len(rest)
                assert upcoming.distance(group, then=also) == expected
        assert upcoming.distance(None) == float("inf")
        upcoming.passed(used[position : position + 1])
