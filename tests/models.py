"""Small models, data and the plain PyTorch run that everything is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False, use_cache=False),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False, use_cache=False),
    "gpt2": lambda: GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=131, n_positions=128, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    ),
}  # fmt: skip


def small_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    with torch.no_grad():  # biases and norms away from their trivial first values
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def batches(
    steps: int, *, batch: int, seq: int, vocab: int = 131, ignored: bool = True, seed: int = 1
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        ids = torch.randint(0, vocab, (batch, seq), generator=generator)
        labels = ids.clone()
        if ignored:
            labels[:, : seq // 4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def plain_run(
    model: nn.Module, data: list[dict[str, torch.Tensor]], *, lr: Callable[[int], float],
    weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95),
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """In-memory PyTorch AdamW; 16-bit models get fp32 master weights."""
    model = copy.deepcopy(model)
    wide = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(decay_groups(wide, weight_decay), lr=1.0, betas=betas)
    losses = []
    for step, batch in enumerate(data):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, {name: p.detach() for name, p in wide.named_parameters()}


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the tensor."""
    value, expected = value.float(), expected.float()
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
