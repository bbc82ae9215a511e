"""Machines and models by name, from the TOML files in this package or from the user's files."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape, dit_shape, gpt_shape, shape_from_config
from lohan.util.files import read_object
from lohan.util.units import parse_bytes

CONFIG_FILE = "config.json"
SHOWN = 3  # number of similar names that an error message suggests
_PARTS = ("server", "gpu", "drive", "drive_count")  # keys of a machine that Profile does not have


def model_names() -> list[str]:
    return list(_table("models.toml"))


def machine_names() -> list[str]:
    return list(_table("machines.toml")["machines"])


def model(name_or_path: str | Path) -> ModelShape:
    """Return the shape of a preset, of a config.json, or of a folder that contains one."""
    presets = _table("models.toml")
    if str(name_or_path) in presets:
        return _preset_model(str(name_or_path), presets[str(name_or_path)])
    path = Path(name_or_path).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return shape_from_config(_read_json(path), str(name_or_path))
    raise _unknown("model", name_or_path, presets, "a config.json or the folder that holds one")


def machine(name_or_path: str | Path) -> Profile:
    """Return a preset, or the profile in a TOML file as written by `lohan profile`."""
    presets = _table("machines.toml")["machines"]
    if str(name_or_path) in presets:
        return _preset_machine(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_file() or path.suffix == ".toml":
        return Profile.read(path)
    raise _unknown("machine", name_or_path, presets, "a TOML file from `lohan profile`")


def gpu_of(card: str) -> dict[str, Any] | None:
    """Return the preset of a GPU, given the name that its driver reports, or None.

    Of all presets whose device name is contained in `card`, the one with the longest name is used.
    """
    gpus = [gpu for gpu in _table("machines.toml")["gpus"].values() if gpu["device"] in card]
    if not gpus:
        return None
    best = max(gpus, key=lambda gpu: len(gpu["device"]))
    size = best.get("device_bytes", 0)  # A GPU with unified memory has none of its own.
    return {**best, "device_bytes": parse_bytes(size, name="device_bytes") if size else 0}


def _preset_model(name: str, table: Mapping[str, Any]) -> ModelShape:
    sizes = dict(table)
    family = sizes.pop("family", None)
    if family == "gpt":
        return gpt_shape(**sizes, name=name)
    if family == "dit":
        return dit_shape(**sizes, name=name)
    return shape_from_config(sizes, name)


def _preset_machine(name: str) -> Profile:
    """Return the profile of a preset, merged from its server, its GPU and its drives.

    Keys of the machine itself take precedence.
    """
    tables = _table("machines.toml")
    machine = tables["machines"][name]
    parts = {**tables["servers"][machine["server"]], **tables["gpus"][machine["gpu"]], **machine}
    drive = {"name": parts["drive"], **tables["drives"][parts["drive"]]}
    merged = {key: value for key, value in parts.items() if key not in _PARTS}
    merged |= {"name": name, "drives": [drive] * parts["drive_count"]}
    return Profile.from_mapping(merged, source=f"machine {name}")


@cache
def _table(file: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def _read_json(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a folder that holds {CONFIG_FILE}")
    return read_object(file, kind=ConfigError, remedy="download it again")


def _unknown(kind: str, name: str | Path, presets: Mapping[str, Any], other: str) -> ConfigError:
    names = list(presets)
    lowered = str(name).lower()
    number = re.search(r"\d{3,}", lowered)  # the number of a GPU model, or a parameter count
    near = [one for one in names if number is not None and number[0] in one]
    near += difflib.get_close_matches(lowered, names, n=SHOWN, cutoff=0.5)
    near = list(dict.fromkeys(near))[:SHOWN]
    hint = f"did you mean {', '.join(near)}?" if near else f"presets are {', '.join(names)};"
    return ConfigError(
        f"{kind} {str(name)!r} is neither a preset nor a file; {hint} "
        f"`lohan presets` lists them; {other} will do too"
    )
