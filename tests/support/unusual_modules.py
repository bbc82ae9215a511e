"""Modules that do what blocks may do beyond x -> y, and what they must not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 12


class Step(nn.Module):
    """x + tanh(Wx)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Conditioned(nn.Module):
    """A block with two streams, a conditioning vector, a shared table and a mode.

    It takes a dict and returns a dict and a tuple.
    """

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.gate = gate

    def forward(
        self,
        streams: dict[str, torch.Tensor],
        mode: str,
        *,
        condition: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        options: Any = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, str]:
        x, y = streams["x"], streams["y"]
        scale = 1 + self.scale(condition)[:, None]
        x = x + self.gate * torch.tanh(self.one(x * scale) + table[0]) * weight[:, None, None]
        y = y + torch.tanh(self.two(y)) * x.mean(1, keepdim=True) + table[1]
        return {"x": x, "y": y}, (x * y.mean(1, keepdim=True)).mean((1, 2)), mode


class Streams(nn.Module):
    """Two lists of different blocks, one of them nested, around shared conditioning.

    There are as many tokens as samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.condition = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList(Conditioned(0.5 + n) for n in range(3))
        self.nested = nn.ModuleList(nn.ModuleList([Step(), nn.Identity(), Step()]) for _ in "ab")
        self.table = nn.Parameter(0.1 * torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        streams = {"x": self.entry(x), "y": self.entry(x.flip(1))}
        condition, extra = self.condition(c), torch.zeros(())
        table = (self.table, self.table.sin())
        for block in self.blocks:
            streams, each, mode = block(
                streams, "plain", condition=condition, table=table, weight=weight
            )
            assert mode == "plain"
            extra = extra + (each * weight).mean()
        hidden = streams["x"] + streams["y"]
        for first, none, second in self.nested:
            hidden = second(none(first(hidden)))
        return hidden.square().mean() + extra

    @staticmethod
    def data(steps: int) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        return [
            {
                "x": torch.randn(4, 4, WIDTH, generator=g),
                "c": torch.randn(4, WIDTH, generator=g),
                "weight": torch.rand(4, generator=g),
            }
            for _ in range(steps)
        ]


class Rebinding(Step):
    """Gives its weight other memory in every call, as `module.to(dtype)` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data.clone()
        return super().forward(x)


class Plain(nn.Module):
    """Blocks of one kind between two projections; `outside` names what is read outside of them."""

    def __init__(self, block: Any = Step, *, outside: str = "", inner: Any = None) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.exit = nn.Linear(WIDTH, 2)
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.outside == "module":
            hidden = hidden + self.blocks[1].linear(x)
        if self.outside == "parameter":
            hidden = hidden @ self.entry.weight.T
        return self.exit(hidden).square().mean()

    @staticmethod
    def data(steps: int, *, samples: int = 4) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        return [{"x": torch.randn(samples, 5, WIDTH, generator=g)} for _ in range(steps)]


class Normed(nn.Module):
    """BatchNorm over samples and tokens: statistics that change, samples that mix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


class Centred(Step):
    """Takes half the mean over all samples away: they mix, and no shape shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 0.5 * x.mean(0)


class SequenceFirst(nn.Module):
    """Attention over the first dimension: tokens come first here, samples second."""

    def __init__(self) -> None:
        super().__init__()
        # The gradient of a key bias is zero in exact arithmetic; Adam would update it by rounding.
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Spectral(nn.Module):
    """Each forward moves a vector on which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("direction", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            moved = self.linear.weight @ self.direction
            self.direction = moved / moved.norm()
        return x + torch.tanh(self.linear(x) * (self.linear.weight @ self.direction))


class Counting(nn.Module):
    """Counts its calls in a buffer, in place, and in an attribute; its result depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.count += 1
        return x + torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls + 0.2 * self.count)


class Sharing(nn.Module):
    """Blocks that write into a mapping which all of them get, and read what others wrote.

    The model chooses its path by integers, and counts its calls as its blocks do.
    """

    def __init__(self, kind: Any = dict) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Writer() for _ in range(3))
        self.kind, self.seen = kind, nn.Buffer(torch.zeros(2, dtype=torch.long))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.seen[0] += 1
        self.seen = self.seen + 1
        hidden, shared = self.entry(x[rows.nonzero()[:, 0]]), self.kind()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, number, shared=shared)
        return hidden.square().mean() + shared["first"][1].sin().mean() * self.seen.sum()

    @staticmethod
    def data(steps: int) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        rows = torch.tensor([1, 0, 1, 1, 1])
        return [{"x": torch.randn(5, 3, WIDTH, generator=g), "rows": rows} for _ in range(steps)]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int, *, shared: Any) -> torch.Tensor:
        if number == 0:
            shared["first"] = torch.tanh(self.key(x)), self.value(x)
        if number == 1:
            shared["second"] = shared["first"][0] + self.key(x)
        extra = shared["second"] if number == 2 else shared["first"][1]
        return x + torch.tanh(self.value(x)) * extra
