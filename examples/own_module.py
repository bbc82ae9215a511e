"""Train a plain nn.Module of repeated blocks out of core.

python examples/own_module.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import lohan

WIDTH, LAYERS, STEPS = 64, 6, 30


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(LAYERS)))  # its weights are in memory
    x = torch.randn(32, WIDTH)
    y = x.roll(1, dims=1) * x
    with tempfile.TemporaryDirectory() as ssd:
        budget = lohan.Budget(host="64MiB", ssd=[ssd])
        with lohan.attach(model, optimizer=lohan.AdamW(lr=1e-3), budget=budget) as session:
            for _ in range(STEPS):
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()  # the optimizer step happens inside, and is committed
                print(f"step {session.step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
