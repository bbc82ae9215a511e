"""Every option of `lohan train` arrives at the setting of its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lohan.cli.train import train

OTHERS = ("config", "assignments", "dry_run", "as_json")  # that are no settings


class Seen(Exception):
    pass


def test_every_option_reaches_its_setting(monkeypatch):
    seen: dict[str, Any] = {}

    def noted(config: Any, *, overrides: dict[str, Any], assignments: Any) -> None:
        seen.update(overrides)
        raise Seen

    monkeypatch.setattr("lohan.cli.train.load_config", noted)
    names = [name for name in inspect.signature(train).parameters if name not in OTHERS]
    given: dict[str, Any] = {name: number for number, name in enumerate(names)}
    with pytest.raises(Seen):
        train(**given)
    for name, value in given.items():
        keys = {key for key, item in seen.items() if item == value}
        wanted = {k for k in seen if name in (k.rpartition(".")[2], k.replace(".", "_"))}
        assert len(keys) == 1 and keys <= wanted, f"--{name}: {keys or 'nothing'}"
