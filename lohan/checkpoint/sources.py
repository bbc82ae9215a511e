"""Sources of the initial parameter values: folders, modules, initialisation, layout conversion."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import site_names
from lohan.capture.placeholders import lacks_values
from lohan.capture.saved_call import swapped
from lohan.checkpoint.quantized import open_folder
from lohan.checkpoint.safetensors import Assembly, ReadFlat, TensorFolder, runs_of
from lohan.errors import ModelError
from lohan.util.files import checked, load_json, write_atomic

# -- Checkpoints whose tensor layout differs from that of the model in memory ----------------------
#
# For example, a checkpoint may store each expert as a tensor of its own. transformers has rules
# that convert layouts for loading and for saving. Instead of weights, a rule is applied to tensors
# of row numbers. The result shows which source row each row comes from, so the weights themselves
# can be read in contiguous runs.


Shapes = Mapping[str, tuple[int, ...]]
Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
MOST_ELEMENTS = 2**24  # maximum size of tensors whose elements are numbered individually


class _NotRows(Exception):
    """Raised when a conversion rule does more than permute rows or elements."""


def assembled(convert: Convert, sources: Shapes, results: Shapes) -> dict[str, Assembly]:
    """Return how a conversion rule assembles `results` from `sources`.

    The rule must use every element of the sources exactly once.
    """
    widths = {shape[-1] for shape in (*sources.values(), *results.values()) if shape}
    elements = sum(torch.Size(shape).numel() for shape in sources.values())
    if len(widths) == 1:
        with suppress(Exception):  # A rule that does not work on rows may fail with any error.
            return _numbered(convert, sources, results, widths.pop())
    if elements > MOST_ELEMENTS:
        raise _NotRows(f"{elements:,} elements, {MOST_ELEMENTS:,} at most")
    return _numbered(convert, sources, results, 0)


def _numbered(
    convert: Convert, sources: Shapes, results: Shapes, width: int
) -> dict[str, Assembly]:
    """Apply a conversion rule to row numbers, and return the assembly of each result.

    `width` is the number of elements in a row. If it is 0, elements are numbered instead of rows.
    """
    numbers, counts, at = {}, [], 0
    for name, shape in sources.items():
        rows = (*shape[:-1], 1) if width else shape
        count = torch.Size(rows).numel()
        numbers[name] = torch.arange(at, at + count).reshape(rows)
        counts.append((name, count))
        at += count
    converted = convert(numbers)
    if converted.keys() != results.keys() or any(
        t.dtype != torch.int64 for t in converted.values()
    ):
        raise _NotRows("other tensors than expected")
    everything = torch.cat([rows.reshape(-1) for rows in converted.values()])
    if not torch.equal(everything.sort()[0], torch.arange(at)):
        raise _NotRows("not every element exactly once")
    return {
        name: Assembly(tuple(results[name]), runs_of(rows, width or 1, counts))
        for name, rows in converted.items()
    }


# -- Loading --------------------------------------------------------------------------------------


@dataclass
class Merger:
    """A conversion rule of transformers and the checkpoint tensors it uses for one target."""

    rule: Any
    sources: dict[str, str] = field(default_factory=dict)  # tensor -> the pattern that it matches

    def assemblies(self, model: nn.Module, target: str, shapes: Shapes) -> dict[str, Assembly]:
        """Return the assemblies of all parameters that the rule produces.

        `shapes` maps the names of the checkpoint tensors to their shapes.
        """
        sources = {name: tuple(shapes[name]) for name in self.sources}

        def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            rule = copy.deepcopy(self.rule)
            for name, tensor in tensors.items():
                rule.add_tensor(target, name, self.sources[name], tensor)
            converted = rule.convert(target, model=model, config=getattr(model, "config", None))
            return {key: v[0] if isinstance(v, list) else v for key, v in converted.items()}

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


# -- Saving ---------------------------------------------------------------------------------------


def saved_layout(model: nn.Module | None, shapes: Shapes) -> dict[str, str | Assembly]:
    """Return the layout that `save_pretrained` writes for the tensors of a model.

    The layout maps each name in the file to a whole tensor of the model or, for a part of one, to
    an `Assembly` of runs of its elements. If `save_pretrained` would merge several tensors into
    one, the model's own layout is returned instead. transformers can load that layout too.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "base_model_prefix"):
        return {name: name for name in shapes}
    from transformers.core_model_loading import revert_weight_conversion

    hf_model: Any = model

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted: dict[str, torch.Tensor] = revert_weight_conversion(hf_model, dict(tensors))
        return converted

    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    converted = convert(meta)
    names = {id(tensor): name for name, tensor in meta.items()}
    layout: dict[str, str | Assembly] = {
        name: names[id(tensor)] for name, tensor in converted.items() if id(tensor) in names
    }
    for name in sorted(set(shapes) - set(layout.values())):
        try:
            results = {key: tuple(t.shape) for key, t in convert({name: meta[name]}).items()}
        except (ValueError, KeyError):
            break  # The rule needs other tensors too, for example for the experts of ERNIE.
        if any(
            key not in converted or converted[key].shape != shape for key, shape in results.items()
        ):
            break  # The tensor is merged with others.
        with suppress(_NotRows):
            layout |= assembled(convert, {name: tuple(shapes[name])}, results)
    return layout if layout.keys() == converted.keys() else {name: name for name in shapes}


