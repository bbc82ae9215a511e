"""The model card of an export: a README.md that says how the model was made.

The card names models and datasets, not the folders of this machine. A base model or dataset of the
Hugging Face hub is recognised by its folder in the hub's cache.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lohan.checkpoint.replacing import MODEL_CARD
from lohan.config import Config, fields_of
from lohan.train.inputs import TASKS, task_of_model
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from lohan.util.files import load_json
from lohan.util.settings import Source, toml_value

PACKAGES = ("lohan", "torch", "transformers", "peft", "diffusers")
# Settings that belong to the machine or to one run folder, and not to the result.
LOCAL = ("model", "data", "out", "init", "tokenizer")
LOCAL_SECTIONS = ("budget", "output", "sample")
# Fields of the base model's card that also hold for a model trained from it.
LICENSE_FIELDS = ("license", "license_name", "license_link")
_CACHED = re.compile(r"(?:models|datasets)--([^/]+?)--([^/]+)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Name:
    """The name of a model or dataset, and whether it is on the hub."""

    text: str
    on_hub: bool

    @property
    def code(self) -> str:
        return f"`{_plain(self.text)}`"


def name_of(path: Path) -> Name:
    """Return the name on the hub if `path` is in the hub's cache, otherwise its last component."""
    for part in reversed(path.absolute().parts):
        if cached := _CACHED.fullmatch(part):
            return Name(f"{cached[1]}/{cached[2]}", True)
    return Name(path.name or str(path), False)


def base_name(folder: Path) -> Name:
    """Return the name of a model folder.

    A folder outside of the hub's cache may have its name on the hub in config.json.
    """
    name = name_of(folder)
    if name.on_hub:
        return name
    try:
        recorded = load_json(folder / "config.json").get("_name_or_path", "")
    except (OSError, ValueError, AttributeError):
        return name
    return Name(recorded, True) if _HUB_NAME.fullmatch(str(recorded)) else name


