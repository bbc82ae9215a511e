"""Use transformers' Trainer, with one import changed.

    python examples/trainer.py MODEL OUT

Budgets are given by a keyword here; the environment variables LOHAN_HOST and LOHAN_SSD work too.
"""

from __future__ import annotations

import sys

import torch
from transformers import TrainingArguments

import lohan
from lohan.hf import LohanArguments, Trainer  # instead of: from transformers import Trainer


def main() -> None:
    folder, out = sys.argv[1:]
    model = lohan.load(folder)  # or from_pretrained, if the model fits in memory
    tokens = torch.randint(3, model.config.vocab_size, (12, 32)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]  # your dataset
    settings = TrainingArguments(
        out,
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=rows,
        lohan=LohanArguments(host="1GiB"),
    )
    trainer.train()
    trainer.save_model()  # a plain Hugging Face folder: OUT


if __name__ == "__main__":
    main()
