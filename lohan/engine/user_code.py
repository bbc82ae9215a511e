"""User code that accesses an attached model: parameters that it reads, freezes, replaces or hooks.

A custom loop, a callback or a Trainer subclass may change the model's parameters in any way that
PyTorch allows. Supported changes take effect in the next step: a frozen parameter keeps its values,
gradient hooks run on complete gradients, values are streamed when they are read, and a loss may
depend on them. All other changes are refused with the name of the parameter: added or unfrozen
parameters have no optimizer state, and a torch optimizer would update nothing.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lohan.capture.derivatives import differentiable_once
from lohan.capture.placeholders import AttachedParameter, OffloadedParameter
from lohan.errors import BudgetError, ConfigError, LohanError, ModelError
from lohan.model.layout import FlatGroup
from lohan.model.state import FLOAT
from lohan.util.memory import host_memory_bytes
from lohan.util.units import MiB, format_bytes

if TYPE_CHECKING:
    from lohan.engine.executor import Executor

TensorKey = tuple[str, int]  # key of a group, index of a tensor in it
# A parameter larger than this that is read outside its block is named in a warning.
READ_WARNING_BYTES = 64 * MiB


class WatchedParameters:
    """The parameters of an attached model, by group and index, with changes by user code.

    `frozen` are the parameters that user code has frozen although they have optimizer state.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, FlatGroup],
        parameters: Mapping[TensorKey, AttachedParameter],
    ) -> None:
        self._model, self._groups, self.parameters = model, groups, dict(parameters)
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._order = [id(parameter) for parameter in model.parameters()]
        self.frozen: frozenset[TensorKey] = frozenset()

    def check(self) -> None:
        """Apply changes since the last step, or refuse them with the name of the parameter."""
        present = list(self._model.parameters())
        if [id(parameter) for parameter in present] != self._order or not all(
            isinstance(parameter, AttachedParameter) for parameter in present
        ):
            self._refuse_replaced()
        frozen = []
        with torch._C.DisableTorchFunctionSubclass():
            for key, parameter in self.parameters.items():
                trainable = self._groups[key[0]].tensors[key[1]].trainable
                if trainable and not parameter.requires_grad:
                    frozen.append(key)
                elif parameter.requires_grad and not trainable:
                    raise ModelError(
                        f"{parameter.label[0]} was frozen when the model was attached, and takes "
                        "gradients now, but it has no optimizer state; attach the model again (of "
                        "a Trainer: make a new one over the same model), which starts with new "
                        "moments, or attach it with the parameter unfrozen and freeze it after"
                    )
        self.frozen = frozenset(frozen)
        copies = getattr(getattr(present[0], "stored_weights", None), "copies", None)
        if copies is not None:
            copies.warn_if_changed()

    def check_in_backward(self) -> None:
        """Refuse parameters that user code has frozen since the forward of this step."""
        with torch._C.DisableTorchFunctionSubclass():
            for key, parameter in self.parameters.items():
                if (
                    not parameter.requires_grad
                    and key not in self.frozen
                    and isinstance(parameter, OffloadedParameter)
                    and self._groups[key[0]].tensors[key[1]].trainable
                ):
                    raise ModelError(
                        f"{parameter.label[0]} was frozen between forward and backward, but its "
                        "gradient is part of this step; freeze it before forward or after backward"
                    )

    def _refuse_replaced(self) -> None:
        named = dict(self._model.named_parameters())
        added = [
            name
            for name, parameter in named.items()
            if id(parameter) not in self._ids or not isinstance(parameter, AttachedParameter)
        ]
        if added:
            raise ModelError(
                f"{added[0]} was added or replaced after the model was attached, so it would not "
                "be trained or saved; change the model first, then attach it (of a Trainer: make a "
                "new one over the changed model), or write values with load_state_dict"
            )
        present = {id(parameter) for parameter in named.values()}
        replaced = next((p for p in self.parameters.values() if id(p) not in present), None)
        if replaced is not None:
            raise ModelError(
                f"{replaced.label[0]} was removed from the model after it was attached; change the "
                "model first, then attach it"
            )
        raise ModelError(
            f"the modules of {type(self._model).__name__} were reordered, or parameters renamed "
            "(as by torch.nn.utils.prune), after it was attached, so weights would be saved under "
            "other names; change the model first, then attach it"
        )

    def place_of(self, name: str) -> TensorKey:
        """Return group and index of a parameter, by its name in the store."""
        return next(key for key, p in self.parameters.items() if p.stored_as == name)

    def hooked(self, ranks: int) -> dict[TensorKey, OffloadedParameter]:
        """Return the parameters whose gradient hooks LoHan runs; with several ranks, refuse them.

        Parameters in memory are not among them, because autograd runs their hooks.
        """
        with torch._C.DisableTorchFunctionSubclass():
            hooked = {
                key: parameter
                for key, parameter in self.parameters.items()
                if isinstance(parameter, OffloadedParameter)
                and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
            }
        if hooked and ranks > 1:
            raise ModelError(
                f"{next(iter(hooked.values())).label[0]} has a gradient hook, but no rank has its "
                f"whole gradient: {ranks} ranks share it; train on one rank, or remove the hook"
            )
        return hooked


