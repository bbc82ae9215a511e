"""`lohan init`, and settings of other trainers."""

import json
import tomllib
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification, T5Config

from lohan.cli.recipes import init, refuse_yaml
from lohan.config import load_config
from lohan.errors import ConfigError
from lohan.train.trainer import train
from lohan.util.display import Display
from tests.support.forked_commands import write_tiny_inputs
from tests.support.model_folders import save_tokenizer
from tests.support.models import QUICK_EFFORT


def rows(folder: Path, count: int) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": "abc " * (1 + i % 20)}) for i in range(count)))
    return file


def test_the_file_is_one_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save_tokenizer(write_tiny_inputs(tmp_path) / "model")
    out = tmp_path / "run.toml"
    init(model=str(model), data=rows(tmp_path, 85), file=out, machine="rtx4090")
    config = load_config(out)
    assert config.model == model
    assert config.train.batch == 8  # ten steps a pass
    assert config.train.seq == 128  # 81 tokens with the closing one, in steps of 64
    assert config.budget.host is not None
    assert len(config.budget.ssd) == 2
    assert "the longest of the first 85 examples has 81 tokens" in out.read_text()
    assert f"lohan train --config {out}" in capsys.readouterr().out
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="the file already exists"):
        init(model=str(model), data=tmp_path / "rows.jsonl", file=out, machine="rtx4090")
    assert out.read_bytes() == before


@pytest.mark.parametrize("kind", ["language", "preference", "classification"])
def test_the_file_for_this_machine_trains_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, kind: str
) -> None:
    """Its drives are folders that are here; no preset is named, and nothing is filled in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lohan.engine.probes.effort_for", lambda *_: QUICK_EFFORT)
    model = save_tokenizer(write_tiny_inputs(tmp_path, vocab_size=264) / "model")
    data, given = rows(tmp_path, 24), None
    if kind == "preference":
        pairs = [{"prompt": f"{i}", "chosen": "a", "rejected": "bc"} for i in range(24)]
        data.write_text("\n".join(map(json.dumps, pairs)))
    if kind == "classification":
        classifier_config = LlamaConfig.from_pretrained(model, num_labels=2, pad_token_id=0)
        LlamaForSequenceClassification(classifier_config).save_pretrained(model)
        data.write_text("\n".join(json.dumps({"text": "ab", "label": i % 2}) for i in range(24)))
        given = [tmp_path / "a", tmp_path / "b"]
        for place in given:
            place.mkdir()
    out = tmp_path / "here" / "run.toml"
    out.parent.mkdir()
    init(model=str(model), data=data, file=out, ssd=given)
    config = load_config(out)
    assert (config.task or "language") == kind
    assert list(config.budget.ssd) == (given or [out.parent])
    for place in config.budget.ssd:
        assert place.is_dir()
    train(config, Display())
    assert (out.parent / "run-run" / "metrics.jsonl").read_text().count('"loss"') >= 2
    # A second file goes by what was measured for the first, also if it lies elsewhere.
    monkeypatch.setattr("lohan.engine.probes.profile", lambda *a, **k: pytest.fail("measured"))
    init(model=str(model), data=data, file=tmp_path / "second.toml")
    assert load_config(tmp_path / "second.toml").budget.ssd == config.budget.ssd
    with pytest.raises(ConfigError, match="--ssds 2: this machine's drives are named"):
        init(model=str(model), data=data, file=tmp_path / "third.toml", ssds=2)


def test_presets_need_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.cli.recipes.BATCHES", (8, 16))  # Each is planned on its own.
    out = tmp_path / "big.toml"
    init(model="qwen3-8b", data=rows(tmp_path, 3), file=out, machine="rtx4090", ssds=4)
    loaded = tomllib.loads(out.read_text())
    assert loaded["model"] == "MODEL-FOLDER"
    assert len(loaded["budget"]["ssd"]) == 4
    assert loaded["train"]["batch"] > 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base_model: a\nsequence_len: 4\nflash_attention: true\n",
            "base_model is model, sequence_len is train.seq .*without a counterpart: flash_attention",  # noqa: E501
        ),
        ("model_name_or_path: a\ncutoff_len: 9\n", "model_name_or_path is model, cutoff_len is"),
        ("- 1\n", "settings are TOML; `lohan init` writes such a file"),
        ("a: [\n", "cannot be read: .*; give a TOML file"),
        ("a: " + "[" * 5000, "cannot be read: nested too deep; give a TOML file"),
        ("d: 2020-99-99\nbase_model: a\n", "base_model is model .*without a counterpart: d;"),
        ('a: !!int "x"\nb: !!bool "x"\nc: !!timestamp "x"\nseed: 1\n', "seed is seed"),
        ("a: \x01\n", "cannot be read: .*; give a TOML file"),
    ],
)
def test_settings_of_other_trainers(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        refuse_yaml(file)


def test_other_tasks_have_a_file_too(tmp_path: Path) -> None:
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    out = tmp_path / "run.toml"
    init(model=str(tmp_path / "t5"), data=rows(tmp_path, 3), file=out, machine="rtx4090")
    config = load_config(out)
    assert (config.task, config.train.dtype, config.train.batch) == ("text-to-text", "bf16", 8)
