"""Train a vision transformer to tell bright images from dark ones.

    python examples/classify_images.py

The model is a small ViT with random weights; `lohan.load(FOLDER)` loads yours.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import ViTConfig, ViTForImageClassification

import lohan

STEPS, BATCH = 20, 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    images = {"image_size": 32, "patch_size": 8}
    config = ViTConfig(num_attention_heads=4, num_labels=2, **sizes, **images)
    model = ViTForImageClassification(config).train()
    kinds = torch.arange(BATCH) % 2
    pixels = torch.randn(BATCH, 3, 32, 32) + kinds[:, None, None, None]
    batch = {"pixel_values": pixels, "labels": kinds}
    with tempfile.TemporaryDirectory() as ssd:
        budget = lohan.Budget(host="256MiB", ssd=[ssd])
        with lohan.attach(
            model, optimizer=lohan.AdamW(lr=1e-3), budget=budget, batch=batch
        ) as session:
            for _ in range(STEPS):
                loss = model(**batch).loss
                loss.backward()  # the optimizer step happens inside, and is committed
                print(f"step {session.step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
