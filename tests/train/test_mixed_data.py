"""Several data files and a chat template of one's own, through a whole run."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lohan.config import load_config
from lohan.model.layout import RankInfo
from lohan.train.inputs import Inputs, open_inputs
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import resume, train
from lohan.util.display import Display
from tests.support.forked_commands import TINY_STEPS, tiny_result, write_tiny_inputs
from tests.support.model_folders import save_tokenizer


def run(inputs: Path, out: Path, *data: str, **train_settings: object) -> Path:
    overrides: dict[str, object] = {
        "model": str(inputs / "model"),
        "data": [*data],
        "out": str(out),
        "budget.host": "2MiB",
        "train.steps": TINY_STEPS,
        "train.batch": 2,
        "train.seq": 48,
        "train.lr": 1e-3,
        **train_settings,
    }
    train(load_config(None, overrides=overrides), Display())
    return out


def test_a_mixture_goes_on_where_it_was(tmp_path: Path) -> None:
    inputs = write_tiny_inputs(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"input_ids": [i, 7, 9, i]}) for i in range(5)))
    files = (f"{inputs / 'data.jsonl'}:1", f"{other}:3")
    steady = {"train.schedule": "constant"}
    whole = tiny_result(run(inputs, tmp_path / "whole", *files, **steady))
    first = run(inputs, tmp_path / "parts", *files, **steady, **{"train.steps": 3})
    resume(RunFolder(first), Display(), steps=TINY_STEPS)
    assert tiny_result(first) == whole
    alone = tiny_result(run(inputs, tmp_path / "alone", str(inputs / "data.jsonl")))
    assert whole[0] != alone[0]  # the second file was trained on


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_are_mixed_by_weight_too(tmp_path: Path, loss: str) -> None:
    """Resuming keeps the order, and the shares are those requested."""
    model = save_tokenizer(write_tiny_inputs(tmp_path, vocab_size=264) / "model")
    files = []
    for name, count, weight in (("a", 12, 1), ("b", 5, 3)):
        pair = {"chosen": name * 2, "rejected": name * 3}
        rated = {"completion": name * 2}
        rows = [{"prompt": str(i), **pair} for i in range(count)]
        if loss == "kto":
            rows = [{"prompt": str(i), **rated, "label": i % 2} for i in range(count)]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        files.append(f"{file}:{weight}")
    more = {"task": "preference", "preference.loss": loss, "train.schedule": "constant"}
    whole = tiny_result(run(tmp_path, tmp_path / "whole", *files, **more))
    first = run(tmp_path, tmp_path / "parts", *files, **more, **{"train.steps": 3})
    resume(RunFolder(first), Display(), steps=TINY_STEPS)
    assert tiny_result(first) == whole
    config = load_config(tmp_path / "parts" / "run.toml")
    inputs = open_inputs(RunFolder(first), config, Display(), resume=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    seen = [
        tokenizer.decode([t for t in row.tolist() if t >= 0])[:1]
        for step in range(250)
        for batch in [inputs.train_examples.batch(step, 4)]
        for row in batch["labels"][:4]
    ]
    assert seen.count("a") == 250 and seen.count("b") == 750


@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_of_a_run_share_the_batches_of_one(tmp_path: Path, world: int) -> None:
    """The rows of all ranks, one after the other, are those of a single rank."""
    inputs = write_tiny_inputs(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"input_ids": [i, 7, 9, i]}) for i in range(5)))
    files = [f"{inputs / 'data.jsonl'}:1", f"{other}:3"]

    def opened(gpus: int) -> Inputs:
        overrides = {
            "model": str(inputs / "model"),
            "data": files,
            "out": str(tmp_path / str(gpus)),
            "budget.host": "2MiB",
            "budget.gpus": gpus,
            "train.steps": TINY_STEPS,
            "train.batch": 7,
            "train.seq": 48,
        }
        config = load_config(None, overrides=overrides)
        return open_inputs(RunFolder(tmp_path / str(gpus)), config, Display())

    alone, shared = opened(1), opened(world)
    for step in range(TINY_STEPS):
        whole, batch = alone.train_examples.batch(step, 7), shared.train_examples.batch(step, 7)
        spans = [ranks.rows(7) for ranks in RankInfo(0, world).all()]
        parts = [shared.task.part(batch, *span) for span in spans]
        assert [len(part["input_ids"]) for part in parts] == [b - a for a, b in spans]
        for name, rows in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), rows), name


def test_a_template_is_exported_with_the_model(tmp_path: Path) -> None:
    inputs = write_tiny_inputs(tmp_path)
    save_tokenizer(inputs / "model", bos=True)
    chats = inputs / "chats.json"
    chats.write_text(json.dumps([{"input_ids": [1, 2, 3, 4]}] * 4))
    out = run(inputs, tmp_path / "run", str(chats), **{"train.chat_template": "alpaca"})
    text = (out / "model" / "chat_template.jinja").read_text()
    assert text.startswith("{% for m in messages %}") and "### Response:" in text
