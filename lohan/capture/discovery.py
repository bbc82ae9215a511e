"""What of a model's blocks is used outside their calls, found by one run on fake tensors.

A model may call a part of a block on its own (an embedding that the first block owns), or read a
parameter without calling its module (a head that shares the embedding's weight). The part becomes a
site of its own over the block's weights; the parameter stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lohan.capture.blocks import cut, default_decay, site_names
from lohan.capture.fake import CPU, UNKNOWN, buffers_at, fake_like, faking
from lohan.model.layout import Blocks


@dataclass(frozen=True)
class Outside:
    modules: tuple[str, ...] = ()  # called on their own, in the order of their calls
    parameters: tuple[str, ...] = ()  # read without a call


def cut_for(
    model: nn.Module, batch: Mapping[str, Any] | None, *, blocks: Sequence[str] = (),
    resident: Sequence[str] = (), decay: Callable[[str, nn.Parameter], bool] = default_decay,
) -> Blocks:  # fmt: skip
    """The cut of a model, for what a call with this batch shows; without one, as it is built."""
    outside = Outside()
    if batch is not None:
        outside = used_outside(model, site_names(model, resident, blocks), batch)
    return cut(
        model, resident=(*resident, *outside.parameters), blocks=blocks, called=outside.modules,
        decay=decay,
    )  # fmt: skip


def used_outside(model: nn.Module, sites: Sequence[str], batch: Mapping[str, Any]) -> Outside:
    """Nothing, if the model cannot run on fake tensors: then its first real run will tell."""
    for numbers in (False, True):
        watch = _Watch(model, sites)
        random, here = torch.random.fork_rng(devices=[]), buffers_at(model, CPU)
        try:
            with faking(numbers=numbers), random, here, watch.running():
                fake = partial(fake_like, numbers=numbers)
                inputs = pytree.tree_map_only(torch.Tensor, fake, dict(batch))
                model(**inputs)
        except UNKNOWN:
            continue
        return Outside(tuple(watch.modules), tuple(watch.parameters))
    return Outside()


class _Watch(TorchFunctionMode):
    """Follows which modules run, and sees every parameter that an operation reads."""

    def __init__(self, model: nn.Module, sites: Sequence[str]) -> None:
        super().__init__()
        self._model, self._sites = model, sites
        self._stack: list[str] = []
        self._owner: dict[int, tuple[str, list[str]]] = {}  # parameter -> name and its sites
        self.modules: dict[str, None] = {}
        self.parameters: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        makes = name.startswith("new_") or name.endswith("_like")
        if not makes and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(out)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._owner:
                    self._read(*self._owner[id(leaf)])
        return out

    def _read(self, parameter: str, sites: list[str]) -> None:
        if not sites or any(site in self._stack for site in sites):
            return
        parts = (m for m in self._stack if any(m.startswith(f"{site}.") for site in sites))
        part = next(parts, None)
        if part is None:
            self.parameters[parameter] = None
        else:
            self.modules[part] = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fake parameters in their places, and hooks that follow the calls."""
        handles: list[Any] = []
        places: list[tuple[Any, str, torch.Tensor]] = []
        made: dict[int, torch.Tensor] = {}
        for name, module in self._model.named_modules(remove_duplicate=False):
            for key, old in module._parameters.items():
                if old is not None:
                    places.append((module, key, old))
                    if id(old) not in made:
                        made[id(old)] = torch.empty(old.shape, dtype=old.dtype)
                        made[id(old)].requires_grad_(old.requires_grad)
                    full = f"{name}.{key}" if name else key
                    known = self._owner.setdefault(id(made[id(old)]), (full, []))
                    known[1].extend(s for s in self._sites if f"{full}.".startswith(f"{s}."))
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            for module, key, old in places:
                module._parameters[key] = made[id(old)]
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, key, old in places:
                module._parameters[key] = old

    def _enter(self, name: str) -> Any:
        return lambda *_: self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
