"""`lohan train` for masked words, answers in a context and classes of images.

Results are those of plain PyTorch, a resumed run has the same bits, and bad input is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file

from lohan.data.dataset import IGNORE
from lohan.errors import LohanError
from lohan.train import trainer
from lohan.train.inputs import open_inputs
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.model_folders import byte_level_tokenizer
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

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK, VOCAB = 257, 258, 259, 260
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NO_GRADIENT = ("key.bias", "qa_outputs.bias")  # in exact arithmetic: rounding noise alone
WORDS = ["red", "green", "blue", "grey", "white", "black", "pink"]
TEXTS = [{"text": f"paint it {word}" * (1 + 2 * number)} for number, word in enumerate(WORDS)]
ASKED = [
    {
        "question": "Which?",
        "context": f"The door is {word}.",
        "answers": {"text": [word], "answer_start": [12]},
    }
    for word in WORDS
]


def save_tokenizer(folder: Path, **more: str) -> None:
    inner = byte_level_tokenizer(SPECIAL)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        **more,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def vit() -> Any:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=16,
            patch_size=8,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label={0: "cat", 1: "dog", 2: "none"},
        )
    )


MODELS = {
    "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)),
    "question-answering": lambda: hf.BertForQuestionAnswering(hf.BertConfig(**ENCODER)),
    "image-classification": vit,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
    save_tokenizer(folder / "masked", mask_token="[MASK]")
    save_tokenizer(folder / "question-answering")
    hf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(
        folder / "image-classification"
    )
    noise, rows = np.random.default_rng(0), []
    for number in range(7):
        kind = ("cat", "dog", "none")[number % 3]
        pixels = noise.integers(0, 255, (12 + number, 20, 3), dtype=np.uint8)
        path = folder / "pictures" / kind / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        rows.append({"image": str(path.relative_to(folder)), "label": kind})
    write_rows(folder / "masked.jsonl", TEXTS)
    write_rows(folder / "question-answering.jsonl", ASKED)
    write_rows(folder / "image-classification.jsonl", rows)
    return folder


def run(place: Path, name: str, out: Path, **more: Any) -> RecordingDisplay:
    return train_task(place / name, place / f"{name}.jsonl", out, **more)


@pytest.mark.parametrize("name", MODELS)
def test_as_in_memory(name, place, tmp_path):
    """Losses and weights are those of plain PyTorch.

    The task is detected from the model, and the export has all files.
    """
    out = tmp_path / "run"
    run(place, name, out)
    kind = type(MODELS[name]())
    losses, weights = train_task_in_memory(out, kind.from_pretrained(place / name))
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    tuned = kind.from_pretrained(out / "model").state_dict()
    assert tuned.keys() == weights.keys()
    for key, tensor in weights.items():
        if not key.endswith(NO_GRADIENT):
            assert torch.allclose(tuned[key], tensor, atol=2e-5), key
    for file in (place / name).iterdir():
        assert file.suffix == ".safetensors" or (out / "model" / file.name).is_file(), file


PEFT = {
    "masked": {},
    "question-answering": {"task_type": "QUESTION_ANS", "exclude_modules": ["qa_outputs"]},
    "image-classification": {
        "exclude_modules": ["classifier"],
        "modules_to_save": ["classifier"],
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_adapters_as_with_peft(name, place, tmp_path, lohan):
    """A head of answers or classes learns whole, one of words not; merged, it is a model again."""
    out, kind = tmp_path / "run", type(MODELS[name]())
    run(place, name, out, train__lora=4)
    learnt = compare_with_peft(out, kind.from_pretrained(place / name), **PEFT[name])
    whole = {key for key in learnt if "lora" not in key}
    heads = {"question-answering": {"qa_outputs"}, "image-classification": {"classifier"}}
    assert {key.split(".")[2] for key in whole} == heads.get(name, set())
    merged = lohan("export", out, "--merge", "--out", tmp_path / "merged")
    assert merged.code == 0, merged
    peft = pytest.importorskip("peft")
    reference = peft.PeftModel.from_pretrained(kind.from_pretrained(place / name), out / "model")
    expected = reference.merge_and_unload().state_dict()
    actual = kind.from_pretrained(tmp_path / "merged").state_dict()
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(actual[key], tensor, atol=1e-6), key


@pytest.mark.parametrize("name", MODELS)
def test_resume_is_exact_and_evaluation_changes_nothing(name, place, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    held = {"eval__data": place / f"{name}.jsonl", "eval__every": 1}
    how = {"train__activations": "recompute", "task": name}
    run(place, name, one, **how)
    run(place, name, two, train__steps=1, **how, **held)
    trainer.resume(RunFolder(two), RecordingDisplay(), steps=TASK_STEPS)
    files = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    # The last step's model, evaluated in memory, a row at a time: what is random is the same.
    net, total, count = type(MODELS[name]()).from_pretrained(two / "model").eval(), 0.0, 0
    inputs = open_inputs(RunFolder(two), RunFolder(two).config(), RecordingDisplay(), resume=True)
    with torch.no_grad():
        for batch in inputs.held_out.passes(1):
            weight = inputs.task.weight(net, batch)
            total, count = total + weight * net(**batch).loss.item(), count + weight
    rows = eval_rows(RunFolder(two))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_masks_are_drawn_anew_and_again_the_same(place, tmp_path):
    """Masks depend only on the step.

    Special tokens and padding are not masked, and long texts continue in the next example.
    """
    texts = [{"text": "".join(chr(97 + (n + i) % 26) for i in range(50 + n))} for n in range(24)]
    data = write_rows(tmp_path / "data.jsonl", texts)
    config = task_config(place / "masked", data, tmp_path / "run", train__seq=32)
    inputs = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay())
    again = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay(), resume=True)
    assert len(inputs.train_examples) == 24 + sum(-(-(50 + n) // 30) - 1 for n in range(24))
    chosen = masked = kept = other = seen = 0
    for step in range(40):
        batch, same = inputs.train_examples.batch(step, 8), again.train_examples.batch(step, 8)
        assert all(torch.equal(batch[name], same[name]) for name in batch)
        ids, labels = batch["input_ids"], batch["labels"]
        picked = labels != IGNORE
        assert picked.any(1).all()
        assert torch.equal(ids[~picked] == MASK, torch.zeros_like(ids[~picked], dtype=torch.bool))
        assert not picked[(ids == CLS) & (batch["attention_mask"] == 0)].any()
        assert (labels[picked] < 256).all()
        chosen, seen = chosen + int(picked.sum()), seen + int(((ids < 256) | picked).sum())
        masked += int((ids[picked] == MASK).sum())
        kept += int((ids[picked] == labels[picked]).sum())
        other += int(((ids[picked] != labels[picked]) & (ids[picked] != MASK)).sum())
    assert 0.12 < chosen / seen < 0.18
    assert 0.74 < masked / chosen < 0.86 and kept > 0 and other > 0
    epoch = len(
        inputs.train_examples
    )  # a batch of one: the same example, an epoch later, is masked anew
    order = [inputs.train_examples.batch(step, 1)["labels"] for step in range(epoch)]
    later = [inputs.train_examples.batch(epoch + step, 1)["labels"] for step in range(epoch)]
    assert not any(torch.equal(a, b) for a in order[:5] for b in later if a.shape == b.shape)
    assert [b["input_ids"].tolist() for b in inputs.train_examples.passes(5)] == [
        b["input_ids"].tolist() for b in again.train_examples.passes(5)
    ]


def test_masks_of_a_text_file(place, tmp_path):
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question. " * 8)
    shown = train_task(place / "masked", tmp_path / "a.txt", tmp_path / "run", train__steps=1)
    assert shown.notes[0].startswith("6 examples\nfirst example")


def test_answers_are_where_they_stand(place, tmp_path):
    """Windows of a long context: the answer by its tokens, or the first token where it is not."""
    letters = "".join(chr(97 + i % 26) for i in range(100))
    context = f"{letters} The answer is 42, not 24. {'z' * 60}"
    answers = {"text": ["42"], "answer_start": [115]}
    rows = [
        {"question": "What?", "context": context, "answers": answers},
        {"question": "What?", "context": "It is 42.", "answer": "42"},
        {"question": "What?", "context": "It is.", "answers": {"text": [], "answer_start": []}},
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    config = task_config(place / "question-answering", data, tmp_path / "run", train__seq=48)
    inputs = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay())
    collected = []
    for batch in inputs.train_examples.passes(1):
        start, end = (int(batch[name][0]) for name in ("start_positions", "end_positions"))
        ids = batch["input_ids"][0].tolist()
        assert ids[0] == CLS and len(ids) <= 48
        spell = hf.AutoTokenizer.from_pretrained(place / "question-answering").decode
        collected.append(spell(ids[start : end + 1]) if start else "")
        assert start <= end and (start or end == 0)
    assert set(collected) == {"42", ""}
    assert collected.count("42") in (2, 3)  # windows overlap
    seen = {spell(b["input_ids"][0]) for b in inputs.train_examples.passes(1)}
    assert any("zz[SEP]" in text for text in seen)  # to the end of the context


def test_a_folder_of_classes(lohan, place, tmp_path):
    """The folders' names are the classes; the same as rows, and plans without data."""
    how = ("--model", place / "image-classification", "--host", "32MiB", "--batch", TASK_BATCH)
    plan = lohan("plan", *how)
    assert plan.code == 0, plan
    out = tmp_path / "run"
    result = lohan("train", *how, "--data", place / "pictures", "--out", out, "--steps", 1)
    assert result.code == 0 and "7 images" in result.out, result
    run(place, "image-classification", tmp_path / "rows")
    folders = [
        open_inputs(RunFolder(f), RunFolder(f).config(), RecordingDisplay(), resume=True)
        for f in (out, tmp_path / "rows")
    ]
    every = [inputs.train_examples.passes(1) for inputs in folders]
    classes = [sorted(int(batch["labels"]) for batch in batches) for batches in every]
    assert classes[0] == classes[1] == [0, 0, 0, 1, 1, 2, 2]


