"""One block of a small model with the call that the model makes of it, slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from lohan.capture.saved_call import SavedCall
from lohan.capture.selective_checkpoint import SavedOps, SavePlan, recompute_with, run_and_save
from lohan.capture.slicing import find_cut

SEQ = 24
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "use_cache": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "gpt2": lambda: GPT2Config(  # dropout as it comes: 0.1, in attention too
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=SEQ, use_cache=False
    ),
}


def call_made(model: nn.Module, block: nn.Module, batch: dict[str, Any]) -> SavedCall:
    """Return the call that the model makes of one of its modules."""
    calls: list[SavedCall] = []
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(SavedCall("block", args, kwargs)), with_kwargs=True
    )
    with torch.random.fork_rng(devices=[]):
        model(**batch)
    handle.remove()
    calls[0].detach()
    calls[0].cut = find_cut(block, calls[0], block, values=True)
    return calls[0]


def second_block(model: nn.Module) -> nn.Module:
    lists = (child for child in model.modules() if isinstance(child, nn.ModuleList))
    return next(lists)[1]


def small_block(
    kind: str, *, batch: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, SavedCall]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype).train()
    block = second_block(model)
    return block, call_made(model, block, {"input_ids": torch.randint(0, 61, (batch, SEQ))})


@dataclass
class CallResult:
    gradients: list[torch.Tensor]
    random: torch.Tensor  # state behind the last recomputation
    kept_bytes: int


def forward_and_backward(
    block: nn.Module,
    call: SavedCall,
    *,
    micro_batch: int,
    save_plan: Callable[[int], SavePlan | None],
    between: Callable[[SavedOps], None] = lambda kept: None,
    counting: Any = None,
) -> CallResult:
    """Run a call as the executor does: forward of all slices, then recomputation and backward.

    `save_plan` returns the plan for a slice of that many samples; None recomputes everything.
    """
    torch.manual_seed(5)
    block.zero_grad()
    slices, left = call.slices(micro_batch), []
    with torch.no_grad():
        for part in slices:
            _, args, kwargs = call.restore(part, grad=False)
            state, wanted = torch.get_rng_state(), save_plan(part.stop - part.start)
            if wanted is None:
                left.append((state, None))
                block(*args, **kwargs)
            else:
                _, kept = run_and_save(lambda a=args, k=kwargs: block(*a, **k), wanted)
                left.append((state, kept))
    held = sum(t.nbytes for _, kept in left if kept is not None for t in kept.tensors)
    gradients: list[torch.Tensor] = []
    for part, (state, kept) in zip(slices, left, strict=True):
        torch.set_rng_state(state)
        tensors, args, kwargs = call.restore(part, grad=True)
        with counting or nullcontext():
            if kept is None:
                out = block(*args, **kwargs)
                out = out[0] if isinstance(out, tuple) else out
            else:
                between(kept)
                out = recompute_with(lambda a=args, k=kwargs: block(*a, **k), kept)[0]
        after = torch.get_rng_state()
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
        out.backward(grad)
        gradients += [tensor.grad for tensor in tensors if tensor.grad is not None]
    gradients += [p.grad.clone() for p in block.parameters() if p.grad is not None]
    return CallResult(gradients, after, held)


def assert_same(one: CallResult, other: CallResult) -> None:
    """Bit for bit, the random state included."""
    assert len(one.gradients) == len(other.gradients) > 1
    assert all(map(torch.equal, one.gradients, other.gradients))
    assert torch.equal(one.random, other.random)
