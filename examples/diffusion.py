"""Train a diffusion transformer from diffusers to predict noise, out of core.

pip install diffusers; python examples/diffusion.py
"""

from __future__ import annotations

import tempfile

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel

import lohan

STEPS, SAMPLES, CLASSES = 20, 8, 10


def main() -> None:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        sample_size=16,
        num_embeds_ada_norm=CLASSES,
    ).train()
    latents = torch.randn(SAMPLES, 4, 16, 16)  # replace by the latents of your images
    classes = torch.arange(SAMPLES) % CLASSES
    example = {"hidden_states": latents, "timestep": classes, "class_labels": classes}
    with tempfile.TemporaryDirectory() as ssd:
        budget = lohan.Budget(host="256MiB", ssd=[ssd])
        adamw = lohan.AdamW(lr=1e-3)
        with lohan.attach(model, optimizer=adamw, budget=budget, batch=example) as session:
            for _ in range(STEPS):
                noise, times = torch.randn_like(latents), torch.randint(0, 1000, (SAMPLES,))
                noisy = DDPMScheduler().add_noise(latents, noise, times)
                loss = (model(noisy, times, classes).sample - noise).square().mean()
                loss.backward()  # the optimizer step happens inside, and is committed
                print(f"step {session.step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
