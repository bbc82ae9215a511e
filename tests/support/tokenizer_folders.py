"""Folders with a tokenizer for tests: one token per byte, or one per word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lohan.data import IGNORE, Encoder, encode_row
from tests.support.model_families import CONFIGS, VOCAB, save_model

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<pad>", "<s>", "</s>", "<user>", "<bot>", *(f"w{i}" for i in range(VOCAB - 5))]


def write_model(folder: Path, kind: str, *, template: str | None = None) -> Path:
    save_model(folder, CONFIGS[kind])
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    result.chat_template = template
    result.save_pretrained(folder)
    return folder


def expected(folder: Path, prompts: list[str], **how: Any) -> list[str]:
    """Plain transformers, all in memory, with the same padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in prompts
        ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(how.pop("seed", 0))
    out = model.generate(**inputs, **how)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>", "<s>"]


def save_tokenizer(
    folder: Path,
    *,
    template: str | None = None,
    bos: bool = False,
    merges: list[tuple[str, str]] | None = None,
) -> Path:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a, b in merges or [])]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges or [])
    )
    level = tokenizers.pre_tokenizers.ByteLevel
    inner.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    if bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(name="model_dir", scope="session")
def model_dir_fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tokenizer with the given traits, once for each."""
    created: dict[str, Path] = {}

    def get(**traits: Any) -> Path:
        key = repr(traits)
        if key not in created:
            created[key] = save_tokenizer(tmp_path_factory.mktemp("model"), **traits)
        return created[key]

    return get


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spelled(encoder: Encoder, ids: list[int], labels: list[int]) -> tuple[str, str]:
    """Return the text of the tokens, and the same with a tilde for each token without loss."""
    decode = encoder.tokenizer("test").decode
    assert len(ids) == len(labels)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    shown = "".join(
        "~" if label == IGNORE else decode([label])
        for label in labels  # one byte or one special token each
    )
    return decode(ids), shown


def encode(folder: Path, row: dict[str, Any]) -> tuple[str, str]:
    encoder = Encoder(folder)
    return spelled(encoder, *encode_row(row, encoder=encoder, place="x.jsonl, line 1"))


rows = st.lists(
    st.lists(st.tuples(st.integers(0, 999), st.booleans()), max_size=20), min_size=1, max_size=20
)
