"""`lohan train` for text to text and classification: as plain PyTorch, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from lohan.errors import LohanError
from lohan.train import trainer
from lohan.train.inputs import open_inputs
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from lohan.ui.runs import read_run
from lohan.ui.view import first_example
from tests.support.model_folders import save_tokenizer
from tests.support.training_runs import (
    TASK_BATCH,
    TASK_STEPS,
    RecordingDisplay,
    compare_with_peft,
    task_config,
    train_task,
    train_task_in_memory,
    write_rows,
)

VOCAB = 264
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
WORDS = ["red", "green", "blue", "grey", "white", "black", "pink"]


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=258,
            eos_token_id=257,
        )
    )


def bart() -> Any:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            dropout=0.0,
            pad_token_id=258,
            bos_token_id=259,
            eos_token_id=257,
            decoder_start_token_id=257,
            forced_eos_token_id=257,
        )
    )


def bert(kind: str, **more: Any) -> Any:
    config = hf.BertConfig(
        **ENCODER,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **{"id2label": {0: "cold", 1: "warm", 2: "none"}, **more},
    )
    return getattr(hf, f"BertFor{kind}Classification")(config)


PAIRS = [{"input": f"paint it {w}", "target": w * (1 + i % 3)} for i, w in enumerate(WORDS)]
CLASSES = [
    {"text": f"paint it {w}", "label": ("cold", "warm", 2)[i % 3]} for i, w in enumerate(WORDS)
]
TAGS = [{"tokens": ["paint", "it", w], "tags": ["none", 2, i % 2]} for i, w in enumerate(WORDS)]
MODELS = {
    "t5": (t5, PAIRS),
    "bart": (bart, PAIRS),
    "sequence": (lambda: bert("Sequence"), CLASSES),
    "token": (lambda: bert("Token"), TAGS),
    "number": (
        lambda: bert("Sequence", id2label={0: "warmth"}),
        [{"sentence1": w, "sentence2": "colour", "label": i / 2} for i, w in enumerate(WORDS)],
    ),
    "several": (
        lambda: bert("Sequence", problem_type="multi_label_classification"),
        [{"text": w, "labels": [0, "none"] if i % 2 else []} for i, w in enumerate(WORDS)],
    ),
}


FIRST = {
    "t5": "  paint it red>>>red",
    "bart": "  paint it red>>>red",
    "sequence": "  paint it red>>>cold",
    "number": ">>>0",
    "several": "  red>>>none",
    "token": "p: none, i: none, r: cold",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    for name, (make, rows) in MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
        save_tokenizer(folder / name)
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def run(place: Path, name: str, out: Path, **more: Any) -> RecordingDisplay:
    return train_task(place / name, place / f"{name}.jsonl", out, **more)


@pytest.mark.parametrize("name", MODELS)
def test_as_in_memory(name, place, tmp_path):
    """Losses and weights are those of plain PyTorch, and transformers loads what is exported."""
    out = tmp_path / "run"
    shown = run(place, name, out)
    assert shown.notes[0].startswith("7 examples\nfirst example (loss on what follows >>>):")
    assert FIRST[name] in shown.notes[0]
    assert FIRST[name] in "\n".join(first_example(read_run(RunFolder(out))))
    kind = type(MODELS[name][0]())
    losses, weights = train_task_in_memory(out, kind.from_pretrained(place / name))
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    tuned = kind.from_pretrained(out / "model").state_dict()
    assert tuned.keys() == weights.keys()
    for key, tensor in weights.items():
        if not key.endswith(("k_proj.bias", "key.bias")):  # rounding noise alone
            assert torch.allclose(tuned[key], tensor, atol=2e-5), key
    assert (out / "model" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "name", ["sequence", *(pytest.param(x, marks=pytest.mark.slow) for x in ("t5", "token"))]
)
def test_adapters_as_with_peft(name, place, tmp_path):
    """A head of classes learns whole; losses and weights are those of PEFT in memory."""
    out = tmp_path / "run"
    run(place, name, out, train__lora=4)
    task = {"t5": None, "sequence": "SEQ_CLS", "token": "TOKEN_CLS"}[name]
    net = type(MODELS[name][0]()).from_pretrained(place / name)
    left = {"exclude_modules": ["classifier"]} if name == "token" else {}
    learnt = compare_with_peft(out, net, task_type=task, **left)
    assert any("classifier" in key for key in learnt) is (name != "t5")


def test_files_are_mixed_by_weight_and_tokenised_in_parallel(place, tmp_path, monkeypatch):
    """The order is a pure function of the step, and processes make the same examples."""
    other = write_rows(tmp_path / "other.jsonl", [{"text": "cold " * 90, "label": 1}] * 3)
    files = [f"{place / 'sequence.jsonl'}:1", f"{other}:3"]

    def opened(name: str) -> Any:
        config = task_config(place / "sequence", files, tmp_path / name)
        return open_inputs(RunFolder(tmp_path / name), config, RecordingDisplay()).train_examples

    alone = opened("alone")
    assert alone.sources == (7, 3) and alone.about["cut"] == 3
    seen = np.concatenate([alone.batch(step, 4)["labels"].numpy() for step in range(250)])
    lengths = [alone.batch(step, 4)["attention_mask"].sum(1) for step in range(250)]
    assert int((np.concatenate(lengths) == 64).sum()) == 750 and len(seen) == 1000
    monkeypatch.setattr("lohan.data.reading.ROWS_PER_TASK", 2)
    monkeypatch.setattr("lohan.train.supervised.processes_for", lambda source: 2)
    several = opened("several")
    assert several.about == alone.about and several.sources == alone.sources
    for number in range(10):
        pair = [each.example(number) for each in (alone, several)]
        assert all(np.array_equal(pair[0][key], pair[1][key]) for key in pair[0])


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "token"])
def test_resume_is_exact_and_evaluation_changes_nothing(name, place, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    held = {"eval__data": place / f"{name}.jsonl", "eval__every": 1}
    run(place, name, one, train__activations="recompute")
    run(place, name, two, train__steps=1, train__activations="recompute", **held)
    trainer.resume(RunFolder(two), RecordingDisplay(), steps=TASK_STEPS)
    files = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    rows = eval_rows(RunFolder(two))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ("eval_perplexity" in rows[0]) is (name == "t5")
    # The last step's model, evaluated in memory, a row at a time.
    kind = type(MODELS[name][0]())
    net, total, count = kind.from_pretrained(two / "model").eval(), 0.0, 0
    inputs = open_inputs(RunFolder(two), RunFolder(two).config(), RecordingDisplay(), resume=True)
    with torch.no_grad():
        for batch in inputs.held_out.passes(1):
            labelled = int((batch["labels"] != -100).sum())
            total, count = total + net(**batch).loss.item() * labelled, count + labelled
    assert rows[-1]["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert rows[-1]["eval_tokens"] == count


def test_the_command_line(lohan, place, tmp_path):
    """Without --task it is what the model is made for; plans and exports know it too."""
    out = tmp_path / "run"
    words = (
        "--model",
        place / "t5",
        "--data",
        place / "t5.jsonl",
        "--out",
        out,
        "--host",
        "32MiB",
        "--batch",
        TASK_BATCH,
        "--steps",
        1,
        "--seq",
        32,
    )
    dry = lohan("train", *words, "--task", "text-to-text", "--dry-run")
    assert dry.code == 0 and "1 step" in dry.out and not out.exists(), dry
    assert lohan("train", *words, "--freeze", "encoder").code == 0
    before, after = (load_file(f / "model.safetensors") for f in (place / "t5", out / "model"))
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and not any(key.startswith("encoder") for key in moved)
    assert lohan("export", out, "--out", tmp_path / "tuned").code == 0
    plan = lohan(
        "plan", "--model", place / "sequence", "--host", "32MiB", "--batch", 2, "--seq", 32
    )
    assert plan.code == 0, plan


@pytest.mark.parametrize(
    ("name", "rows", "more", "message"),
    [
        ("t5", [{"text": "a"}], {}, r"line 1: no input and target \(keys found: text\)"),
        ("t5", [{"input": "a", "target": 3}], {}, "target must be text, got a number"),
        ("sequence", [{"text": "a", "label": "hot"}], {}, "class 'hot' is none of the model's 3"),
        ("sequence", [{"text": "a", "label": 3}], {}, "class 3 is none of the model's 3"),
        ("token", [{"tokens": ["a"], "tags": [1, 2]}], {}, "1 words and 2 tags"),
        ("number", [{"text": "a", "label": "hot"}], {}, "the model predicts a number"),
        ("t5", PAIRS, {"task": "classification"}, "T5ForConditionalGeneration is a model for text"),
        ("t5", PAIRS, {"task": "language"}, "is not a causal language model"),
        ("t5", PAIRS, {"train__pack": True}, "--pack: is for causal language models"),
        ("t5", PAIRS, {"train__freeze": ["wings"]}, "has no part of that name"),
    ],
)
def test_rejects_wrong_rows_and_settings(name, rows, more, message, place, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(LohanError, match=message):
        trainer.train(task_config(place / name, data, tmp_path / "run", **more), RecordingDisplay())
    assert not (tmp_path / "run").exists()


def test_long_examples_are_cut_and_counted(place, tmp_path):
    """BERT has 64 places: a longer --seq does not lead beyond them."""
    rows = [{"text": "a" * 100, "label": 1}, {"text": "b", "label": 0}]
    data = write_rows(tmp_path / "data.jsonl", rows)
    shown = train_task(place / "sequence", data, tmp_path / "run", train__seq=256, train__steps=1)
    assert "1 cut to 64 tokens" in shown.notes[0]
