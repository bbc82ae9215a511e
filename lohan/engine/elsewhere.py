"""The place of a parameter whose values are in the store: it says so to whoever reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.model.layout import Blocks


class Elsewhere(nn.Parameter):
    """Shape, type and name of a parameter. Its block's call puts the values in its place; anything
    that needs them outside such a call is refused."""

    label: tuple[str, str] = ("(a copy)", "(unknown)")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            raise _refusal(args, kwargs) from error
        name = getattr(func, "__name__", "")
        if type(out) is torch.Tensor and not (name.startswith("new_") or name.endswith("_like")):
            if name not in _ALLOWED and getattr(func, "__self__", None) is not torch.Tensor.data:
                raise _refusal(args, kwargs)
            label = _label(args, kwargs)
            out = out.as_subclass(cls)
            out.label = label
        return out


_ALLOWED = ("detach", "to", "clone", "requires_grad_")  # what comes out has no values either


def _label(args: Any, kwargs: Any) -> tuple[str, str]:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return next(leaf.label for leaf in leaves if isinstance(leaf, Elsewhere))


def _refusal(args: Any, kwargs: Any) -> ModelError:
    parameter, site = _label(args, kwargs)
    return ModelError(
        f"parameter {parameter} is read outside the call of its block {site}, where its values are "
        f"not in memory; give attach an example `batch`, which shows such uses, or keep the module "
        f"in memory with resident=[{parameter.rpartition('.')[0]!r}]"
    )


def leave_places(model: nn.Module, blocks: Blocks) -> None:
    """Every parameter that belongs to a site becomes a place."""
    made: dict[tuple[str, int], Elsewhere] = {}
    for site in blocks.sites:
        for slot in site.slots:
            module = model.get_submodule(slot.module)
            old = module._parameters[slot.attribute]
            assert old is not None
            key = (slot.group, slot.tensor)
            if key not in made:
                empty = torch.empty(old.shape, dtype=old.dtype, device="meta")
                made[key] = Elsewhere(empty, requires_grad=old.requires_grad)
                made[key].label = (f"{slot.module}.{slot.attribute}", site.name)
            module._parameters[slot.attribute] = made[key]
