"""`lohan train --task vision-language`: images and messages, with the processor of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file

from lohan.checkpoint.adapters import AdapterValues
from lohan.data.images import load_processor
from lohan.errors import LohanError
from lohan.train import trainer
from lohan.train.inputs import open_inputs
from lohan.train.language import VisionLanguage
from lohan.train.run_folder import RunFolder, step_rows
from tests.support.model_folders import (
    IMAGE_ID,
    VIDEO_ID,
    VISION_END_ID,
    VISION_START_ID,
    VISION_TEMPLATE,
    VISION_TEXT_SIZES,
    save_llava,
    vision_tokenizer,
)
from tests.support.training_runs import (
    TASK_STEPS,
    RecordingDisplay,
    task_config,
    train_task,
    train_task_in_memory,
    write_rows,
)


def qwen2(text: dict[str, Any], **tokens: int) -> Any:
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config=text,
            tie_word_embeddings=False,
            **tokens,
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "temporal_patch_size": 2,
            },
        )
    )


def qwen2_5(text: dict[str, Any], **tokens: int) -> Any:
    """Build a model with windowed attention of 2 by 2 merged patches, and a global block."""
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(
            text_config=text,
            tie_word_embeddings=False,
            **tokens,
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 48,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        )
    )


def qwen3(text: dict[str, Any], **tokens: int) -> Any:
    """Features of the first block of its tower go to the first layer of the language model."""
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(
            text_config={**text, "head_dim": 8},
            tie_word_embeddings=False,
            **tokens,
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 48,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        )
    )


def save_qwen(folder: Path, build: Callable[..., Any]) -> None:
    """As the folders of the hub have it: files of image processor and tokenizer."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    model = build(
        {**VISION_TEXT_SIZES, "rope_parameters": rope},
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID,
    )
    model.save_pretrained(folder)
    hf.Qwen2VLImageProcessor(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=256
    ).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    kinds = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    kind = f"{kinds[model.config.model_type]}Processor"
    settings = {**json.loads(file.read_text()), "processor_class": kind}
    file.write_text(json.dumps(settings))
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    vision_tokenizer(VISION_TEMPLATE.replace("IMAGE", image)).save_pretrained(folder)


