"""Loss on data that is not trained on: forward only, weights streamed as in training.

Training does not notice: no random numbers are drawn, no step counts, nothing is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.train.task import Batch, Examples, Task

LARGEST_EXPONENT = 700.0  # beyond it a perplexity is no float


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over all that carry one: tokens, or examples."""

    loss: float
    tokens: int
    seconds: float
    perplexing: bool = True  # whether the loss has a perplexity

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}"
        return f"{text}, perplexity {self.perplexity:.4g}" if self.perplexing else text

    def to_row(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "eval_loss": self.loss,
            **({"eval_perplexity": self.perplexity} if self.perplexing else {}),
            "eval_tokens": self.tokens,
            "eval_s": self.seconds,
        }


def evaluate(
    model: nn.Module, dataset: Examples, *, batch: int, task: Task[Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False, loss_of: Callable[[Batch], float] | None = None,
) -> Evaluation | None:  # fmt: skip
    """Every row of the dataset once; None if `stop` asked for an end before it was done. `loss_of`
    a batch: if it is not the model's alone."""
    found = loss_of or (lambda inputs: task.loss(model, inputs).item())
    start, total, tokens = time.perf_counter(), 0.0, 0
    passes = -(-len(dataset) // batch)
    progress(0, passes)
    with forward_only(model):
        for number, inputs in enumerate(dataset.passes(batch)):
            if stop():
                return None
            count = task.weight(inputs)
            total += found(inputs) * count
            tokens += count
            progress(number + 1, passes)
    return Evaluation(total / tokens, tokens, time.perf_counter() - start, task.PERPLEXITY)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """No graph, evaluation mode, and the random state of before at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), _same_random_state(place_of(model)):
            yield
    finally:
        for module in training:
            module.training = True


def place_of(model: nn.Module) -> torch.device:
    """Where a model computes whose streamed parameters are nowhere."""
    here = (p.device for p in model.parameters() if not p.is_meta)
    return next(here, torch.device("cpu"))


def _same_random_state(place: torch.device) -> AbstractContextManager[None]:
    if place.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[place.index or 0], device_type=place.type)


@dataclass(frozen=True)
class History:
    """Evaluations of a run so far, read from its log."""

    steps: frozenset[int] = frozenset()
    best: float = math.inf
    best_step: int = 0
    since_best: int = 0  # evaluations after the best one

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> History:
        made = cls()
        for row in rows:
            made = made.with_row(row)
        return made

    def improves(self, loss: float) -> bool:
        return loss < self.best

    def with_row(self, row: Mapping[str, Any]) -> History:
        steps, loss = self.steps | {row["step"]}, row["eval_loss"]
        if self.improves(loss):
            return History(steps, loss, row["step"], 0)
        return History(steps, self.best, self.best_step, self.since_best + 1)
