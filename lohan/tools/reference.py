"""The reference of `lohan verify`: the same run in memory, in plain PyTorch and transformers."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lohan.capture.blocks import cut, dtype_of
from lohan.checkpoint.adapters import AdapterValues, add_lora, unify_dtype
from lohan.checkpoint.packed import dequantise, pack_base, quantise
from lohan.checkpoint.store_io import source_of
from lohan.checkpoint.train_state import TrainState
from lohan.config import TrainConfig
from lohan.engine.attach import load
from lohan.errors import ModelError, first_line
from lohan.model.state import STATE_FORMATS
from lohan.optim import SGD, AdamW, Lion, Optimizer
from lohan.param_groups import choose

# -- In-memory optimizers: torch's own, or plain implementations -----------------------------------


def in_memory(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an in-memory optimizer with the same update rule, and a learning rate of 1.

    Values that a group sets replace the optimizer's values.
    """
    if isinstance(optimizer, AdamW):
        return torch.optim.AdamW(
            groups, lr=1.0, betas=optimizer.betas, eps=optimizer.eps, foreach=False
        )
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(
            groups, lr=1.0, momentum=optimizer.momentum, nesterov=optimizer.nesterov, foreach=False
        )
    assert isinstance(optimizer, Lion)
    return PlainLion(groups, lr=1.0, betas=optimizer.betas)


class PlainLion(torch.optim.Optimizer):
    """Lion, implemented as in its paper."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                m = state.setdefault("m", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.sub_(lr * (beta1 * m + (1 - beta1) * grad).sign())
                m.mul_(beta2).add_((1 - beta2) * grad)


# -- The run in memory: plain PyTorch and transformers, without LoHan's engine ---------------------
#
# 16-bit models have fp32 master weights, and fp16 models use the loss scale of a run. Weights after
# every step are saved to files, so the compared runs need not be in memory at the same time.


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """The settings that all compared runs share: the first `steps` steps of a run of `total`."""

    model: Path
    train: TrainConfig
    dtype: str
    seed: int
    steps: int
    total: int
    batch: Callable[[int], dict[str, torch.Tensor]]

    def lr(self, step: int, peak: float) -> float:
        """Return the learning rate of a step for parameters with the peak rate `peak`."""
        return replace(self.train, lr=peak).lr_at(step, self.total)


class PlainRun:
    """A model in memory and the optimizer on its master weights."""

    def __init__(self, recipe: Recipe, *, compute: torch.dtype, master: torch.dtype) -> None:
        self.recipe = recipe
        self.model = loaded(recipe, compute)
        wide = self.model if compute == master else loaded(recipe, master)
        self.all = dict(wide.named_parameters())
        self.masters = {name: p for name, p in self.all.items() if p.requires_grad}
        self._scaled = compute == torch.float16
        self._progress = TrainState.start("fp16" if self._scaled else "fp32")
        train = recipe.train
        self._optimizer = in_memory(train.optimizer_with(1.0), self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        """Return torch's parameter groups for the settings.

        Every configured group is split into matrices and vectors. Vectors do not decay unless the
        group sets a weight decay.
        """
        train = self.recipe.train
        settings: list[dict[str, Any]] = [{}, *(dict(g.values) for g in train.param_groups)]
        chosen = choose(train.check_groups(), self.model)
        groups = []
        for number, values in enumerate(settings, start=-1):  # -1 stands for parameters in no group
            members = [p for name, p in self.masters.items() if chosen.get(name, -1) == number]
            for masters, decay in (
                ([p for p in members if p.ndim >= 2], train.weight_decay),
                ([p for p in members if p.ndim < 2], 0.0),
            ):
                group = {"weight_decay": decay, **values, "params": masters}
                groups.append({**group, "lr": 1.0, "peak_lr": values.get("lr", train.lr)})
        return groups

    def step(self, number: int) -> float:
        """Run one step and return its loss."""
        scale = self._progress.loss_scale if self._scaled else 1.0
        loss = self.model(**self.recipe.batch(number)).loss
        (loss * scale).backward()
        finite = self._take_gradients(scale)
        if self._scaled and not finite:
            self._progress = self._progress.overflowed()
        else:
            self._update(number)
            self._progress = self._progress.updated(scaled=self._scaled, absent=())
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    def _take_gradients(self, scale: float) -> bool:
        """Move gradients from compute weights to masters, and return whether all are finite."""
        finite = True
        for name, parameter in self._trained():
            grad, master = parameter.grad, self.masters[name]
            if grad is None:
                continue
            finite = finite and (not self._scaled or bool(torch.isfinite(grad).all()))
            if parameter is not master:
                master.grad = grad.to(master.dtype).div_(scale)
                parameter.grad = None
        return finite

    def _update(self, step: int) -> None:
        limit = self.recipe.train.clip or math.inf
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), limit, foreach=False)
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.lr(step, group["peak_lr"])
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._trained():
                if parameter is not self.masters[name]:
                    parameter.copy_(self.masters[name])

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)


def loaded(recipe: Recipe, dtype: torch.dtype) -> Any:
    """Return the model as transformers loads it, in training mode.

    Adapters are added by PEFT and start from the initial values that a run gives them.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    from_folder: Callable[..., nn.Module] = AutoModelForCausalLM.from_pretrained
    try:
        model: Any = from_folder(
            str(recipe.model),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            "transformers, with which a run is compared, cannot load this model: "
            f"{first_line(error)}; verify one that it can"
        ) from error
    model.config.use_cache = False
    if recipe.train.adapter is not None:
        model = add_lora(model, recipe.train.adapter)
        unify_dtype(model, dtype)
        values = AdapterValues(model)
        with torch.no_grad():
            for name in values.names():
                parameter = model.get_parameter(name)
                first = values.read_flat(name, 0, parameter.numel())
                parameter.copy_(first.view(parameter.shape))
    if recipe.train.base is not None:
        _dequantise_base(model, recipe, recipe.train.base)
    return model.train()


