"""The help of `lohan train`: panels by purpose, short texts, readable at 100 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.cli.options import PANEL_OF, PANELS
from lohan.cli.train import ONLY_BY_SET
from lohan.config import fields_of

LONGEST_HELP = 170  # characters, four lines beside the names in 100 columns


def test_every_option_of_train_has_a_panel():
    settings = {info.dotted for info in fields_of()}
    assert set(PANEL_OF) == settings - set(ONLY_BY_SET)
    assert len(PANEL_OF) == sum(map(len, PANELS.values()))


def test_train_help_shows_common_panels_first_within_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    shown = CliRunner().invoke(app, ["train", "--help"]).output
    titles = re.findall(r"─ ([A-Z][^─]*?) ─", shown)
    assert titles == ["Options", *PANELS]
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    "name", ["train", "resume", "export", "eval", "generate", "plan", "doctor"]
)
def test_help_texts_are_one_or_two_short_sentences(name):
    group: Any = typer.main.get_command(app)
    for item in group.commands[name].params:
        text = re.split(" (?:Default: |On by default)", str(item.help or ""))[0]
        assert len(text) <= LONGEST_HELP and len(re.findall(r"\. [A-Z]", text)) <= 1, item.opts
