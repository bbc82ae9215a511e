"""What a model has learnt stays its own: attached anew, saved, copied and merged from its store."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lohan
from lohan.util.system import host_memory_bytes
from tests.models import batches, small_model


def attached(model: nn.Module, place: Path, *, lr: float = 1e-2, **options: Any) -> lohan.Session:
    batch = batches(1, batch=2, seq=8)[0]
    return lohan.attach(
        model, optimizer=lohan.AdamW(lr=lr), budget=lohan.Budget(host="64MiB", ssd=[place]),
        batch=batch, **options,
    )  # fmt: skip


def learn(model: nn.Module, steps: int = 2) -> list[float]:
    losses = []
    for batch in batches(steps, batch=2, seq=8):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def stored(session: lohan.Session, out: Path) -> dict[str, torch.Tensor]:
    session.export(out, overwrite=True, dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    return {name: p.detach() for name, p in loaded.named_parameters()}


@pytest.mark.parametrize("closed", [False, True])
def test_attached_anew_a_model_has_what_it_has_learnt(closed, tmp_path):
    model = small_model("llama")
    first = attached(model, tmp_path / "a")
    learn(model)
    learnt = stored(first, tmp_path / "one")
    if closed:
        first.close()
    with attached(model, tmp_path / "b") as second:
        assert first.closed and second.step == 0
        found = stored(second, tmp_path / "two")
        assert all(torch.equal(found[name], learnt[name]) for name in learnt)
        before, after = learn(model, 1)[0], learn(model, 1)[0]
        assert after < before and second.step == 2


def test_a_model_whose_store_is_gone_is_refused(tmp_path):
    model = small_model("llama")
    first = attached(model, tmp_path / "a")
    learn(model)
    first.close()
    lohan_store = tmp_path / "a" / "lohan-store"
    lohan_store.rename(tmp_path / "elsewhere")
    with pytest.raises(lohan.LohanError, match="is gone; load the model again"):
        attached(model, tmp_path / "b")


def test_an_attach_that_fails_leaves_the_earlier_session_as_it_was(tmp_path):
    model = small_model("llama")
    with attached(model, tmp_path / "a") as first:
        learn(model)
        with pytest.raises(lohan.LohanError, match="host budget"):
            lohan.attach(
                model, optimizer=lohan.AdamW(lr=0.1), batch=batches(1, batch=2, seq=8)[0],
                budget=lohan.Budget(host="1KiB", ssd=[tmp_path / "b"]),
            )  # fmt: skip
        assert not first.closed
        learn(model, 1)
        assert first.step == 3


@pytest.mark.parametrize("closed", [False, True])
def test_save_pretrained_streams_the_weights(closed, tmp_path):
    model = small_model("llama")
    session = attached(model, tmp_path / "ssd")
    learn(model)
    expected = stored(session, tmp_path / "exported")
    if closed:
        session.close()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine.txt").write_text("stays")
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.float32
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json", "generation_config.json", "mine.txt", "model.safetensors",
    ]  # fmt: skip
    with pytest.raises(lohan.LohanError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    session.close()


def test_state_dict_and_copies_are_in_memory(tmp_path, monkeypatch):
    model = small_model("llama")
    with attached(model, tmp_path / "ssd") as session:
        learn(model)
        expected = stored(session, tmp_path / "exported")
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        other = copy.deepcopy(model)
        assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())
        batch = batches(1, batch=2, seq=8)[0]
        with torch.no_grad():
            assert torch.allclose(other(**batch).loss, model(**batch).loss, rtol=1e-5)
        other(**batch).loss.backward()  # of its own
        assert session.step == 2 and other.lm_head.weight.grad is not None
        learn(model, 1)
        assert session.step == 3
        monkeypatch.setattr("lohan.engine.stored.host_memory_bytes", lambda: 1000)
        with pytest.raises(lohan.LohanError, match=r"1000 B of memory are free; save_pretrained"):
            copy.deepcopy(model)
    assert host_memory_bytes() > 1000


def test_an_adapter_is_merged_while_it_streams(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra: pip install 'lohan[peft]'")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(small_model("llama"), lora)
    with attached(model, tmp_path / "ssd") as session:
        learn(model, 3)
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        session.export(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(small_model("llama"), tmp_path / "adapter")
    expected = dict(plain.merge_and_unload().named_parameters())
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    assert loaded.keys() == expected.keys()
    for name, parameter in loaded.items():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    start = dict(small_model("llama").named_parameters())
    changed = {name for name in start if not torch.equal(start[name], loaded[name])}
    assert len(changed) == 2 * 3 + 1
    in_memory = copy.deepcopy(merged)
    assert all(
        torch.allclose(p, expected[name], atol=1e-6) for name, p in in_memory.named_parameters()
    )


class Root(nn.Module):
    """Parameters on the root alone, or behind blocks that are frozen."""

    def __init__(self, *, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(blocks)).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x * self.a + self.b, y)


@pytest.mark.parametrize(("blocks", "clip"), [(0, 0.0), (0, 0.3), (2, 0.3)])
def test_parameters_on_the_root_learn_though_no_block_does(blocks, clip, tmp_path):
    torch.manual_seed(1)
    model = Root(blocks=blocks)
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(2, 4, 6, generator=generator).unbind() for _ in range(4)]
    optimizer = torch.optim.AdamW([plain.a, plain.b], lr=0.1, weight_decay=0.0)
    expected = []
    for x, y in data:
        loss = plain(x, y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with lohan.attach(
        model, optimizer=lohan.AdamW(lr=0.1), clip=clip,
        budget=lohan.Budget(host="16MiB", ssd=[tmp_path]),
    ) as session:  # fmt: skip
        found = []
        for x, y in data:
            loss = model(x, y)
            loss.backward()
            found.append(loss.item())
        assert session.step == len(data)
        assert found == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(model.state_dict()["a"], plain.a, atol=1e-6)
