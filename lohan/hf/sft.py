"""TRL's SFTTrainer, out of core."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from lohan.checkpoint.adapters import base_of
from lohan.engine.head import IGNORED
from lohan.engine.session import Session
from lohan.errors import ConfigError
from lohan.hf.mixin import LohanMixin

try:
    import trl
except ImportError:
    raise ConfigError(
        "lohan.hf.SFTTrainer needs the package trl, which is not installed; pip install "
        "'lohan[trl]'"
    ) from None


ROWS = 64  # whose probabilities are looked at together
Theirs = trl.SFTTrainer  # as it was imported: scripts may put ours in its place


def _weighted_by_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TRL's "dft": what is likely already counts more."""
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * (-losses).exp().detach()).sum()


class SFTTrainer(LohanMixin, Theirs):
    """Datasets, templates, packing, adapters and metrics are TRL's. Its own head in tiles reads the
    weights of the head outside a call, where they are not; LoHan's takes its place."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        vars(base_of(self.model)).pop("forward", None)  # TRL's head
        self._seen = torch.zeros(3, dtype=torch.float64)  # tokens, entropy, right guesses

    def attach(self, inputs: Mapping[str, Any], *, lasting: bool = True) -> Session:
        session = super().attach(inputs, lasting=lasting)
        if session.head is not None:
            session.head.seen = self._look
            if self.args.loss_type == "dft":
                session.head.token_loss = _weighted_by_probability
        return session

    def _repeatable(self) -> bool:
        return type(self).compute_loss is SFTTrainer.compute_loss and not self.compute_loss_func

    def _recorded(self) -> Any:
        return deepcopy(self._metrics), self._total_train_tokens

    def _record_again(self, recorded: Any) -> None:
        self._metrics, self._total_train_tokens = recorded

    def _look(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        for part, right in zip(logits.split(ROWS), labels.split(ROWS), strict=True):
            logs = part.float().log_softmax(-1)
            entropy = -(logs.exp() * logs).sum().item()
            hits = (logs.argmax(-1) == right).sum().item()
            self._seen += torch.tensor([len(right), entropy, hits], dtype=torch.float64)

    def _too_much(self, auxiliary: torch.Tensor) -> torch.Tensor:
        """The model adds the auxiliary loss of every batch, TRL its mean over those of a step."""
        assert self.session is not None
        part = self.router_aux_loss_coef * auxiliary
        part = part * (1 - 1 / self.current_gradient_accumulation_steps)
        value, scale = part.detach(), self.session.executor.train_state.loss_scale
        return value + scale * (part - value)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        metrics = self._metrics["train" if self.model.training else "eval"]
        if self.model.training:
            mask = inputs.get("attention_mask")
            counted = mask.sum() if mask is not None else inputs["input_ids"].numel()
            self._total_train_tokens += int(counted)
        metrics["num_tokens"] = [self._total_train_tokens]
        self._seen.zero_()
        labels = inputs.get("labels")
        count = {"num_items_in_batch": num_items_in_batch}
        found = super(Theirs, self).compute_loss(model, dict(inputs), return_outputs=True, **count)
        loss, outputs = self._of_all_ranks(found, count)
        if not self._seen[0] and labels is not None:  # the head made all logits at once
            following = labels[:, 1:].reshape(-1)
            learnt = following != IGNORED
            logits = outputs.logits.detach()[:, :-1].flatten(0, 1)
            self._look(logits[learnt], following[learnt])
        tokens, entropy, hits = self._seen.tolist()
        if tokens:
            metrics["entropy"].append(entropy / tokens)
            metrics["mean_token_accuracy"].append(hits / tokens)
        if self.aux_loss_enabled:
            metrics["aux_loss"].append(outputs.aux_loss.item())
            if num_items_in_batch is not None:
                loss = loss - self._too_much(outputs.aux_loss)
        return (loss, outputs) if return_outputs else loss
