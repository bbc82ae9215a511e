"""Position-wise parts of blocks run in tiles of tokens, with the gradients of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lohan.capture.casting import cast_inputs
from lohan.capture.tiling import Tiling
from tests.support.models import small_model

WIDTH, TOKENS = 8, 48


class Part(nn.Module):
    """A wide hidden layer, followed by a given function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)
        self.function = function

    def forward(self, x, *more):
        return self.function(self.down(torch.tanh(self.up(x))), *more)


class Block(nn.Module):
    def __init__(self, function, *more) -> None:
        super().__init__()
        self.part, self.more = Part(function), more

    def forward(self, x):
        out = self.part(x, *self.more)
        return x + (out[0] * out[1] if isinstance(out, tuple) else out)


def results_and_gradients(
    block: nn.Module, run, *inputs: torch.Tensor, **more
) -> list[torch.Tensor]:
    """Return the result, and the gradients of inputs and weights."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    block.zero_grad()
    torch.manual_seed(3)
    out = run(*leaves, **more)
    out.pow(2).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in block.parameters())]


def parts_of(forward) -> set[str]:
    return {type(part.module).__name__ for parts in forward._parts.values() for part in parts}


class Averaged(nn.Module):
    """A part that saves much for the gradient of its input and little for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(torch.sigmoid(x)).mean(-1, keepdim=True))


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Averaged()

    def forward(self, x, condition):
        return x + self.part(condition)


def test_parts_do_not_depend_on_which_inputs_take_a_gradient():
    """A first call without gradients would decide about all that follow."""
    inputs, collected = [torch.randn(2, TOKENS, WIDTH) for _ in range(2)], []
    for learns in (True, False):
        block = Conditioned()
        forward = Tiling(20).forward(block, block.forward)
        with torch.set_grad_enabled(learns):
            forward(*(tensor.clone().requires_grad_(learns) for tensor in inputs))
        collected.append(parts_of(forward))
    assert collected == [{"Averaged"}, {"Averaged"}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_block_in_tiles_has_the_gradients_of_the_whole(dtype):
    """A block in tiles has the gradients of the whole block.

    In fp64 they differ only by the order of a sum. In bf16, sums over tiles round once, as
    those over tokens do.
    """
    model = small_model("llama", dtype=dtype)
    block = model.model.layers[0]
    x = torch.randn(2, TOKENS, 64, dtype=dtype)
    more = {"position_embeddings": model.model.rotary_emb(x, torch.arange(TOKENS)[None])}
    forward = Tiling(20).forward(block, block.forward)
    whole, tiled = (
        results_and_gradients(block, block, x, **more),
        results_and_gradients(block, forward, x, **more),
    )
    assert parts_of(forward) == {"LlamaRMSNorm", "LlamaMLP"}  # and not attention
    for one, other in zip(whole, tiled, strict=True):
        close = 1e-13 if dtype == torch.float64 else 1e-2
        assert (one - other).norm() <= close * one.norm()
    assert vars(block.mlp).get("forward") is None


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (lambda x: x, ()),
        (lambda x: x.flip(-1), ()),
        (lambda x, t: (x, torch.sigmoid(t)), (torch.randn(2, 1, WIDTH),)),  # of all tokens
        (lambda x, t: x * t, (torch.randn(2, TOKENS, WIDTH),)),
    ],
    ids=["plain", "channels", "result of all tokens", "two inputs"],
)
def test_tiles_functions_that_treat_tokens_alike(function, more):
    block = Block(function, *more)
    x = torch.randn(2, TOKENS, WIDTH)
    forward = Tiling(20).forward(block, block.forward)
    whole, tiled = results_and_gradients(block, block, x), results_and_gradients(block, forward, x)
    assert parts_of(forward) == {"Part"}
    for one, other in zip(whole, tiled, strict=True):
        torch.testing.assert_close(one, other)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(1),
        lambda x: x.flip(1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x + torch.arange(x.shape[1])[:, None],
        lambda x: x / x.shape[1],
        lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
        lambda x: torch.roll(x, -1, 1),
        lambda x: x.sum(1, keepdim=True).expand_as(x),
        lambda x: x + 1e-6 * x.mean(1, keepdim=True),
        Counts(),
    ],
    ids=[
        "sums",
        "order",
        "mean",
        "positions",
        "count",
        "attention",
        "next",
        "same",
        "faint",
        "counter",
    ],
)
def test_does_not_tile_functions_that_mix_tokens(function):
    block = Block(function)
    x = torch.randn(2, TOKENS, WIDTH)
    forward = Tiling(20).forward(block, block.forward)
    whole, tiled = results_and_gradients(block, block, x), results_and_gradients(block, forward, x)
    assert "Part" not in parts_of(forward)
    assert all(map(torch.equal, whole, tiled))


