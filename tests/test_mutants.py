"""The tables of mutants and of waits fit the tree: benchmarks/mutants.py and
benchmarks/remove_waits.py run them, which takes long."""

from __future__ import annotations

from benchmarks import remove_waits
from benchmarks.mutants import ROOT, ids_of_tests, places_of, read_table, sources


def test_every_mutant_has_one_place_and_its_tests() -> None:
    """What fails here is to be mended in benchmarks/mutants.toml, with the change that moved it."""
    texts, table = sources(ROOT), read_table()
    found = {mutant.name: len(places_of(mutant.find, texts)) for mutant in table}
    assert {name: count for name, count in found.items() if count != 1} == {}
    named = {
        mutant.name: [t for t in mutant.tests if not ids_of_tests([t], ROOT)] for mutant in table
    }
    assert {name: missing for name, missing in named.items() if missing} == {}
    assert len(found) == len(table), "two mutants of one name"
    assert all(mutant.find != mutant.replace and mutant.tests for mutant in table)


def test_every_wait_that_is_removed_has_one_place_and_its_tests() -> None:
    """What fails here is to be mended in remove_waits.py, with the change that moved it."""
    for wait in remove_waits.WAITS:
        source = (ROOT / "lohan" / wait.file).read_text()
        changed = remove_waits.changed(source, wait.text, wait.without, file=wait.file)
        assert changed != source
    for test in (remove_waits.RACES, remove_waits.BACKEND):
        assert (ROOT / test).is_file()
