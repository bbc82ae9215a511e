"""The examples are short and run, the config files with a small model instead of their own."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.support.model_folders import save_tokenizer
from tests.support.models import GROUPED_SIZES, save_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = {"demo.py", "demo_model.py", "generate.py"}  # tested in test_demo.py
NANO = {"nano_lohan.py"}  # tested in test_nano.py
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in DEMO | NANO)
CONFIGS = sorted(path.name for path in EXAMPLES.glob("*.toml"))
NEEDS = {
    "diffusion.py": "diffusers",
    "diffusion_run.py": "diffusers",
    "trainer.py": "accelerate",
    "lora.toml": "peft",
}
SMALL = (
    "train.batch=2",
    "train.seq=48",
    "train.steps=2",
    "train.max_dropped=1",
    "budget.host=64MiB",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "my-model"
    save_model(folder, LlamaConfig(**{**GROUPED_SIZES, "vocab_size": 264}))
    return save_tokenizer(folder)


def needed_package(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])


def test_examples_are_short() -> None:
    for name in (*SCRIPTS, *CONFIGS):
        lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 45, name


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_learns(name, model, tmp_path, monkeypatch, capsys) -> None:
    needed_package(name)
    places = {"MODEL": str(model), "SSD": "ssd", "TUNED": "tuned", "OUT": "out", "RUN": "run"}
    usage = re.search(rf"python examples/{name}((?: [A-Z]+)*)", (EXAMPLES / name).read_text())
    assert usage, "the docstring says how to start it"
    words = [places[word] for word in usage[1].split()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    losses = re.findall(r"loss'?:? '?([\d.]+)", capsys.readouterr().out)
    assert len(losses) >= 3 and float(losses[-1]) < float(losses[0])
    for result in {"tuned", "out"} & set(words):
        assert (tmp_path / result / "model.safetensors").is_file()
    if "run" in words:
        assert (tmp_path / "run" / "model" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.parametrize("name", CONFIGS)
def test_config_trains(name, lohan, model, tmp_path) -> None:
    needed_package(name)
    out = tmp_path / "run"
    given = ("--config", EXAMPLES / name, "--model", model, "--out", out)
    changed = [word for setting in SMALL for word in ("--set", setting)]
    ended = lohan("train", *given, *changed)
    assert ended.code == 0, ended
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    created = {
        "full.toml": "best/model.safetensors",
        "lora.toml": "model/adapter_model.safetensors",
        "emulated.toml": "trace.json",
    }
    assert (out / created[name]).is_file()
