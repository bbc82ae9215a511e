"""Small pipelines of diffusers, and folders of data for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

CLASSES = 5
TEXT, POOLED = "encoder_hidden_states", "pooled_projections"
SIZES = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
JOINT = {"joint_attention_dim": 16, "pooled_projection_dim": 12}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dit": (
        "DiTTransformer2DModel",
        {
            **SIZES,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": CLASSES,
            "dropout": 0.0,
        },
    ),
    "pixels": (
        "DiTTransformer2DModel",
        {**SIZES, "in_channels": 3, "sample_size": 8, "num_embeds_ada_norm": CLASSES},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **SIZES,
            **JOINT,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **SIZES,
            **JOINT,
            "in_channels": 16,
            "num_single_layers": 2,
            "axes_dims_rope": [2, 2, 4],
            "guidance_embeds": True,
        },
    ),
}


def save_pipeline(folder: Path, kind: str, *, vae: bool = False) -> Path:
    """Save a folder with transformer and scheduler, as diffusers writes it."""
    import diffusers

    name, config = CONFIGS[kind]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():  # gates that start as zero would hide what is behind them
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "transformer")
    scheduler: Any = diffusers.DDIMScheduler(num_train_timesteps=50)
    if kind in ("sd3", "flux"):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    if vae:
        autoencoder().save_pretrained(folder / "vae")
    index = {"_class_name": "Pipeline", "transformer": ["diffusers", name]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    }
    return AutoencoderKL(
        **blocks,
        block_out_channels=[8, 8],
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
    )


def loaded(folder: Path, kind: str) -> nn.Module:
    import diffusers

    return getattr(diffusers, CONFIGS[kind][0]).from_pretrained(folder)


def save_latents(folder: Path, kind: str, count: int = 7) -> Path:
    """Save `count` latents.

    Those of DiT are in class folders. Others have their conditioning next to them, every other
    one as safetensors.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        latent = torch.randn(4, 8, 8, generator=generator)
        if kind == "dit":
            place = folder / f"class-{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{number}.npy", latent.numpy())
            continue
        folder.mkdir(parents=True, exist_ok=True)
        others = {
            TEXT: torch.randn(6, 16, generator=generator),
            POOLED: torch.randn(12, generator=generator),
        }
        if number % 2:
            save_file({"latents": latent, **others}, folder / f"{number}.safetensors")
            continue
        np.save(folder / f"{number}.npy", latent.numpy())
        for name, tensor in others.items():
            np.save(folder / f"{number}.{name}.npy", tensor.numpy())
    return folder


def save_images(folder: Path, count: int = 6) -> Path:
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder
