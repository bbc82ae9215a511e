"""Small language models, their data, and the plain PyTorch run to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import lohan
from lohan.capture.blocks import split
from lohan.checkpoint.store_io import store_reader
from lohan.engine.probes import Effort, Sizes
from lohan.model.state import chunks, state_key, stored_model
from lohan.store.io_engine import aligned_buffer
from lohan.util.units import MiB

# -- training a small model, in memory and out of core ---------------------------------------------

SMALL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}
SMALL_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL_SIZES, tie_word_embeddings=False, use_cache=False),
    "qwen3": lambda: Qwen3Config(
        **SMALL_SIZES, head_dim=16, tie_word_embeddings=False, use_cache=False
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=131,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    ),
}


def small_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(SMALL_CONFIGS[kind]()).to(dtype)
    with torch.no_grad():  # biases and norms away from their trivial first values
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def batches(
    steps: int, *, batch: int, seq: int, vocab: int = 131, ignored: bool = True, seed: int = 1
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    created = []
    for _ in range(steps):
        ids = torch.randint(0, vocab, (batch, seq), generator=generator)
        labels = ids.clone()
        if ignored:
            labels[:, : seq // 4] = -100
        created.append({"input_ids": ids, "labels": labels})
    return created


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def lr(step: int) -> float:
    """Return a rate that changes in every step, so that a stale or shifted one is detected."""
    return 5e-4 * min(1.0, (step + 1) / 5) * 0.98**step


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def plain_run(
    model: nn.Module,
    data: list[dict[str, torch.Tensor]],
    *,
    lr: Callable[[int], float] = lr,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    loss_scale: float = 1.0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """In-memory PyTorch AdamW; 16-bit models get fp32 master weights."""
    model = copy.deepcopy(model)
    wide = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(decay_groups(wide, weight_decay), lr=1.0, betas=betas)
    losses = []
    for step, batch in enumerate(data):
        loss = loss_of(model, batch)
        (loss * loss_scale).backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all()
            master.grad = None if parameter.grad is None else parameter.grad.float() / loss_scale
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(wide.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, {name: p.detach() for name, p in wide.named_parameters()}


def attached(model: nn.Module, place: Path, **options: Any) -> lohan.Session:
    """`model` with the optimizer of `plain_run`, its state in `place`."""
    adamw = lohan.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {
        "optimizer": adamw,
        "budget": lohan.Budget(host="256MiB", ssd=[place]),
        **options,
    }
    return lohan.attach(model, **settings)


def lohan_run(
    model: nn.Module, data: list[dict[str, torch.Tensor]], place: Path, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run the same steps out of core; return what `plain_run` returns."""
    losses = []
    with attached(model, place, **options) as session:
        for batch in data:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        assert session.step == len(data)
        return losses, master_weights(session)


def master_weights(session: lohan.Session) -> dict[str, torch.Tensor]:
    """Return the fp32 values of every parameter after the last step."""
    session.commit()
    read = store_reader(session.store)
    return {
        tensor.name: read(tensor.name, 0, tensor.parameters).view(tensor.shape)
        for group in session.executor.blocks.groups
        for tensor in group.tensors
    }


def first_moments(session: lohan.Session) -> dict[str, torch.Tensor]:
    """Adam's means of the gradients after the last step."""
    session.commit()
    held = stored_model(session.store.meta, session.store.regions)
    collected = {}
    for group in held.groups:
        collected.update({tensor.name: torch.zeros(tensor.shape) for tensor in group.tensors})
        for chunk in () if group.frozen else chunks(group, held.chunk_params):
            count = chunk.stop - chunk.start
            buffer = aligned_buffer(held.state_format.state_size(count))
            session.store.wait(session.store.read(state_key(group), chunk.index, buffer))
            values = split(held.state_format, torch.from_numpy(buffer), count)["m"]
            for own_range in chunk.ranges:
                flat = collected[group.tensors[own_range.tensor].name].view(-1)
                flat[own_range.start : own_range.stop] = values[own_range.at :][
                    : own_range.stop - own_range.start
                ]
    return collected


