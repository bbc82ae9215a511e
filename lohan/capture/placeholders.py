"""Parameters of an attached model, as user code sees them between the calls of its blocks.

A parameter that belongs to a block is a placeholder (`OffloadedParameter`). It has shape, type and
device, which models use (`x.to(weight.device)`, `weight.new_zeros(n)`), and reads its values from
the store for every operation that needs them. Parameters that stay in memory are
`ResidentParameter`. Both raise an error for what LoHan cannot support: an operation that writes
values in place, and gradients that are read or set after backward has consumed them. Views of a
parameter's values, such as `weight[0]`, can be read but not written (`ParameterView`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.errors import ModelError
from lohan.model.layout import Blocks, ParameterRef

TORCH_MODULES = "torch.nn.modules.module"  # Module.to, load_state_dict and zero_grad
TORCH_CLIPPING = "torch.nn.utils.clip_grad"
_ALIASES = ("detach", "requires_grad_", "alias")  # the result shares the values of the parameter
_CONVERSIONS = ("to", "cpu", "cuda", "xpu", "float", "half", "bfloat16", "double", "type")
_NEED_VALUES = ("numpy", "__array__", "tolist", "item", "__iter__", "__dlpack__")
_TENSOR_GRAD: Any = torch.Tensor.grad  # the property of every tensor
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class ParameterValues(Protocol):
    """The methods of a model's store that its parameters use."""

    def read(self, parameter: AttachedParameter) -> torch.Tensor: ...

    def write(self, parameter: AttachedParameter, values: torch.Tensor) -> None: ...


class StepGradients:
    """The state of the current step's gradients, shared by all parameters of a model.

    `consumed`: backward has passed the gradients to the optimizer, and `zero_grad` has not been
    called since, so PyTorch would have a gradient where LoHan has none. `in_backward`: backward
    runs, and hooks may set gradients. `updates`: backward updates the weights; otherwise gradients
    are kept in `.grad` as in PyTorch. `refresh` brings resident parameters up to date.
    """

    def __init__(self) -> None:
        self.consumed = self.in_backward = False
        self.updates = True
        self.refresh: Callable[[], None] = lambda: None