def license_of(folder: Path) -> dict[str, str]:
    """Return the license fields of the card in a model folder; empty if it names no license."""
    try:
        text = (folder / MODEL_CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    matter = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    fields = {}
    for line in matter[1].splitlines() if matter else ():
        key, colon, value = line.partition(":")
        if colon and key in LICENSE_FIELDS and value.strip():
            fields[key] = value.strip().strip("\"'")
    return fields if "license" in fields else {}


def model_card(
    folder: RunFolder,
    config: Config,
    *,
    step: int,
    content: str | None = None,
    averaged: bool = False,
) -> str:
    """Return the card of an export of the state after `step`.

    `content` is "weights", "adapter" or "merged model"; by default what the run trains. With
    `averaged`, the export holds the moving average of the weights.
    """
    content = content or ("adapter" if config.train.lora else "weights")
    task = config.task or task_of_model(config.model)
    base = None if config.init is not None else base_name(config.model)
    datasets = [name_of(source.path) for source in config.data]
    matter = _front_matter(config, base, datasets, content=content, task=task)
    lines = ["---", *matter, "---", "", f"# {_plain(folder.path.name)}", ""]
    lines += [_summary(base, datasets, content=content, step=step), ""]
    if averaged:
        lines += ["The weights are the moving average over the steps.", ""]
    lines += _results(folder, step)
    lines += ["## Settings", "", "Settings that differ from the defaults:", ""]
    lines += ["```toml", _settings(config, base, datasets), "```", ""]
    lines += ["## How to repeat it", ""]
    lines += [
        "Save the settings above as `run.toml`, with `model` and `data` as the paths or hub names "
        "of your copies, and run:",
        "",
        "```sh",
        f"lohan train --config run.toml --out run --steps {step}",
        "```",
        "",
        "## Versions",
        "",
    ]
    lines += [f"* {name} {version}" for name, version in _versions()]
    return "\n".join(lines) + "\n"


def _front_matter(
    config: Config, base: Name | None, datasets: Sequence[Name], *, content: str, task: str
) -> list[str]:
    """Return the lines of YAML at the beginning of the card.

    JSON strings are YAML strings, so names are quoted as JSON.
    """
    whole = content in ("weights", "merged model")
    lines = [f"library_name: {TASKS[task].LIBRARY if whole else 'peft'}"]
    if pipeline := TASKS[task].PIPELINE:
        lines.append(f"pipeline_tag: {pipeline}")
    if base is not None:
        if base.on_hub:
            kind = "finetune" if whole else "adapter"
            lines += [f"base_model: {json.dumps(base.text)}", f"base_model_relation: {kind}"]
        for key, value in license_of(config.model).items():
            lines.append(f"{key}: {json.dumps(value)}")
    if hub := [name for name in datasets if name.on_hub]:
        lines += ["datasets:", *(f"- {json.dumps(name.text)}" for name in hub)]
    tags = ["lohan", "lora" if config.train.lora else "full-fine-tuning", task]
    return [*lines, "tags:", *(f"- {tag}" for tag in tags)]


def _summary(base: Name | None, datasets: Sequence[Name], *, content: str, step: int) -> str:
    trained = f"trained on {', '.join(name.code for name in datasets)} for {step} steps"
    if base is None:
        what = f"A model with random initial weights, {trained}"
    elif content == "weights":
        what = f"All parameters of {base.code}, {trained}"
    elif content == "adapter":
        what = f"A LoRA adapter for {base.code}, {trained}"
    elif content == "merged model":
        what = f"{base.code} with a LoRA adapter merged into it, {trained}"
    else:
        what = f"{content} of {base.code}, {trained}"
    return f"{what} with LoHan, which streams weights and optimizer state from SSD."


def _results(folder: RunFolder, step: int) -> list[str]:
    """Return the table of the last loss and of the last evaluation up to `step`."""
    rows: list[tuple[str, str]] = []
    trained = [row for row in step_rows(folder) if row.get("step", 0) <= step]
    if trained:
        last = trained[-1]
        rows.append((f"training loss, step {last['step']}", f"{last['loss']:.4f}"))
        tokens = [row["tokens"] for row in trained if isinstance(row.get("tokens"), int)]
        if tokens:
            rows.append(("tokens", f"{sum(tokens):,}"))
    evaluated = [row for row in eval_rows(folder) if row.get("step", 0) <= step]
    if evaluated:
        last = evaluated[-1]
        best = min(evaluated, key=lambda row: row["eval_loss"])
        rows.append((f"evaluation loss, step {last['step']}", f"{last['eval_loss']:.4f}"))
        if best is not last:
            rows.append((f"best evaluation loss, step {best['step']}", f"{best['eval_loss']:.4f}"))
    if not rows:
        return []
    table = [f"| {name} | {value} |" for name, value in rows]
    return ["## Results", "", "| metric | value |", "|---|---|", *table, ""]


def _settings(config: Config, base: Name | None, datasets: Sequence[Name]) -> str:
    """Return the settings that differ from their defaults as TOML, without local paths."""
    lines = [] if base is None else [f"model = {json.dumps(base.text)}"]
    weights = [source.weight for source in config.data]
    named = [
        str(Source(Path(name.text), weight)) for name, weight in zip(datasets, weights, strict=True)
    ]
    lines.append(f"data = {toml_value(tuple(named) if len(named) > 1 else named[0])}")
    section = ""
    for info in fields_of():
        if info.section in LOCAL_SECTIONS or info.dotted in LOCAL:
            continue
        value = getattr(getattr(config, info.section) if info.section else config, info.key)
        if info.key == "param_groups":
            value = tuple(group.table() for group in value)
        if info.key == "chat_template" and value is not None and "/" in value:
            continue  # A file of this machine; the export holds the template itself.
        if value is None or value == info.default or isinstance(value, Path):
            continue
        if info.section != section:
            section = info.section
            lines += ["", f"[{section}]"]
        lines.append(f"{info.key} = {toml_value(value)}")
    return "\n".join(lines)


def _versions() -> list[tuple[str, str]]:
    versions = [("Python", platform.python_version())]
    for package in PACKAGES:
        try:
            versions.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return versions


def _plain(text: str) -> str:
    """Return a text with spaces in place of characters that have a meaning in Markdown or HTML."""
    return re.sub(r"[`<>|\[\]\r\n]", " ", text).strip()