@dataclass(frozen=True)
class Saved:
    """The tensors of a folder to be written, in the order in which the model's tensors are read."""

    layout: Mapping[str, str | Assembly]
    tensors: Shapes
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, model: nn.Module | None, shapes: Shapes, buffers: Mapping[str, torch.Tensor]
    ) -> Saved:
        """Return the saved form of a model with parameters `shapes` and the given buffers.

        If the model is None, its tensors are written without conversion.
        """
        every = {**shapes, **{name: tuple(buffer.shape) for name, buffer in buffers.items()}}
        layout = saved_layout(model, every)
        order = {name: number for number, name in enumerate(shapes)}

        def position(source: str | Assembly) -> tuple[int, int]:
            if isinstance(source, str):
                return order[source], 0
            return order[source.runs[0].tensor], source.runs[0].start

        parameters = {new: source for new, source in layout.items() if source not in buffers}
        tensors = {
            new: shapes[source] if isinstance(source, str) else source.shape
            for new, source in sorted(parameters.items(), key=lambda item: position(item[1]))
        }
        used = {new: buffers[str(source)] for new, source in layout.items() if source in buffers}
        return cls(layout, tensors, used)

    def reading(self, read_flat: ReadFlat) -> ReadFlat:
        """Return a reader for names in the folder, given a reader for names in the model."""

        def read(name: str, start: int, stop: int) -> torch.Tensor:
            source = self.layout[name]
            if isinstance(source, str):
                return read_flat(source, start, stop)
            return source.read(start, stop, read_flat)

        return read


# -- Initial values from a safetensors folder or a module in memory --------------------------------
#
# The tensor names of a checkpoint may differ from those of the model: they may lack the base
# model's prefix, come from an older release, include or omit the second name of a tied weight, or
# list experts separately. `checkpoint_map` finds the tensor of every parameter before any data is
# read, and names a parameter that is missing.


RANGE_ELEMENTS = 2**24


@dataclass(frozen=True)
class CheckpointMap:
    """The checkpoint tensor of each parameter and buffer, and the unused checkpoint tensors.

    `parameters` and `buffers` map model names to checkpoint names. A tied weight is listed under
    all of its names.
    """

    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    ignored: tuple[str, ...]


