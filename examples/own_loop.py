"""Use LoHan in your own training loop.

    python examples/own_loop.py MODEL SSD TUNED

MODEL is a Hugging Face folder, SSD a folder for the training state, TUNED the folder for the
result.
"""

from __future__ import annotations

import sys

import torch

import lohan

STEPS, BATCH, TOKENS = 3, 4, 32


def main() -> None:
    folder, ssd, tuned = sys.argv[1:]
    model = lohan.load(folder).train()  # the structure; weights come with attach
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (BATCH, TOKENS), generator=generator)
    batch = {"input_ids": ids, "labels": ids}  # your data
    with lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=lambda step: 1e-3 / (1 + 0.1 * step)),
        budget=lohan.Budget(host="1GiB", ssd=[ssd]),
        batch=batch,
        clip=1.0,
        run_again=True,  # train_step may run a batch twice
    ) as session:
        for _ in range(STEPS):
            loss = session.train_step(batch)  # forward, backward and optimizer, block by block
            print(f"step {session.step}: loss {loss.item():.4f}")
        session.export(tuned)


if __name__ == "__main__":
    main()
