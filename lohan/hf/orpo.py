"""TRL's ORPO and CPO trainers, which need no reference model, out of core.

SimPO is one of the losses of CPO. TRL calls these trainers experimental.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from trl.experimental.cpo import CPOTrainer as TheirCPO
from trl.experimental.orpo import ORPOTrainer as TheirORPO

from lohan.engine.head import IGNORED
from lohan.errors import ModelError
from lohan.hf.trl import OverTokens, Part, StandIn


class Concatenated(OverTokens):
    """The common part of ORPO and CPO, which run both answers as one batch.

    TRL computes all logits of that batch at once. Here they are computed in slices, so
    `logits/chosen` and `logits/rejected` in the log are means over the tokens that have a loss.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if self.is_encoder_decoder:  # type: ignore[attr-defined]
            raise ModelError(
                f"{type(self.model).__name__} is an encoder-decoder model, and lohan.hf's "
                f"{type(self).__name__} takes the log-probabilities of a causal language model; "
                "use one, or TRL's own trainer where the model fits in memory"
            )

    def _whole_prompt(self) -> bool:
        """Return whether the loss of the chosen answer includes its prompt."""
        return False

    def _averages(self) -> bool:
        """Return whether the log-probability of an answer is the mean over its tokens."""
        return True

    def _of_both(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        pad = getattr(self, "padding_value", None)
        pad = pad if pad is not None else self.pad_token_id  # type: ignore[attr-defined]
        inputs: dict[str, torch.Tensor] = self.concatenated_inputs(  # type: ignore[attr-defined]
            batch, is_encoder_decoder=False, padding_value=pad, device=self.accelerator.device
        )
        return inputs

    def _parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        both = self._of_both(inputs)
        ids, mask = both["concatenated_input_ids"], both["concatenated_attention_mask"]
        labels = both["concatenated_labels"].clone()
        if self._whole_prompt():
            chosen = len(ids) // 2
            labels[:chosen] = ids[:chosen].masked_fill(mask[:chosen] == 0, IGNORED)
        labels[:, 0] = IGNORED
        return [{"input_ids": ids, "attention_mask": mask, "labels": labels}]

    def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: str = "train") -> Any:
        inherited = super().get_batch_loss_metrics  # type: ignore[misc]
        noted: dict[str, Any] = {}

        def compute(stand_in: StandIn) -> torch.Tensor:
            loss: torch.Tensor
            loss, metrics = inherited(stand_in, batch, train_eval)
            noted.update(metrics)
            return loss

        return self._auxiliary(self._call(model, self._parts(batch), compute)), noted

    def concatenated_forward(self, model: Any, batch: Any) -> Any:
        """Return the values of TRL's method, computed from log-probabilities instead of logits."""
        output: Any = model.answer(0)
        answer = self._of_both(batch)["concatenated_labels"][:, 1:] != IGNORED
        logps = (output.log_probs * answer).sum(1)
        if self._averages():
            logps = logps / answer.sum(1)
        chosen = len(logps) // 2
        learnt = output.labelled if self._whole_prompt() else answer
        logits = [
            output.mean_logits[half][answer[half]] for half in (slice(chosen), slice(chosen, None))
        ]
        nll = -output.log_probs[:chosen][learnt[:chosen]].mean()
        if not getattr(self, "cpo_alpha", 1):
            nll = torch.zeros_like(nll)
        return (logps[:chosen], logps[chosen:], *logits, nll, output.aux_loss)


class ORPOTrainer(Concatenated, TheirORPO):
    """TRL's ORPOTrainer."""

    def _whole_prompt(self) -> bool:
        return True


class CPOTrainer(Concatenated, TheirCPO):
    """TRL's CPOTrainer. SimPO is one of its losses."""

    def _averages(self) -> bool:
        return self.loss_type in ("ipo", "simpo")
