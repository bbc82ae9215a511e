"""Casts of float inputs to the narrower type of a layer's weights, as autocast does.

`dtype="bf16"` changes the type of a model's parameters, while inputs, buffers and intermediate
results of the user's code may stay in fp32. torch refuses layers with mixed types. Autocast would
cast the input of such a layer, and so does this module. The hooks that it installs take effect
wherever the layer runs, also in recomputation and in runs on fake tensors for planning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

LAYERS = (
    nn.Linear,
    nn.Bilinear,
    _ConvNd,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.PReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def cast_inputs(model: nn.Module) -> None:
    """Make the layers of a model accept float inputs of another type than their weights have."""
    for module in model.modules():
        if isinstance(module, LAYERS) and _cast not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_cast)
        elif isinstance(module, _NormBase) and not isinstance(module, _WithWiderStatistics):
            module.__class__ = _with_wider_statistics(module.__class__)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks besides the one that `cast_inputs` gives it."""
    before = [hook for hook in module._forward_pre_hooks.values() if hook is not _cast]
    return bool(before or module._forward_hooks or module._backward_hooks)


def _cast(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the floating-point positional inputs of a layer to the type of its parameters."""
    dtype = next((p.dtype for p in module.parameters()), None)
    return tuple(
        value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype is not None
        else value
        for value in inputs
    )


class _WiderWeights(TorchFunctionMode):
    """A mode that converts weight and bias of normalisation layers to fp32.

    This is the type of the layers' statistics.
    """

    FUNCTIONS = (nn.functional.batch_norm, nn.functional.instance_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS:
            args = (*args[:1], *map(_float, args[1:]))
            kwargs = {k: v if k == "input" else _float(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


class _WithWiderStatistics:
    """A BatchNorm or InstanceNorm with 16-bit weights and fp32 statistics.

    Its original class does not accept this combination of types.
    """

    plain: type[nn.Module]  # the class before `cast_inputs` replaced it

    def forward(self, *inputs: Any) -> Any:
        with _WiderWeights():
            return self.plain.forward(self, *inputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the plain class, because the copy has weights of the original type."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        return make, (self.plain, *arguments[1:]), *rest


_CLASSES: dict[type, Any] = {}  # keys are the plain classes, values the classes derived from them


def _with_wider_statistics(plain: type) -> Any:
    if plain not in _CLASSES:
        _CLASSES[plain] = type(plain.__name__, (_WithWiderStatistics, plain), {"plain": plain})
        _CLASSES[plain].__module__ = plain.__module__
    return _CLASSES[plain]
