"""Tests of the mutant generator, and of the table of waits in benchmarks/remove_waits.py.

Running the mutants and the removed waits takes too long for a test.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from benchmarks import remove_waits
from benchmarks.mutants import EFFECTS, KINDS, ROOT, all_mutants, choose, mutants_of, select_tests

SOURCE = '''"""A módule: offsets count bytes, not characters."""


def scale(n: int, limit: int = 2 * 3) -> int:
    if n < limit and "é":
        print(n)
    n += 1
    if n > 9:
        raise ValueError(f"{n * 3} is too large: {n == 3}")
    return n * 2 + 1
'''


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("flip-comparison", "n < limit", "(n >= limit)"),
        ("flip-comparison", "n > 9", "(n <= 9)"),
        ("off-by-one", "n < limit", "(n <= limit)"),
        ("off-by-one", "n > 9", "(n >= 9)"),
        ("off-by-one", "n * 2 + 1", "(n * 2)"),
        ("drop-factor", "n * 2", "(n)"),
        ("drop-factor", "2 * 3", "(2)"),
        ("swap-and-or", "n < limit and 'é'", "(n < limit or 'é')"),
        ("drop-statement", "print(n)", "pass"),
        ("drop-statement", "n += 1", "pass"),
    ],
)
def test_changes_one_place_of_the_source(kind: str, before: str, after: str) -> None:
    mutants = [m for m in mutants_of(SOURCE, "a.py") if (m.kind, m.before) == (kind, before)]
    assert len(mutants) == 1
    changed = mutants[0].apply(SOURCE)
    assert changed == SOURCE.replace(before.replace("'", '"'), after, 1)


def test_generates_nothing_in_messages_and_annotations() -> None:
    assert len(mutants_of(SOURCE, "a.py")) == 10


def test_every_mutant_of_the_package_is_valid_and_different() -> None:
    sources = {path: (ROOT / path).read_text() for path in {m.file for m in all_mutants(ROOT)}}
    for mutant in choose(all_mutants(ROOT), 60, seed=1):
        changed = ast.dump(ast.parse(mutant.apply(sources[mutant.file])))
        assert changed != ast.dump(ast.parse(sources[mutant.file])), mutant


def test_choice_has_every_kind_and_ignores_line_numbers() -> None:
    mutants = all_mutants(ROOT)
    assert len({mutant.identity for mutant in mutants}) == len(mutants)
    counts = Counter(mutant.kind for mutant in choose(mutants, 30, seed=0))
    assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
    assert choose(mutants, 30, seed=0) != choose(mutants, 30, seed=1)
    moved = [
        mutant for mutant in mutants_of("import os\n\n" + (ROOT / EFFECTS).read_text(), EFFECTS)
    ]
    unmoved = [mutant for mutant in mutants if mutant.file == EFFECTS]
    assert [m.identity for m in choose(moved, 5, 0)] == [m.identity for m in choose(unmoved, 5, 0)]


def test_every_effect_of_the_schedule_can_be_dropped() -> None:
    source = (ROOT / EFFECTS).read_text()
    mutants = [mutant for mutant in mutants_of(source, EFFECTS) if mutant.kind == "drop-effect"]
    assert {mutant.scope for mutant in mutants} == {"Op", "_forward", "_backward", "_update"}
    effects = re.findall(r"(?:READ|WRITE|AFTER), (?:WHOLE|chunk)\)", source)
    assert len(mutants) == len(effects) - 2  # Two are elements of comprehensions.


def test_every_module_has_tests() -> None:
    assert select_tests("lohan/store/io_engine.py", ROOT) == ["tests/store/test_io_engine.py"]
    assert select_tests("lohan/config.py", ROOT) == ["tests/top_level/test_config.py"]
    files = {mutant.file for mutant in all_mutants(ROOT)}
    assert [file for file in sorted(files) if not select_tests(file, ROOT)] == []


def test_every_wait_that_is_removed_has_one_place_and_its_tests() -> None:
    """A failure is fixed in remove_waits.py, with the change that moved the wait."""
    for wait in remove_waits.WAITS:
        source = (ROOT / "lohan" / wait.file).read_text()
        changed = remove_waits.changed(source, wait.text, wait.without, file=wait.file)
        assert changed != source
    for test in (remove_waits.RACES, remove_waits.BACKEND):
        assert (ROOT / test).is_file()
