"""A child of the step benchmark: the same steps in PyTorch with everything in memory."""

from __future__ import annotations

import json
import sys
from typing import Any

import reference
from children import tell


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).train()
    model.config.use_cache = False
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=reference.LR,
        betas=reference.BETAS,
        eps=reference.EPS,
        weight_decay=reference.WEIGHT_DECAY,
        fused=True,
    )

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if spec["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    tell(reference.time_steps(spec, step))


if __name__ == "__main__":
    main()
