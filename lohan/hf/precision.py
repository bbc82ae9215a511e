"""Losses in fp32 for models in bf16 or fp16, as autocast computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import convert_to_fp32
from torch import nn
from torch.overrides import TorchFunctionMode


def _widened(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Convert the outputs of the model to fp32.

    Logits that are computed on access are also converted on access.
    """
    make = getattr(outputs, "make_logits", None)
    if make is None:
        return convert_to_fp32(outputs)
    object.__setattr__(outputs, "make_logits", lambda: make().float())
    return outputs


class _LossesInFp32(TorchFunctionMode):
    """A mode that computes loss functions in fp32 while the forward of the model runs.

    The mode is not active while blocks are recomputed.
    """

    KINDS = frozenset(
        getattr(nn.functional, name)
        for name in (
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.KINDS:
            args, kwargs = convert_to_fp32((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def begin(self, *_: Any) -> None:
        self.__enter__()

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


@contextmanager
def losses_in_fp32(model: nn.Module, args: Any) -> Iterator[None]:
    """Compute losses in fp32 if the model is in bf16 or fp16, as autocast does.

    The model's outputs are converted to fp32 too, as accelerate does, for label smoothing and for
    losses that the user defines.
    """
    if not (args.bf16 or args.fp16):
        yield
        return
    losses = _LossesInFp32()
    hooks = [
        model.register_forward_pre_hook(losses.begin),
        model.register_forward_hook(losses.end, always_call=True),
        model.register_forward_hook(_widened),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
