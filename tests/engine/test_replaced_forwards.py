"""Functions that user code puts around a module's forward stay, also when the plan changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import (
    attached,
    batches,
    decay_groups,
    loss_of,
    lr,
    master_weights,
    small_model,
)

CHANGED_AT, REPLANNED_AT, STEPS = 1, 2, 4


def halve(module: nn.Module) -> None:
    """Put a function around the forward of a module, as user code does."""
    forward = module.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5

    module.forward = halved


def double_loss(model: nn.Module) -> None:
    forward = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.loss = out.loss * 2
        return out

    model.forward = doubled


def replace_loss(model: nn.Module) -> None:
    def own(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        text, wanted = logits[:, :-1].float(), labels[:, 1:]
        return nn.functional.cross_entropy(text.reshape(-1, vocab_size), wanted.reshape(-1)) ** 2

    model.loss_function = own


@pytest.mark.parametrize("replanned", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: halve(model.model.layers[1]),
        lambda model: halve(model.model.layers[1].mlp),
        lambda model: halve(model.lm_head),
        double_loss,
        replace_loss,
    ],
)
def test_a_replaced_forward_is_honoured(change, replanned, tmp_path):
    model, data = small_model("llama"), batches(STEPS, batch=4, seq=8)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(decay_groups(plain, 0.1), lr=1.0, betas=(0.9, 0.95))
    expected = []
    for step, batch in enumerate(data):
        if step == CHANGED_AT:
            change(plain)
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        loss = loss_of(plain, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses = []
    with attached(model, tmp_path) as session:
        for step, batch in enumerate(data):
            if step == CHANGED_AT:
                change(model)
            if replanned and step == REPLANNED_AT:
                del loss
                session.follow(session.plan)
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        weights = master_weights(session)
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, parameter in plain.named_parameters():
        if name in weights:
            torch.testing.assert_close(weights[name], parameter.detach(), atol=5e-4, rtol=1e-3)