class AttachedParameter(nn.Parameter):
    """A parameter of an attached model. `label` contains its name and that of its block."""

    label: tuple[str, str] = ("(a copy)", "(unknown)")
    stored_weights: Any = None  # the ParameterValues that hold its values
    stored_as: str = ""  # the name of the values in the store
    step_gradients: StepGradients | None = None  # shared by all parameters of a model

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient. Reading it after a step that has consumed it raises an error."""
        gradient = self._stored_gradient()
        step = self.step_gradients
        if gradient is None and step is not None and step.consumed and self.requires_grad:
            self._check_gradient_read(step)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        step = self.step_gradients
        if gradient is not None and step is not None and step.updates and not step.in_backward:
            raise ModelError(
                f"the gradient of {self.label[0]} is set, but the update of this step has already "
                "run inside backward; change gradients with register_hook or "
                "register_post_accumulate_grad_hook, and clip them with attach(clip=...) or "
                "max_grad_norm of a Trainer"
            )
        self._store_gradient(gradient)

    @grad.deleter
    def grad(self) -> None:
        self._store_gradient(None)

    def _stored_gradient(self) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient: torch.Tensor | None = _TENSOR_GRAD.__get__(self)
        return gradient

    def _store_gradient(self, gradient: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _TENSOR_GRAD.__set__(self, gradient)

    def _check_gradient_read(self, step: StepGradients) -> None:
        """Raise an error if user code reads a consumed gradient.

        Libraries that only check whether there is a gradient (`Module.zero_grad`, `Module.to`) get
        None.
        """
        frame = sys._getframe(2)  # the frame of the code that reads `.grad`
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "zero_grad":
            step.consumed = False
        elif module == TORCH_CLIPPING:
            raise ModelError(
                f"the gradient of {self.label[0]} cannot be clipped by torch.nn.utils: LoHan "
                "updates weights inside backward, so there is no gradient left, and this call "
                "would do nothing; give attach(clip=1.0), or max_grad_norm to a Trainer, and leave "
                "the call out (session.grad_norm is the norm of the last step)"
            )
        elif module.partition(".")[0] not in ("torch", "lohan"):
            raise ModelError(
                f"the gradient of {self.label[0]} is read after backward, which has consumed it "
                "for the update; read or change gradients with register_hook or "
                "register_post_accumulate_grad_hook, and see session.grad_norm for their norm"
            )


class OffloadedParameter(AttachedParameter):
    """A placeholder with shape, type, device and name, based on a tensor on torch's meta device."""

    compute_device = torch.device("cpu")  # where its block computes
    _kept_gradient: torch.Tensor | None = None

    def _stored_gradient(self) -> torch.Tensor | None:
        return self._kept_gradient

    def _store_gradient(self, gradient: torch.Tensor | None) -> None:
        self._kept_gradient = gradient

    def values(self) -> torch.Tensor:
        """Read the current values into memory.

        The result is differentiable if gradients are enabled.
        """
        if self.stored_weights is None:
            raise _not_in_memory(self)
        values: torch.Tensor = self.stored_weights.read(self)
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._in_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._in_memory()
        return memo[id(self)]

    def _in_memory(self) -> nn.Parameter:
        with torch.no_grad():
            return nn.Parameter(self.values(), requires_grad=self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        leaves = pytree.tree_leaves((args, kwargs))
        one = next((x for x in leaves if isinstance(x, cls)), None)
        if one is None:  # all parameters among the arguments are resident
            return ResidentParameter.__torch_function__(func, types, args, kwargs)
        if name == "__get__" and owner in _DEVICE_PROPERTIES:
            return _DEVICE_PROPERTIES[owner](one.compute_device)
        if name == "get_device":
            return -1 if one.compute_device.type == "cpu" else one.compute_device.index or 0
        # The call converts an ordinary tensor to the device and type of this parameter.
        if name in ("to", "type_as") and not isinstance(args[0], cls):
            how = {key: value for key, value in kwargs.items() if key != "other"}
            return args[0].to(one.compute_device, one.dtype, **how)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if _is_written(name, owner, args, kwargs):
            return _write(name, args, kwargs, caller)
        if name in _HOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad or (
            name in ("view_as", "expand_as") and args[0] is args[-1]
        ):
            raise _no_node(one)
        if name in _CONVERSIONS and caller.partition(".")[0] in ("torch", "lohan"):
            return _converted(func, one, args, kwargs, caller)
        makes = name.startswith("new_") or name.endswith("_like")
        if makes and kwargs.get("device") is None:
            kwargs["device"] = one.compute_device
        if name in _NEED_VALUES:
            return _with_values(func, args, kwargs)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # the operation needs values
            return _with_values(func, args, kwargs)
        if makes or out is one:
            return out
        if name in _ALIASES or (name == "__get__" and owner is torch.Tensor.data):
            return _alias(one, out)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(out)):
            return _with_values(func, args, kwargs)
        return out


class ResidentParameter(AttachedParameter):
    """A parameter that stays in memory, as a copy of what the optimizer updates."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = (*args, *kwargs.values())
        if any(isinstance(x, OffloadedParameter) for x in leaves):
            return OffloadedParameter.__torch_function__(func, types, args, kwargs)
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        one = next((x for x in pytree.tree_leaves(leaves) if isinstance(x, cls)), None)
        if one is not None and one.step_gradients is not None:
            if _is_written(name, owner, args, kwargs):
                caller = sys._getframe(1).f_globals.get("__name__", "")
                return _write(name, args, kwargs, caller)
            one.step_gradients.refresh()
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if one is None or out is one:
            return out
        if name == "detach" or (name == "__get__" and owner is torch.Tensor.data):
            return _alias(one, out)
        if one.step_gradients is not None:
            return _read_only(out, {one.label[0]: one})
        return out


class ParameterView(torch.Tensor):
    """A view of the values of an attached parameter, such as `weight[0]` or `weight.cpu()`.

    It can be read; writing to it is refused, since the values are in the store.
    """

    parameter_name = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.as_subclass(torch.Tensor).clone()
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        views = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        written = next(iter(_written(name, owner, args, kwargs, cls)), None)
        if written is not None:
            raise _refused_write(written.parameter_name)
        if any(issubclass(kind, AttachedParameter) for kind in types):
            args, kwargs = without_views(args, kwargs)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return _read_only(out, {view.parameter_name: view for view in views})


def _read_only(out: Any, sources: Mapping[str, torch.Tensor]) -> Any:
    """Return the result of an operation on parameters, with views of their values made read-only.

    `sources` are the values of the parameters by name. If autograd records the operation, PyTorch
    itself refuses writes to views of parameters. The forward of a training step therefore gets
    ordinary tensors.
    """
    if isinstance(out, np.ndarray):
        out.flags.writeable = False
        return out
    if isinstance(out, torch.Size) or not isinstance(out, (torch.Tensor, tuple, list)):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources.values()):
            return out
        names = {_storage(source): name for name, source in sources.items()}
        names.pop(0, None)

        def protect(tensor: torch.Tensor) -> torch.Tensor:
            name = names.get(_storage(tensor)) if type(tensor) is torch.Tensor else None
            if name is None:
                return tensor
            view = tensor.as_subclass(ParameterView)
            view.parameter_name = name
            return view

        return pytree.tree_map_only(torch.Tensor, protect, out)


def without_views(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, with read-only views converted to ordinary tensors."""
    if not any(isinstance(leaf, ParameterView) for leaf in pytree.tree_leaves((args, kwargs))):
        return args, kwargs
    plain: tuple[Any, Any] = pytree.tree_map_only(ParameterView, without_view, (args, kwargs))
    return plain


