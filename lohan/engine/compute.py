"""How fast this machine computes: a Llama-shaped block, a token head, and AdamW on chunks.

Compute runs on the device that a run will use, behind the same seam, on weights in its memory and
in the type that it computes in; the update is the optimizer's own, on state in a host pool. So what
is measured is what a run will see. Several sets of weights take turns: none of them stays in the
caches from one use to the next, as in a model of many blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import torch
from torch.nn import functional as fn

from lohan.capture.tensors import dtype_of
from lohan.device.base import CpuDevice, Device
from lohan.engine.optimizer import StepScalars, update_chunk
from lohan.engine.pool import HostPool
from lohan.model.families import gated_block
from lohan.model.layout import Group, TensorSpec
from lohan.model.shapes import BlockShape
from lohan.model.state import FLOAT, MODES, chunks
from lohan.optim import AdamW

LONGEST = 1024  # tokens of one sequence; more come as several
ROTATED, SMALL = 10000.0, 1e-6
Point = tuple[float, float]


@dataclass(frozen=True)
class Sizes:
    """Of the block and the head that stand for a model's."""

    hidden: int = 1024
    inner: int = 2816
    heads: int = 16
    vocabulary: int = 8192
    copies: int = 4  # of weights and state
    chunk_params: int = 2**22


@dataclass(frozen=True)
class Weights:
    norm1: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    norm2: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return list(vars(self).values())


class Figure:
    """What something takes, measured in several goes: the speed of a machine that others use too
    changes within seconds."""

    def __init__(self, run: Callable[[], float]) -> None:
        """`run` says what it took."""
        self._run = run
        self._taken: list[float] = []

    def measure(self, seconds: float) -> None:
        """At least two runs and so many seconds. The very first run pays for what is set up once;
        it counts only where it is long enough not to matter."""
        taken: list[float] = []
        if not self._taken and (first := self._run()) > seconds:
            taken.append(first)
        while len(taken) < 2 or sum(taken) < seconds:
            taken.append(self._run())
        self._taken += taken

    @property
    def median_s(self) -> float:
        return median(self._taken)


def repeated(run: Callable[[], float], *, seconds: float) -> float:
    """Measured in one go."""
    figure = Figure(run)
    figure.measure(seconds)
    return figure.median_s


def computed_s(device: Device, run: Callable[[], object]) -> float:
    """Seconds until the device has done what `run` gives it."""
    start = time.perf_counter()
    with device.computing():
        run()
    device.mark().synchronize()
    return time.perf_counter() - start