def element_ranges(numel: int, *, most: int = RANGE_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of at most `most` elements that cover `numel` elements."""
    for start in range(0, numel, most):
        yield start, min(start + most, numel)


def checkpoint_map(
    model: nn.Module,
    folder: TensorFolder | str | os.PathLike[str],
    names: Mapping[str, str] | None = None,
) -> CheckpointMap:
    """Return the checkpoint tensor of every parameter and persistent buffer of the model.

    If adapters have changed the model, `names` maps the name of each tensor to be found to the name
    that it has without adapters.
    """
    tensors = folder if isinstance(folder, TensorFolder) else open_folder(folder)
    held = model.state_dict(keep_vars=True)
    plain = names or {name: name for name in held}
    targets = {plain[name]: tensor for name, tensor in held.items() if name in plain}
    matched, ignored = _match(model, tensors, targets)
    parameters: dict[str, str] = {}
    missing: list[str] = []
    for tied in tied_names(model):
        wanted = [plain[name] for name in tied if name in plain]
        present = [name for name in wanted if name in matched]
        if wanted and not present:
            missing.append(wanted[0])
        for name in present:
            stored_shape, shape = tensors.shape(matched[name]), tuple(targets[name].shape)
            if stored_shape != shape:
                raise ModelError(
                    f"{tensors.path}: tensor {matched[name]} has shape {list(stored_shape)}, "
                    f"parameter {name} has {list(shape)}; config.json and weights are of "
                    "different models"
                )
            _check_float(tensors, matched[name], name)
        _check_tied(tensors, [matched[name] for name in present])
        parameters.update({name: matched[present[0]] for name in wanted if present})
    missing = [name for name in missing if not _is_computed(model, name)]
    if missing:
        raise ModelError(
            f"{tensors.path}: no tensor for parameter {missing[0]} of {type(model).__name__}, "
            f"{len(missing)} of {len(missing) + len(parameters)} missing; the folder's config.json "
            "and weights must be of the same model, download both again"
        )
    buffers = {name: source for name, source in matched.items() if name not in parameters}
    return CheckpointMap(parameters, buffers, tuple(sorted(ignored)))


def _is_computed(model: nn.Module, name: str) -> bool:
    """Return whether transformers lets a checkpoint omit this tensor because it is computed."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, *left_out))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter, beginning with the name in named_parameters()."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _match(
    model: nn.Module, tensors: TensorFolder, targets: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[str]]:
    """Return a map of model names to checkpoint names, and the checkpoint tensors without a match.

    The rules are those of from_pretrained.
    """
    matched: dict[str, str] = {}
    ignored: list[str] = []
    mergers: dict[str, Merger] = {}
    for name, target, pattern, rule in _renamed(model, tensors.names(), targets):
        if target not in targets or target in matched:
            ignored.append(name)
        elif rule is not None:
            mergers.setdefault(target, Merger(rule)).sources[name] = pattern
        else:
            matched[target] = name
    for target, merger in mergers.items():
        shapes = {name: tensors.shape(name) for name in merger.sources}
        for assembled, assembly in merger.assemblies(model, target, shapes).items():
            for source in assembly.sources:
                _check_float(tensors, source, assembled)
            matched[assembled] = tensors.assemble(assembled, assembly)
    return matched, ignored


def _renamed(
    model: nn.Module, names: list[str], targets: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (checkpoint name, model name, matching pattern, rule) for every checkpoint tensor.

    The rule is None if renaming is sufficient.
    """
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
    prefix, remaining = model.base_model_prefix, dict(targets)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, remaining)
        if target not in targets and name in targets:
            target, pattern = name, None
        yield name, target, pattern or "", by_pattern[pattern] if pattern else None


def _check_float(tensors: TensorFolder, source: str, name: str) -> None:
    if not tensors.dtype(source).is_floating_point:
        raise ModelError(
            f"{tensors.path}: tensor {source} is {tensors.dtype(source)}, parameter {name} needs a "
            "floating-point dtype; give the unquantized checkpoint"
        )


def _check_tied(tensors: TensorFolder, sources: list[str]) -> None:
    """Check that tied weights are equal if the checkpoint holds both."""
    for first, other in pairwise(sources):
        numel = torch.Size(tensors.shape(first)).numel()
        if not all(
            torch.equal(tensors.read_flat(first, *span), tensors.read_flat(other, *span))
            for span in element_ranges(numel)
        ):
            raise ModelError(
                f"{tensors.path}: config.json ties {first} and {other}, the weights hold both with "
                'different values; set "tie_word_embeddings": false in config.json'
            )


class FolderSource:
    """A reader of values in a model folder, by the parameter names of the model."""

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
        for a, b in element_ranges(stop - start, most=RANGE_ELEMENTS // 4):
            values[a:b] = self._folder.read_flat(source, start + a, start + b)
        return values


class ModuleSource:
    """A reader of the parameters of a module in memory, optionally only of those in `names`."""

    def __init__(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        named = module.named_parameters(remove_duplicate=False)
        self._parameters = {name: p for name, p in named if names is None or name in names}
        for name, parameter in self._parameters.items():
            if lacks_values(parameter):
                raise ModelError(
                    f"parameter {name} of {type(module).__name__} is on the meta device and has no "
                    "values; load the model from its folder instead"
                )

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        flat = self._parameters[name].detach().reshape(-1)[start:stop]
        return flat.to(device="cpu", dtype=torch.float32, copy=True)


# -- Initial values of a model without weights: its own initialisation, block by block -------------
#
# The parameters of one block are allocated, and the model's `initialize_weights` runs over the
# whole model. It has no effect on the other blocks, which are meta tensors. Then the block's values
# are read. The random numbers of a block are seeded with the seed and the block's name, so its
# values do not depend on other blocks.


MARK = ".lohan-init"  # file with the seed from which the weights of this folder are drawn


def mark_initial(folder: Path, seed: int) -> None:
    write_atomic(folder / MARK, f'{{"seed": {seed}}}\n'.encode())


def initial_seed(folder: Path) -> int | None:
    """Return the seed of a folder whose weights are drawn at random, or None for other folders."""
    if not (folder / MARK).is_file():
        return None
    try:
        seed: int = checked(load_json(folder / MARK)["seed"], int, "seed")
        return seed
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder / MARK}: cannot be read ({error}); start the run again"
        ) from None


def seed_of(seed: int, block: str) -> int:
    """Return the seed of a block; the CPU generator uses 32 bits of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {block}".encode()).digest()[:4], "little")


class InitialValues:
    """A reader that draws the initial values of a model on the meta device, block by block."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model: Any = model
        self._seed = seed
        self._first = {name: names[0] for names in tied_names(model) for name in names}
        names = set(site_names(model))
        self._block = {name: _block_of(name, names) for name in self._first.values()}
        self._at: str | None = None  # the block whose values are in self._values
        self._values: dict[str, torch.Tensor] = {}

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        name = self._first[name]
        if self._block[name] != self._at:
            self._values.clear()
            self._values = self._draw(self._block[name])
            self._at = self._block[name]
        return self._values[name].reshape(-1)[start:stop].clone()

    def _draw(self, block: str) -> dict[str, torch.Tensor]:
        """Return the initial values of a block's parameters.

        A tied weight is drawn by the module that holds its first name.
        """
        model, names = self._model, [n for n, other in self._block.items() if other == block]
        others: list[tuple[dict[str, Any], str, Any]] = []
        drawn: dict[str, torch.Tensor] = {}
        for name in names:
            module, _, last = name.rpartition(".")
            owner = model.get_submodule(module)._parameters
            drawn[name] = torch.full(owner[last].shape, torch.nan)
            others.append((owner, last, nn.Parameter(drawn[name], owner[last].requires_grad)))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        with swapped(others), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed_of(self._seed, block))
            initialise: Callable[[], None] = model.initialize_weights
            initialise()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        empty = [name for name, values in drawn.items() if values.isnan().any()]
        if empty:
            raise ModelError(
                f"{type(model).__name__} does not initialise parameter {empty[0]}; "
                "make a folder of weights with transformers, and give it as --model"
            )
        return drawn


def _block_of(name: str, site_names: set[str]) -> str:
    """Return the name of the block that contains a parameter.

    For a parameter outside all blocks, return the name of its module.
    """
    parts = name.split(".")
    for length in range(1, len(parts)):
        if ".".join(parts[:length]) in site_names:
            return ".".join(parts[:length])
    return ".".join(parts[:-1])
