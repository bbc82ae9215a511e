"""The options of every command, most of them made from settings, against the recorded list."""

from __future__ import annotations

import re
from pathlib import Path

from typer.utils import get_params_from_function

from lohan.cli.main import MODULES, app, command_line, store_app

RECORDED = Path(__file__).with_name("options.txt")


def test_every_option_keeps_its_name_and_type():
    collected = []
    for info in [*app.registered_commands, *store_app.registered_commands]:
        assert info.callback is not None
        command = info.name or info.callback.__name__
        for parameter in get_params_from_function(info.callback).values():
            names = "/".join(getattr(parameter.default, "param_decls", None) or [parameter.name])
            kind = re.sub(r"pathlib\.|<class '|'>", "", str(parameter.annotation))
            collected.append(f"{command} {names}: {kind}")
    assert sorted(collected) == RECORDED.read_text(encoding="utf-8").splitlines()


def test_every_command_is_found_by_its_name():
    """The module of a command is imported only when the command is used."""
    names = [info.name or info.callback.__name__ for info in app.registered_commands]
    assert sorted(names) == sorted(name for item in MODULES.values() for name in item)
    for name in names:
        alone = command_line([name]).registered_commands
        assert [info.name or info.callback.__name__ for info in alone] == [name]
    assert command_line(["store", "ls"]).registered_commands == []
