"""Reward models: a score for each answer, so that chosen ones have more than rejected ones.

A causal language model gets a new head with one score in the place of its own, drawn from the run's
seed; a model for sequence classification with one label goes on with the one it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from lohan.capture.blocks import dtype_of
from lohan.checkpoint.adapters import add_lora
from lohan.checkpoint.hf_folder import build_model, draw_head, is_causal, load_config, reward_config
from lohan.config import Config, Source
from lohan.data import Encoder
from lohan.data.supervised import Preferences
from lohan.engine.session import Session
from lohan.errors import ConfigError
from lohan.model.state import MODES
from lohan.train import language, preference
from lohan.train.task import Batch, OnProgress
from lohan.util.system import offline

PERPLEXITY = False
describe, arrange, rows = preference.describe, preference.arrange, preference.rows
tokens, weight = preference.tokens, preference.weight


def check(config: Config) -> None:
    preference.check(config)
    if config.sample.prompts:
        raise ConfigError("--sample-prompts: a reward model writes nothing; leave it out")


def load(config: Config, *, dtype: str) -> nn.Module:
    found = reward_config(config.model)
    encoder = Encoder(config.model, template=config.train.chat_template)
    encoder.tokenizer(str(config.model))
    text: Any = found.get_text_config()
    text.pad_token_id = encoder.pad_id(getattr(text, "vocab_size", None))  # behind it is no score
    with offline():
        model = build_model(config.model, dtype=dtype_of(MODES[dtype]), config=found)
        if is_causal(load_config(config.model)):
            draw_head(model, seed=config.seed)
        if config.train.adapter is not None:
            return add_lora(model, config.train.adapter)
    return model


def prepare(
    sources: Sequence[Source], cache: Path, config: Config, *, option: str, resume: bool,
    progress: OnProgress,
) -> Preferences:  # fmt: skip
    made = language.prepare(
        sources, cache, config, option=option, resume=resume, progress=progress, preferences=True,
        model=reward_config(config.model),
    )  # fmt: skip
    preference.check_kind(made, rated=False, option=option, what="--task reward")
    return Preferences(made, np.arange(made.summary.examples // 2), config.train.batch)


def shapes(config: Config, examples: list[Preferences], *, dtype: str) -> Batch:
    made = preference.shapes(config, examples, dtype=dtype)
    return {name: shape for name, shape in made.items() if name != "labels"}


def before_training(
    session: Session, examples: Preferences, config: Config, progress: OnProgress
) -> None:
    """Nothing."""


def part(batch: Batch, start: int, stop: int) -> Batch:
    return preference.part(batch, start, stop) | {"stats": {}}  # of a rank's own rows


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over the pairs; rewards go to the `stats` of the batch."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    chosen, rejected = model(**inputs).logits.squeeze(-1).float().chunk(2)
    preference.note(
        batch.get("stats"), chosen.detach(), rejected.detach(), None, lambda x: float(x.mean())
    )
    return -logsigmoid(chosen - rejected).mean()
