"""Record the happens-before relation of a fixed set of schedules, and their simulated step times.

    python -m tests.replay.happens_before

writes happens_before.json next to this file. test_happens_before.py compares today's code with it.
The relation is stored instead of the waits: two schedules with different waits but the same
relation run in the same way. An action's clock is the number of actions of each lane that are
known to have finished when the action starts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lohan.schedule.actions import Action, ScheduleSpec
from lohan.schedule.placement import UpdateOptions
from lohan.schedule.simulate import simulate
from lohan.schedule.steps import ExecutionOrder, chain_of
from lohan.util.trace import LANES

RECORDED = Path(__file__).parent / "happens_before.json"

# The seconds of an action by its letter. The values are distinct, so that a different order of
# actions leads to a different step time.
SECONDS = {
    "F": 3.1,
    "B": 6.3,
    "E": 0.0,
    "R": 1.3,
    "S": 1.7,
    "W": 2.9,
    "H": 0.2,
    "U": 1.1,
    "P": 0.9,
    "G": 0.7,
    "O": 1.9,
    "I": 1.5,
    "C": 0.4,
    "L": 0.8,
    "V": 1.2,
    "K": 1.4,
    "D": 0.6,
    "A": 0.5,
    "X": 1.0,
}

# -- The cases -------------------------------------------------------------------------------------

TIED = ScheduleSpec(  # Group 0 belongs to two sites, and group 3 to none.
    sites=((0,), (1,), (2,), (0,)),
    chunks=(2, 2, 1, 1),
    slots=2,
    ring=2,
    window=1,
    grads=1,
    host_cached_weights=(3,),
    host_cached_state=((3, 0),),
)
DEEP = ScheduleSpec(  # Group 2 is frozen, and site 3 uses two groups.
    sites=((0,), (1,), (2,), (3, 4), (5,)),
    chunks=(1, 2, 0, 1, 2, 1),
    slots=4,
    ring=3,
    window=2,
    grads=2,
)
SPECS: dict[str, ScheduleSpec] = {
    "tied": TIED,
    "tied, cached": replace(
        TIED, host_cached_weights=(3, 1), host_cached_state=((3, 0), (1, 0), (1, 1), (2, 0))
    ),
    "tied, all cached": replace(
        TIED,
        host_cached_weights=(3, 0, 1, 2),
        host_cached_state=((3, 0), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)),
    ),
    "tied, spilled gradients": replace(TIED, spilled_gradients=frozenset({0, 2})),
    "three chunks, spilled gradients": ScheduleSpec(
        sites=((0,), (1,)),
        chunks=(3, 3),
        slots=2,
        ring=3,
        window=1,
        grads=1,
        spilled_gradients=frozenset({0, 1}),
        host_cached_state=((0, 0), (0, 1), (1, 2)),
    ),
    "deep": DEEP,
    "deep, spilled activations": replace(DEEP, spilled_sites=frozenset({1, 4})),
    "deep, device": replace(
        DEEP, device_slots=3, offloaded=frozenset({0, 1, 3}), spilled_sites=frozenset({1})
    ),
    "deep, device, head alone": replace(
        DEEP,
        device_slots=2,
        device_grads=1,
        head_alone=True,
        offloaded=frozenset(range(5)),
        spilled_gradients=frozenset({1, 3}),
    ),
    "deep, ranks": replace(DEEP, device_slots=3, net=True, offloaded=frozenset({0, 4})),
}


@dataclass(frozen=True)
class Order:
    """How updates run in a chain of steps."""

    update_mode: str = "optimized"
    deferred: str = "none"  # none, some or all of the trained groups
    overlap: bool = True
    commits: tuple[bool, ...] = (True, True, True)
    speculates: tuple[bool, ...] = ()


ORDERS: dict[str, Order] = {
    "optimized": Order(),
    "naive": Order(update_mode="naive"),
    "balanced": Order(update_mode="balanced", deferred="some"),
    "waits for the norm": Order(deferred="all"),
    "waits for the norm, serial": Order(update_mode="serial", deferred="all"),
    "waits for the norm, commits by interval": Order(
        deferred="all", commits=(True, False, False, True)
    ),
    "commits by interval": Order(commits=(False, True, True, False)),
    "speculates": Order(
        deferred="all", commits=(True,) * 5, speculates=(False, True, True, False, True)
    ),
    "no overlap": Order(overlap=False, deferred="all"),
}


def cases() -> Iterator[tuple[str, ScheduleSpec, Order]]:
    """Yield about 45 pairs of a spec and an order; each value meets most values of the other."""
    pairs = itertools.product(SPECS.items(), ORDERS.items())
    for number, ((spec_name, spec), (order_name, order)) in enumerate(pairs):
        if number % 2 == 0:
            yield f"{spec_name}; {order_name}", spec, order


def chain(spec: ScheduleSpec, order: Order) -> list[tuple[Action, ...]]:
    """Return the phases of the steps in a row."""
    sites = tuple(range(len(spec.sites)))
    trained = [group for group, chunks in enumerate(spec.chunks) if chunks]
    late = trained[::2] if order.deferred == "some" else []
    execution = ExecutionOrder(
        forward=sites,
        backward=sites[::-1],
        updates=UpdateOptions(
            mode=order.update_mode,
            needs_all_gradients=order.deferred == "all",
            late=frozenset(late),
            overlap=order.overlap,
            every_step_commits=all(order.commits),
        ),
    )
    steps = chain_of(spec, execution, order.commits, order.speculates)
    return [phase for phases in steps for phase in phases.values() if phase]


# -- The relation ----------------------------------------------------------------------------------

Clock = tuple[int, ...]


def clocks(actions: Sequence[Action]) -> list[Clock]:
    """Return for each action how many actions of each lane have finished when it starts.

    An action of the ssd lane starts when its predecessor in the lane has started; an action of any
    other lane starts when its predecessor has finished. All lanes finish their actions in order.
    """
    zero = (0,) * len(LANES)
    last_start, last_done = dict.fromkeys(LANES, zero), dict.fromkeys(LANES, zero)
    done: dict[str, Clock] = {}
    starts: list[Clock] = []
    for action in actions:
        lane = action.lane
        start = (last_start if lane == "ssd" else last_done)[lane]
        for wait in action.waits:
            start = join(start, done.get(wait, zero))
        finished = list(join(start, last_done[lane]))
        finished[LANES.index(lane)] += 1
        last_start[lane], last_done[lane] = start, tuple(finished)
        done[action.name] = tuple(finished)
        starts.append(start)
    return starts


def join(first: Clock, second: Clock) -> Clock:
    return tuple(map(max, first, second))


def describe(spec: ScheduleSpec, order: Order) -> dict[str, object]:
    """Return the program order, the clock of every action, and the simulated step times."""
    phases = chain(spec, order)
    actions = [action for phase in phases for action in phase]
    return {
        "actions": " ".join(action.waiting_for(()).token() for action in actions),
        "clocks": " ".join(",".join(map(str, clock)) for clock in clocks(actions)),
        "step_s": [
            round(simulate(phases, seconds, caller_updates=shared).step_s, 9)
            for shared in (False, True)
        ],
    }


def seconds(action: Action) -> float:
    return SECONDS[action.kind]


def main() -> None:
    actual = {name: describe(spec, order) for name, spec, order in cases()}
    RECORDED.write_text(json.dumps(actual, indent=1) + "\n")


if __name__ == "__main__":
    main()
