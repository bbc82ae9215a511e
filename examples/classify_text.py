"""Train an encoder to tell two kinds of text apart.

    python examples/classify_text.py

The model is a small BERT with random weights; `lohan.load(FOLDER)` loads yours.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification

import lohan

STEPS, BATCH = 20, 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = BertConfig(vocab_size=64, num_attention_heads=4, num_labels=2, **sizes)
    model = BertForSequenceClassification(config).train()
    kinds = torch.arange(BATCH) % 2
    words = torch.randint(1, 32, (BATCH, 16)) + 32 * kinds[:, None]
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": kinds}
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