def has_gradient_hooks(model: nn.Module) -> bool:
    """Return whether user code has registered gradient hooks of a model's parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            parameter._backward_hooks
            or any(
                not str(getattr(hook, "__module__", "")).startswith("lohan.engine.")
                for hook in (parameter._post_accumulate_grad_hooks or {}).values()
            )
            for parameter in model.parameters()
        )


def run_gradient_hooks(parameter: OffloadedParameter, grad: torch.Tensor) -> torch.Tensor | None:
    """Run a parameter's hooks on its complete gradient of one backward.

    The order is that of PyTorch. Return the resulting gradient, or None if a hook has set `.grad`
    to None.
    """
    shape = grad.shape
    with torch._C.DisableTorchFunctionSubclass():
        before = list((parameter._backward_hooks or {}).values())
        after = list((parameter._post_accumulate_grad_hooks or {}).values())
    kept: torch.Tensor | None = grad
    with torch.no_grad():
        for hook in before:
            changed = hook(grad)
            kept = grad = grad if changed is None else changed
        if after:
            parameter.grad = kept
            try:
                for hook in after:
                    hook(parameter)
                kept = parameter.grad
            finally:
                parameter.grad = None
    if kept is not None and (kept.shape != shape or not kept.is_floating_point()):
        raise ModelError(
            f"a gradient hook of {parameter.label[0]} returned a tensor of shape "
            f"{list(kept.shape)} and {kept.dtype}, the gradient is {list(shape)}; "
            "return one like it, or None"
        )
    return None if kept is None else kept.detach().contiguous()


class Copies:
    """The copies of parameters that `state_dict` has returned.

    In PyTorch they share memory with the parameters, so writing to them changes the model.
    """

    def __init__(self) -> None:
        # each copy that may still exist, with its version and the name of its parameter
        self._copies: list[tuple[weakref.ref[torch.Tensor], int, str]] = []

    def add(self, copies: Mapping[str, torch.Tensor]) -> None:
        self._copies += [
            (weakref.ref(tensor), tensor._version, name)
            for name, tensor in copies.items()
            if not tensor.is_inference()
        ]

    def warn_if_changed(self) -> None:
        """Warn if user code has written to copies since the last step."""
        kept, changed = [], []
        for reference, version, name in self._copies:
            copy = reference()
            if copy is not None and copy._version == version:
                kept.append((reference, version, name))
            elif copy is not None:
                changed.append(name)
        self._copies = kept
        if changed:
            warnings.warn(
                f"a value of model.state_dict() was changed in place (of {changed[0]}), which does "
                "not change the model: state_dict returns copies of what is in the store; write "
                "values with model.load_state_dict(..., strict=False), or change a clone",
                stacklevel=3,
            )


# -- Values that are read outside the call of a block ----------------------------------------------


def read_weight(executor: Executor, parameter: AttachedParameter) -> torch.Tensor:
    """Return the current values of a parameter, in the type and on the device of its block.

    They are streamed from the store. Raise ModelError with several ranks, during backward, and
    inside another block.
    """
    name, group = parameter.label[0], executor.collectives.process_group
    if group.several:
        raise ModelError(
            f"parameter {name} is read outside the call of its block, but its values are spread "
            f"over {group.world} ranks; read what save_pretrained has written"
        )
    if executor.in_backward or executor.hooks.sites_with_weights:
        situation = "during backward" if executor.in_backward else "inside another block"
        raise ModelError(
            f"parameter {name} is read {situation}, when its values cannot be streamed; read it "
            "before or after, or keep its module in memory with "
            f"attach(resident=[{name.rpartition('.')[0]!r}])"
        )
    size = parameter.numel() * parameter.itemsize
    if size >= READ_WARNING_BYTES:
        warnings.warn(
            f"parameter {name} is read outside the call of its block: {format_bytes(size)} are "
            "streamed from the store each time",
            stacklevel=5,
        )
    executor.roll_back_unfinished()
    hooks, runner = executor.hooks, executor.block_runner
    key, index = hooks.watched.place_of(parameter.stored_as)
    wrapped = next(site for site in hooks.wrapped_sites if key in site.site.groups)
    weights = runner.weights(wrapped, training=False)
    with executor.scheduler.reading(), weights as tensors, executor.device.computing():
        return tensors[key][index].detach().clone()


class WeightRead(torch.autograd.Function):
    """An autograd function for values that were read outside the call of their block.

    Their gradient is added to that of the block in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        stored: Any,
        stored_as: str,
        label: str,
        values: torch.Tensor,
    ) -> torch.Tensor:
        ctx.stored, ctx.stored_as, ctx.label = stored, stored_as, label
        session = stored.running_session
        ctx.step = None if session is None else session.step
        return values

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        session = ctx.stored.running_session
        if session is None:
            raise LohanError(
                f"the loss depends on {ctx.label}, whose session is closed, so its gradient would "
                "be lost; attach the model again to train it"
            )
        wanted = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        session.executor.add_gradient(ctx.stored_as, ctx.label, grad, step=ctx.step, wanted=wanted)
        return None, None, None, None, None