class BlockProbe:
    """A decoder block, forward and backward, on weights that take turns."""

    def __init__(self, sizes: Sizes, device: Device | None = None) -> None:
        self._sizes, self._device = sizes, device or CpuDevice()
        self._dtype = dtype_of(MODES[self._device.mode])
        h, inner = sizes.hidden, sizes.inner
        self.shape: BlockShape = gated_block(
            parameters=4 * h * h + 3 * h * inner + 2 * h, hidden=h, queries=h, keys=h, inner=inner
        )
        self._weights: Iterator[Weights] = cycle([self._made() for _ in range(sizes.copies)])
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.backward_s(1)  # the first one of a process also starts autograd's threads

    def _memory(self, count: int) -> torch.Tensor:
        """Bytes where compute reads them."""
        if self._device.linked:
            return self._device.allocate(count)
        return torch.from_numpy(self._device.host_memory(count))

    def _made(self) -> Weights:
        h, inner = self._sizes.hidden, self._sizes.inner
        shapes = [(h,), (h, h), (h, h), (h, h), (h, h), (h,), (inner, h), (inner, h), (h, inner)]
        flat = self._memory(self.shape.parameters * self._dtype.itemsize).view(self._dtype)
        parts, at = [], 0
        for shape in shapes:
            count = torch.Size(shape).numel()
            parts.append(flat[at : at + count].view(shape).normal_(std=0.02))
            at += count
        return Weights(*parts)

    def flops(self, tokens: int) -> float:
        return tokens * self.shape.flops_at(min(tokens, LONGEST))

    def forward_s(self, tokens: int) -> float:
        x, weights = self._input(tokens), next(self._weights)

        def run() -> None:
            with torch.no_grad():
                self._run(x, weights)

        return computed_s(self._device, run)

    def backward_s(self, tokens: int) -> float:
        """Of backward alone; the forward before it is not counted."""
        x, weights = self._input(tokens).requires_grad_(), next(self._weights)
        leaves = [leaf.detach().requires_grad_() for leaf in weights.leaves()]
        made: list[torch.Tensor] = []
        computed_s(self._device, lambda: made.append(self._run(x, Weights(*leaves))))
        grad = torch.ones_like(made[0])
        return computed_s(self._device, lambda: torch.autograd.backward(made[0], grad))

    def _input(self, tokens: int) -> torch.Tensor:
        sequences = -(-tokens // LONGEST)
        made = torch.randn(sequences, tokens // sequences, self._sizes.hidden)
        return made.to(self._device.torch_device, self._dtype)

    def _run(self, x: torch.Tensor, w: Weights) -> torch.Tensor:
        b, s, h = x.shape
        heads = self._sizes.heads
        cos, sin = self._rotation(s)

        def split(y: torch.Tensor, *, rotate: bool) -> torch.Tensor:
            y = y.view(b, s, heads, h // heads).transpose(1, 2)
            if not rotate:
                return y
            left, right = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-right, left), dim=-1) * sin

        y = _normed(x, w.norm1)
        q, k = split(fn.linear(y, w.q), rotate=True), split(fn.linear(y, w.k), rotate=True)
        v = split(fn.linear(y, w.v), rotate=False)
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + fn.linear(mixed.transpose(1, 2).reshape(b, s, h), w.o)
        y = _normed(x, w.norm2)
        return x + fn.linear(fn.silu(fn.linear(y, w.gate)) * fn.linear(y, w.up), w.down)

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length not in self._tables:
            half = self._sizes.hidden // self._sizes.heads // 2
            rates = ROTATED ** (-torch.arange(half) / half)
            angles = torch.outer(torch.arange(length), torch.cat((rates, rates)))
            place = self._device.torch_device, self._dtype
            self._tables[length] = angles.cos().to(*place), angles.sin().to(*place)
        return self._tables[length]


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square, operation by operation as in most models: each has a price of its own."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + SMALL))


class BlockPoint:
    """A block at so many tokens: FLOP/s of forward and of backward, which counts as twice the
    work."""

    def __init__(self, probe: BlockProbe, tokens: int) -> None:
        self._flops, self._tokens = probe.flops(tokens), float(tokens)
        self._forward = Figure(lambda: probe.forward_s(tokens))
        self._backward = Figure(lambda: probe.backward_s(tokens))

    def measure(self, seconds: float) -> None:
        self._forward.measure(seconds)
        self._backward.measure(seconds)

    @property
    def forward(self) -> Point:
        return self._tokens, self._flops / self._forward.median_s

    @property
    def backward(self) -> Point:
        return self._tokens, 2 * self._flops / self._backward.median_s

    def least_s(self, rate: float) -> float:
        """About how long a go takes at least: two forwards, and two with a backward."""
        return 8 * self._flops / rate


def head_flops(sizes: Sizes, tokens: int) -> float:
    """Of logits, loss and both gradients of one slice of tokens."""
    return 6.0 * sizes.hidden * sizes.vocabulary * tokens


def head_figure(sizes: Sizes, tokens: int, device: Device) -> Figure:
    place, dtype = device.torch_device, dtype_of(MODES[device.mode])
    weight = torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02).to(place, dtype)
    weight.requires_grad_()
    labels = torch.randint(sizes.vocabulary, (tokens,)).to(place)

    def run() -> float:
        x = torch.randn(tokens, sizes.hidden).to(place, dtype).requires_grad_()
        weight.grad = None

        def slice_of_tokens() -> None:
            logits = fn.linear(x, weight).float()
            fn.cross_entropy(logits, labels, reduction="sum").backward()

        return computed_s(device, slice_of_tokens)

    return Figure(run)


def adam_figure(sizes: Sizes, mode_name: str) -> Figure:
    """One update of a chunk in host memory."""
    mode, count = MODES[mode_name], sizes.chunk_params
    group = Group("probe", (TensorSpec("weight", (count,), 0, count, True, True),), count)
    (chunk,) = chunks(group, count)
    each = count * (mode.weight_bytes + FLOAT) + mode.state_size(count)
    pool = HostPool(sizes.copies * each)
    sets = []
    for _ in range(sizes.copies):
        weights = pool.allocate("weights", count * mode.weight_bytes).tensor(dtype_of(mode))
        grad = pool.allocate("gradient", count * FLOAT).tensor(torch.float32)
        state = pool.allocate("state", mode.state_size(count)).tensor(torch.uint8)
        sets.append((weights.normal_(), grad.normal_(), state.zero_()))
    turns = cycle(sets)
    scalars = StepScalars(lr=1e-4, update=1, grad_scale=1.0, missed={})

    def run() -> float:
        weights, grad, state = next(turns)
        start = time.perf_counter()
        update_chunk(
            group, chunk, weights=weights, state=state, grad_of=lambda piece: grad,
            optimizer=AdamW(), mode=mode, scalars=scalars,
        )  # fmt: skip
        return time.perf_counter() - start

    for _ in sets:
        run()
    return Figure(run)
