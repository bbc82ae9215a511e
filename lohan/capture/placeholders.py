"""Placeholders of offloaded parameters: they answer as the parameter would, but for its values.

Models ask their parameters where and what they are (`x.to(weight.device)`, `torch.zeros(n,
dtype=weight.dtype)`, `weight.new_zeros(n)`), and get the device and type that blocks compute in.
Whoever wants values outside the call of the block, or changes them, is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.errors import ModelError
from lohan.model.layout import Blocks

READ = "is read outside the call of its block"
CHANGED = "is changed outside the call of its block"
_COPIES = ("detach", "to", "clone", "requires_grad_")  # what comes out has no values either
_BYTES = ("numpy", "__array__", "tolist", "copy_", "share_memory_")


class OffloadedParameter(nn.Parameter):
    """Shape, type, device and name of a parameter, on torch's meta device underneath."""

    label: tuple[str, str] = ("(a copy)", "(unknown)")
    place = torch.device("cpu")  # where its block computes
    home: Any = None  # where its values are
    stored_as: str = ""  # and their name there

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, READ)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, asked = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        one = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))
        if name == "__get__" and asked in _PLACES:
            return _PLACES[asked](one.place)
        if name == "get_device":
            return -1 if one.place.type == "cpu" else one.place.index or 0
        if name in ("to", "type_as") and not isinstance(args[0], cls):  # another tensor to its kind
            how = {key: value for key, value in kwargs.items() if key != "other"}
            return args[0].to(one.place, one.dtype, **how)
        if name == "__set__" and asked is torch.Tensor.data and not isinstance(args[1], cls):
            raise _refusal(one, CHANGED)
        if name in _BYTES:
            raise _refusal(one, READ)
        makes = name.startswith("new_") or name.endswith("_like")
        if makes and kwargs.get("device") is None:
            kwargs["device"] = one.place
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise _refusal(one, READ) from error
        if makes:
            return out
        if name in _COPIES or (name == "__get__" and asked is torch.Tensor.data):
            return out if out is one else _like(one, out)
        if out is one:
            raise _refusal(one, CHANGED)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(out)):
            raise _refusal(one, READ)
        return out


_PLACES = {
    torch.Tensor.device: lambda place: place,
    torch.Tensor.is_meta: lambda place: False,
    torch.Tensor.is_cpu: lambda place: place.type == "cpu",
    torch.Tensor.is_cuda: lambda place: place.type == "cuda",
    torch.Tensor.is_xpu: lambda place: place.type == "xpu",
}


def _like(one: OffloadedParameter, out: torch.Tensor) -> OffloadedParameter:
    made = out.as_subclass(OffloadedParameter)
    made.label, made.place = one.label, one.place
    return made


def _refusal(one: OffloadedParameter, what: str) -> ModelError:
    parameter, site = one.label
    return ModelError(
        f"parameter {parameter} {what} {site}, where its values "
        f"are not in memory; give attach an example `batch`, which shows such uses, or keep the "
        f"module in memory with resident=[{parameter.rpartition('.')[0]!r}]"
    )


def lacks_values(tensor: torch.Tensor) -> bool:
    """A placeholder, or any other tensor on the meta device."""
    return isinstance(tensor, OffloadedParameter) or tensor.is_meta


def install_placeholders(model: nn.Module, blocks: Blocks, place: torch.device) -> None:
    """Every parameter that belongs to a site becomes a placeholder."""
    made: dict[tuple[str, int], OffloadedParameter] = {}
    for site in blocks.sites:
        for ref in site.parameters:
            module = model.get_submodule(ref.module)
            old = module._parameters[ref.attribute]
            assert old is not None
            key = (ref.group, ref.tensor)
            if key not in made:
                empty = torch.empty(old.shape, dtype=old.dtype, device="meta")
                made[key] = OffloadedParameter(empty, requires_grad=old.requires_grad)
                made[key].label = (f"{ref.module}.{ref.attribute}", site.name)
                made[key].place = place
                made[key].home = getattr(old, "home", None)
                made[key].stored_as = blocks.by_key[ref.group].tensors[ref.tensor].name
            module._parameters[ref.attribute] = made[key]
