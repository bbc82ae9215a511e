"""The table of mutants fits the tree: benchmarks/mutants.py runs it, which takes long."""

from __future__ import annotations

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