def test_plans_without_data(lohan, place):
    for name in ("masked", "question-answering"):
        plan = lohan("plan", "--model", place / name, "--host", "32MiB", "--batch", 2, "--seq", 32)
        assert plan.code == 0, plan


ANSWER = {"question": "a", "context": "bcd"}


@pytest.mark.parametrize(
    ("name", "rows", "more", "message"),
    [
        ("masked", [{"text": ""}], {}, "the text has no token"),
        ("masked", [{"label": 1}], {}, "no text .keys found: label"),
        ("question-answering", TEXTS, {"task": "masked"}, "is a model for question answering"),
        ("question-answering", [ANSWER], {}, "no answer .keys found: question, context"),
        ("question-answering", [{**ANSWER, "answer": "x"}], {}, "'x' is not in the context"),
        (
            "question-answering",
            [{**ANSWER, "answer": "b", "answer_start": 1}],
            {},
            "at 1 is 'c'",
        ),
        (
            "question-answering",
            [{**ANSWER, "question": "a" * 90, "answer": "b"}],
            {},
            "the question has 90 tokens, which leaves 0 of 64",
        ),
        ("image-classification", [{"image": "gone.png", "label": 0}], {}, "no image .*gone.png"),
        ("image-classification", [{"image": "0.png", "label": "cow"}], {}, "class 'cow' is none"),
        ("image-classification", [{"image": 3, "label": 0}], {}, "image is a number"),
    ],
)
def test_rejects_wrong_rows_and_settings(name, rows, more, message, place, tmp_path):
    (tmp_path / "0.png").symlink_to(place / "pictures" / "cat" / "0.png")
    data = write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(LohanError, match=message):
        trainer.train(task_config(place / name, data, tmp_path / "run", **more), RecordingDisplay())
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_mask(place, tmp_path):
    folder = tmp_path / "model"
    MODELS["masked"]().save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(LohanError, match="its tokenizer has no mask token"):
        trainer.train(
            task_config(folder, place / "masked.jsonl", tmp_path / "run"), RecordingDisplay()
        )