SAVE = {
    "llava": save_llava,
    "qwen": partial(save_qwen, build=qwen2),
    "qwen2.5": partial(save_qwen, build=qwen2_5),
    "qwen3": partial(save_qwen, build=qwen3),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, images of several sizes, and conversations in every form."""
    folder = tmp_path_factory.mktemp("vision")
    hf.logging.set_verbosity_error()
    for name, save in SAVE.items():
        torch.manual_seed(0)
        save(folder / name)
    noise = np.random.default_rng(0)
    for number, size in enumerate([(16, 16), (12, 20), (24, 8), (8, 8)]):
        pixels = noise.integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    answer = [{"role": "assistant", "content": "A cat."}]
    rows = [
        {"images": ["0.png"], "messages": [{"role": "user", "content": "<image>What?"}, *answer]},
        {"images": "1.png", "messages": [{"role": "user", "content": "Which?"}, *answer]},
        {
            "image": "2.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"},
                {"from": "gpt", "value": "Two dogs."},
            ],
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "3.png"},
                        {"type": "image", "image": "0.png"},
                        {"type": "text", "text": "Alike?"},
                    ],
                },
                {"role": "assistant", "content": "No."},
                {"role": "user", "content": "Why?"},
                *answer,
            ]
        },
        {"messages": [{"role": "user", "content": "Hello."}, *answer]},
    ]
    write_rows(folder / "data.jsonl", rows)
    return folder


@pytest.mark.parametrize(
    "name",
    ["llava", "qwen", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen2.5", "qwen3"))],
)
def test_as_in_memory(name, place, tmp_path):
    """Losses and weights are those of plain PyTorch with the vision tower frozen.

    The export has the files of the processor.
    """
    out = tmp_path / "run"
    shown = train_task(place / name, place / "data.jsonl", out, train__seq=128)
    assert shown.notes[0].startswith("5 examples, 4 images\nfirst example (chat template: the ")
    assert "system prompt: none; images: 0.png; loss on what follows >>>):" in shown.notes[0]
    assert "What?<|im_end|>" in shown.notes[0] and ">>>A cat.<|im_end|>" in shown.notes[0]
    net = hf.AutoModelForImageTextToText.from_pretrained(place / name)
    frozen = {n for n, _ in net.named_parameters() if "vision_tower" in n or ".visual." in n}
    frozen = {n for n in frozen if "merger" not in n}
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(key not in frozen)
    forward = net.forward
    net.forward = lambda rows=None, **batch: forward(**batch)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    losses, weights = train_task_in_memory(out, net)
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    tuned = hf.AutoModelForImageTextToText.from_pretrained(out / "model").state_dict()
    assert tuned.keys() == weights.keys() and frozen
    for key, tensor in weights.items():
        assert torch.allclose(tuned[key], tensor, atol=2e-5), key
        assert torch.equal(tuned[key], before[key]) or key not in frozen, key
    moved = [key for key in tuned if not torch.equal(tuned[key], before[key])]
    assert any("merger" in key or "projector" in key for key in moved)
    for file in (place / name).iterdir():
        assert file.suffix == ".safetensors" or (out / "model" / file.name).is_file(), file
    load_processor(out / "model")


def test_an_adapter_leaves_the_vision_tower(place, tmp_path):
    """As PEFT trains it in memory, with adapters in the language model alone."""
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    out = tmp_path / "run"
    train_task(place / "llava", place / "data.jsonl", out, train__seq=128, train__lora=4)
    config = RunFolder(out).config()
    result = VisionLanguage().load(config, dtype="fp32")
    net = hf.AutoModelForImageTextToText.from_pretrained(place / "llava")
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        exclude_modules=".*vision_tower.*",
        task_type="CAUSAL_LM",
    )
    net = peft.get_peft_model(net, lora)
    torch.manual_seed(config.seed)
    values = AdapterValues(result)
    for key in values.names():
        parameter = net.get_parameter(key)
        parameter.data = values.read_flat(key, 0, parameter.numel()).view(parameter.shape)
    forward = net.forward
    net.forward = lambda rows=None, **batch: forward(**batch)
    losses, _ = train_task_in_memory(out, net)
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    exported = load_file(out / "model" / "adapter_model.safetensors")
    learnt = peft.get_peft_model_state_dict(net)
    assert exported.keys() == learnt.keys() and not any("vision_tower" in key for key in learnt)
    for key, tensor in learnt.items():
        assert torch.allclose(exported[key], tensor, atol=2e-5), key


def test_processes_make_the_same_examples(place, tmp_path, monkeypatch):
    """Images keep the numbers of the order they are met in."""

    def opened(name: str) -> Any:
        config = task_config(place / "llava", place / "data.jsonl", tmp_path / name, train__seq=128)
        return open_inputs(RunFolder(tmp_path / name), config, RecordingDisplay()).train_examples

    alone = opened("alone")
    monkeypatch.setattr("lohan.data.reading.ROWS_PER_TASK", 2)
    monkeypatch.setattr("lohan.data.images.processes_for", lambda source, least: 2)
    several = opened("several")
    assert several.about == alone.about
    for number in range(5):
        pair = [each.example(number) for each in (alone, several)]
        assert all(np.array_equal(pair[0][key], pair[1][key]) for key in pair[0])


@pytest.mark.slow
def test_resume_is_exact(place, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    how = {"train__activations": "recompute", "eval__split": 0.2}
    train_task(place / "llava", place / "data.jsonl", one, **how)
    train_task(place / "llava", place / "data.jsonl", two, train__steps=1, **how)
    trainer.resume(RunFolder(two), RecordingDisplay(), steps=TASK_STEPS)
    files = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


def test_labels_and_places(place, tmp_path):
    """Loss is on the answers alone, wherever the images stand; a share of a batch has its own."""
    config = task_config(place / "qwen", place / "data.jsonl", tmp_path / "run", train__seq=128)
    inputs = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay())
    spell = load_processor(place / "qwen").tokenizer.decode
    messages = []
    for batch in inputs.train_examples.passes(5):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            trained = labels[labels != -100]
            assert torch.equal(ids[labels != -100], trained)
            messages.append(spell(trained))
        assert batch["image_grid_thw"].shape == (5, 3)
        assert [len(batch["labels"]), VisionLanguage().rows(batch)] == [5, 5]
        parts = [VisionLanguage().part(batch, 0, 2), VisionLanguage().part(batch, 2, 5)]
        merged = torch.cat([part["pixel_values"] for part in parts])
        assert torch.equal(merged, batch["pixel_values"])
        weights = [VisionLanguage().weight(torch.nn.Identity(), part) for part in parts]
        assert sum(weights) == VisionLanguage().weight(torch.nn.Identity(), batch)
    assert sorted(messages) == [
        "A cat.<|im_end|>",
        "A cat.<|im_end|>",
        "A cat.<|im_end|>",
        "No.<|im_end|>A cat.<|im_end|>",
        "Two dogs.<|im_end|>",
    ]


def test_a_plan_without_data(lohan, place):
    plan = lohan("plan", "--model", place / "llava", "--host", "32MiB", "--batch", 2, "--seq", 64)
    assert plan.code == 0, plan


def conversation(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "A."},
            ],
            **more,
        }
    ]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"text": "a"}], {}, "no conversation .keys found: text"),
        (conversation("<image>?", images=["none.png"]), {}, "no image .*none.png"),
        (conversation("<image><image>?", images=["0.png"]), {}, "2 places for images"),
        (conversation("?", images=[{"bytes": "a"}]), {}, "an image is an object"),
        (conversation([{"type": "video"}]), {}, "a part of type 'video'"),
        (conversation("<image>?", images=["0.png"]), {"train__seq": 8}, "1 dropped"),
        (conversation("<image>?", images=["data.jsonl"]), {}, "not readable as an image"),
        (conversation("?"), {"train__pack": True}, "--pack: is for causal language models"),
    ],
)
def test_rejects_wrong_rows_and_settings(rows, more, message, place, tmp_path):
    for name in ("0.png", "data.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(LohanError, match=message):
        trainer.train(
            task_config(place / "llava", data, tmp_path / "run", **more), RecordingDisplay()
        )
    assert not (tmp_path / "run").exists()


def test_changed_image_is_reported(place, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes((place / "0.png").read_bytes())
    data = write_rows(tmp_path / "rows.jsonl", conversation("<image>?", images=["a.png"]))
    config = task_config(place / "llava", data, tmp_path / "run")
    inputs = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay())
    inputs.train_examples.batch(0, 1)
    picture.write_bytes((place / "1.png").read_bytes())
    with pytest.raises(LohanError, match="has changed since the run began"):
        inputs.train_examples.batch(0, 1)
