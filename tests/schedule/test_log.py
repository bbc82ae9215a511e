"""Schedules that log gradients: what they read, write and wait for."""

from __future__ import annotations

import pytest

from lohan.errors import LohanError
from lohan.schedule import phases
from lohan.schedule.actions import Action, ScheduleSpec, effects_of
from lohan.schedule.ops import Effect, Op, Operation
from lohan.schedule.placement import UpdateOptions
from lohan.schedule.steps import ExecutionOrder, chain_of, check_order

FROZEN = 1
TRAINED = (0, 2, 3, 4, 5)
RESIDENT = 6  # always cached
SPECS = {
    f"{place}-{cached}-{ring}": ScheduleSpec(
        sites=((0,), (1, 2), (3,), (4,), (5,), (0,)),  # tied weights
        chunks=(2, 0, 3, 1, 2, 1, 1),
        slots=4,
        ring=ring,
        window=2,
        grads=grads,
        host_cached_weights=(RESIDENT, *groups),
        host_cached_state=tuple((group, 0) for group in groups),
        spilled_gradients=frozenset((*TRAINED, RESIDENT)),
        log=True,
        **options,
    )
    for place, options in {
        "host": {},
        "linked": {"device_slots": 3, "offloaded": frozenset(range(6))},
        "ranks": {"device_slots": 3, "offloaded": frozenset(range(6)), "net": True},
    }.items()
    for cached, groups in {"none": (), "some": (2, 3), "all": TRAINED}.items()
    for ring, grads in ((2, 1), (8, 6))
}
ORDER = ExecutionOrder(
    forward=(0, 1, 2, 3, 4, 5),
    backward=(5, 4, 3, 2, 1, 0),
    updates=UpdateOptions(logs=True, needs_all_gradients=True, every_step_commits=False),
)


@pytest.mark.parametrize("name", SPECS)
def test_every_action_waits_for_what_it_uses(name: str) -> None:
    check_order.__wrapped__(SPECS[name], ORDER)


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("host")])
def test_reads_the_last_full_state_and_writes_weights_that_backward_reads(name: str) -> None:
    spec = SPECS[name]
    streamed = [group for group in TRAINED if group not in spec.host_cached_weights]
    *_, step = chain_of(spec, ORDER, (True, True, False, False, False))
    kinds = {phase: [(a.kind, a.index, a.chunk) for a in step[phase]] for phase in step}
    forward, backward = kinds["forward"], kinds["backward"]
    assert [i for kind, i, _ in forward if kind == Op.READ_BASE_WEIGHTS] == streamed
    chunks = [(Op.WRITE_WEIGHTS, g, c) for g in streamed for c in range(spec.chunks[g])]
    assert [action for action in forward if action[0] == Op.WRITE_WEIGHTS] == chunks
    assert not any(kind == Op.WRITE for kind, _, _ in (*forward, *backward))
    read = [i for kind, i, _ in (*forward, *backward) if kind == Op.READ_WEIGHTS]
    assert set(read) <= {FROZEN, *streamed}
    assert backward[-1][0] == Op.COMMIT_LOG


def cases() -> list[tuple[Operation, str]]:
    kinds = set()
    for spec in SPECS.values():
        for phase_by_name in chain_of(spec, ORDER, (True, True, False, False)):
            for action in (action for phase in phase_by_name.values() for action in phase):
                if action.kind in NEW:
                    kinds |= {(action.kind, str(r[0])) for r, _, _ in effects_of(action, spec)}
    return sorted(kinds)


NEW = (Op.READ_BASE_WEIGHTS, Op.READ_BASE, Op.WRITE_WEIGHTS, Op.FETCH_LOGGED, Op.COMMIT_LOG)
# Effects that others imply in these schedules: J waits for all gradients of the step, every update
# waits for a read of the log, and the drives complete their actions in order.
IMPLIED = {
    (Op.READ_BASE_WEIGHTS, "group on SSD"),
    (Op.READ_BASE_WEIGHTS, "open generation"),
    (Op.READ_BASE, "group on SSD"),
    (Op.READ_BASE, "open generation"),
    (Op.READ_BASE, "slot"),
    (Op.READ_BASE, "state buffer"),
    (Op.WRITE_WEIGHTS, "group on SSD"),
    (Op.WRITE_WEIGHTS, "open generation"),
    (Op.FETCH_LOGGED, "gradients on SSD"),
    (Op.COMMIT_LOG, "end of backward"),
}


@pytest.mark.parametrize(("op", "resource"), cases())
def test_check_finds_a_missing_effect(
    op: Operation, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(action: Action, spec: ScheduleSpec) -> list[Effect]:
        effects = effects_of(action, spec)
        if action.kind is not op:
            return effects
        return [effect for effect in effects if effect[0][0] != resource]

    monkeypatch.setattr(phases, "effects_of", without)
    differs = False
    for spec in SPECS.values():
        try:
            check_order.__wrapped__(spec, ORDER)
        except LohanError:
            differs = True
    assert differs is ((op, resource) not in IMPLIED)
