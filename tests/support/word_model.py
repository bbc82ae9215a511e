"""A tiny Llama over a dozen words, rows of text for it, and the same training in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from lohan.config import load_config
from lohan.data import open_dataset
from lohan.optim import lr_at
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.small_models import decay_groups

WORDS = ["<pad>", "<s>", "<end>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "red", "?"]


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("inputs") / "model"
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    write_random_checkpoint(folder, config, std=0.1)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


TEXTS = [{"text": " ".join(WORDS[3 + (i * j) % 9] for j in range(1, 5 + i % 6))} for i in range(9)]


def reference(
    model: Path, run: Path, steps: int, batch: int, *, pack: bool = False
) -> torch.nn.Module:
    """Train on the same batches with PyTorch's AdamW in memory, with the settings of the run."""
    train = load_config(run / "run.toml").train
    dataset = open_dataset(run / "data", seed=0)
    dataset = dataset.pack() if pack else dataset
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    net.config.use_cache = False  # with a cache, examples in a row would see each other
    optimizer = torch.optim.AdamW(
        decay_groups(net, train.weight_decay), lr=1.0, betas=train.optimizer_with(1.0).betas
    )
    for step in range(steps):
        net(**dataset.batch(step, batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(
                step,
                total_steps=steps,
                peak_lr=train.lr,
                schedule=train.schedule,
                warmup_steps=train.warmup_steps(steps),
            )
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()
