"""Runs of `lohan train --task`, and the same batches through plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import nn

from lohan.checkpoint.adapters import AdapterValues
from lohan.config import load_config
from lohan.optim import lr_at
from lohan.train import trainer
from lohan.train.inputs import open_inputs, task_of
from lohan.train.run_folder import RunFolder, step_rows
from tests.support.recording_display import Watch
from tests.support.small_models import decay_groups

STEPS, BATCH = 3, 3


def settings(model: Path, data: Path, out: Path, **more: Any) -> Any:
    overrides = {
        "model": model,
        "data": data,
        "out": out,
        "budget.host": "32MiB",
        "train.steps": STEPS,
        "train.batch": BATCH,
        "train.lr": 1e-3,
        "train.seq": 64,
        # AdamW with the default eps amplifies the rounding of gradients that are nearly zero.
        "train.eps": 1e-3,
        "train.schedule": "constant",
        "train.weight_decay": 0.1,
        "train.clip": 0.5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return load_config(None, overrides=overrides)


def train(model: Path, data: Path, out: Path, **more: Any) -> Watch:
    shown = Watch()
    trainer.train(settings(model, data, out, **more), shown)
    return shown


def reference(out: Path, net: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the run's batches with PyTorch's AdamW in memory; return losses and weights."""
    config = RunFolder(out).config()
    inputs = open_inputs(RunFolder(out), config, Watch(), resume=True)
    net, train_ = net.train(), config.train
    learns = nn.ParameterList([p for p in net.parameters() if p.requires_grad])
    optimizer = torch.optim.AdamW(decay_groups(learns, train_.weight_decay), eps=train_.eps)
    torch.manual_seed(config.seed)
    losses = []
    for step in range(STEPS):
        loss = net(**inputs.train_examples.batch(step, BATCH)).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(learns, train_.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, total_steps=STEPS, peak_lr=train_.lr, schedule="constant")
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(net.state_dict())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def byte_level(special: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer with a token for each byte, then special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={p: i for i, p in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def with_peft(out: Path, net: nn.Module, **lora: Any) -> dict[str, torch.Tensor]:
    """Compare the adapter of a run with one trained by PEFT in memory, and return it.

    `lora` are the settings that a user of PEFT would give.
    """
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    adapted = peft.get_peft_model(net, peft.LoraConfig(**settings))
    config = RunFolder(out).config()
    torch.manual_seed(config.seed)
    values = AdapterValues(task_of(config).load(config, dtype="fp32"))
    for key in values.names():
        parameter = adapted.get_parameter(key)
        parameter.data = values.read_flat(key, 0, parameter.numel()).view(parameter.shape)
    losses, _ = reference(out, adapted)
    assert [row["loss"] for row in step_rows(RunFolder(out))] == pytest.approx(losses, rel=1e-5)
    exported = load_file(out / "model" / "adapter_model.safetensors")
    learnt: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(adapted)
    assert exported.keys() == learnt.keys()
    for key, tensor in learnt.items():
        assert torch.allclose(exported[key], tensor, atol=2e-5), key
    return learnt
