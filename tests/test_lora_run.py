"""`lohan train --lora`: planned, trained, resumed, exported, asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_cli import lohan  # noqa: F401 - a fixture
from tests.tiny_models import CONFIGS, VOCAB, save_model

peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")


@pytest.fixture
def inputs(tmp_path: Path) -> list[object]:
    save_model(tmp_path / "base", CONFIGS["llama"])
    rows = [{"input_ids": [(7 * n + i * i) % VOCAB for i in range(6 + n % 5)]} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model", tmp_path / "base", "--data", tmp_path / "data.jsonl", "--host", "64MiB"]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_resume_export(lohan, inputs, tmp_path):  # noqa: F811
    lora = ["--lora", 4, "--lora-alpha", 8, "--lora-targets", "q_proj", "--lora-targets", "v_proj"]
    common = ["--batch", 4, "--seq", 16, "--lr", "1e-2", "--schedule", "constant", *lora]
    for name, steps in (("whole", 6), ("parts", 3)):
        ended = lohan("train", *inputs, *common, "--out", tmp_path / name, "--steps", steps)
        assert ended.code == 0, ended.err
        assert f"adapter: {tmp_path / name / 'model'}" in ended.out and "tuned" not in ended.out
    assert lohan("resume", tmp_path / "parts", "--steps", 6).code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]

    config = json.loads((tmp_path / "parts" / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    ended = lohan("export", tmp_path / "parts", "--out", tmp_path / "adapter", "--dtype", "fp32")
    assert ended.code == 0, ended.err
    assert "adapter after step 6: " in ended.out
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    learnt = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(learnt) == 4 and all(parameter.any() for parameter in learnt)


def test_the_plan_shows_what_is_saved(lohan, inputs):  # noqa: F811
    ssd = {}
    for rank in (0, 4):
        ended = lohan("plan", *inputs[:2], *inputs[4:], "--seq", 16, "--lora", rank, "--json")
        assert ended.code == 0, ended.err
        ledger = json.loads(ended.out)["plan"]["ledger"]
        ssd[rank] = {e["owner"]: e["bytes"] for e in ledger if e["tier"] == "ssd"}
    assert "frozen weights" not in ssd[0]
    assert 0 < ssd[4]["frozen weights"] < ssd[0]["weights and state x2"] / 5
    assert ssd[4]["weights and state x2"] < ssd[0]["weights and state x2"] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", 4, "--lora-targets", "nothing"], "LoRA on nothing: "),
        (["--lora", -1], "[train] lora: got -1"),
    ],
)
def test_mistakes(options, message, lohan, inputs, tmp_path):  # noqa: F811
    ended = lohan("train", *inputs, *options, "--out", tmp_path / "run", "--steps", 1)
    assert ended.code == 2
    assert message in ended.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()