def _dequantise_base(model: nn.Module, recipe: Recipe, packing: str) -> None:
    """Replace the weights that the run packs by the values that the run computes with."""
    fmt = STATE_FORMATS[recipe.dtype]
    read = source_of(load(recipe.model, dtype=recipe.dtype, lora=recipe.train.adapter))
    blocks = pack_base(model, cut(model), packing, fmt.weight_bytes)
    with torch.no_grad():
        for _, spec in blocks.tensors():
            if spec.packing:
                values = torch.empty(spec.parameters, dtype=dtype_of(fmt))
                dequantise(quantise(spec, read), spec.packing, spec.shape, values)
                model.get_parameter(spec.name).copy_(values.view(spec.shape))


class Trajectory:
    """The losses of the in-memory run and, in files, its trained weights after every step.

    Step 0 is the initial model. Its file also contains the weights that are not trained.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self.dtype = folder, dtype
        self.losses: list[float] = []
        self.alias: dict[str, str] = {}  # maps every name of a tied weight to its name in the files

    def keep(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        narrow = {name: w.detach().to(torch.float32).contiguous() for name, w in weights.items()}
        save_file(narrow, self._folder / f"step-{step}.safetensors")

    def open(self, step: int) -> Any:
        """Open the file of a step, for `keys()` and `get_tensor(name)`."""
        return safe_open(str(self._folder / f"step-{step}.safetensors"), framework="pt")


def reference_run(recipe: Recipe, folder: Path, advance: Callable[[int, int], None]) -> Trajectory:
    """Run the recipe in memory, in the types that the run under test uses.

    Return the losses and the weights after every step.
    """
    folder.mkdir()
    torch.manual_seed(recipe.seed)
    run = PlainRun(recipe, compute=TYPES[recipe.dtype], master=torch.float32)
    trajectory = Trajectory(folder, TYPES[recipe.dtype])
    seen: dict[int, str] = {}
    for name, parameter in run.model.named_parameters(remove_duplicate=False):
        trajectory.alias[name] = seen.setdefault(id(parameter), name)
    trajectory.keep(0, run.all)
    for step in range(recipe.steps):
        trajectory.losses.append(run.step(step))
        trajectory.keep(step + 1, run.masters)
        advance(step + 1, recipe.steps)
    del run
    gc.collect()
    return trajectory


def noise_run(
    recipe: Recipe, reference: Trajectory, advance: Callable[[int, int], None]
) -> tuple[list[float], list[dict[str, float]]]:
    """Measure how far the in-memory run is from the same run in a finer type.

    Return, per step, the absolute difference of the loss, and the 2-norm of the difference of every
    tensor.
    """
    torch.manual_seed(recipe.seed)
    finer = torch.float64 if recipe.dtype == "fp32" else torch.float32
    run = PlainRun(recipe, compute=finer, master=finer)
    losses, weights = [], []
    for step in range(recipe.steps):
        losses.append(abs(run.step(step) - reference.losses[step]))
        with reference.open(step + 1) as file:
            weights.append(
                {
                    name: float((master.detach() - file.get_tensor(name)).norm())
                    for name, master in run.masters.items()
                }
            )
        advance(step + 1, recipe.steps)
    del run
    gc.collect()
    return losses, weights
