"""Model folders with random weights, of any size."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lohan.checkpoint.hf_folder import build_from_config, persistent_buffers
from lohan.checkpoint.safetensors import FileTensor, ShardedWriter
from lohan.checkpoint.sources import element_ranges

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def write_random_checkpoint(
    folder: str | os.PathLike[str],
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a loadable folder with random weights of any size, streamed in pieces.

    Norms get the values that the model itself initialises them with, biases 0, everything else
    N(0, std). Every tensor has a seed of its own, so its values do not depend on the other
    tensors.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model = build_from_config(config, dtype=dtype)
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(path)
    owners = _owners(model)
    specs = [FileTensor(n, dtype, tuple(p.shape)) for n, p in model.named_parameters()]
    buffers = persistent_buffers(model)
    specs += [FileTensor(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    with ShardedWriter(path, tensors=specs, max_shard_bytes=max_shard_bytes) as writer:
        for name, parameter in model.named_parameters():
            # The CPU generator uses 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            norm = _norm_values(model, owners[name], name.rpartition(".")[2])
            for start, stop in element_ranges(parameter.numel()):
                piece = torch.zeros(stop - start)
                if norm is not None:
                    piece = norm.reshape(-1)[start:stop]
                elif not name.endswith("bias"):
                    piece.normal_(0.0, std, generator=generator)
                writer.write(name, piece.to(dtype))
        for name, buffer in buffers.items():
            writer.write(name, buffer)


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        for name in module._parameters
    }


def _norm_values(model: PreTrainedModel, module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the initial values of a norm's parameter: 1, or 0 if it multiplies by 1 + w."""
    if "norm" not in type(module).__name__.lower():
        return None
    meta = module._parameters[name]
    assert meta is not None
    module._parameters[name] = nn.Parameter(torch.full(meta.shape, float(name == "weight")))
    try:
        with torch.no_grad():
            initialise: Callable[[nn.Module], None] = model._init_weights
            initialise(module)
        return module._parameters[name]
    finally:
        module._parameters[name] = meta
