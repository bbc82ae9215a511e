"""PEFT adapters over a base that streams from SSD: trained, resumed and exported as with PEFT."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lohan
from lohan.checkpoint.adapters import add_lora
from lohan.optim import Lora
from tests.support.every_model import build
from tests.support.models import (
    FAMILY_CONFIGS,
    FAMILY_VOCAB,
    adapted,
    assert_close,
    assert_same,
    attached,
    batches,
    lohan_run,
    master_weights,
    plain_run,
    save_model,
    small_model,
    train_steps,
)

peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")

STEPS = 10


@pytest.mark.parametrize(
    ("kind", "lora", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"update_mode": "serial", "micro_batch": 2}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}, {}),
        ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, {"micro_batch": 3}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"], "bias": "all"}, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", {}, {"overlap": False}),
                ("llama", {}, {"update_mode": "naive", "activations": "all"}),
                ("qwen3", {}, {"update_mode": "optimized", "clip": 100.0}),
                ("llama", {"use_dora": True, "use_rslora": True}, {}),
            )
        ),
    ],
)
def test_equals_in_memory_adamw(kind, lora, options, tmp_path):
    model, data = adapted(small_model(kind), **lora), batches(STEPS, batch=4, seq=16)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    expected_losses, expected = plain_run(model, data)
    budget = lohan.Budget(host="6MiB", ssd=[tmp_path])
    losses, weights = lohan_run(model, data, tmp_path, batch=data[0], budget=budget, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    assert {name for name in start if not torch.equal(weights[name], start[name])} == trained


def test_dropout_is_the_same_with_and_without_overlap(tmp_path):
    data, collected = batches(3, batch=3, seq=12), []
    for number, options in enumerate([{"overlap": False}, {"activations": "all"}]):
        model = adapted(small_model("llama"), lora_dropout=0.3)
        torch.manual_seed(11)
        place = tmp_path / str(number)
        collected.append(lohan_run(model, data, place, batch=data[0], **options))
    assert collected[0][0] == collected[1][0]
    assert_same(collected[0][1], collected[1][1])


def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "base", FAMILY_CONFIGS["qwen2-tied"])
    return tmp_path / "base"


def tokens(steps: int):
    return batches(steps, batch=2, seq=12, vocab=FAMILY_VOCAB)


def test_base_from_a_folder_adapter_resumed_and_exported(tmp_path):
    """The base never is in memory as a whole: weights come from the folder, adapters start new."""
    base, data = folder(tmp_path), tokens(6)

    def fresh() -> nn.Module:
        torch.manual_seed(3)
        return adapted(lohan.load(base))

    whole = fresh()
    assert all(parameter.is_meta for parameter in whole.parameters())
    with attached(whole, tmp_path / "whole", batch=data[0]) as session:
        start = master_weights(session)
        expected = train_steps(whole, data)
        last = master_weights(session)
        groups = session.executor.blocks.groups
        small = [g.key for g in groups if g.key.endswith(("layers.0", "layers.1"))]
        assert set(small) <= set(
            session.plan.host_cached_weights
        )  # next to the base of their block
    drawn = {n: w for n, w in start.items() if "lora_A" in n}
    assert drawn and all(0 < w.abs().max() <= 1 / w.shape[1] ** 0.5 for w in drawn.values())
    assert len({w.sum().item() for w in drawn.values()}) == len(drawn)
    assert all(not w.any() for n, w in start.items() if "lora_B" in n)

    first = fresh()
    with attached(first, tmp_path / "parts"):
        losses = train_steps(first, data[:3])
    second = adapted(lohan.load(base))
    with attached(second, tmp_path / "parts", resume=True) as session:
        losses += train_steps(second, data[3:])
        assert losses == expected
        assert_same(master_weights(session), last)
        assert session.export(tmp_path / "adapter") == tmp_path / "adapter"
        with torch.no_grad():
            logits = second(input_ids=data[0]["input_ids"]).logits

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    collected = dict(loaded.named_parameters())
    for name, weight in last.items():
        assert torch.equal(collected[name].detach(), weight), name
    with torch.no_grad():
        wanted = loaded(input_ids=data[0]["input_ids"]).logits
    assert torch.allclose(logits, wanted, atol=1e-4)


def test_initial_adapter_depends_on_torchs_seed(tmp_path):
    base, collected = folder(tmp_path), []
    for number, seed in enumerate((3, 3, 4)):
        model = adapted(lohan.load(base))
        torch.manual_seed(seed)
        with attached(model, tmp_path / str(number)) as session:
            collected.append(master_weights(session))
    assert_same(collected[0], collected[1])
    assert any(not torch.equal(collected[0][name], collected[2][name]) for name in collected[0])


def test_adapters_in_memory_over_a_base_that_is_not(tmp_path):
    base, data = folder(tmp_path), tokens(3)
    in_memory = adapted(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    model = adapted(lohan.load(base))
    values = {n: p for n, p in in_memory.named_parameters() if p.requires_grad}
    model.load_state_dict(values, strict=False, assign=True)
    expected_losses, expected = plain_run(in_memory, data)
    losses, weights = lohan_run(model, data, tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_adapter_from_a_folder_is_trained_further(tmp_path):
    base, data = folder(tmp_path), tokens(3)
    in_memory = adapted(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    in_memory.save_pretrained(tmp_path / "adapter")
    expected_losses, expected = plain_run(in_memory, data)
    model = lohan.load(base, adapter=tmp_path / "adapter").train()
    assert {p.is_meta for p in model.parameters() if not p.requires_grad} == {True}
    losses, weights = lohan_run(model, data, tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    with pytest.raises(lohan.LohanError, match=r"holds no adapter_config\.json"):
        lohan.load(base, adapter=base)


def test_16_bit_base_with_fp32_adapters(tmp_path):
    """PEFT keeps adapters in fp32 over a 16-bit base: they become masters of the same precision."""
    model, data = adapted(small_model("llama", dtype=torch.bfloat16)), batches(4, batch=2, seq=12)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    with attached(model, tmp_path) as session:
        assert session.plan.dtype == "bf16"
        first = master_weights(session)
        losses = train_steps(model, data)
        session.export(tmp_path / "adapter", dtype="fp32")
    for name, weight in start.items():
        assert torch.equal(first[name], weight)
    reference = adapted(small_model("llama", dtype=torch.bfloat16))
    with torch.no_grad():
        wanted = reference(**data[0]).loss.item()
    assert losses[0] == pytest.approx(wanted, rel=2**-7)
    assert losses[-1] != losses[0]


def test_trains_with_a_host_budget_smaller_than_the_base(tmp_path):
    data = batches(3, batch=1, seq=8)
    model = adapted(small_model("llama"))
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad) * 4
    budget = lohan.Budget(host=base * 4 // 5, ssd=[tmp_path])
    with attached(model, tmp_path, batch=data[0], budget=budget) as session:
        assert session.plan.weight_slots < 2 * 3
        before = session.counters.bytes_read
        train_steps(model, data)
        session.flush()
        assert session.counters.bytes_read - before > base  # it was not kept


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"use_dora": True}, "DoRA cannot start without the base weights"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' cannot start"),
    ],
)
def test_rejects_adapters_that_need_base_weights_of_a_meta_model(lora, message, tmp_path):
    base = lohan.load(folder(tmp_path))
    try:
        model = adapted(base, **lora)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        pytest.skip("peft itself refuses this on the meta device")
    with pytest.raises(lohan.LohanError, match=message):
        attached(model, tmp_path / "store")


def losses(model: nn.Module, data, step) -> list[float]:
    collected = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        step()
        collected.append(loss.item())
    return collected


@pytest.mark.parametrize(
    "config", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"]
)
def test_virtual_tokens_over_a_base_that_streams(config, tmp_path):
    """Training and saving equal PEFT in memory."""
    more = {"encoder_hidden_size": 16} if config == "PromptEncoderConfig" else {}
    config = getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=4, **more)
    plain = peft.get_peft_model(small_model("llama"), config)
    actual, data = copy.deepcopy(plain), batches(3, batch=2, seq=8)
    learning = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, weight_decay=0.0)
    expected = losses(plain, data, lambda: (optimizer.step(), optimizer.zero_grad()))
    with lohan.attach(
        actual,
        optimizer=lohan.AdamW(lr=1e-2),
        batch=data[0],
        budget=lohan.Budget(host="64MiB", ssd=[tmp_path]),
    ) as session:
        assert losses(actual, data, int) == pytest.approx(expected, rel=1e-5)
        session.export(tmp_path / "ours")
        losses(actual, data[:1], int)
        assert session.step == 4
    plain.save_pretrained(tmp_path / "theirs")
    result, wanted = (
        peft.PeftModel.from_pretrained(small_model("llama"), tmp_path / name)(**data[0]).loss
        for name in ("ours", "theirs")
    )
    assert torch.allclose(result, wanted, rtol=1e-5)


def test_virtual_tokens_over_a_model_without_weights(tmp_path):
    save_model(tmp_path / "base", FAMILY_CONFIGS["llama"])
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(lohan.load(tmp_path / "base"), config)
    data = batches(3, batch=2, seq=8, vocab=FAMILY_VOCAB)
    with lohan.attach(
        model, optimizer=lohan.AdamW(lr=0.1), budget=lohan.Budget(host="64MiB", ssd=[tmp_path])
    ):
        first, *_, last = losses(model, [data[0]] * 4, int)
        assert last < first
    needy = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(lohan.load(tmp_path / "base"), needy)
    with pytest.raises(lohan.LohanError, match="cannot start without the base weights"):
        attached(model, tmp_path / "other")


@pytest.mark.parametrize("options", [{}, {"tiles": 4}])
def test_adapters_on_tensors_of_experts(options, tmp_path):
    from transformers import MixtralConfig

    def experts() -> nn.Module:
        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=131,
            use_cache=False,
        )
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        base = AutoModelForCausalLM.from_config(config)
        return adapted(base, target_modules=["q_proj"], target_parameters=names)

    data, plain = batches(3, batch=2, seq=8), experts()
    learning = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, weight_decay=0.0)
    expected = losses(plain, data, lambda: (optimizer.step(), optimizer.zero_grad()))
    actual = experts()
    with lohan.attach(
        actual,
        optimizer=lohan.AdamW(lr=1e-2),
        batch=data[0],
        budget=lohan.Budget(host="64MiB", ssd=[tmp_path]),
        **options,
    ):
        assert losses(actual, data, int) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(lohan.LohanError, match="ParamWrapper cannot be merged while"):
            actual.merge_and_unload()


def test_adapters_without_a_peft_model_are_refused(tmp_path):
    model = copy.deepcopy(small_model("llama"))
    model.add_adapter(peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(lohan.LohanError, match=r"peft\.get_peft_model instead"):
        attached(model, tmp_path)


def test_state_spaces_get_adapters_on_all_layers_but_the_last():
    """PEFT refuses out_proj of Mamba, and with it `--lora` would be of no use without targets."""
    model = add_lora(build("causal", "mamba2"), Lora(rank=4))
    names = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"in_proj"}
