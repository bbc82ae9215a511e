"""`lohan train --lora`: planning, training, resuming, exporting and generating."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lohan import load
from lohan.planner import presets
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model

peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")


@pytest.fixture
def inputs(tmp_path: Path) -> list[object]:
    save_model(tmp_path / "base", FAMILY_CONFIGS["llama"])
    rows = [
        {"input_ids": [(7 * n + i * i) % FAMILY_VOCAB for i in range(6 + n % 5)]} for n in range(12)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model", tmp_path / "base", "--data", tmp_path / "data.jsonl", "--host", "64MiB"]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_resume_export(lohan, inputs, tmp_path):
    lora = ["--lora", 4, "--lora-alpha", 8, "--lora-targets", "q_proj", "--lora-targets", "v_proj"]
    common = ["--batch", 4, "--seq", 16, "--lr", "1e-2", "--schedule", "constant", *lora]
    for name, steps in (("whole", 6), ("parts", 3)):
        ended = lohan("train", *inputs, *common, "--out", tmp_path / name, "--steps", steps)
        assert ended.code == 0, ended.err
        assert f"adapter: {tmp_path / name / 'model'}" in ended.out and "tuned" not in ended.out
        assert "usual for whole models" not in ended.out
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


def test_advises_a_higher_default_rate_for_adapters(lohan, inputs, tmp_path):
    given = ["--lora", 4, "--batch", 4, "--seq", 16, "--out", tmp_path / "run", "--steps", 1]
    ended = lohan("train", *inputs, *given)
    assert ended.code == 0, ended.err
    assert "lr is 1e-05, the default, which is usual for whole models" in ended.out


def test_a_packed_base_is_resumed_and_evaluated(lohan, inputs, tmp_path):
    common = ["--batch", 4, "--seq", 16, "--lr", "1e-2", "--schedule", "constant", "--lora", 4]
    for name, steps in (("whole", 4), ("parts", 2)):
        out = ["--out", tmp_path / name, "--steps", steps]
        ended = lohan("train", *inputs, *common, "--base", "nf4", *out)
        assert ended.code == 0, ended.err
    assert "dequantised weights" in ended.out
    assert lohan("resume", tmp_path / "parts", "--steps", 4).code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    evaluated = lohan("eval", tmp_path / "parts", "--data", inputs[3], "--host", "64MiB", "--json")
    assert evaluated.code == 0, evaluated.err
    # The merged model is the dequantised base with what was learnt.
    ended = lohan("export", tmp_path / "parts", "--out", tmp_path / "merged", "--merge")
    assert ended.code == 0, ended.err
    assert "merged model after step 4: " in ended.out
    again = lohan("eval", tmp_path / "merged", "--data", inputs[3], "--host", "64MiB", "--json")
    actual = [json.loads(ended.out)["loss"] for ended in (evaluated, again)]
    assert actual[0] == pytest.approx(actual[1], rel=1e-6)
    plain = lohan("eval", inputs[1], "--data", inputs[3], "--host", "64MiB", "--json")
    assert json.loads(plain.out)["loss"] > actual[0] + 0.01
    refused = lohan("export", tmp_path / "merged", "--out", tmp_path / "twice", "--merge")
    assert refused.code == 2


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_merged_export_equals_base_plus_adapter(lohan, inputs, tmp_path):
    """Merging a run, or the folder of an adapter, gives the logits of PEFT on the base."""
    base, run = inputs[1], tmp_path / "run"
    how = ["--lora", 4, "--lora-targets", "q_proj", "--lora-targets", "down_proj", "--lr", "1e-2"]
    ended = lohan("train", *inputs, *how, "--seq", 16, "--out", run, "--steps", 2)
    assert ended.code == 0, ended.err
    adapter = run / "model"
    assert lohan("export", run, "--out", tmp_path / "one", "--merge").code == 0
    ended = lohan("export", adapter, "--out", tmp_path / "two", "--merge", "--model", base)
    assert ended.code == 0, ended.err
    ids = torch.arange(12)[None]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain, ids)
    wanted = logits(peft.PeftModel.from_pretrained(plain, adapter), ids)
    assert not torch.allclose(wanted, before, atol=1e-4)
    for name in ("one", "two"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.allclose(logits(merged, ids), wanted, atol=1e-5)
        assert not any(folder.name.startswith("adapter") for folder in (tmp_path / name).iterdir())
    ended = lohan("export", adapter, "--out", base, "--merge", "--overwrite", "--model", base)
    assert ended.code == 2 and "holds --model" in ended.err.replace("\n", " ")
    ended = lohan("export", adapter, "--out", tmp_path / "three")
    assert ended.code == 2 and "add --merge" in ended.err.replace("\n", " ")


def test_plan_of_a_lora_run_has_less_state_on_ssd(lohan, inputs):
    ssd = {}
    for rank in (0, 4):
        ended = lohan("plan", *inputs[:2], *inputs[4:], "--seq", 16, "--lora", rank, "--json")
        assert ended.code == 0, ended.err
        ledger = json.loads(ended.out)["plan"]["ledger"]
        ssd[rank] = {e["owner"]: e["bytes"] for e in ledger if e["tier"] == "ssd"}
    assert "frozen weights" not in ssd[0]
    assert 0 < ssd[4]["frozen weights"] < ssd[0]["weights and state x2"] / 5
    assert ssd[4]["weights and state x2"] < ssd[0]["weights and state x2"] / 2


@pytest.mark.parametrize("device", [(), ("--device", "emulated", "--device-memory", "10KiB")])
@pytest.mark.parametrize("base", [(), ("--base", "nf4"), ("--base", "int8")])
def test_advice_of_a_refusal_is_enough(base, device, lohan, inputs, tmp_path):
    """One refusal for each budget: the sizes that they name are accepted, as they are."""
    common = ["--batch", 4, "--seq", 16, "--steps", 2, "--lora", 4, "--out", tmp_path / "run"]
    budgets, advised = {"--host": "20KiB", **dict([device[2:]] if device else [])}, []
    for _ in range(len(budgets) + 1):
        options = [word for pair in budgets.items() for word in pair]
        ended = lohan("train", *inputs[:4], *common, *base, *device[:2], *options)
        advice = re.search(r"raise (--[\w-]+) to ([\d.]+ \w+)", ended.err.replace("\n", " "))
        if advice is None:
            break
        advised.append(advice[1])
        budgets[advice[1]] = advice[2]
    assert ended.code == 0, ended.err
    assert sorted(advised) == sorted(budgets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", 4, "--lora-targets", "nothing"], "LoRA on nothing: "),
        (["--lora", -1], "[train] lora: got -1"),
        (["--base", "nf4"], "nf4 is for weights that are only read"),
        (["--lora", 4, "--base", "nf3"], 'got text "nf3", wants one of nf4, int8, fp8'),
    ],
)
def test_rejects_wrong_lora_options(options, message, lohan, inputs, tmp_path):
    ended = lohan("train", *inputs, *options, "--out", tmp_path / "run", "--steps", 1)
    assert ended.code == 2
    assert message in ended.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_shape_counts_the_adapter_parameters_of_the_model(inputs):
    shape = presets.model(str(inputs[1] / "config.json"))
    model = load(inputs[1], lora=4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(block.adapter_parameters(4) for block in shape.blocks) == trained
