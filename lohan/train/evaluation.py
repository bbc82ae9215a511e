"""The loss on held-out data, with weights streamed as in training.

Evaluation does not affect training: it restores the random state, counts no step and writes
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lohan.train.task import Batch, Examples, Stats, Task, mean_stats

LARGEST_EXPONENT = 700.0  # larger losses would overflow the perplexity


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of an evaluation, over all tokens (or all examples) that have a loss."""

    loss: float
    tokens: int
    seconds: float
    perplexing: bool = True  # whether a perplexity is meaningful for this loss
    stats: Mapping[str, float] = field(default_factory=dict)  # means of the task's other statistics

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}"
        extra = "".join(f", {name.replace('_', ' ')} {x:.3g}" for name, x in self.stats.items())
        return (f"{text}, perplexity {self.perplexity:.4g}" if self.perplexing else text) + extra

    def to_row(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "eval_loss": self.loss,
            **({"eval_perplexity": self.perplexity} if self.perplexing else {}),
            "eval_tokens": self.tokens,
            "eval_s": self.seconds,
            **{f"eval_{name}": value for name, value in self.stats.items()},
        }


def evaluate(
    model: nn.Module,
    dataset: Examples,
    *,
    batch: int,
    task: Task[Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
    loss_of: Callable[[Batch], float] | None = None,
) -> Evaluation | None:
    """Evaluate every row once and return the result, or None if `stop` returns True before the end.

    `loss_of` computes the loss of a batch if the model's own loss is not sufficient, for example
    with several ranks.
    """
    loss_function = loss_of or (lambda inputs: task.loss(model, inputs).item())
    start, total, tokens = time.perf_counter(), 0.0, 0
    passes, results = -(-len(dataset) // batch), list[tuple[Stats, int]]()
    progress(0, passes)
    with forward_only(model):
        for number, inputs in enumerate(dataset.passes(batch)):
            if stop():
                return None
            count = task.weight(model, inputs)
            total += loss_function(inputs) * count
            tokens += count
            results.append((inputs.get("stats", {}), task.rows(inputs)))
            progress(number + 1, passes)
    stats = {name: mean for name, (mean, _) in mean_stats(results).items()}
    return Evaluation(total / tokens, tokens, time.perf_counter() - start, task.PERPLEXITY, stats)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Run the `with` body without gradients in evaluation mode; restore mode and random state."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        torch_device = compute_device(model)
        forked = [] if torch_device.type == "cpu" else [torch_device.index or 0]
        with torch.no_grad(), torch.random.fork_rng(devices=forked, device_type=torch_device.type):
            yield
    finally:
        for module in training:
            module.training = True


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that the model computes on."""
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


@dataclass(frozen=True)
class History:
    """The evaluations of a run so far, read from its log."""

    steps: frozenset[int] = frozenset()
    best: float = math.inf
    best_step: int = 0
    since_best: int = 0  # number of evaluations after the best one

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> History:
        history = cls()
        for row in rows:
            history = history.with_row(row)
        return history

    def improves(self, loss: float) -> bool:
        return loss < self.best

    def with_row(self, row: Mapping[str, Any]) -> History:
        steps, loss = self.steps | {row["step"]}, row["eval_loss"]
        if self.improves(loss):
            return History(steps, loss, row["step"], 0)
        return History(steps, self.best, self.best_step, self.since_best + 1)
