"""Frozen parameters are only read: no state, no gradients, no updates, and PyTorch's result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

import lohan
from lohan.model.layout import RESIDENT
from tests.support.models import (
    SMALL_SIZES,
    assert_close,
    assert_same,
    attached,
    batches,
    lohan_run,
    master_weights,
    plain_run,
    small_model,
    stored_bytes,
)

STEPS = 10
# What stays as it is: names of parameters that begin or end like this.
PATTERNS = {
    "first blocks": ("model.embed_tokens", "model.layers.0", "model.layers.1.self_attn"),
    "all but norms": (".proj.weight", "_proj.weight", "embed_tokens.weight", "lm_head.weight"),
    "middle and head": ("model.layers.1.", "lm_head", "model.norm"),
}


def freeze(model: nn.Module, which: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        frozen = name.startswith(PATTERNS[which]) or name.endswith(PATTERNS[which])
        parameter.requires_grad_(not frozen)
    return model


def partly(which: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    return freeze(small_model("llama", dtype=dtype), which)


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("first blocks", {}),
        ("first blocks", {"update_mode": "serial", "micro_batch": 2}),
        ("all but norms", {"update_mode": "naive", "micro_batch": 3}),
        ("middle and head", {"update_mode": "optimized", "activations": "all"}),
    ],
)
def test_equals_in_memory_adamw(which, options, tmp_path):
    model, data = partly(which), batches(STEPS, batch=4, seq=16)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    expected_losses, expected = plain_run(model, data)
    budget = lohan.Budget(host="4MiB", ssd=[tmp_path])
    losses, weights = lohan_run(model, data, tmp_path, batch=data[0], budget=budget, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    moved = {name for name in start if not torch.equal(weights[name], start[name])}
    assert moved == trained


@pytest.mark.parametrize(
    ("which", "clip"),
    [
        ("first blocks", 0.5),
        pytest.param("middle and head", 0.0, marks=pytest.mark.slow),
        pytest.param("all but norms", 0.0, marks=pytest.mark.slow),
    ],
)
def test_every_mode_gives_the_bits_of_one_after_the_other(which, clip, tmp_path):
    data = batches(3, batch=3, seq=12)
    collected = []
    for number, options in enumerate(
        [{"overlap": False}, {}, {"update_mode": "serial"}, {"device": "emulated"}]
    ):
        memory = "64MiB" if "device" in options else None
        budget = lohan.Budget(host="4MiB", device=memory, ssd=[tmp_path / str(number)])
        run = lohan_run(
            partly(which), data, tmp_path, batch=data[0], budget=budget, clip=clip, **options
        )
        collected.append(run)
    for losses, weights in collected[1:]:
        assert losses == collected[0][0]
        assert_same(weights, collected[0][1])


def test_frozen_groups_have_no_state_and_no_writes(tmp_path):
    """The ledger equals the files on SSD and the bytes that a step moves."""
    data = batches(3, batch=2, seq=12)
    model = partly("first blocks")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    with attached(model, tmp_path, batch=data[0]) as session:
        regions = {region.key: region for region in session.store.layout.regions}
        groups = session.executor.blocks.groups
        for group in groups:
            assert regions[f"w/{group.key}"].fixed is group.frozen
            assert (f"s/{group.key}" in regions) is not group.frozen
        assert [g.key for g in groups if g.frozen and g.key.startswith("model.layers")] == [
            "model.layers.0/frozen",
            "model.layers.1/frozen",
        ]
        ledger = {e.owner: e.bytes for e in session.plan.ledger if e.tier == "ssd"}
        assert ledger["frozen weights"] == pytest.approx(4 * frozen, rel=0.1)
        assert ledger["weights and state x2"] == pytest.approx(24 * trained, rel=0.1)
        for batch in data:
            session.flush()
            before = session.counters.bytes_written
            model(**batch).loss.backward()
            session.flush()
            written = session.counters.bytes_written - before
            assert written == ledger["weights and state x2"] / 2
        files = session.store.dirs[0].glob("*.bin")
        assert sum(file.stat().st_size for file in files) == sum(ledger.values())


def test_backward_does_not_reach_blocks_below_the_first_that_learns(tmp_path):
    model, data = partly("first blocks"), batches(4, batch=2, seq=12)
    with attached(model, tmp_path, batch=data[0], trace=True) as session:
        for batch in data:
            model(**batch).loss.backward()
        session.flush()
        sites = {site.name: number for number, site in enumerate(session.executor.blocks.sites)}
        names = [span.name for span in session.executor.trace.take_step()]
    still = [sites["model.embed_tokens"], sites["model.layers.0"]]
    for site in sites.values():
        assert names.count(f"F{site}") == len(data)
        assert names.count(f"B{site}") == (0 if site in still else len(data))


def test_resumed_run_is_the_uninterrupted_one(tmp_path):
    data = batches(6, batch=2, seq=12)
    _, expected = lohan_run(partly("middle and head"), data, tmp_path / "whole")
    first = partly("middle and head")
    with attached(first, tmp_path / "parts"):
        for batch in data[:3]:
            first(**batch).loss.backward()
    second = partly("middle and head")
    with attached(second, tmp_path / "parts", resume=True) as session:
        assert session.step == 3
        for batch in data[3:]:
            second(**batch).loss.backward()
        assert_same(master_weights(session), expected)


def test_resume_wants_the_same_parameters_frozen(tmp_path):
    attached(partly("first blocks"), tmp_path).close()
    with pytest.raises(lohan.LohanError, match="holds another model"):
        attached(partly("middle and head"), tmp_path, resume=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_that_are_frozen_are_those_of_torch(dtype, tmp_path):
    wide = partly("middle and head")
    start = {name: p.detach().clone() for name, p in wide.named_parameters()}
    model = freeze(small_model("llama").to(dtype), "middle and head")
    data = batches(3, batch=2, seq=12)
    with attached(model, tmp_path) as session:
        for batch in data:
            model(**batch).loss.backward()
        weights = master_weights(session)
    for name, parameter in wide.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(weights[name], start[name].to(dtype).float()), name


def test_an_error_in_a_step_leaves_frozen_weights_as_they_are(tmp_path):
    model, data = partly("all but norms"), batches(3, batch=2, seq=12)
    with attached(model, tmp_path) as session:
        model(**data[0]).loss.backward()
        before = stored_bytes(session)
        loss = model(**data[1]).loss
        hook = model.model.layers[0].mlp.register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        hook.remove()
        assert stored_bytes(session) == before
        model(**data[1]).loss.backward()
        assert session.step == 2


def _fail(*_):
    raise RuntimeError("on purpose")


class Loose(nn.Module):
    """A model with resident parameters of both kinds, and a frozen block around a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 16)
        self.scale = nn.Parameter(torch.randn(16))
        self.shift = nn.Parameter(torch.randn(16), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[0].bias = self.scale
        self.blocks.requires_grad_(False)
        self.scale.requires_grad_(True)
        self.entry.requires_grad_(False)

    def forward(self, x, target):
        x = self.entry(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x * self.scale + self.shift, target)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_loose_parameters_of_both_kinds(micro_batch, tmp_path):
    torch.manual_seed(1)
    model = Loose()
    data = [{"x": torch.randn(4, 3, 10), "target": torch.randn(4, 3, 16)} for _ in range(5)]
    expected_losses, expected = plain_run(model, data)
    with attached(model, tmp_path, micro_batch=micro_batch) as session:
        kinds = {g.key: g.frozen for g in session.executor.blocks.groups if g.resident}
        assert kinds == {RESIDENT: False, f"{RESIDENT}/frozen": True}
        losses = []
        for batch in data:
            loss = model(**batch)
            loss.backward()
            losses.append(loss.item())
        weights = master_weights(session)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


@pytest.mark.parametrize(("name", "tied"), [("embed_tokens", True), ("lm_head", False)])
def test_trains_a_single_layer(name, tied, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL_SIZES, tie_word_embeddings=tied, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).train().requires_grad_(False)
    next(m for n, m in model.named_modules() if n.endswith(name)).requires_grad_(True)
    data = batches(5, batch=3, seq=12)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=2)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_trains_only_the_head_of_a_classifier_past_a_new_plan(tmp_path):
    """The plan is checked after the third step, when nothing below the head has an update."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL_SIZES, num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("score"))
    data = [
        {"input_ids": torch.randint(1, config.vocab_size, (4, 16)), "labels": torch.arange(4) % 3}
        for _ in range(6)
    ]
    plain = copy.deepcopy(model)
    rule = torch.optim.AdamW(plain.score.parameters(), lr=1e-2, weight_decay=0.0)
    optimizer, budget = lohan.AdamW(lr=1e-2), lohan.Budget(host="4MiB", ssd=[tmp_path])
    with lohan.attach(model, optimizer=optimizer, budget=budget, batch=data[0]) as session:
        for batch in data:
            loss, expected = model(**batch).loss, plain(**batch).loss
            loss.backward()
            expected.backward()
            rule.step()
            rule.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert session.step == len(data)


def test_refuses_a_model_whose_parameters_are_all_frozen(tmp_path):
    with pytest.raises(lohan.LohanError, match="every parameter is frozen"):
        attached(small_model("llama").requires_grad_(False), tmp_path)
    assert not any(tmp_path.iterdir())
