"""The form of a new run, made from the settings, and the settings file that it writes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lohan.config import Config, field_of, fields_of
from lohan.errors import ConfigError
from lohan.ui.places import Places
from lohan.util.files import write_atomic
from lohan.util.settings import FieldInfo, Kind, assignment, toml_value

# Settings that are written in the file by hand, because a list of tables has no form field.
NOT_IN_FORM = ("train.param_groups", "out")
# Settings that a first run needs. The form shows them first, and then the others by section.
FIRST = (
    "model",
    "data",
    "train.epochs",
    "train.steps",
    "train.batch",
    "train.seq",
    "train.lr",
    "train.lora",
    "budget.host",
    "eval.split",
)


def fields() -> list[dict[str, Any]]:
    """Return a description of every field of the form."""
    return [
        {
            "key": info.dotted,
            "section": info.section,
            "name": info.key,
            "help": info.help,
            "required": info.required,
            "first": info.dotted in FIRST,
            "default": "" if info.default in (None, ()) else _shown(info.default),
            "metavar": info.kind.metavar,
            **_widget(info.kind),
        }
        for info in fields_of()
        if info.dotted not in NOT_IN_FORM
    ]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _alternatives(kind: Kind) -> list[Mapping[str, Any]]:
    return [kind.schema, *kind.schema.get("anyOf", ())]


def takes_list(kind: Kind) -> bool:
    return any(each.get("type") == "array" for each in _alternatives(kind))


def _widget(kind: Kind) -> dict[str, Any]:
    if kind.typed is bool:
        return {"widget": "choice", "options": ["true", "false"]}
    if "enum" in kind.schema:
        return {"widget": "choice", "options": list(kind.schema["enum"])}
    if takes_list(kind):
        return {"widget": "lines"}
    options = [one for each in _alternatives(kind) for one in each.get("enum", ())]
    return {"widget": "text", "options": options}


def raw_value(info: FieldInfo, text: str) -> Any:
    """Convert the text of a form field to the value that a TOML file would hold."""
    declared = [each.get("type", "string") for each in _alternatives(info.kind)]
    kinds = {one for each in declared for one in (each if isinstance(each, list) else [each])}
    if takes_list(info.kind):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if len(lines) == 1 else lines
    texts_only = kinds == {"string"} and info.kind.typed is not bool
    value = text.strip() if texts_only else assignment(f"value={text.strip()}")[1]
    if isinstance(value, (str, bool, int, float)):
        return value
    return text.strip()


def settings_text(values: Mapping[str, str], out: str) -> str:
    """Return a settings file with `out` and the non-empty values, and no other settings."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for key, text in values.items():
        try:
            info = field_of(key)
        except KeyError:
            raise ConfigError(f"{key}: not a setting; reload the page") from None
        if text.strip() and key not in NOT_IN_FORM:
            tables.setdefault(info.section, {})[info.key] = raw_value(info, text)
    tables[""]["out"] = out
    order = list(dict.fromkeys(info.section for info in fields_of()))
    lines: list[str] = []
    for section in order:
        if section not in tables:
            continue
        lines += ["", f"[{section}]"] if section else []
        for key, value in tables[section].items():
            plain = tuple(value) if isinstance(value, list) else value
            lines.append(f"{key} = {toml_value(plain)}")
    return "\n".join(lines) + "\n"


def parsed(text: str, places: Places) -> Config:
    """Parse the text of a settings file, and check it as `lohan train` does before it reads data.

    In addition, all paths must be inside the folders of `places`, and data files must exist.
    """
    config = Config.from_mapping(tomllib.loads(text), base_dir=places.root)
    places.check(config)
    paths = [("data", source.path) for source in config.data]
    paths += [("[eval] data", config.eval.data)] if config.eval.data else []
    for name, path in paths:
        if not path.exists():
            raise ConfigError(f"{name}: {path}: no such file or folder; check its name")
    return config


def name_of_run(places: Places, name: str) -> str:
    """Return the path of a new run relative to the root; raise ConfigError if it is outside."""
    name = name.strip()
    if not name:
        raise ConfigError("out: not given; name the folder of the run")
    path = places.path(name, "out")
    if path == places.root or places.root not in path.parents:
        raise ConfigError(f"out: {name} is not below {places.root}; give a name such as my-run")
    return str(path.relative_to(places.root))


def save(places: Places, name: str, text: str) -> Path:
    """Write the settings file beside the run folder, and return its path.

    A file with other settings is never replaced.
    """
    file = places.root / f"{name}.toml"
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(
            f"{file}: the file already exists and holds other settings; choose another name for "
            "the run"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written: {error.strerror}; check its folder"
        ) from None
    return file
