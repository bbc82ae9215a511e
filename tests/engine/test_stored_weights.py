"""Trained weights in a store can be attached again, saved, copied and merged."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lohan
from lohan.checkpoint.replacing import SAVED, SAVED_MARK, joining, replacing
from lohan.util.memory import host_memory_bytes
from tests.support.models import batches, small_model
from tests.support.stores import file_digests


def attached(model: nn.Module, place: Path, *, lr: float = 1e-2, **options: Any) -> lohan.Session:
    batch = batches(1, batch=2, seq=8)[0]
    return lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=lr),
        budget=lohan.Budget(host="64MiB", ssd=[place]),
        batch=batch,
        **options,
    )


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
def test_model_attached_again_keeps_its_weights(closed, tmp_path):
    model = small_model("llama")
    first = attached(model, tmp_path / "a")
    learn(model)
    learnt = stored(first, tmp_path / "one")
    if closed:
        first.close()
    with attached(model, tmp_path / "b") as second:
        assert first.closed and second.step == 0
        actual = stored(second, tmp_path / "two")
        assert all(torch.equal(actual[name], learnt[name]) for name in learnt)
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
                model,
                optimizer=lohan.AdamW(lr=0.1),
                batch=batches(1, batch=2, seq=8)[0],
                budget=lohan.Budget(host="1KiB", ssd=[tmp_path / "b"]),
            )
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
        ".lohan-saved",
        "config.json",
        "generation_config.json",
        "mine.txt",
        "model.safetensors",
    ]
    with pytest.raises(lohan.LohanError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    session.close()


# -- saving into a folder that is there -----------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_saving_again_replaces_what_was_saved(tmp_path):
    """One file, then many, then one again; other files are kept."""
    model, saved = small_model("llama"), tmp_path / "saved"
    with attached(model, tmp_path / "ssd") as session:
        for size in (None, "20KB", "20KB", None):
            learn(model, 1)
            model.save_pretrained(saved, **({} if size is None else {"max_shard_size": size}))
            (saved / "mine.txt").write_text("stays")
            expected = stored(session, tmp_path / "exported")
            loaded = AutoModelForCausalLM.from_pretrained(saved).named_parameters()
            assert all(torch.equal(p, expected[name]) for name, p in loaded)
            assert ("model.safetensors" in names(saved)) == (size is None)
            assert ("model.safetensors.index.json" in names(saved)) == (size is not None)
    assert names(saved) == {
        "config.json",
        "generation_config.json",
        "mine.txt",
        "model.safetensors",
    }


FOREIGN = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "link",
)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_files_of_the_user_are_kept(foreign, tmp_path):
    model, saved = small_model("llama"), tmp_path / "saved"
    saved.mkdir()
    (tmp_path / "precious").write_text("mine")
    if foreign == "link":
        (saved / "model.safetensors").symlink_to(tmp_path / "precious")
    else:
        (saved / foreign).write_text("mine")
    before = file_digests(tmp_path)
    with attached(model, tmp_path / "ssd"):
        with pytest.raises(lohan.LohanError, match=r"did not save there .*give another folder"):
            model.save_pretrained(saved)
        assert before.items() <= file_digests(tmp_path).items()
        assert len(list(saved.iterdir())) == 1
        model.save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "model.safetensors").write_text("edited")
        with pytest.raises(lohan.LohanError, match=r"'model.safetensors', which LoHan did not"):
            model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "model.safetensors").read_text() == "edited"


def test_model_card_of_the_user_is_kept(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra: pip install 'lohan[peft]'")
    model = peft.get_peft_model(small_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "README.md").write_text("mine")
    (tmp_path / "saved" / "model.safetensors").write_text("the base's, which no adapter replaces")
    before = file_digests(tmp_path / "saved")
    with attached(model, tmp_path / "ssd"):
        for _ in range(2):
            model.save_pretrained(tmp_path / "saved")
    assert before.items() <= file_digests(tmp_path / "saved").items()
    peft.PeftModel.from_pretrained(small_model("llama"), tmp_path / "saved")


def save_shards(folder: Path, number: int) -> None:
    with joining(folder) as result, replacing(result, check=lambda: None, mark=SAVED) as new:
        for name in SHARDS:
            (new / name).write_text(str(number))


def loads(folder: Path) -> str:
    """Return what a loader finds: nothing without an index, and never shards of two saves."""
    if not (folder / SHARDS[-1]).exists():
        return "none"
    (actual,) = {(folder / name).read_text() for name in SHARDS[1:]}
    return actual


SHARDS = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


@pytest.mark.parametrize("killed", [False, True])
def test_a_save_that_stops_anywhere_leaves_no_mixture(killed, tmp_path, monkeypatch):
    """A save that stops at any rename leaves the old model, never a mixture.

    If the process is killed, there may be no loadable model until one is saved again.
    """
    folder, rename, left, outcomes = tmp_path / "saved", Path.rename, 0, []

    def renamed(path: Path, to: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0 and killed:
            os._exit(7)
        if left == 0:
            raise KeyboardInterrupt
        return rename(path, to)

    def stops(at: int) -> bool:
        nonlocal left
        left = at
        if killed and (pid := os.fork()):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", renamed)
            try:
                save_shards(folder, 2)
            except KeyboardInterrupt:
                return True
        if killed:
            os._exit(0)
        return False

    for at in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        save_shards(folder, 1)
        if not stops(at):
            break
        outcomes.append(loads(folder))
        save_shards(folder, 3)
        assert loads(folder) == "3"
        assert {path.name for path in folder.iterdir()} == {SAVED_MARK, *SHARDS}
    assert len(outcomes) == 10  # two of folders, four files aside, four in their places
    assert set(outcomes) == ({"1", "none"} if killed else {"1"})


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
        monkeypatch.setattr("lohan.engine.stored_weights.host_memory_bytes", lambda: 1000)
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
    """A model with parameters on its root only, or behind frozen blocks."""

    def __init__(self, *, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(blocks)).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x * self.a + self.b, y)


@pytest.mark.parametrize(("blocks", "clip"), [(0, 0.0), (0, 0.3), (2, 0.3)])
def test_trains_root_parameters_without_trained_blocks(blocks, clip, tmp_path):
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
        model,
        optimizer=lohan.AdamW(lr=0.1),
        clip=clip,
        budget=lohan.Budget(host="16MiB", ssd=[tmp_path]),
    ) as session:
        collected = []
        for x, y in data:
            loss = model(x, y)
            loss.backward()
            collected.append(loss.item())
        assert session.step == len(data)
        assert collected == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(model.state_dict()["a"], plain.a, atol=1e-6)
