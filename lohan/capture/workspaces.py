"""Memory that kernels take and that fake tensors do not show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lohan.model.state import FLOAT
from lohan.util.units import PAGE, align_up

FLASH, EFFICIENT, CUDNN = (
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward").default
    for name in ("flash", "efficient", "cudnn")
)


def attention_workspace(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of workspace that an attention kernel takes on an accelerator.

    No tensor shows them. They hold sums of gradients in fp32 and, if query heads share keys and
    values, the gradients of keys and values for every query head. cuDNN's kernel, which torch
    prefers on cards for servers, is assumed to need as much as flash attention.
    """
    if func not in (FLASH, EFFICIENT, CUDNN) or args[1].device.type == "cpu":
        return 0
    query, key, value = args[1:4]
    if func is EFFICIENT:
        return FLOAT * (key.numel() + value.numel())
    batch, heads, length, width = query.shape
    rows = batch * heads * align_up(length, 128)
    every = 0 if key.shape[1] == heads else heads // key.shape[1] * (key.numel() + value.numel())
    return FLOAT * rows * (align_up(width, 32) + 1) + every * key.itemsize


RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
RECURRENT = {torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default}


def recurrent_workspace(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return an upper bound of the bytes that a recurrent layer's kernel keeps for its backward.

    On fake tensors, kernels return an empty workspace. oneDNN keeps up to 16 numbers in fp32 for
    each token and unit, in padded rows, and eight pages; cuDNN's kernels are assumed to need no
    more.
    """
    if func not in RECURRENT:
        return 0
    result = out[0]
    width = max(args[0].shape[-1], result.shape[-1])
    tokens = result.numel() // result.shape[-1] + result.shape[-2]
    return 16 * FLOAT * tokens * (align_up(width, 16) + 16) + 8 * PAGE