def stored_bytes(session: lohan.Session) -> dict[str, bytes]:
    """Weights and optimizer state of every group after the last step, byte by byte."""
    session.commit()
    collected = {}
    for region in session.store.regions:
        if region.scratch:
            continue
        parts = []
        for chunk, size in enumerate(region.chunks):
            buffer = aligned_buffer(size)
            session.store.wait(session.store.read(region.key, chunk, buffer))
            parts.append(buffer.tobytes())
        collected[region.key] = b"".join(parts)
    return collected


def assert_close(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = 1e-5
) -> None:
    """Compare weights by their absolute difference.

    Adam turns the rounding noise of a gradient that is zero in exact arithmetic (the key bias
    of attention) into updates; fp32 PyTorch is as far from an fp64 run there.
    """
    assert weights.keys() == expected.keys()
    worst = {
        name: float((weights[name] - wanted.detach()).abs().max())
        for name, wanted in expected.items()
    }
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def deep_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL_SIZES, "num_hidden_layers": 8}, use_cache=False)
    return AutoModelForCausalLM.from_config(config).train()


def adapted(base: nn.Module, *, filled: bool = True, **options) -> nn.Module:
    """Return a model with LoRA, on all linear layers by default; `filled` moves it off zero."""
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    settings = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", **options}
    torch.manual_seed(7)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if filled and parameter.requires_grad and not parameter.is_meta:
                parameter.add_(0.05 * torch.randn_like(parameter)) if "lora_B" in name else None
    return model.train()


def train_steps(model: nn.Module, data) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses


# -- configs of every model family -----------------------------------------------------------------

FAMILY_VOCAB = 96
FAMILY_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILY_SIZES = {
    "vocab_size": FAMILY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **FAMILY_IDS,
}
GROUPED_SIZES = {**FAMILY_SIZES, "num_key_value_heads": 2, "head_dim": 8}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_SIZES = {"vocab_size": FAMILY_VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


class CopiedConfigs(dict[str, PreTrainedConfig]):
    """Every look gives a copy: models change theirs, and all tests share these."""

    def __getitem__(self, name: str) -> PreTrainedConfig:
        return copy.deepcopy(super().__getitem__(name))


FAMILY_CONFIGS = CopiedConfigs(
    {
        "llama": LlamaConfig(**GROUPED_SIZES),
        "llama3-rope": LlamaConfig(**GROUPED_SIZES, rope_parameters=LLAMA3_ROPE),
        "yarn-rope": LlamaConfig(**GROUPED_SIZES, rope_parameters=YARN_ROPE),
        "qwen2-tied": Qwen2Config(**FAMILY_SIZES, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**GROUPED_SIZES),
        "mistral": MistralConfig(**GROUPED_SIZES),
        "gpt2": GPT2Config(**GPT_SIZES, **FAMILY_IDS),
        "opt": OPTConfig(
            vocab_size=FAMILY_VOCAB,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **FAMILY_IDS,
        ),
        "gemma": GemmaConfig(**GROUPED_SIZES),
        "gemma2": Gemma2Config(**GROUPED_SIZES),
        "gemma3": Gemma3TextConfig(**GROUPED_SIZES),
        "gptj": GPTJConfig(**GPT_SIZES, **FAMILY_IDS, rotary_dim=4),
        "neox": GPTNeoXConfig(**FAMILY_SIZES),
    }
)


def save_model(folder: Path, config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Save a random model with save_pretrained and return it in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def family_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(24).view(2, 12) * 3 % FAMILY_VOCAB).logits


# -- a model large enough to compare its memory with the plan --------------------------------------

MEMORY_TOLERANCE = 0.05


def save_llama(path: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        use_cache=False,
        tie_word_embeddings=False,
    )
    save_model(path, config, seed=5)
    return path


# -- a profile within a second ---------------------------------------------------------------------

PROBE_SIZES = Sizes(hidden=64, inner=160, heads=4, vocabulary=96, copies=2, chunk_params=4096)
QUICK_EFFORT = Effort(
    sizes=PROBE_SIZES,
    tokens=(4, 16),
    head_tokens=8,
    shared_tokens=4,
    shared_seconds=0.001,
    shared_bytes=MiB,
    seconds=0.001,
    drive_seconds=0.001,
    drive_bytes=MiB,
    chunk_bytes=MiB // 4,
)
