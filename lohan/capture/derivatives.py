"""Autograd functions whose gradients cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lohan.errors import ModelError


class _SecondDerivative(torch.autograd.Function):
    """An identity whose backward is refused."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            "a second derivative is computed through a block (create_graph=True, as for a gradient "
            "penalty), but blocks have first derivatives only; leave the penalty out, or train "
            "with all weights in memory"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of an autograd function so that a second derivative is refused.

    torch's `once_differentiable` treats the results as constants if the gradient of the output is a
    constant, as that of a sum. A penalty on the gradient would then have no effect.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # The caller computes no second derivative.
            return results
        every = results if isinstance(results, tuple) else (results,)
        tensors = [result for result in every if isinstance(result, torch.Tensor)]
        anchor = torch.zeros((), requires_grad=True)
        remaining = iter(_SecondDerivative.apply(anchor, *tensors)) if tensors else iter(())
        return tuple(next(remaining) if isinstance(r, torch.Tensor) else r for r in every)

    return wrapped
