"""The command line: `schema`, which describes the settings file for editors and programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from lohan.config import fields_of
from lohan.util.display import echo
from lohan.util.settings import FieldInfo, Source

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def settings_schema() -> dict[str, Any]:
    """Return a JSON Schema of the settings file of `lohan train --config`.

    The schema checks names and types. Conditions that involve several settings, and files that must
    exist, are checked by `lohan train --dry-run`. No setting is required, because each can be given
    on the command line instead.
    """
    tables: dict[str, dict[str, Any]] = {}
    for info in fields_of():
        tables.setdefault(info.section, {})[info.key] = _property(info)
    top = tables.pop("")
    for section, properties in tables.items():
        top[section] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {
        "$schema": DIALECT,
        "title": "Settings of a LoHan run",
        "type": "object",
        "additionalProperties": False,
        "properties": top,
    }


def _property(info: FieldInfo) -> dict[str, Any]:
    described = {"description": info.help, **info.kind.schema}
    if info.default not in (None, ()):
        described["default"] = info.default
    return described


def schema() -> None:
    """Print a JSON Schema of the settings file, for editors that check TOML."""
    echo(json.dumps(settings_schema(), indent=1, default=_plain))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, (Path, Source)) else list(value)


def register(app: typer.Typer) -> None:
    app.command()(schema)
