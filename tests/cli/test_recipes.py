"""`lohan init`, and settings of other trainers."""

import json
import tomllib
from pathlib import Path

import pytest

from lohan.cli.recipes import init, refuse_yaml
from lohan.config import load_config
from lohan.errors import ConfigError
from tests.test_data import save_tokenizer
from tests.tiny_run import write_inputs


def rows(folder: Path, count: int) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": "abc " * (1 + i % 20)}) for i in range(count)))
    return file


def test_the_file_is_one_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save_tokenizer(write_inputs(tmp_path) / "model")
    out = tmp_path / "run.toml"
    init(model=str(model), data=rows(tmp_path, 85), out=out, machine="rtx4090")
    made = load_config(out)
    assert made.model == model
    assert made.train.batch == 8  # ten steps a pass
    assert made.train.seq == 128  # 81 tokens with the closing one, in steps of 64
    assert made.budget.host is not None
    assert len(made.budget.ssd) == 2
    assert "the longest of the first 85 examples has 81 tokens" in out.read_text()
    assert f"lohan train --config {out}" in capsys.readouterr().out
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="the file is there already"):
        init(model=str(model), data=tmp_path / "rows.jsonl", out=out, machine="rtx4090")
    assert out.read_bytes() == before


def test_presets_need_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "big.toml"
    init(model="qwen3-8b", data=rows(tmp_path, 3), out=out, machine="rtx4090", ssds=4)
    made = tomllib.loads(out.read_text())
    assert made["model"] == "MODEL-FOLDER"
    assert len(made["budget"]["ssd"]) == 4
    assert made["train"]["batch"] > 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: a\nsequence_len: 4\nflash_attention: true\n",
         "base_model is model, sequence_len is train.seq .*without a counterpart: flash_attention"),
        ("model_name_or_path: a\ncutoff_len: 9\n", "model_name_or_path is model, cutoff_len is"),
        ("- 1\n", "settings are TOML; `lohan init` writes such a file"),
        ("a: [\n", "cannot be read: .*; give a TOML file"),
        ("a: " + "[" * 5000, "cannot be read: nested too deep; give a TOML file"),
        ("d: 2020-99-99\nbase_model: a\n", "base_model is model .*without a counterpart: d;"),
        ('a: !!int "x"\nb: !!bool "x"\nc: !!timestamp "x"\nseed: 1\n', "seed is seed"),
        ("a: \x01\n", "cannot be read: .*; give a TOML file"),
    ],
)  # fmt: skip
def test_settings_of_other_trainers(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        refuse_yaml(file)


def test_other_tasks_have_a_file_too(tmp_path: Path) -> None:
    import transformers as hf

    hf.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    out = tmp_path / "run.toml"
    init(model=str(tmp_path / "t5"), data=rows(tmp_path, 3), out=out, machine="rtx4090")
    made = load_config(out)
    assert (made.task, made.train.dtype, made.train.batch) == ("text-to-text", "bf16", 8)
