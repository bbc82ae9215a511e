"""Several data files and a chat template of one's own, through a whole run."""

import json
from pathlib import Path

from lohan.config import load_config
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import resume, train
from lohan.util.display import Display
from tests.test_data import save_tokenizer
from tests.tiny_run import STEPS, result, write_inputs


def run(inputs: Path, out: Path, *data: str, **train_settings: object) -> Path:
    overrides: dict[str, object] = {
        "model": str(inputs / "model"), "data": [*data], "out": str(out),
        "budget.host": "2MiB", "train.steps": STEPS, "train.batch": 2, "train.seq": 48,
        "train.lr": 1e-3, **train_settings,
    }  # fmt: skip
    train(load_config(None, overrides=overrides), Display())
    return out


def test_a_mixture_goes_on_where_it_was(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"input_ids": [i, 7, 9, i]}) for i in range(5)))
    files = (f"{inputs / 'data.jsonl'}:1", f"{other}:3")
    steady = {"train.schedule": "constant"}
    whole = result(run(inputs, tmp_path / "whole", *files, **steady))
    first = run(inputs, tmp_path / "parts", *files, **steady, **{"train.steps": 3})
    resume(RunFolder(first), Display(), steps=STEPS)
    assert result(first) == whole
    alone = result(run(inputs, tmp_path / "alone", str(inputs / "data.jsonl")))
    assert whole[0] != alone[0]  # the second file was trained on


def test_a_template_is_exported_with_the_model(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    save_tokenizer(inputs / "model", bos=True)
    chats = inputs / "chats.json"
    chats.write_text(json.dumps([{"input_ids": [1, 2, 3, 4]}] * 4))
    out = run(inputs, tmp_path / "run", str(chats), **{"train.chat_template": "alpaca"})
    text = (out / "model" / "chat_template.jinja").read_text()
    assert text.startswith("{% for m in messages %}") and "### Response:" in text
