"""transformers' Trainer, out of core."""

from __future__ import annotations

import transformers

from lohan.hf.mixin import LohanMixin


class Trainer(LohanMixin, transformers.Trainer):
    """transformers.Trainer, but for where weights and optimizer state are."""
