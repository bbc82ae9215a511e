"""Generation of text with streamed weights.

The prompt is processed in one pass. After that, every new token needs one pass over the weights.
Several prompts are answered together: each pass over the weights gives one token to every prompt.
Keys and values are cached. The generation loop is that of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.data import Encoder
from lohan.errors import DataError
from lohan.train.evaluation import compute_device, forward_only
from lohan.util.files import checked, parse_json
from lohan.util.settings import PROMPT_SUFFIXES


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings for choosing the next token; temperature 0 selects the most likely token."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def read_prompts(entries: Sequence[str]) -> list[str]:
    """Return the prompts; an entry that names a file is replaced by the prompts in the file.

    A text file has one prompt per line. In JSON files, a prompt is a string or the `prompt` or
    `text` of an object.
    """
    prompts: list[str] = []
    for entry in entries:
        if entry.endswith(PROMPT_SUFFIXES) and "\n" not in entry and Path(entry).is_file():
            prompts += _prompts_of(Path(entry))
        else:
            prompts.append(entry)
    return prompts


def _prompts_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".txt":
            prompts = [line for line in text.splitlines() if line.strip()]
        elif file.suffix == ".jsonl":
            prompts = [_prompt_of(parse_json(line)) for line in text.splitlines() if line.strip()]
        else:
            rows: list[Any] = checked(parse_json(text), list[Any], "")
            prompts = [_prompt_of(row) for row in rows]
    except ValueError as error:
        raise DataError(
            f"{file}: not a file of prompts ({error}); write one per line, or objects with prompt"
        ) from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; check the path") from None
    if not prompts:
        raise DataError(f"{file}: holds no prompt; write one per line")
    return prompts


def _prompt_of(row: Any) -> str:
    value = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
    if not isinstance(value, str):
        raise ValueError("no prompt in an object")
    return value


def encode_prompts(encoder: Encoder, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each prompt, rendered with the model's chat template if it has one."""
    encoded = [encoder.prompt(text, place="generation") for text in prompts]
    if empty := [text for text, ids in zip(prompts, encoded, strict=True) if not ids]:
        raise DataError(f"prompt {empty[0]!r} has no token; write a longer one")
    return encoded


def generate(
    model: nn.Module,
    encoder: Encoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    streamer: Any = None,
) -> list[str]:
    """Return the text that follows each prompt.

    Short prompts are padded on the left, and the padding is masked.
    """
    tokenizer = encoder.tokenizer("generation")
    causal: Any = model
    longest = max(map(len, prompts))
    pad = encoder.pad_id(None)
    torch_device = compute_device(model)
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=torch_device)
    real = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    mask = torch.tensor(real, device=torch_device)
    with forward_only(model):
        torch.manual_seed(sampling.seed)
        out = causal.generate(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            streamer=streamer,
            pad_token_id=pad,
            max_new_tokens=sampling.max_new_tokens,
            **_choice(sampling),
        )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in out]


def _choice(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }
