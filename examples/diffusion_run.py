"""Run `lohan train --task diffusion` on a folder of latents, with a small DiT.

pip install diffusers; python examples/diffusion_run.py RUN
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import DiTTransformer2DModel

from lohan.cli.main import app


def make_inputs(folder: Path) -> None:
    """Write a model as diffusers saves it, and a folder of latents for each class."""
    torch.manual_seed(0)
    DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=16,
        num_embeds_ada_norm=2,
    ).save_pretrained(folder / "model")
    for name in ("cats", "dogs"):
        (folder / "latents" / name).mkdir(parents=True)
        for number in range(4):
            latent = np.random.default_rng(number).standard_normal((4, 16, 16), dtype=np.float32)
            np.save(folder / "latents" / name / f"{number}.npy", latent)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        make_inputs(Path(place))
        inputs = f"--task diffusion --model {place}/model --data {place}/latents --host 256MiB"
        settings = "--batch 8 --steps 20 --lr 1e-3 --schedule constant --clip 0"
        words = f"train {inputs} {settings}".split()
        app([*words, "--out", sys.argv[1]], standalone_mode=False)
