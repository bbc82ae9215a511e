"""`lohan train --init config.json --tokenizer DIR`: a run from random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from lohan.checkpoint.hf_folder import build_from_config
from lohan.checkpoint.sources import InitialValues
from lohan.errors import LohanError
from lohan.train import trainer
from lohan.train.run_folder import RunFolder
from tests.support.model_folders import save_tokenizer
from tests.support.training_runs import (
    TASK_STEPS,
    RecordingDisplay,
    task_config,
    train_task_in_memory,
    write_rows,
)

LLAMA = hf.LlamaConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    pad_token_id=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "config.json").write_text(LLAMA.to_json_string())
    save_tokenizer(folder / "tokens")
    write_rows(folder / "data.jsonl", [{"text": f"number {n} " * (n % 3 + 1)} for n in range(7)])
    return folder


def config_for(place: Path, out: Path, **more):
    result = task_config(place, place / "data.jsonl", out)  # for its numbers
    overrides = {
        "init": place / "config.json",
        "tokenizer": place / "tokens",
        "data": result.data[0].path,
        "out": out,
        "seed": 5,
        "budget.host": "32MiB",
        "train.steps": TASK_STEPS,
        "train.batch": 3,
        "train.lr": 1e-3,
        "train.seq": 64,
        "train.schedule": "constant",
        "train.weight_decay": 0.1,
        "train.clip": 0.5,
        "train.activations": "recompute",
        **more,
    }
    from lohan.config import load_config

    return load_config(None, overrides=overrides)


def test_trains_what_the_class_would_draw(place, tmp_path):
    """Training from scratch matches a run in memory from the same initial weights.

    The export is complete, and a run that was moved and resumed has the same bits.
    """
    out, other = tmp_path / "run", tmp_path / "other"
    trainer.train(config_for(place, out), RecordingDisplay())
    empty = build_from_config(LLAMA, dtype=torch.float32)
    first = InitialValues(empty, 5)
    net = type(empty)(LLAMA)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(first.read_flat(name, 0, parameter.numel()).view(parameter.shape))
    _, weights = train_task_in_memory(out, net)
    tuned = hf.AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    assert tuned.keys() == weights.keys()
    assert all(torch.allclose(tuned[name], weights[name], atol=2e-5) for name in weights)
    assert len(hf.AutoTokenizer.from_pretrained(out / "model")) == 260
    assert not [p.name for p in (out / "model").iterdir() if p.name == ".lohan-init"]
    trainer.train(config_for(place, other, **{"train.steps": 1}), RecordingDisplay())
    other.rename(tmp_path / "moved")
    trainer.resume(RunFolder(tmp_path / "moved"), RecordingDisplay(), steps=TASK_STEPS)
    files = [load_file(f / "model" / "model.safetensors") for f in (out, tmp_path / "moved")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_the_command_line(lohan, place, tmp_path):
    out = tmp_path / "run"
    words = (
        "train",
        "--init",
        place / "config.json",
        "--data",
        place / "data.jsonl",
        "--out",
        out,
        "--host",
        "32MiB",
        "--steps",
        1,
        "--batch",
        2,
        "--seq",
        32,
    )
    dry = lohan(*words, "--tokenizer", place / "tokens", "--dry-run")
    assert dry.code == 0 and "1 step" in dry.out and not out.exists(), dry
    both = lohan(*words, "--model", place)
    assert both.code == 2 and "give one of them" in both.err, both


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"init": "none.json"}, "no such file; give a config.json"),
        ({"tokenizer": "."}, "no tokenizer there"),
        ({"small": True}, "has 260 tokens, vocab_size in .* is 100; raise vocab_size"),
        ({"train.lora": 4}, "an adapter needs a trained model"),
        ({"init": None}, "tokenizer: goes with --init"),
    ],
)
def test_rejects_configs_and_settings_that_do_not_match(more, message, place, tmp_path):
    config_file = tmp_path / "config.json"
    raw = json.loads((place / "config.json").read_text())
    config_file.write_text(
        json.dumps({**raw, "vocab_size": 100} if more.pop("small", None) else raw)
    )
    paths = {"init": config_file, "tokenizer": place / "tokens"}
    for name in ("init", "tokenizer"):
        if isinstance(more.get(name), str):
            paths[name] = tmp_path / more.pop(name)
    model = {"model": place} if "init" in more else {}
    with pytest.raises(LohanError, match=message):
        trainer.train(
            config_for(place, tmp_path / "run", **{**paths, **more, **model}), RecordingDisplay()
        )
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_leaves_nothing(place, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [{"no": 1}])
    with pytest.raises(LohanError, match="no known keys"):
        trainer.train(config_for(place, tmp_path / "run", data=data), RecordingDisplay())
    assert not (tmp_path / "run").exists()


def test_missing_tokenizer_names_the_option(place, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words\n" * 100)
    with pytest.raises(LohanError, match=r"--init has no tokenizer.*with --tokenizer DIR"):
        trainer.train(
            config_for(place, tmp_path / "run", data=text, tokenizer=None), RecordingDisplay()
        )
    assert not (tmp_path / "run").exists()
