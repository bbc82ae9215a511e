"""Train a vision-language model to write captions.

    python examples/describe_images.py

The model is a small LLaVA with random weights; `lohan.load(FOLDER)` loads yours.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import lohan

STEPS, BATCH = 20, 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sight = CLIPVisionConfig(image_size=16, patch_size=4, num_attention_heads=4, **sizes)
    text = LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes)
    places = {"image_token_index": 1, "image_seq_length": 16, "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=sight, text_config=text, **places)
    model = LlavaForConditionalGeneration(config).train()
    ids = torch.randint(2, 64, (BATCH, 24))
    ids[:, :16] = 1  # the positions of the image
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 1, -100)}
    batch["pixel_values"] = torch.randn(BATCH, 3, 16, 16)
    with tempfile.TemporaryDirectory() as ssd:
        budget = lohan.Budget(host="256MiB", ssd=[ssd])
        optimizer = lohan.AdamW(lr=1e-3)
        with lohan.attach(model, optimizer=optimizer, budget=budget, batch=batch) as session:
            for _ in range(STEPS):
                (loss := model(**batch).loss).backward()  # the optimizer step happens inside
                print(f"step {session.step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
