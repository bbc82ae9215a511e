"""Extending a run: the effect on the learning rate, and the first example."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lohan.cli.main import app
from lohan.config import load_config
from lohan.optim import lr_at
from lohan.train.inputs import open_inputs
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import resume, train
from lohan.ui.runs import RunRecord, read_run
from lohan.ui.view import first_example
from lohan.util.display import Display
from tests.support.forked_commands import metrics_rows
from tests.support.training_runs import (
    preference_model_fixture,  # noqa: F401 - a fixture
)


class Told(Display):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def begun(model: Path, out: Path, **more: Any) -> RunFolder:
    data = out.with_suffix(".jsonl")
    rows = [{"prompt": f"ask <{i}>: ", "completion": "yes " * (1 + i % 3)} for i in range(12)]
    data.write_text("\n".join(map(json.dumps, rows)))
    overrides = {
        "model": str(model),
        "data": [str(data)],
        "out": str(out),
        "budget.host": "4MiB",
        "train.batch": 2,
        "train.seq": 48,
        "train.lr": 1e-3,
        "train.steps": 4,
        "train.warmup": 0.25,
        **more,
    }
    train(load_config(None, overrides=overrides), Display())
    return RunFolder(out)


def rates(total: int, steps: range) -> list[float]:
    how = {"peak_lr": 1e-3, "schedule": "cosine", "warmup_steps": -(-total // 4)}
    return [lr_at(step, total_steps=total, **how) for step in steps]  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [True, False])
def test_more_steps_and_the_learning_rate(model: Path, tmp_path: Path, keep: bool) -> None:
    run, reported = begun(model, tmp_path / "run"), Told()
    resume(run, reported, steps=6, keep_schedule=keep)
    actual = [row["lr"] for row in metrics_rows(run.path)]
    assert actual[:4] == pytest.approx(rates(4, range(4)))
    assert actual[4:] == pytest.approx(rates(4 if keep else 6, range(4, 6)))
    (message,) = [note for note in reported.notes if "learning rate" in note]
    if keep:
        assert message == "the learning rate keeps its schedule over 4 steps, and is 0 after them"
        assert run.config().train.schedule_steps == 4  # a later resume keeps it too
    else:
        assert message.startswith(
            "the learning rate follows its cosine schedule over 6 steps instead"
        )
        assert "instead of 0; --keep-schedule keeps the old one" in message


def test_keep_schedule_requires_steps(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["resume", str(tmp_path), "--keep-schedule"])
    assert "--keep-schedule goes with --steps" in str(ended.exception)


def test_the_first_example_is_in_the_report(model: Path, tmp_path: Path) -> None:
    run = begun(model, tmp_path / "run", **{"train.steps": 1})
    shown = "\n".join(first_example(read_run(run)))
    assert "first example" in shown and "chat template: none" in shown
    assert "ask <0>: >>>yes" in shown


DEFAULT = "You help."
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>DEFAULT</s>\n{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}<s>{{ m['content'] }}</s>\n{% else %}<{{ m['role'] }}>"
    "{{ m['content'] }}</{{ m['role'] }}>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("row", "template", "expected"),
    [
        ({"system": "Be brief."}, TEMPLATE.replace("DEFAULT", DEFAULT), "'Be brief.', of the data"),
        ({}, TEMPLATE.replace("DEFAULT", DEFAULT), f"'{DEFAULT}', of the template"),
        ({}, TEMPLATE.replace("<s>DEFAULT</s>\n", ""), "none"),
        ({"system": "Be brief."}, None, "none"),
    ],
)
def test_template_and_system_prompt_are_named(
    model: Path, tmp_path: Path, row: dict[str, str], template: str | None, expected: str
) -> None:
    """They are named at the start and in the report, with the full example."""
    data, shown = tmp_path / "d.jsonl", Told()
    data.write_text(json.dumps({"prompt": "a" * 900, "completion": "b" * 1100, **row}) + "\n")
    more: dict[str, Any] = {}
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        more["train.chat_template"] = str(tmp_path / "t.jinja")
    overrides = {
        "model": str(model),
        "data": [str(data)],
        "out": str(tmp_path / "run"),
        "train.seq": 2100,
        "budget.host": "64MiB",
        "train.batch": 1,
        "train.steps": 1,
        **more,
    }
    config = load_config(None, overrides=overrides)
    open_inputs(RunFolder(tmp_path / "run"), config, shown)
    (message,) = [note for note in shown.notes if "first example" in note]
    used = "none" if template is None else tmp_path / "t.jinja"
    assert (
        f"(chat template: {used}; system prompt: {expected}; loss on what follows >>>)" in message
    )
    assert "a" * 900 in message and f"{'b' * 1000} ..." in message and "b" * 1001 not in message
    record = RunRecord(RunFolder(tmp_path / "run"), config, [], [], [], [])
    assert "b" * 1100 in "\n".join(first_example(record))


def test_both_answers_of_the_first_pair_are_shown(model: Path, tmp_path: Path) -> None:
    data, shown = tmp_path / "d.jsonl", Told()
    data.write_text(json.dumps({"prompt": "ask:", "chosen": "yes", "rejected": "never"}) + "\n")
    overrides = {
        "model": str(model),
        "data": [str(data)],
        "out": str(tmp_path / "run"),
        "train.seq": 48,
        "task": "preference",
        "train.batch": 1,
        "train.steps": 1,
    }
    open_inputs(RunFolder(tmp_path / "run"), load_config(None, overrides=overrides), shown)
    (message,) = [note for note in shown.notes if "first example" in note]
    assert "  ask:>>>yes" in message and "  rejected: >>>never" in message