def test_detects_mixing_of_distant_tokens_with_the_real_tile_size():
    """Each token meets the one sixteen behind it: two tiles of eight do not show that."""
    block = Block(lambda x: x + nn.functional.pad(x, (0, 0, 16, 0))[:, : x.shape[1]])
    x = torch.randn(2, TOKENS, WIDTH)
    forward = Tiling(40).forward(block, block.forward)
    whole = results_and_gradients(block, block, x)
    with pytest.warns(RuntimeWarning, match="tiles are off for Part: it gives other results"):
        tiled = results_and_gradients(block, forward, x)
    assert all(map(torch.equal, whole, tiled))


def test_dropout_is_the_same_in_every_run_of_a_tile():
    """The gradient is the one of the results that forward gave."""
    block = Block(nn.Dropout(0.5)).double()
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    forward = Tiling(16).forward(block, block.forward)

    def run(x):
        torch.manual_seed(7)
        return forward(x)

    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    out = run(leaf)
    after = torch.get_rng_state()
    (out * x).sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    step = 1e-6 * torch.randn_like(x)
    slope = ((run(x + step) - run(x - step)) * x).sum() / 2
    torch.testing.assert_close((leaf.grad * step).sum(), slope, rtol=1e-6, atol=0)


def test_autocast_of_forward_is_that_of_backward():
    block = Block(lambda x: x.float())
    x = torch.randn(1, TOKENS, WIDTH)
    forward = Tiling(16).forward(block, block.forward)

    def cast(run):
        def inside(*inputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(*inputs)

        return inside

    whole, tiled = (
        results_and_gradients(block, cast(block), x),
        results_and_gradients(block, cast(forward), x),
    )
    for one, other in zip(whole, tiled, strict=True):
        assert (one - other).norm() <= 1e-2 * one.norm()


def test_sums_of_many_tiles_round_once():
    """A sum of so many terms in bf16 itself would lose most of them."""
    block = Block(lambda x: x).bfloat16()
    x = torch.rand(1, 512, WIDTH, dtype=torch.bfloat16)
    whole = results_and_gradients(block, block, x)
    tiled = results_and_gradients(block, Tiling(1).forward(block, block.forward), x)
    for one, other in zip(whole, tiled, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * one.float().norm()


@pytest.mark.parametrize("part", [nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
def test_parts_that_save_nothing_of_their_own_run_as_a_whole(part):
    """Tiles would save what is saved anyway."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH))
    forward = Tiling(16).forward(block, block.forward)
    results_and_gradients(block, forward, torch.randn(1, TOKENS, WIDTH))
    assert parts_of(forward) == set()


def test_layers_that_cast_their_inputs_run_in_tiles():
    block = Block(lambda x: x)
    plain = Tiling(16).forward(block, block.forward)
    results_and_gradients(block, plain, torch.randn(1, TOKENS, WIDTH))
    cast_inputs(block)
    forward = Tiling(16).forward(block, block.forward)
    results_and_gradients(block, forward, torch.randn(1, TOKENS, WIDTH))
    assert parts_of(forward) == parts_of(plain) != set()


def test_a_hook_inside_a_part_sees_all_tokens():
    """Router logits are collected through such hooks, with their gradients."""
    block = Block(lambda x: x)
    seen = []
    block.part.up.register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
    results_and_gradients(
        block, Tiling(16).forward(block, block.forward), torch.randn(1, TOKENS, WIDTH)
    )
    assert set(seen) == {TOKENS}
