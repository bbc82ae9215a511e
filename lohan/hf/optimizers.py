"""The torch optimizer of a Trainer: its class, its parameter groups, and their values in each step.

A Trainer has a torch optimizer, created by transformers, by the script or by an overridden method.
Its step never computes anything, because updates run inside backward, by LoHan's kernels. Its
parameter groups do apply: they are read in every step, so that values written by schedulers and
callbacks take effect in the next step.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from lohan.capture.placeholders import StepGradients
from lohan.errors import ConfigError, ModelError
from lohan.hf.arguments import OPTIM, optimizer_kwargs, optimizer_name
from lohan.optim import OPTIMIZERS, Optimizer
from lohan.param_groups import (
    GroupValues,
    Members,
    changed_members,
    group_fields,
    groups_to_json,
    members_by_group,
)
from lohan.util.units import counted

logger = logging.get_logger(__name__)


class LionGroups(torch.optim.Optimizer):
    """The parameter groups of Lion, which torch does not have; it has no step of its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, because backward has already updated the weights."""


# Classes of torch that LoHan has kernels for, by the name of LoHan's optimizer. Subclasses may
# compute something else, so they are not accepted.
CLASSES: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.SGD: "sgd",
    LionGroups: "lion",
}
# Keys of a group that change an update, with the only value that LoHan's kernels have.
FIXED = {"amsgrad": False, "maximize": False, "dampening": 0, "decoupled_weight_decay": True}
# Keys that select torch's implementation, and keys that schedulers of torch add for themselves.
WITHOUT_EFFECT = frozenset(
    (
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
    )
)


def class_and_kwargs(
    args: Any, model: Any = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments of the torch optimizer that `args.optim` names."""
    name = optimizer_name(args)
    kind = next(kind for kind, optimizer in CLASSES.items() if optimizer == name)
    return kind, {"lr": args.learning_rate, **optimizer_kwargs(args, name)}


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrapper that accelerate puts around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def check_class(kind: Any) -> None:
    """Refuse an optimizer that LoHan has no kernel for."""
    if kind in CLASSES:
        return
    name = kind.__name__ if isinstance(kind, type) else type(kind).__name__
    raise ConfigError(
        f"a {name} cannot be used with lohan.hf: updates run inside backward, by LoHan's own "
        "kernels, which are torch.optim.AdamW, torch.optim.SGD and Lion; pass or return one of the "
        "first two, with any parameter groups, or choose one with "
        f"TrainingArguments(optim=...): {', '.join(OPTIM)}"
    )


# Packages that read gradients and moments from an optimizer, and continue silently if there are
# none.
ASKING = ("torch.optim", "torch.amp", "torch.cuda.amp", "accelerate", "copy", "lohan")


def _called_by_library(depth: int) -> bool:
    module = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return any(module == name or module.startswith(f"{name}.") for name in ASKING)


class StandIn(nn.Parameter):
    """A stand-in for a parameter in a group, with its shape and type but no values or gradient.

    Code that reads values or gradients from the optimizer is refused, since it would have no
    effect.
    """

    groups: TorchGroups

    @property
    def grad(self) -> None:
        """Always None. User code that reads it after the gradient was consumed is refused."""
        step = self.groups.step_gradients()
        if step is None or not step.consumed:
            return
        if sys._getframe(1).f_code.co_name == "zero_grad":
            step.consumed = False
        elif not _called_by_library(1):
            raise ModelError(
                "the gradient of a parameter in optimizer.param_groups is read after backward, "
                "which has consumed it for the update; read, change or clip gradients with "
                "register_hook of the model's parameters, or with max_grad_norm"
            )

    @grad.setter
    def grad(self, gradient: Any) -> None:
        if gradient is not None:
            raise ModelError(
                "the gradient of a parameter in optimizer.param_groups is set, but the update has "
                "already run inside backward; use register_hook of the model's parameters"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, library = getattr(func, "__name__", ""), _called_by_library(1)
        with torch._C.DisableTorchFunctionSubclass():
            result = None if _needs_values(name) else func(*args, **(kwargs or {}))
        if library or (result is not None and not isinstance(result, torch.Tensor)):
            return result
        raise ModelError(
            f"{name} of a parameter in optimizer.param_groups: the optimizer holds no values, "
            "which are in LoHan's store; read the parameters of the model, and write them with "
            "load_state_dict"
        )


def _needs_values(name: str) -> bool:
    return name in ("item", "tolist", "numpy", "__array__") or (
        name.endswith("_") and not name.endswith("__")
    )


class NoState(defaultdict[Any, Any]):
    """The empty `state` of an optimizer; user code that accesses it gets a ModelError."""


def _guarded(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: NoState, *args: Any, **kwargs: Any) -> Any:
        if not _called_by_library(1):
            raise ModelError(f"optimizer.state is read or changed, but {_MOMENTS}")
        return plain(self, *args, **kwargs)

    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "keys", "values", "items"):
    setattr(NoState, _name, _guarded(_name))