# -- Gradients without a step, and torch's own optimizers ------------------------------------------


class KeptGradients:
    """A target of gradients that adds them to `.grad`, as PyTorch does, and updates nothing."""

    def __init__(self, watched: WatchedParameters, groups: tuple[FlatGroup, ...]) -> None:
        self._groups, self._parameters = groups, watched.parameters
        needed = sum(group.numel for group in groups if not group.frozen) * FLOAT
        free = host_memory_bytes()
        if needed > free:
            raise BudgetError(
                f"backward outside training keeps all gradients in memory: they take "
                f"{format_bytes(needed)}, {format_bytes(free)} are free; train with train() or "
                "attach, which keep those of a few blocks at a time"
            )

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        for index, grad in grads.items():
            parameter = self._parameters[self._groups[number].key, index]
            grad = grad.to(parameter.device, parameter.dtype)
            before = parameter.grad
            parameter.grad = grad.clone() if before is None else before.add_(grad)


class UnwantedGradients:
    """A target that discards the gradients of parameters if backward is for other tensors.

    It stores the previous target, and the gradients that resident parameters had.
    """

    def __init__(self, target: Any, resident_grads: list[torch.Tensor | None]) -> None:
        self.target_before, self.resident_before = target, resident_grads

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None: ...


_checking: list[Any] = []  # Holds the hook after it was registered.


def watch_torch() -> None:
    """Refuse calls of torch that would do nothing for attached parameters.

    These are steps of torch optimizers, and backward calls for selected parameters (`inputs=...`),
    because autograd finds no path to those. PyTorch has no hook for the second, so its function is
    replaced.
    """
    if not _checking:
        _checking.append(register_optimizer_step_pre_hook(_check_optimizer))
        torch.autograd.backward = _checked_backward(torch.autograd.backward)


def _checked_backward(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[5] if len(args) > 5 else None)
        named = inputs.values() if isinstance(inputs, dict) else inputs
        for one in (named,) if isinstance(named, torch.Tensor) else tuple(named or ()):
            name = _attached_name(one)
            if name is not None:
                raise ConfigError(
                    f"backward(inputs=...) for {name}: its values are in LoHan's store, so "
                    "autograd finds no path to it and would compute nothing; freeze the other "
                    "parameters instead (requires_grad_(False)) and call backward without inputs"
                )
        plain(*args, **kwargs)

    return backward


def _check_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _attached_name(parameter)
            if name is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__}.step() would not update {name}: its values are "
                    "in LoHan's store, and LoHan updates them inside backward; leave the optimizer "
                    "out, and give its settings to attach(optimizer=lohan.AdamW(...), clip=...) or "
                    "to the arguments of a Trainer. To train with torch.optim, load what "
                    "save_pretrained has written"
                )


def _attached_name(parameter: Any) -> str | None:
    """Return a name, for messages, of a parameter whose values are in a store, otherwise None."""
    if isinstance(parameter, AttachedParameter):
        return parameter.label[0]
    stored = getattr(parameter, "moved_to", None)
    if stored is None or any(parameter is current for current in stored.model.parameters()):
        return None
    return f"a parameter of {type(stored.model).__name__}"
