"""Fake tensors: shapes without memory, and with the values of some inputs if a model needs them.

Some models choose operations by integers and masks, such as the positions of images and the lengths
of sequences, and a few by other inputs, such as padding images. Inputs with known values are real
tensors. An operation that reads only real tensors is executed. All other results are fake,
including everything that depends on weights.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
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

from lohan.capture.kernels import pointer_error

_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
}
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)

_FACTORIES = tuple(
    f"aten.{name}" for name in ("arange", "full", "linspace", "ones", "scalar_tensor", "zeros")
)
MAX_KNOWN_ELEMENTS = (
    2**20
)  # constants with at most this many elements have values; larger ones are fake

Result = TypeVar("Result")
CPU = torch.device("cpu")
# raised when a value is needed
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class KnownValues(IntEnum):
    """The inputs whose values are available in a run on fake tensors."""

    SHAPES = 0  # none
    NUMBERS = 1  # integers and masks
    INPUTS = 2


@contextmanager
def faking(values: KnownValues = KnownValues.SHAPES) -> Iterator[None]:
    """Make tensors created in the `with` body fake, unless they are computed from known values.

    The random states of Python and numpy are restored on exit, because a model may draw from them.
    Inside another `faking` context, the outer context stays in effect.
    """
    if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        yield
        return
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    # torch logs an error in a fake run before it raises it. Some attempts are expected to fail.
    log.setLevel(logging.CRITICAL)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The pointer of a fake tensor would be 0, and a kernel would write to that address.
    mode._allow_unsafe_data_ptr_access = False
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with mode, _Shapes(values):
            yield
    finally:
        log.setLevel(level)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def with_least_values(
    model: nn.Module,
    run: Callable[[KnownValues], Result],
    *,
    least: KnownValues = KnownValues.SHAPES,
) -> Result:
    """Call `run` with as few known values as it needs, and return its result.

    `run` uses fake tensors. It is tried with the known values `least`, then with more of them, and
    finally in eval mode, because layers may be dropped at random in training mode. Raise UNKNOWN if
    the run needs more values than are known, and ModelError if it calls a kernel that needs memory.
    """
    for values in KnownValues:
        if values >= least:
            try:
                return run(values)
            except UNKNOWN:
                continue
            except RuntimeError as error:
                if (message := pointer_error(model, error)) is not None:
                    raise message from error
                raise
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return run(KnownValues.INPUTS)
    finally:
        # restores parts that were in eval mode, such as a frozen tower
        for module, training in modes:
            module.training = training


def fake_like(
    tensor: torch.Tensor,
    values: KnownValues = KnownValues.SHAPES,
    *,
    torch_device: torch.device = CPU,
) -> torch.Tensor:
    """Return a substitute on `torch_device` for an input, with its values if they must be known.

    A tensor without values is returned otherwise; inside `faking`, it is fake. If the values of
    an integer input must be known and the input is a meta tensor, they are zero.
    """
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if values < KnownValues.NUMBERS or (
        not whole and (values < KnownValues.INPUTS or tensor.is_meta)
    ):
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch_device
        )
    if isinstance(tensor, FakeTensor):
        return tensor
    with unset_fake_temporarily():
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=torch_device)
        return tensor.detach().to(torch_device)


@contextmanager
def buffers_at(model: nn.Module, torch_device: torch.device) -> Iterator[None]:
    """Temporarily replace the buffers by copies on a device, and restore all module attributes.

    A trial run must leave no trace. This includes the contents of dicts, lists and sets in the
    attributes of modules: transformers registers hooks in the first forward and records that in
    an attribute. If the hooks stayed without the record, they would be registered again, and
    hidden states would be collected several times.
    """
    modules = list(model.modules())
    kinds = (dict, OrderedDict, list, set)  # containers whose contents are restored
    before = [
        (dict(vars(m)), {name: copy(one) for name, one in vars(m).items() if type(one) in kinds})
        for m in modules
    ]
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    with unset_fake_temporarily():
                        module._buffers[name] = buffer.detach().to(torch_device, copy=True)
        yield
    finally:
        for module, (attributes, contents) in zip(modules, before, strict=True):
            current = vars(module)
            for name in current.keys() - attributes.keys():
                del current[name]
            current.update(attributes)
            for name, saved in contents.items():
                container = current[name]
                container.clear()
                container.extend(saved) if isinstance(container, list) else container.update(saved)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees every operation below autograd.

    Dynamo's check whether to skip the mode is disabled, because it takes a third of the time of
    handling an operation.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Shapes(DispatchMode):
    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _GROUPED is not None and func is _GROUPED.default:
            return _grouped(*args, **kwargs)
        if not self._values or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not tensors and self._makes_values(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _INDEXED:
            indices = [index for entry in args[1] for index in _indices(entry)]
            args = (args[0], indices, *args[2:])
        return func(*args, **kwargs)

    def _makes_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        if _makes_numbers(func, args, kwargs):
            return True
        if self._values < KnownValues.INPUTS or not str(func).startswith(_FACTORIES):
            return False
        return func(*args, **{**kwargs, "device": "meta"}).numel() <= MAX_KNOWN_ELEMENTS


def _makes_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a factory creates integers.

    `arange` and `full` do so for integer arguments.
    """
    dtype = kwargs.get("dtype")
    if dtype is None:
        return str(func).startswith(("aten.arange", "aten.full", "aten.randint")) and all(
            isinstance(value, int) for value in pytree.tree_leaves(args)
        )
    return not (dtype.is_floating_point or dtype.is_complex)


def _indices(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the indices that have the effect of `index`.

    A mask with known values is replaced by the positions of its true elements.
    """
    if (
        index is None
        or isinstance(index, FakeTensor)
        or index.dtype not in (torch.bool, torch.uint8)
    ):
        return [index]
    with unset_fake_temporarily():
        return list(index.nonzero(as_tuple=True))


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result with the shape of a grouped matrix product.

    This replaces torch's shape rule for that operation, which accepts bf16 only.
    """
    if a.ndim == 2 and b.ndim == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]] if a.ndim <= b.ndim else [a.shape[1], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)
