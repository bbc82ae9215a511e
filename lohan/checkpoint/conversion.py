"""Checkpoints that lay their tensors out otherwise than the model in memory: experts one by one.

transformers has the rules, one way for loading and one for saving. They are asked where each row of
a tensor comes from: instead of weights they are given the numbers of rows, and what comes out says
which row of which tensor goes where. So weights themselves are only read in runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lohan.checkpoint.assembly import Assembly, ReadFlat, runs_of
from lohan.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]
Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
MOST_ELEMENTS = 2**24  # of tensors whose elements are numbered one by one


class _NotRows(Exception):
    """The rule does something else than move rows of this width."""


def assembled(convert: Convert, sources: Shapes, results: Shapes) -> dict[str, Assembly]:
    """How a rule puts `results` together from `sources`, as a whole: nothing is left out, nothing
    comes twice."""
    widths = {shape[-1] for shape in (*sources.values(), *results.values()) if shape}
    elements = sum(torch.Size(shape).numel() for shape in sources.values())
    if len(widths) == 1:
        with suppress(Exception):  # a rule that looks at more than rows fails in any way
            return _numbered(convert, sources, results, widths.pop())
    if elements > MOST_ELEMENTS:
        raise _NotRows(f"{elements:,} elements, {MOST_ELEMENTS:,} at most")
    return _numbered(convert, sources, results, 0)


def _numbered(
    convert: Convert, sources: Shapes, results: Shapes, width: int
) -> dict[str, Assembly]:
    """`width` elements are one row; 0: each element has its own number."""
    numbers, counts, at = {}, [], 0
    for name, shape in sources.items():
        rows = (*shape[:-1], 1) if width else shape
        count = torch.Size(rows).numel()
        numbers[name] = torch.arange(at, at + count).reshape(rows)
        counts.append((name, count))
        at += count
    made = convert(numbers)
    if made.keys() != results.keys() or any(t.dtype != torch.int64 for t in made.values()):
        raise _NotRows("other tensors than expected")
    everything = torch.cat([rows.reshape(-1) for rows in made.values()])
    if not torch.equal(everything.sort()[0], torch.arange(at)):
        raise _NotRows("not every element exactly once")
    return {
        name: Assembly(tuple(results[name]), runs_of(rows, width or 1, counts))
        for name, rows in made.items()
    }


# -- loading --------------------------------------------------------------------------------------


@dataclass
class Merger:
    """One rule of transformers and the checkpoint tensors that it takes for one target."""

    rule: Any
    sources: dict[str, str] = field(default_factory=dict)  # tensor -> the pattern it fits

    def assemblies(self, model: nn.Module, target: str, shapes: Shapes) -> dict[str, Assembly]:
        """All parameters that the rule makes of them. `shapes` has those of checkpoint and model,
        under their names."""
        sources = {name: tuple(shapes[name]) for name in self.sources}

        def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            rule = copy.deepcopy(self.rule)
            for name, tensor in tensors.items():
                rule.add_tensor(target, name, self.sources[name], tensor)
            made = rule.convert(target, model=model, config=getattr(model, "config", None))
            return {key: v[0] if isinstance(v, list) else v for key, v in made.items()}

        meta = {name: torch.empty(shape, device="meta") for name, shape in sources.items()}
        try:
            results = {name: tuple(tensor.shape) for name, tensor in convert(meta).items()}
            return assembled(convert, sources, results)
        except Exception as error:
            raise ModelError(
                f"tensor {next(iter(sources))} and {len(sources) - 1} more cannot be converted to "
                f"{target} of {type(model).__name__} in pieces ({error}); save the model once with "
                "save_pretrained(DIR, save_original_format=False) and give that folder"
            ) from error


# -- saving ---------------------------------------------------------------------------------------


def saved_layout(model: nn.Module | None, shapes: Shapes) -> dict[str, str | Assembly]:
    """What `save_pretrained` writes for the tensors of a model: name in the file -> tensor of the
    model, or the part of it. Where that would merge tensors the model's own layout is written,
    which transformers loads as well."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "base_model_prefix"):
        return {name: name for name in shapes}
    from transformers.core_model_loading import revert_weight_conversion

    theirs: Any = model

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = revert_weight_conversion(theirs, dict(tensors))
        return made

    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    made = convert(meta)
    names = {id(tensor): name for name, tensor in meta.items()}
    layout: dict[str, str | Assembly] = {
        name: names[id(tensor)] for name, tensor in made.items() if id(tensor) in names
    }
    for name in sorted(set(shapes) - set(layout.values())):
        results = {key: tuple(t.shape) for key, t in convert({name: meta[name]}).items()}
        if any(key not in made or made[key].shape != shape for key, shape in results.items()):
            break  # it is merged with others
        with suppress(_NotRows):
            layout |= assembled(convert, {name: tuple(shapes[name])}, results)
    return layout if layout.keys() == made.keys() else {name: name for name in shapes}


@dataclass(frozen=True)
class Saved:
    """The tensors of a folder to be written, in an order that reads those of the model in turn."""

    layout: Mapping[str, str | Assembly]
    tensors: Shapes
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, model: nn.Module | None, shapes: Shapes, buffers: Mapping[str, torch.Tensor]
    ) -> Saved:
        """`shapes` are the parameters; a model that is not known is written as it is."""
        every = {**shapes, **{name: tuple(buffer.shape) for name, buffer in buffers.items()}}
        layout = saved_layout(model, every)
        order = {name: number for number, name in enumerate(shapes)}

        def place(found: str | Assembly) -> tuple[int, int]:
            if isinstance(found, str):
                return order[found], 0
            return order[found.runs[0].tensor], found.runs[0].start

        own = {new: found for new, found in layout.items() if found not in buffers}
        tensors = {
            new: shapes[found] if isinstance(found, str) else found.shape
            for new, found in sorted(own.items(), key=lambda item: place(item[1]))
        }
        kept = {new: buffers[str(found)] for new, found in layout.items() if found in buffers}
        return cls(layout, tensors, kept)

    def reading(self, read_flat: ReadFlat) -> ReadFlat:
        """By the names of the folder, from a reader by those of the model."""

        def read(name: str, start: int, stop: int) -> torch.Tensor:
            found = self.layout[name]
            if isinstance(found, str):
                return read_flat(found, start, stop)
            return found.read(start, stop, read_flat)

        return read
