"""Where the first value of every parameter comes from: a safetensors folder or a module in memory.

A checkpoint may name its tensors otherwise than the model does: without the base model's prefix,
by names of older releases, with or without the second name of a tied weight, with experts apart.
`checkpoint_map` finds the tensor of every parameter before anything is read, or says which one is
missing.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from lohan.checkpoint.conversion import Merger
from lohan.checkpoint.safetensors import TensorFolder
from lohan.errors import ModelError

PIECE_ELEMENTS = 2**24


class ParameterSource(Protocol):
    """First values, in pieces: the flattened elements start..stop of a parameter, as float32."""

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class CheckpointMap:
    """Model name -> checkpoint tensor, for all names of a tied weight; and what is left over."""

    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    ignored: tuple[str, ...]


def pieces(numel: int, *, piece: int = PIECE_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Ranges (start, stop) of at most `piece` elements that cover numel."""
    for start in range(0, numel, piece):
        yield start, min(start + piece, numel)


def checkpoint_map(
    model: nn.Module, folder: TensorFolder | str | os.PathLike[str],
    names: Mapping[str, str] | None = None,
) -> CheckpointMap:  # fmt: skip
    """The checkpoint tensor of every parameter and persistent buffer of the model. `names` says
    which of them to look for, and under what name, where adapters have changed the model."""
    tensors = folder if isinstance(folder, TensorFolder) else TensorFolder(folder)
    held = model.state_dict(keep_vars=True)
    plain = names or {name: name for name in held}
    targets = {plain[name]: tensor for name, tensor in held.items() if name in plain}
    found, ignored = _match(model, tensors, targets)
    parameters: dict[str, str] = {}
    missing: list[str] = []
    for known in tied_names(model):
        wanted = [plain[name] for name in known if name in plain]
        present = [name for name in wanted if name in found]
        if wanted and not present:
            missing.append(wanted[0])
        for name in present:
            _check_tensor(tensors, found[name], name, tuple(targets[name].shape))
        _check_tied(tensors, [found[name] for name in present])
        parameters.update({name: found[present[0]] for name in wanted if present})
    if missing:
        raise ModelError(
            f"{tensors.path}: no tensor for parameter {missing[0]} of {type(model).__name__}, "
            f"{len(missing)} of {len(missing) + len(parameters)} missing; the folder's config.json "
            "and weights must be of the same model, download both anew"
        )
    buffers = {name: source for name, source in found.items() if name not in parameters}
    return CheckpointMap(parameters, buffers, tuple(sorted(ignored)))


def tied_names(model: nn.Module) -> list[list[str]]:
    """For each parameter all of its names, first the one that named_parameters() gives."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _match(
    model: nn.Module, tensors: TensorFolder, targets: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[str]]:
    """Model name -> checkpoint name by the rules of from_pretrained, and unmatched tensors."""
    found: dict[str, str] = {}
    ignored: list[str] = []
    mergers: dict[str, Merger] = {}
    for name, target, pattern, rule in _renamed(model, tensors.names(), targets):
        if target not in targets or target in found:
            ignored.append(name)
        elif rule is not None:
            mergers.setdefault(target, Merger(rule)).sources[name] = pattern
        else:
            found[target] = name
    for target, merger in mergers.items():
        shapes = {name: tensors.shape(name) for name in merger.sources}
        for made, assembly in merger.assemblies(model, target, shapes).items():
            for source in assembly.sources:
                _check_float(tensors, source, made)
            found[made] = tensors.assemble(made, assembly)
    return found, ignored


def _renamed(
    model: nn.Module, names: list[str], targets: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, str, Any]]:
    """(checkpoint name, model name, pattern that fits, the rule if it needs more than renaming) for
    every tensor."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    if not isinstance(model, PreTrainedModel):
        yield from ((name, name, "", None) for name in names)
        return
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, dict(targets)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in targets and name in targets:
            target, pattern = name, None
        yield name, target, pattern or "", by_pattern[pattern] if pattern else None


def _check_tensor(tensors: TensorFolder, source: str, name: str, shape: tuple[int, ...]) -> None:
    if tensors.shape(source) != shape:
        raise ModelError(
            f"{tensors.path}: tensor {source} has shape {list(tensors.shape(source))}, parameter "
            f"{name} has {list(shape)}; config.json and weights are of different models"
        )
    _check_float(tensors, source, name)


def _check_float(tensors: TensorFolder, source: str, name: str) -> None:
    if not tensors.dtype(source).is_floating_point:
        raise ModelError(
            f"{tensors.path}: tensor {source} is {tensors.dtype(source)}, parameter {name} needs a "
            "floating-point dtype; give the unquantized checkpoint"
        )


def _check_tied(tensors: TensorFolder, sources: list[str]) -> None:
    """Weights that the config ties must be equal where the file holds both."""
    for first, other in pairwise(sources):
        numel = torch.Size(tensors.shape(first)).numel()
        if not all(
            torch.equal(tensors.read_flat(first, *span), tensors.read_flat(other, *span))
            for span in pieces(numel)
        ):
            raise ModelError(
                f"{tensors.path}: config.json ties {first} and {other}, the weights hold both with "
                'different values; set "tie_word_embeddings": false in config.json'
            )


class FolderSource:
    """Values from a safetensors folder, by the names of the model."""

    def __init__(self, folder: TensorFolder, names: Mapping[str, str]) -> None:
        self._folder = folder
        self._names = names

    def names(self) -> list[str]:
        return list(self._names)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        source = self._names[name]
        if self._folder.dtype(source) == torch.float32:
            return self._folder.read_flat(source, start, stop)
        values = torch.empty(stop - start, dtype=torch.float32)
        for a, b in pieces(stop - start, piece=PIECE_ELEMENTS // 4):
            values[a:b] = self._folder.read_flat(source, start + a, start + b)
        return values


class ModuleSource:
    """Values from the parameters of a module in memory, or of those with these names."""

    def __init__(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        named = module.named_parameters(remove_duplicate=False)
        self._parameters = {name: p for name, p in named if names is None or name in names}
        for name, parameter in self._parameters.items():
            if parameter.is_meta:
                raise ModelError(
                    f"parameter {name} of {type(module).__name__} is on the meta device and has no "
                    "values; load the model from its folder instead"
                )

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        flat = self._parameters[name].detach().reshape(-1)[start:stop]
        return flat.to(device="cpu", dtype=torch.float32, copy=True)


class Sources:
    """Values from several sources, each asked for its own names."""

    def __init__(self, by_name: Mapping[str, ParameterSource]) -> None:
        self._by_name = by_name

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._by_name[name].read_flat(name, start, stop)
