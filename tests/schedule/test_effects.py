"""Every effect of an operation decides a wait in some recorded schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lohan.schedule import phases
from lohan.schedule.actions import Action, ScheduleSpec, Uses, effects_of
from lohan.schedule.ops import AFTER, OPERATIONS, READ, WHOLE, WRITE, Effect, Op, Operation, table
from tests.replay.happens_before import RECORDED, cases, describe

CASES = list(cases())
ROOT = Path(__file__).resolve().parents[2]
# Effects that other effects imply in every schedule. They are kept because they state the truth
# about the operation, and protect schedules that do not exist yet.
IMPLIED = {
    (Op.READ_WEIGHTS, "group on SSD"),
    (Op.SPILL_GRADIENTS, "gradients on SSD"),
    (Op.FETCH_GRADIENTS, "gradients on SSD"),
}


def all_effects() -> set[tuple[Operation, str]]:
    """Return every pair of an operation and a resource in the recorded schedules."""
    collected: set[tuple[Operation, str]] = set()

    def record(action: Action, spec: ScheduleSpec) -> list[Effect]:
        effects = effects_of(action, spec)
        collected.update((action.kind, str(resource[0])) for resource, _, _ in effects)
        return effects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "effects_of", record)
        for _, spec, order in CASES:
            describe(spec, order)
    return collected


@pytest.mark.parametrize(("op", "resource"), sorted(all_effects()))
def test_a_missing_effect_changes_a_schedule(op, resource, monkeypatch):
    def without(action: Action, spec: ScheduleSpec) -> list[Effect]:
        effects = effects_of(action, spec)
        if action.kind is not op:
            return effects
        return [effect for effect in effects if effect[0][0] != resource]

    recorded = json.loads(RECORDED.read_text())
    monkeypatch.setattr(phases, "effects_of", without)
    changed = any(describe(spec, order) != recorded[name] for name, spec, order in CASES)
    assert changed is ((op, resource) not in IMPLIED)


def test_the_documentation_shows_the_table():
    assert "\n".join(table()) in (ROOT / "docs/design.md").read_text()


def action(token: str) -> Action:
    return Action(OPERATIONS[token[0]], int(token[1:]))


def test_waits_follow_from_reads_and_writes():
    uses, slot = Uses(), ("slot", 0)
    assert uses.waits_of(action("R0"), [(slot, WRITE, WHOLE)]) == ()
    assert uses.waits_of(action("F0"), [(slot, READ, WHOLE)]) == ("R0",)
    assert uses.waits_of(action("H0"), [(slot, READ, WHOLE)]) == ("R0",)
    # A write waits for the readers, who have waited for the write before.
    assert set(uses.waits_of(action("L0"), [(slot, WRITE, WHOLE)])) == {"F0", "H0"}


def test_parts_conflict_with_the_whole_and_with_themselves():
    uses, slot = Uses(), ("slot", 0)
    assert uses.waits_of(action("H0"), [(slot, WRITE, 0)]) == ()
    assert uses.waits_of(action("L1"), [(slot, READ, 1)]) == ()
    assert uses.waits_of(action("F2"), [(slot, READ, WHOLE)]) == ("H0",)
    assert set(uses.waits_of(action("R3"), [(slot, WRITE, WHOLE)])) == {"L1", "F2"}


def test_note_follows_writes_and_delays_none():
    uses, fact = Uses(), ("fact",)
    assert uses.waits_of(action("F0"), [(fact, WRITE, WHOLE)]) == ()
    assert uses.waits_of(action("R1"), [(fact, AFTER, WHOLE)]) == ("F0",)
    assert uses.waits_of(action("H2"), [(fact, WRITE, WHOLE)]) == ("F0",)


def test_copied_uses_do_not_see_later_uses_of_the_original():
    uses, slot = Uses(), ("slot", 0)
    uses.waits_of(action("R0"), [(slot, WRITE, WHOLE)])
    copy = uses.copy()
    uses.waits_of(action("F0"), [(slot, READ, WHOLE)])
    assert copy.waits_of(action("L0"), [(slot, WRITE, WHOLE)]) == ("R0",)
