"""Folders of diffusers: a transformer alone, or a pipeline with its scheduler and autoencoder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.checkpoint.hf_folder import load_buffers, parameters_on_meta
from lohan.checkpoint.safetensors import has_weights
from lohan.errors import ModelError, first_line
from lohan.util.json_file import read_object

PIPELINE = "model_index.json"
CLASS = "_class_name"
TRANSFORMERS = ("DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel")


@dataclass(frozen=True)
class DiffusersFolder:
    """Where the parts of a diffusion model are; a folder with the transformer alone has no more."""

    model: Path
    scheduler: Path | None
    vae: Path | None

    def config(self) -> dict[str, Any]:
        return read_json(self.model / "config.json")


def find_diffusers_folder(folder: str | os.PathLike[str]) -> DiffusersFolder | None:
    """The parts of a diffusers folder, or None if it is none."""
    path = Path(folder)
    if (path / PIPELINE).is_file():
        root, model = path, path / "transformer"
        if not (model / "config.json").is_file():
            raise ModelError(
                f"{path}: a pipeline without a transformer/config.json; LoHan trains "
                f"{', '.join(TRANSFORMERS)}, give the folder of one"
            )
    elif (path / "config.json").is_file() and CLASS in read_json(path / "config.json"):
        root, model = path.parent, path
    else:
        return None
    inside = (root / PIPELINE).is_file()
    parts = [root / name if inside and (root / name).is_dir() else None for name in _PARTS]
    return DiffusersFolder(model, *parts)


_PARTS = ("scheduler", "vae")


def weights_folder(folder: Path) -> Path:
    """The folder itself, or the part of a pipeline that is trained."""
    found = find_diffusers_folder(folder)
    return folder if found is None else found.model


def read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, kind=ModelError, remedy="download it again")
    except ModelError:
        return {}  # whoever needs it says what is wrong


def diffusers_class(name: str, of: Path) -> Any:
    """A class of diffusers, which is no dependency."""
    try:
        import diffusers
    except ImportError:
        raise ModelError(
            f"{of}: a diffusion model, which needs the diffusers package; "
            "pip install 'lohan[diffusion]'"
        ) from None
    return getattr(diffusers, name)


def build_diffusers(place: DiffusersFolder, *, dtype: torch.dtype) -> nn.Module:
    """The transformer in `dtype`: parameters on the meta device, buffers real on the CPU."""
    raw = place.config()
    name = str(raw.get(CLASS))
    if name not in TRANSFORMERS:
        raise ModelError(
            f"{place.model}: {name} is not a model that LoHan loads from a diffusers folder; it "
            f"loads {', '.join(TRANSFORMERS)}; build others in memory and attach them"
        )
    if "quantization_config" in raw:
        raise ModelError(
            f"{place.model}: config.json says the weights are quantized; training every parameter "
            "needs the unquantized checkpoint, give that folder"
        )
    kind = diffusers_class(name, place.model)
    try:
        with parameters_on_meta():
            built: Any = kind.from_config(raw)
    except Exception as error:
        raise ModelError(
            f"{place.model}: diffusers cannot build the model: {first_line(error)}; check "
            "config.json"
        ) from error
    # That of diffusers warns of parameters kept wide.
    model: nn.Module = nn.Module.to(built, dtype)
    built.register_to_config(_name_or_path=str(place.model))
    if has_weights(place.model):
        load_buffers(model, place.model)
    return model
