"""Programs can read the settings file's schema and the result of every command."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.utils import get_params_from_function

from lohan.cli.main import app, store_app
from lohan.cli.schema import settings_schema
from lohan.config import fields_of, load_config
from tests.support.training_runs import (
    evaluated_inputs_fixture,  # noqa: F401 - a fixture
    evaluated_settings,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


@pytest.fixture
def command(forge):
    """Return a function that runs a command as a process and returns its JSON."""

    def run(*words):
        ran = forge.run(*words)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return run


def errors(text):
    validator = jsonschema.Draft202012Validator(settings_schema())
    return [error.message for error in validator.iter_errors(tomllib.loads(text))]


def test_schema_describes_every_setting(command):
    printed = command("schema")
    jsonschema.Draft202012Validator.check_schema(printed)
    for info in fields_of():
        table = printed["properties"]
        if info.section:
            table = table[info.section]["properties"]
        assert {"description"} < set(table[info.key]), f"{info.dotted} has no type"


def test_schema_accepts_settings_that_a_run_writes(inputs, tmp_path):
    config = load_config(
        None, overrides=evaluated_settings(inputs, tmp_path / "run", output__log=["mlflow"])
    )
    assert errors(config.to_toml()) == []


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem) for file in sorted(EXAMPLES.rglob("*.toml"))]
)
def test_schema_accepts_the_examples(file):
    assert errors(file.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nlearning_rate = 1e-4",
        "[train]\nbatch = 0",
        '[train]\nlr = "fast"',
        '[output]\nlog = ["paper"]',
        'modle = "llama"',
        '[budget]\ndevice = "abacus"',
    ],
)
def test_schema_rejects_wrong_names_and_values(text):
    assert errors(text)


def test_every_command_that_prints_a_result_has_json():
    without = set()
    for info in [*app.registered_commands, *store_app.registered_commands]:
        parameters = get_params_from_function(info.callback).values()
        names = [name for p in parameters for name in getattr(p.default, "param_decls", None) or ()]
        if "--json" not in names:
            without.add(info.name or info.callback.__name__)
    assert without == {"schema", "ui"}  # JSON in any case, and no result but pages


def test_train_and_store_commands_print_one_json_document(command, inputs, tmp_path):
    out = tmp_path / "run"
    file = tmp_path / "run.toml"
    overrides = evaluated_settings(inputs, out, train__steps=2)
    file.write_text(load_config(None, overrides=overrides).to_toml())
    planned = command("train", "--config", file, "--dry-run", "--json")
    assert planned["steps"] == 2 and not out.exists()
    ended = command("train", "--config", file, "--json")
    assert (ended["step"], ended["steps"], ended["stopped"]) == (2, 2, False)
    assert ended["exports"] == [str(out / "model")]
    assert command("resume", out, "--steps", 3, "--json")["step"] == 3
    (store,) = command("store", "ls", out, "--json")
    assert (store["step"], store["state"]) == (3, "clean")
    (checked,) = command("store", "verify", out, "--json")
    assert checked["problems"] == [] and checked["chunks"] > 0
    exported = command("export", out, "--out", tmp_path / "model", "--json")
    assert exported["step"] == 3 and exported["path"] == str(tmp_path / "model")
    assert command("store", "rm", out, "--yes", "--json")["removed"]


def test_presets_are_printed_as_json(command):
    presets = command("presets", "--json")
    assert "rtx4090" in [machine["name"] for machine in presets["machines"]]
    assert "llama-3-8b" in presets["models"]
