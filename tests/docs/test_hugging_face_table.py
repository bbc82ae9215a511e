"""docs/hugging-face.md covers everything that users of a Trainer can change."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

TITLE = "### What a subclass, callback or hook can change"


def named_in_table() -> set[str]:
    """Return every name in backticks in the first column of the table."""
    text = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text(encoding="utf-8")
    section = text.partition(f"{TITLE}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def public(kind: type) -> set[str]:
    """Return the public names of a class and of those of its bases that transformers defines."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("transformers")]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def test_table_has_every_public_method_of_trainer():
    assert public(transformers.Trainer) - named_in_table() == set()


def test_table_has_every_callback_event():
    events = {name for name in public(transformers.TrainerCallback) if name.startswith("on_")}
    assert len(events) > 10 and events - named_in_table() == set()


def test_table_names_no_method_or_event_that_is_gone():
    existing = public(transformers.Trainer) | public(transformers.TrainerCallback)
    methods = {name for name in named_in_table() if re.fullmatch(r"(get|on|create|save)_\w+", name)}
    assert methods - existing == set()