for _name in ("get", "setdefault", "update", "pop", "popitem", "clear"):
    setattr(NoState, _name, _guarded(_name))
_MOMENTS = (
    "the moments are in LoHan's store; to start with new ones, make a new Trainer over the same "
    "model, and to go back to earlier ones, resume from a checkpoint"
)


def _refuse_state(optimizer: Any, state: Any) -> None:
    """Refuse `load_state_dict`, unless accelerate calls it with the state that it has just read."""
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if (module, function) == ("accelerate.optimizer", "__init__"):
            return
        frame = frame.f_back  # type: ignore[assignment]
    raise ModelError(f"optimizer.load_state_dict would restore no moments: {_MOMENTS}")


class TorchGroups:
    """The parameter groups of a Trainer's optimizer, in the form that updates read."""

    def __init__(self, moments: str) -> None:
        self.step_gradients: Callable[[], StepGradients | None] = lambda: None
        self._moments = moments
        self._torch: Any = None  # the optimizer that these groups belong to
        self._params: list[list[StandIn]] = []  # the stand-ins of each group
        self._warned_of_moments = False  # True once user code has called `state_dict`
        # the group of each parameter, under each of the parameter's names
        self._index: dict[str, int] = {}
        self._keys: list[frozenset[str]] = []  # the keys that each group had when it was taken over
        self._members: Sequence[Members] = ()
        self.optimizer: Optimizer = OPTIMIZERS["adamw"](moments=moments)

    def take_over(self, optimizer: Any, model: nn.Module) -> None:
        """Use the parameter groups of this optimizer for all following updates.

        The optimizer's parameters are replaced by empty stand-ins; otherwise it would keep
        the weights of the whole model in memory.
        """
        torch_optimizer = unwrapped(optimizer)
        if torch_optimizer is self._torch:
            # Accelerate has wrapped the optimizer a second time.
            if not isinstance(torch_optimizer.state, NoState):
                torch_optimizer.state = NoState(dict)
            return
        check_class(type(torch_optimizer))
        if torch_optimizer.state:
            raise ConfigError(
                f"the {type(torch_optimizer).__name__} has moments of "
                f"{counted(len(torch_optimizer.state), 'parameter')}, and LoHan would begin with "
                "new ones; pass an optimizer that has made no step and loaded no state, or resume "
                "from a checkpoint that lohan.hf has saved"
            )
        names: dict[int, list[str]] = {}
        trained: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            if parameter.requires_grad:
                trained.setdefault(id(parameter), name)
        for number, group in enumerate(torch_optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigError(
                        f"optimizer.param_groups[{number}] has a parameter of shape "
                        f"{list(parameter.shape)} that is not in {type(model).__name__}; LoHan "
                        "updates the parameters of the model: make it one of them"
                    )
                trained.pop(id(parameter), None)
        self._index = {
            name: number
            for number, group in enumerate(torch_optimizer.param_groups)
            for parameter in group["params"]
            for name in names[id(parameter)]
        }
        if trained:
            # torch would leave these parameters unchanged; a learning rate of 0 has the same
            # effect.
            for key in trained:
                self._index |= dict.fromkeys(names[key], len(torch_optimizer.param_groups))
            logger.warning(
                f"{counted(len(trained), 'parameter')} of {type(model).__name__} are in no group "
                f"of the optimizer and do not learn, first {next(iter(trained.values()))}; set "
                "requires_grad to False to save their optimizer state"
            )
        first_names = {
            aliases[0]: self._index[aliases[0]]
            for aliases in names.values()
            if aliases[0] in self._index
        }
        self._members = members_by_group(len(torch_optimizer.param_groups) + 1, first_names)
        self._keys = [frozenset(group) for group in torch_optimizer.param_groups]
        for group in torch_optimizer.param_groups:
            group["params"] = [self._stand_in(parameter) for parameter in group["params"]]
        self._params = [list(group["params"]) for group in torch_optimizer.param_groups]
        torch_optimizer.state = NoState(dict)
        torch_optimizer.register_load_state_dict_pre_hook(_refuse_state)
        torch_optimizer.register_state_dict_pre_hook(self._warn_of_missing_moments)
        self._torch = torch_optimizer
        self.optimizer = self.at(0).optimizers[0]

    def check_kept(self, optimizer: Any) -> None:
        """Refuse another optimizer than that of the earlier steps, whose moments are kept."""
        new = unwrapped(optimizer)
        if self._torch is not None and new is not self._torch:
            raise ConfigError(
                f"the optimizer of the Trainer was replaced by another {type(new).__name__}, "
                f"which has no moments in torch, but {_MOMENTS}; to keep them, leave the optimizer "
                "as it is and change its param_groups"
            )

    def at(self, step: int) -> GroupValues:
        """Return the hyper-parameters that the groups of the torch optimizer currently have.

        They do not depend on `step`, because Trainer's scheduler writes them before every step.
        """
        groups = self._torch.param_groups
        if len(groups) != len(self._keys):
            raise ConfigError(
                f"the optimizer has {counted(len(groups), 'parameter group')}, and had "
                f"{len(self._keys)} when training began; add them before train()"
            )
        for number, (group, params) in enumerate(zip(groups, self._params, strict=True)):
            if list(map(id, group["params"])) != list(map(id, params)):
                raise ConfigError(
                    f"the parameters of optimizer.param_groups[{number}] were changed during "
                    "training, and updates keep the groups that it began with; write other values "
                    "to the groups, or freeze parameters with requires_grad"
                )
        kind = OPTIMIZERS[CLASSES[type(self._torch)]]
        optimizers: list[Optimizer] = []
        rates: list[float] = []
        for number, group in enumerate(groups):
            self._check_keys(number, group, kind)
            values = {key: _plain(group[key]) for key in group_fields(kind)}
            rate = values.pop("lr")
            try:
                optimizer = kind(lr=_constant(rate), moments=self._moments, **values)
                rates.append(optimizer.lr_at(step))
            except ConfigError as error:
                raise ConfigError(f"optimizer.param_groups[{number}]: {error}") from None
            optimizers.append(optimizer)
        unlisted = kind(moments=self._moments, weight_decay=0.0)
        return GroupValues((*optimizers, unlisted), (*rates, 0.0), self._index)

    def _stand_in(self, parameter: torch.Tensor) -> StandIn:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        stand_in = StandIn(empty, requires_grad=parameter.requires_grad)
        stand_in.groups = self
        return stand_in

    def _warn_of_missing_moments(self, _: Any) -> None:
        """Warn user code that calls `state_dict` of the optimizer, whose `state` is empty."""
        frame = sys._getframe(1)
        while str(frame.f_globals.get("__name__", "")).startswith("torch."):
            frame = frame.f_back  # type: ignore[assignment]
        # Accelerate reads the state of every optimizer that it wraps.
        caller = frame.f_globals.get("__name__"), frame.f_code.co_name
        if caller == ("accelerate.optimizer", "__init__") or self._warned_of_moments:
            return
        self._warned_of_moments = True
        logger.warning(
            "optimizer.state_dict() has the parameter groups but no moments, which are in LoHan's "
            "store, so training cannot be resumed from it; save a checkpoint of the Trainer "
            "(save_strategy, or control.should_save in a callback), whose lohan-state has them"
        )

    def _check_keys(self, number: int, group: Mapping[str, Any], kind: type[Optimizer]) -> None:
        label, fields = f"optimizer.param_groups[{number}]", group_fields(kind)
        for key in group:
            if key in FIXED and group[key] != FIXED[key]:
                raise ConfigError(
                    f"{label}: {key} is {group[key]!r}, and LoHan's kernels have {FIXED[key]!r}; "
                    f"leave it out, or use one of the optimizers of TrainingArguments(optim=...)"
                )
            if key not in self._keys[number] and key not in WITHOUT_EFFECT | {*fields, *FIXED}:
                raise ConfigError(
                    f"{label}: {key!r} was added during training and has no effect on a "
                    f"{kind.__name__}; it reads {', '.join(fields)}"
                )

    def to_json(self, values: GroupValues) -> list[dict[str, Any]]:
        """Return what the manifest of a step records about its groups."""
        return groups_to_json(values, self._members)

    # -- checkpoints ------------------------------------------------------------------------------

    def saved(self) -> list[dict[str, Any]]:
        """Return the groups in the form that checkpoints store, with changes by callbacks."""
        return self.to_json(self.at(0))

    def restore(self, recorded: Any) -> None:
        """Set the groups to the values recorded in a checkpoint or in the last committed step.

        Learning rates are not restored, since the scheduler sets them. Groups with other
        parameters are refused, as in torch.
        """
        if not isinstance(recorded, list):
            return
        if changed := changed_members(recorded, self.saved()):
            raise ConfigError(
                f"resume_from_checkpoint: {changed}; resume with the optimizer and the trainable "
                "parameters that the training began with"
            )
        filled = [number for number, members in enumerate(self._members) if members.count]
        for number, values in zip(filled, recorded, strict=True):
            if number < len(self._torch.param_groups):
                group = self._torch.param_groups[number]
                fields = set(group_fields(self.optimizer)) - {"lr"}
                group |= {key: _tuple(values[key]) for key in fields & values.keys()}


def _constant(rate: Any) -> Callable[[int], float]:
    """Return a schedule with a constant rate. Unlike a number, it may be negative, as in torch."""
    return lambda step: rate


def _plain(value: Any) -> Any:
    """Convert a tensor with one number, also inside a list or tuple, to a plain number."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
