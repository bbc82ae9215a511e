"""Kernels that torch does not dispatch: Triton, pybind and ctypes code that takes data pointers.

Planning runs a model on fake tensors, which have no memory. An operator that torch dispatches only
computes shapes there. A kernel that takes pointers would write to address 0. Fake tensors therefore
refuse to return a pointer, and `pointer_error` converts the error to a message that names the
module.

Liger replaces the forward of modules by such kernels, with the same results. The forward of the
class is planned instead (`plain_forwards`): it has the same shapes and needs no less memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError

LIGER = "liger_kernel"
_NO_POINTER = "Cannot access data pointer"  # part of torch's message


def pointer_error(model: nn.Module, error: RuntimeError) -> ModelError | None:
    """Return the message for a kernel that asked a fake tensor for its data.

    The result is None if `error` has another cause.
    """
    if _NO_POINTER not in str(error):
        return None
    module = _innermost_module(error)
    names = (name for name, child in model.named_modules() if child is module)
    where = f"module {next(names, '') or type(model).__name__} ({type(module).__name__})"
    return ModelError(
        f"{where} calls a kernel that torch does not dispatch: it takes the addresses of its "
        "tensors, and planning has only their shapes; register the kernel as an operator with "
        "torch.library, with a fake implementation for shapes, or switch it off "
        "(use_liger_kernel=False), or leave `batch` out of lohan.attach"
    )


def _innermost_module(error: BaseException) -> nn.Module | None:
    """Return the module whose code raised the error."""
    module, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        module = owner if isinstance(owner, nn.Module) else module
        trace = trace.tb_next
    return module


def has_replaced_forward(module: nn.Module) -> bool:
    """Return whether Liger has replaced a forward in the module or in one that it contains."""
    return any(_is_liger(vars(child).get("forward")) for child in module.modules())


@contextmanager
def plain_forwards(model: nn.Module) -> Iterator[None]:
    """Temporarily undo Liger's replacements in the modules of a model."""
    with ExitStack() as undo:
        for module in model.modules():
            if _is_liger(replaced := vars(module).get("forward")):
                del module.forward
                undo.callback(setattr, module, "forward", replaced)
        for name in {type(module).__module__ for module in model.modules()}:
            source = sys.modules.get(name)
            for attribute, function in list(vars(source).items()) if source else ():
                plain = _PLAIN.get(function.__name__) if _is_liger(function) else None
                if plain is not None:
                    setattr(source, attribute, plain)
                    undo.callback(setattr, source, attribute, function)
        yield


def _is_liger(function: Any) -> bool:
    function = function.__func__ if isinstance(function, MethodType) else function
    return isinstance(function, FunctionType) and function.__module__.startswith(LIGER)


def _rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary position embeddings, as Llama does."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# The plain versions of functions that Liger replaces in modeling modules, by Liger's name.
_PLAIN = {"liger_rotary_pos_emb": _rotary}
