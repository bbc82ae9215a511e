"""The code gives the weights, plans and schedules that record.py has recorded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.replay.record import AGAIN, FROZEN, PLANS, SCHEDULES, WEIGHTS, Bench, bench
from tests.support.forked_commands import Forge
from tests.support.generated_cases import thinned

MEANT = f"If the change is meant, record again with `{AGAIN}` and say why in the commit."
NEEDS = {"diffusion": "diffusers", "lora": "peft"}


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    return json.loads(FROZEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made(forge: Forge) -> Iterator[Bench]:
    with bench(forge) as opened:
        yield opened


def lines(value: Any) -> list[str]:
    """Return one line for each number, or for each action of a schedule."""
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return [line for title, text in value.items() for line in (title, *text.split())]
    return json.dumps(value, indent=1).splitlines()


def check_same(what: str, actual: Any, recorded: Any) -> None:
    if actual == recorded:
        return
    difference = difflib.unified_diff(
        lines(recorded), lines(actual), "recorded", "today", lineterm="", n=1
    )
    shown = list(difference)
    left = [f"... {len(shown) - 60} more lines"] if len(shown) > 60 else []
    pytest.fail("\n".join((f"{what} changed:", *shown[:60], *left, MEANT)), pytrace=False)


@pytest.mark.parametrize("family", WEIGHTS)
def test_weights(family: str, made: Bench, frozen: dict[str, Any]) -> None:
    """All cases of a family agree with each other, and with the recorded digests.

    Digests are compared only if torch computes as it did when they were recorded.
    """
    if family in NEEDS:
        pytest.importorskip(NEEDS[family])
    recorded = frozen["weights"].get(made.key)
    actual = {
        name: made.weights(f"{family}/{name}", case)
        for name, case in WEIGHTS[family].items()
        if recorded is None or not case.substitute
    }
    (first, expected), *others = actual.items()
    for name, other in others:
        check_same(f"{family}: '{name}' is to have the bits of '{first}', and", other, expected)
    if recorded is None:
        pytest.skip(
            f"the cases agree with each other; nothing was recorded for {made.key}, only for "
            f"{'; '.join(frozen['weights'])}. `{AGAIN}` on the commit before yours records it"
        )
    check_same(f"{family}: losses and weights", expected, recorded[family])


@pytest.mark.parametrize("words", thinned(PLANS, 0, 2, 5, 6))
def test_plan(words: str, made: Bench, frozen: dict[str, Any]) -> None:
    check_same(f"lohan plan {words}", made.plan(words), frozen["plans"][words])


@pytest.mark.parametrize("words", SCHEDULES)
def test_schedule(words: str, made: Bench, frozen: dict[str, Any]) -> None:
    check_same(f"the schedule of {words}", made.schedule(words), frozen["schedules"][words])


def test_nothing_is_recorded_that_nobody_compares(frozen: dict[str, Any]) -> None:
    assert set(frozen["plans"]) == set(PLANS) and set(frozen["schedules"]) == set(SCHEDULES)
    assert all(set(families) == set(WEIGHTS) for families in frozen["weights"].values())
    for words, phases in frozen["schedules"].items():
        titles = [title.split(",")[0] for title in phases]
        assert titles == ["forward", "backward"], words
