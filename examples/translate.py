"""Train an encoder-decoder model to reverse sentences.

    python examples/translate.py

The model is a small T5 with random weights; `lohan.load(FOLDER)` loads yours.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import T5Config, T5ForConditionalGeneration

import lohan

STEPS, BATCH = 20, 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    model = T5ForConditionalGeneration(config).train()
    words = torch.randint(2, 64, (BATCH, 12))
    batch = {"input_ids": words, "labels": words.flip(1)}
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
