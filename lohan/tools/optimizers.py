"""The optimizers in memory: torch's own, or written down plainly where torch has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lohan.optim import SGD, AdamW, Lion, Optimizer


def in_memory(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same on parameter groups, with a learning rate of 1."""
    if isinstance(optimizer, AdamW):
        return torch.optim.AdamW(
            groups, lr=1.0, betas=optimizer.betas, eps=optimizer.eps, foreach=False
        )
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(
            groups, lr=1.0, momentum=optimizer.momentum, nesterov=optimizer.nesterov, foreach=False
        )
    assert isinstance(optimizer, Lion)
    return PlainLion(groups, lr=1.0, betas=optimizer.betas)


class PlainLion(torch.optim.Optimizer):
    """Lion, as its paper has it."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                m = state.setdefault("m", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.sub_(lr * (beta1 * m + (1 - beta1) * grad).sign())
                m.mul_(beta2).add_((1 - beta2) * grad)
