"""A LoRA adapter that approximates the difference between trained weights and their base."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.checkpoint.adapters import (
    _WRAPPERS,
    COPIED,
    PREFIX,
    _adapter_parameters,
    add_lora,
    base_of,
    export_adapter,
)
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.sources import element_ranges
from lohan.errors import ModelError
from lohan.optim import Lora


@dataclass(frozen=True)
class HeldDifference:
    """The squared norm of a parameter's difference from the base, in total and as exported."""

    name: str
    total: float
    exported: float

    @property
    def share(self) -> float:
        """The exported share of the squared norm; 1 if the parameter did not change."""
        return self.exported / self.total if self.total else 1.0


def best_factors(difference: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return A, B and the squared norm of B @ A, the best rank-`rank` approximation.

    The singular vectors of the smaller side are computed as eigenvectors of its Gram matrix. This
    is much cheaper than a full decomposition. The Gram matrix is computed in float64, because it
    holds squares of the values. If `rank` is larger than the rank of the matrix, the factors are
    padded with zeros.
    """
    outputs, inputs = difference.shape
    wide = inputs >= outputs
    side = (difference if wide else difference.T).double()
    values, vectors = torch.linalg.eigh(side @ side.T)  # in ascending order
    kept = min(rank, len(values))
    vectors = vectors[:, -kept:]
    held = float(values[-kept:].clamp(min=0).sum())
    other = vectors.T @ side
    a, b = torch.zeros(rank, inputs), torch.zeros(outputs, rank)
    a[:kept], b[:, :kept] = (other, vectors) if wide else (vectors.T, other.T)
    return a, b, held


class _Factors:
    """The LoRA factors that approximate the differences of trained weights from their base.

    `read_flat` computes the factors of one layer at a time. `held` then contains the share of the
    difference that these factors represent.
    """

    def __init__(self, model: nn.Module, trained: ReadFlat, base: ReadFlat, rank: int) -> None:
        self._trained, self._base, self._rank = trained, base, rank
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.held: dict[str, HeldDifference] = {}
        self._weights: dict[str, tuple[str, tuple[int, ...], bool]] = {}
        self._copies: dict[str, str] = {}
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None
        inner = base_of(model)
        layers: dict[str, list[str]] = {}
        for name, (layer, part, _) in _adapter_parameters(inner).items():
            full = PREFIX + name
            if part == COPIED:
                self._copies[full] = _WRAPPERS.sub("", name)
            else:
                owner: Any = layer
                weight = owner.base_layer.weight
                if part not in ("lora_A", "lora_B") or weight.ndim != 2:
                    raise ModelError(
                        f"{name}: {type(layer).__name__} has no matrix that LoRA could change; "
                        "export all weights instead, without --as-lora"
                    )
                plain = name.partition(f".{part}.")[0] + ".weight"
                transposed = bool(owner.fan_in_fan_out)
                self._weights[full] = plain, tuple(weight.shape), transposed
            layers.setdefault(name.partition(f".{part}.")[0], []).append(full)
        for names in layers.values():  # The two factors of a layer are adjacent.
            for full in names:
                self.shapes[full] = tuple(model.get_parameter(full).shape)

    @property
    def covered(self) -> set[str]:
        """The names of the base model's parameters that the adapter changes."""
        return {plain for plain, _, _ in self._weights.values()} | set(self._copies.values())

    def difference(self, name: str, numel: int) -> torch.Tensor:
        pieces = [self._trained(name, *r) - self._base(name, *r) for r in element_ranges(numel)]
        return torch.cat(pieces)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._copies:
            return self._trained(self._copies[name], start, stop)
        plain, shape, transposed = self._weights[name]
        if self._last is None or self._last[0] != plain:
            self._last = None  # Free the factors of the previous layer first.
            matrix = self.difference(plain, shape[0] * shape[1]).view(shape)
            matrix = matrix.T if transposed else matrix
            a, b, held = best_factors(matrix, self._rank)
            total = float(matrix.double().square().sum())
            self.held[plain] = HeldDifference(plain, total, min(held, total))
            self._last = plain, a, b
        _, a, b = self._last
        factor = a if ".lora_A." in name else b
        return factor.reshape(-1)[start:stop]


def export_low_rank(
    model: nn.Module,
    trained: ReadFlat,
    base: ReadFlat,
    out: str | os.PathLike[str],
    *,
    rank: int,
    dtype: torch.dtype,
    overwrite: bool = False,
    card: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[HeldDifference]:
    """Write the best rank-`rank` approximation of `trained` minus `base` as a PEFT folder.

    Only one matrix is in memory at a time, together with the factors of all matrices.

    Return for each parameter how much of its difference the adapter holds: first the matrices with
    LoRA factors, then all other parameters. The adapter holds nothing of the differences of
    embeddings and norms, and all of a head that PEFT saves as a module.
    """
    numels = {name: p.numel() for name, p in model.named_parameters()}
    adapted = add_lora(model, Lora(rank=rank, alpha=float(rank)))
    factors = _Factors(adapted, trained, base, rank)
    all_, done = len(factors.shapes), set[str]()

    def read_flat(name: str, start: int, stop: int) -> torch.Tensor:
        piece = factors.read_flat(name, start, stop)
        done.add(name)
        progress(len(done), all_)
        return piece

    shapes = factors.shapes
    export_adapter(
        adapted,
        Path(out),
        shapes=shapes,
        read_flat=read_flat,
        dtype=dtype,
        overwrite=overwrite,
        card=card,
    )
    held = list(factors.held.values())
    for name, numel in numels.items():
        if name not in factors.held:
            total = float(factors.difference(name, numel).double().square().sum())
            held.append(HeldDifference(name, total, total if name in factors.covered else 0.0))
    return held
