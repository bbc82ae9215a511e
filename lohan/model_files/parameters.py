"""Where the first value of every parameter comes from: a safetensors folder or a module in memory.

A checkpoint may name its tensors otherwise than the model does: without the base model's prefix,
by names of older releases, with or without the second name of a tied weight. `checkpoint_map` finds
the tensor of every parameter before anything is read, or says which one is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.model_files.reader import TensorFolder

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
    model: nn.Module, folder: TensorFolder | str | os.PathLike[str]
) -> CheckpointMap:
    """The checkpoint tensor of every parameter and persistent buffer of the model."""
    tensors = folder if isinstance(folder, TensorFolder) else TensorFolder(folder)
    targets = model.state_dict(keep_vars=True)
    found, ignored = _match(model, tensors, targets)
    parameters: dict[str, str] = {}
    missing: list[str] = []
    for names in tied_names(model):
        present = [name for name in names if name in found]
        if not present:
            missing.append(names[0])
            continue
        for name in present:
            _check_tensor(tensors, found[name], name, tuple(targets[name].shape))
        _check_tied(tensors, [found[name] for name in present])
        parameters.update(dict.fromkeys(names, found[present[0]]))
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
    merged: list[str] = []
    for name, target, converted in _renamed(model, tensors.names(), targets):
        if target not in targets or target in found:
            ignored.append(name)
        elif converted:
            merged.append(name)
        else:
            found[target] = name
    if merged:
        raise ModelError(
            f"{tensors.path}: tensor {merged[0]} and {len(merged) - 1} more have to be merged or "
            f"split to fit {type(model).__name__}, which is not supported yet; save the model once "
            "with save_pretrained(DIR, save_original_format=False) and give that folder"
        )
    return found, ignored


def _renamed(
    model: nn.Module, names: list[str], targets: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, bool]]:
    """(checkpoint name, model name, needs more than renaming) for every tensor."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    if not isinstance(model, PreTrainedModel):
        yield from ((name, name, False) for name in names)
        return
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    prefix, known = model.base_model_prefix, dict(targets)
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in targets and name in targets:
            target, pattern = name, None
        yield name, target, pattern is not None


def _check_tensor(tensors: TensorFolder, source: str, name: str, shape: tuple[int, ...]) -> None:
    if tensors.shape(source) != shape:
        raise ModelError(
            f"{tensors.path}: tensor {source} has shape {list(tensors.shape(source))}, parameter "
            f"{name} has {list(shape)}; config.json and weights are of different models"
        )
    if not tensors.dtype(source).is_floating_point:
        raise ModelError(
            f"{tensors.path}: tensor {source} is {tensors.dtype(source)}, parameter {name} needs a "
            "floating-point dtype; give the unquantized checkpoint"
        )


def _check_tied(tensors: TensorFolder, sources: list[str]) -> None:
    """Weights that the config ties must be equal where the file holds both."""
    first = sources[0]
    for other in sources[1:]:
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

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        source = self._names[name]
        if self._folder.dtype(source) == torch.float32:
            return self._folder.read_flat(source, start, stop)
        values = torch.empty(stop - start, dtype=torch.float32)
        for a, b in pieces(stop - start, piece=PIECE_ELEMENTS // 4):
            values[a:b] = self._folder.read_flat(source, start + a, start + b)
        return values


class ModuleSource:
    """Values from the parameters of a module in memory."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in self._parameters.items():
            if parameter.is_meta:
                raise ModelError(
                    f"parameter {name} of {type(module).__name__} is on the meta device and has no "
                    "values; load the model from its folder instead"
                )

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        flat = self._parameters[name].detach().reshape(-1)[start:stop]
        return flat.to(device="cpu", dtype=torch.float32, copy=True)
