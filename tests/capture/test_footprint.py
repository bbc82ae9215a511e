"""The footprint measured on fake tensors equals what the real allocator sees."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lohan.capture.blocks import cut
from lohan.capture.footprint import measure
from lohan.capture.workspaces import CUDNN, EFFICIENT, FLASH, attention_workspace

BATCH, SEQ = 4, 128
CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        use_cache=False,
    ),
    "gpt2": GPT2Config(
        n_embd=128,
        n_layer=2,
        n_head=4,
        vocab_size=500,
        n_positions=SEQ,
        use_cache=False,
        resid_pdrop=0.1,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    ),
}
LAYER = {"llama": "model.layers.1", "gpt2": "transformer.h.1"}


def allocated_peak(work) -> int:
    """Return the peak bytes of torch's allocator during `work`, beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = work()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def real_peak(model, name, batch, micro_batch) -> int:
    """Return the peak of forward and backward of one real block on a slice of the batch."""
    layer, calls = model.get_submodule(name), []
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**batch)
    handle.remove()
    args, kwargs = calls[0]
    x = args[0][:micro_batch].clone().requires_grad_()
    kwargs = {
        key: value[:micro_batch]
        if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == BATCH
        else value
        for key, value in kwargs.items()
    }

    def work():
        out = layer(x, *args[1:], **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.empty_like(out))
        return out

    work()
    model.zero_grad()
    x.grad = None
    return allocated_peak(work)


@pytest.mark.parametrize("micro_batch", [BATCH, 1])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peak_of_a_block_is_the_allocators(kind, micro_batch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).train()
    batch = {"input_ids": torch.randint(0, 500, (BATCH, SEQ))}
    blocks = cut(model)
    actual = measure(model, blocks, batch, micro_batch=micro_batch).sites[LAYER[kind]]
    truth = real_peak(model, LAYER[kind], batch, micro_batch)
    assert actual.peak_bytes == pytest.approx(truth, rel=0.1)
    assert actual.peak_bytes >= 0.98 * truth


def test_inputs_are_counted_once_and_measuring_leaves_no_trace():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).train()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    shapes = {"input_ids": torch.empty((BATCH, SEQ), dtype=torch.long, device="meta")}
    blocks = cut(model)
    actual = measure(model, blocks, shapes, micro_batch=2)
    hidden = BATCH * SEQ * 128 * 4
    # Each layer keeps its own hidden state; positions and rotary tables are shared by both.
    first, second = (actual.sites[f"model.layers.{i}"].input_bytes for i in range(2))
    assert second == hidden < first < 2 * hidden
    assert actual.input_bytes == sum(site.input_bytes for site in actual.sites.values())
    assert torch.equal(torch.get_rng_state(), state)
    after = {name: (id(p), p.detach()) for name, p in model.named_parameters()}
    assert all(after[n][0] == i and torch.equal(after[n][1], v) for n, (i, v) in before.items())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_smaller_micro_batches_need_less_work_and_the_same_inputs():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).train()
    shapes = {"input_ids": torch.empty((BATCH, SEQ), dtype=torch.long, device="meta")}
    blocks = cut(model)
    whole, half, one = (measure(model, blocks, shapes, micro_batch=m) for m in (BATCH, 2, 1))
    assert whole.peak_bytes > half.peak_bytes > one.peak_bytes
    assert whole.input_bytes == half.input_bytes == one.input_bytes


def heads(count: int, keys: int, place: str) -> list[torch.Tensor]:
    """Return gradient, query, key and value of attention: 2 samples of 200 tokens, 40 wide."""
    shapes = [(2, n, 200, 40) for n in (count, count, keys, keys)]
    return [torch.empty(shape, dtype=torch.bfloat16, device=place) for shape in shapes]


@pytest.mark.parametrize("keys", [8, 2])
def test_attention_takes_a_workspace_on_an_accelerator(keys):
    """The workspace of attention backward is counted on an accelerator.

    Flash attention sums the gradients of queries in fp32, in tiles of 128 tokens and 32
    features, with one number for each row. If heads are shared, it computes the gradients of
    keys and values for every head.
    """
    elements = 2 * keys * 200 * 40  # of keys, and of values
    sums = 4 * 2 * 8 * 256 * (64 + 1)
    shared = 0 if keys == 8 else 2 * (8 // keys) * 2 * elements
    assert attention_workspace(FLASH, heads(8, keys, "meta")) == sums + shared
    assert attention_workspace(EFFICIENT, heads(8, keys, "meta")) == 4 * 2 * elements
    assert attention_workspace(CUDNN, heads(8, keys, "meta")) == sums + shared
    assert attention_workspace(FLASH, heads(8, keys, "cpu")) == 0
    assert attention_workspace(torch.ops.aten.mul.Tensor, heads(8, keys, "meta")) == 0