def without_view(leaf: Any) -> Any:
    """Return a read-only view as an ordinary tensor, and any other value unchanged."""
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, ParameterView) else leaf


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or 0 if the tensor has no memory."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


_DEVICE_PROPERTIES = {
    torch.Tensor.device: lambda device: device,
    torch.Tensor.is_meta: lambda device: False,
    torch.Tensor.is_cpu: lambda device: device.type == "cpu",
    torch.Tensor.is_cuda: lambda device: device.type == "cuda",
    torch.Tensor.is_xpu: lambda device: device.type == "xpu",
}


def _is_written(name: str, owner: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation changes the values of an attached parameter.

    For an operation that sets an attribute of a tensor, `owner` is the attribute.
    """
    return bool(_written(name, owner, args, kwargs, AttachedParameter))


def _written(
    name: str, owner: Any, args: Any, kwargs: Mapping[str, Any], kind: type[torch.Tensor]
) -> list[Any]:
    """Return the tensors of class `kind` whose values an operation changes."""
    if name == "__set__":
        is_data = owner is torch.Tensor.data and not isinstance(args[1], kind)
        return [args[0]] if is_data and isinstance(args[0], kind) else []
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    targets = [kwargs.get("out")]
    if in_place or name in _IN_PLACE:
        # The functions of nn.init pass the tensor that they fill by name.
        targets += [args[:1], *(kwargs.get(key) for key in ("self", "input", "tensor"))]
    return [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, kind)]


_IN_PLACE = {f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow")}
_IN_PLACE.add("__setitem__")


def _write(name: str, args: Any, kwargs: Mapping[str, Any], caller: str) -> Any:
    """Write to the store what load_state_dict copies; raise an error for all other writes."""
    leaves = pytree.tree_leaves((args, kwargs))
    one = next(leaf for leaf in leaves if isinstance(leaf, AttachedParameter))
    if name == "copy_" and caller == TORCH_MODULES and one.stored_weights is not None:
        one.stored_weights.write(one, args[1])
        if isinstance(one, ResidentParameter):
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                one.copy_(args[1])
        return one
    raise _refused_write(one.label[0])


def _refused_write(name: str) -> ModelError:
    return ModelError(
        f"parameter {name} is changed in memory, where its values would be lost: they are in the "
        f"store; write them with model.load_state_dict({{{name!r}: values}}, strict=False)"
    )


def _converted(func: Any, one: OffloadedParameter, args: Any, kwargs: Any, caller: str) -> Any:
    """Return the result of `Module.to` or a related method for a placeholder.

    If the dtype stays the same, this is the same placeholder, because the session decides where a
    parameter is used. User code cannot change the dtype, which the store decides. LoHan's own code
    gets a placeholder with the new dtype.
    """
    with torch._C.DisableTorchFunctionSubclass():
        name = func.__name__
        meta = torch.empty(one.shape, dtype=one.dtype, device="meta")
        if name in ("cpu", "cuda", "xpu"):
            dtype = one.dtype
        elif name == "to":
            dtype = torch._C._nn._parse_to(*args[1:], **_parsed(kwargs))[1] or one.dtype
        else:
            dtype = func(meta, *args[1:], **kwargs).dtype
    if dtype == one.dtype:
        return one
    if caller.startswith("lohan"):
        return _alias(one, meta.to(dtype))
    raise ModelError(
        f"parameter {one.label[0]} is converted from {one.dtype} to {dtype}, but its values are in "
        "the store in the type that the session computes in; give attach(dtype=...), or bf16=True "
        "or fp16=True to a Trainer, or convert what save_pretrained has written"
    )


def _parsed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    accepted = ("device", "dtype", "non_blocking", "copy", "memory_format")
    return {key: value for key, value in kwargs.items() if key in accepted}


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Read the values of all placeholders among the arguments, and run the operation on them."""
    streamed: dict[int, torch.Tensor] = {}

    def fetch(leaf: OffloadedParameter) -> torch.Tensor:
        if id(leaf) not in streamed:
            streamed[id(leaf)] = leaf.values()
        return streamed[id(leaf)]

    leaves = pytree.tree_leaves((args, kwargs))
    labels = {id(leaf): leaf.label[0] for leaf in leaves if isinstance(leaf, OffloadedParameter)}
    args, kwargs = pytree.tree_map_only(OffloadedParameter, fetch, (args, kwargs))
    out = func(*args, **kwargs)
    return _read_only(out, {labels[key]: values for key, values in streamed.items()})


def _alias(one: AttachedParameter, out: torch.Tensor) -> Any:
    """Return `out` as an attached parameter that reads the same values as `one`, as for `.data`."""
    alias: Any = out.as_subclass(type(one))
    alias.label, alias.step_gradients = one.label, None
    alias.stored_weights, alias.stored_as = one.stored_weights, one.stored_as
    if isinstance(one, OffloadedParameter):
        alias.compute_device = one.compute_device
    else:
        alias.step_gradients = one.step_gradients
    return alias


def _not_in_memory(one: AttachedParameter) -> ModelError:
    parameter, site = one.label
    return ModelError(
        f"parameter {parameter} is read outside the call of its block {site}, where its values "
        "cannot be streamed; give attach an example `batch`, which shows such uses, or keep the "
        f"module in memory with resident=[{parameter.rpartition('.')[0]!r}]"
    )


def _no_node(one: AttachedParameter) -> ModelError:
    return ModelError(
        f"parameter {one.label[0]} has no node in the graph of autograd, since its values are in "
        "the store, so torch.autograd.grad and register_multi_grad_hook cannot find its gradient; "
        "use register_hook, or loss.backward() after session.updates_in_backward = False, which "
        "leaves gradients in .grad"
    )


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a placeholder, or any other tensor on the meta device."""
    if type(tensor) is torch.Tensor:  # The usual case. Parameters have a slow `isinstance`.
        return tensor.is_meta
    return isinstance(tensor, OffloadedParameter) or tensor.is_meta


# -- Replacing parameters --------------------------------------------------------------------------


def carry_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Transfer the gradient hooks of a parameter to its replacement.

    The dictionaries of hooks are shared, so that handles in user code still remove their hooks.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(old, name)
            if hooks is not None and getattr(new, name) is not hooks:
                setattr(new, name, hooks)


def put_parameter(model: nn.Module, ref: ParameterRef, parameter: nn.Parameter) -> None:
    """Replace the parameter at `ref`, bypassing the checks of `setattr`.

    The new parameter refers to the same store.
    """
    parameters = model.get_submodule(ref.module)._parameters
    old = parameters[ref.attribute]
    if old is not None and old is not parameter:
        parameter.stored_weights = getattr(old, "stored_weights", None)  # type: ignore[attr-defined]
        carry_hooks(old, parameter)
    parameters[ref.attribute] = parameter


def replace_parameters(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in every module that uses them.

    The keys of `new` are the ids of the parameters to replace.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                carry_hooks(parameter, new[id(parameter)])
                module._parameters[name] = new[id(parameter)]


def install_placeholders(
    model: nn.Module, blocks: Blocks, compute_device: torch.device, step: StepGradients
) -> dict[tuple[str, int], OffloadedParameter]:
    """Replace the parameters of all sites by placeholders, and return these by group and index.

    Placeholders that exist already are reused, with their hooks.
    """
    placeholders: dict[tuple[str, int], OffloadedParameter] = {}
    for site in blocks.sites:
        for ref in site.parameters:
            key = (ref.group, ref.tensor)
            if key not in placeholders:
                old = model.get_submodule(ref.module)._parameters[ref.attribute]
                assert old is not None
                if not isinstance(old, OffloadedParameter):
                    empty = torch.empty(old.shape, dtype=old.dtype, device="meta")
                    old = OffloadedParameter(empty, requires_grad=old.requires_grad)
                old.label = (f"{ref.module}.{ref.attribute}", site.name)
                old.compute_device, old.step_gradients = compute_device, step
                old.stored_as = blocks.by_key[ref.group].tensors[ref.tensor].name
                placeholders[key] = old
            put_parameter(model, ref, placeholders[key])
    return placeholders
