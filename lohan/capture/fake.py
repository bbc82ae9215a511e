"""Fake tensors: shapes without memory; where a model needs them, with the values of whole numbers.

Some models choose what to run by integers and masks: where the tokens of images are, how long each
sequence is. With `numbers` an operation that reads only real tensors runs for real, and everything
that depends on weights or on other floating-point inputs is fake.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_INDEXED = {
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
}  # fmt: skip
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)

CPU = torch.device("cpu")
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)  # a value is needed


@contextmanager
def faking(*, numbers: bool = False) -> Iterator[None]:
    """Tensors made inside are fake; with `numbers`, unless they are whole numbers that are known.
    Inside another `faking` that one goes on."""
    if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        yield
        return
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what does not fit is tried, and its error comes anyway
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Shapes(numbers):
            yield
    finally:
        log.setLevel(level)


def fake_like(
    tensor: torch.Tensor, *, numbers: bool = False, place: torch.device = CPU
) -> torch.Tensor:
    """For an input, on the device where it would be: with `numbers` integers keep their values, or
    are zero where they have none."""
    if not numbers or tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    if isinstance(tensor, FakeTensor):
        return tensor
    with unset_fake_temporarily():
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=place)
        return tensor.detach().to(place)


@contextmanager
def buffers_at(model: nn.Module, place: torch.device) -> Iterator[None]:
    """Buffers are copies on this device for the while, and what modules remember is afterwards what
    it was before: a trial counts for nothing. Also what their dicts, lists and sets hold:
    transformers adds hooks in the first forward and notes it in an attribute; hooks that stayed
    without the note would be added again, and hidden states taken several times."""
    modules = list(model.modules())
    before = [(dict(vars(module)), _contents(module)) for module in modules]
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    with unset_fake_temporarily():
                        module._buffers[name] = buffer.detach().to(place, copy=True)
        yield
    finally:
        for module, (attributes, contents) in zip(modules, before, strict=True):
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            for name, held in contents.items():
                there = now[name]
                there.clear()
                there.extend(held) if isinstance(there, list) else there.update(held)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the module's containers, by attribute."""
    kinds = (dict, OrderedDict, list, set)
    return {name: copy(value) for name, value in vars(module).items() if type(value) in kinds}


class _Shapes(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, numbers: bool) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _GROUPED is not None and func is _GROUPED.default:
            return _grouped(*args, **kwargs)
        if not self._numbers or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not tensors and _makes_numbers(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _INDEXED:
            places = [place for index in args[1] for place in _places(index)]
            args = (args[0], places, *args[2:])
        return func(*args, **kwargs)


def _makes_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a factory makes whole numbers. `arange` and `full` do so if they are given such."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return str(func).startswith(("aten.arange", "aten.full", "aten.randint")) and all(
            isinstance(value, int) for value in pytree.tree_leaves(args)
        )
    return not (dtype.is_floating_point or dtype.is_complex)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """A mask that is known as the places where it holds."""
    if (
        index is None
        or isinstance(index, FakeTensor)
        or index.dtype not in (torch.bool, torch.uint8)
    ):
        return [index]
    with unset_fake_temporarily():
        return list(index.nonzero(as_tuple=True))


def _grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """A matrix product by groups of rows: torch's own shape rule knows bf16 only."""
    if a.ndim == 2 and b.ndim == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]] if a.ndim <= b.ndim else [a.shape[1], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)
