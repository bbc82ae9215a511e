"""Packed examples do not see each other, and each has the loss that it has alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from lohan.checkpoint.hf_folder import build_model
from lohan.data import dataset as arrange
from lohan.data import prepare
from lohan.data.dataset import IGNORE
from lohan.errors import ModelError
from lohan.train.evaluation import evaluate
from lohan.train.language import CausalLM, check_packs
from lohan.train.run_folder import RunFolder, step_rows
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model
from tests.support.training_runs import trained_in_memory

EXAMPLES = [
    [(7 * i + j * j) % (FAMILY_VOCAB - 3) + 3 for j in range(2 + (5 * i) % 9)] for i in range(11)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write examples of 2 to 10 tokens, some with a part that carries no loss."""
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {
            "input_ids": ids,
            "labels": [IGNORE if i % 3 == 0 and j == 1 else t for j, t in enumerate(ids)]
            if len(ids) > 2
            else ids,
        }
        for i, ids in enumerate(EXAMPLES)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def dataset(data: Path, place: Path, seq: int = 16):
    return prepare(data, model_dir=place, cache_dir=place / "tokens", seq=seq, seed=3)


EAGER_ONLY = ("gemma2", "gptj")
CASES = [(kind, "eager") for kind in sorted(FAMILY_CONFIGS) if kind != "opt"]
CASES += [(kind, "sdpa") for kind, _ in CASES if kind not in EAGER_ONLY]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_packed_example_has_loss_of_unpacked_example(kind, attention, data, tmp_path):
    model = save_model(tmp_path / "model", FAMILY_CONFIGS[kind])
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    check_packs(build_model(tmp_path / "model", dtype=torch.float32, attn_implementation=attention))
    alone = dataset(data, tmp_path)
    packed = alone.pack()
    assert 3 < len(packed) < len(alone) and packed.longest <= 16
    checked = 0
    with torch.no_grad():
        for step in range(2):
            batch = packed.batch(step, 2)
            assert "attention_mask" not in batch
            labels = batch.pop("labels")
            logits = model(**batch).logits
            for row, index in enumerate(packed.indices(step, 2)):
                at = 0
                for example in packed.rows[int(index)]:
                    ids, want = (torch.from_numpy(x).long() for x in alone.example(int(example)))
                    span = slice(at, at + len(ids))
                    logits_alone = model(input_ids=ids[None]).logits[0]
                    torch.testing.assert_close(
                        logits[row, span], logits_alone, rtol=1e-4, atol=1e-5
                    )
                    assert torch.equal(batch["input_ids"][row, span], ids)
                    assert labels[row, at] == IGNORE
                    assert torch.equal(labels[row, span][1:], want[1:])
                    at += len(ids)
                    checked += 1
                assert (labels[row, at:] == IGNORE).all()
    assert checked > 5


def test_logits_ignore_previous_example_in_packed_row(tmp_path):
    """The mask, bit for bit: another first example in the row, the same second one."""
    model = save_model(tmp_path / "model", FAMILY_CONFIGS["llama"])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ids = torch.tensor([[5, 6, 7, 10, 11, 12, 13], [50, 60, 70, 10, 11, 12, 13]])
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions.expand(2, 7), use_cache=False).logits
        mixed = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(out[0, 3:], out[1, 3:])
    assert not torch.allclose(mixed[0, 3:], mixed[1, 3:])


def test_evaluation_does_not_depend_on_packing(data, tmp_path):
    model = save_model(tmp_path / "model", FAMILY_CONFIGS["qwen3"])
    model.config.use_cache = False
    rows = dataset(data, tmp_path)
    apart, packed = (
        evaluate(model, r, batch=b, task=CausalLM()) for r, b in ((rows, 3), (rows.pack(), 2))
    )
    assert apart is not None and packed is not None
    assert packed.loss == pytest.approx(apart.loss, rel=1e-6)
    assert packed.tokens == apart.tokens == rows.summary.trained_tokens


def test_packed_run_matches_in_memory_training(lohan, data, tmp_path):
    save_model(tmp_path / "model", FAMILY_CONFIGS["llama"])
    out = tmp_path / "run"
    ended = lohan(
        "train",
        "--model",
        tmp_path / "model",
        "--data",
        data,
        "--out",
        out,
        "--host",
        "8MiB",
        "--pack",
        "--epochs",
        3,
        "--batch",
        3,
        "--micro-batch",
        2,
        "--seq",
        16,
        "--lr",
        "1e-3",
    )
    assert ended.code == 0, ended.err
    steps = len(step_rows(RunFolder(out)))
    rows = dataset(data, tmp_path).pack()
    assert f"11 examples packed into {len(rows)} rows" in ended.out
    assert steps == -(-3 * len(rows) // 3)
    tuned = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    wanted = trained_in_memory(tmp_path / "model", out, steps, 3, pack=True)
    ids = torch.tensor([EXAMPLES[-1]])
    with torch.no_grad():
        torch.testing.assert_close(tuned(ids).logits, wanted(ids).logits, rtol=1e-3, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=200),
    seed=st.integers(0, 9),
)
def test_every_example_is_in_one_row_that_holds_it(lengths: list[int], seed: int) -> None:
    members = np.arange(len(lengths)) * 2  # of a split: not all numbers
    rows = arrange.pack(members, np.array(lengths), seq=16, seed=seed)
    assert sorted(i for row in range(len(rows)) for i in rows[row]) == members.tolist()
    sums = [sum(lengths[i // 2] for i in rows[row]) for row in range(len(rows))]
    assert all(0 < total <= 16 for total in sums)
    if len(rows) <= arrange.OPEN_ROWS:  # then no two of them would go into one
        assert sum(total <= 8 for total in sums) <= 1
    again = arrange.pack(members, np.array(lengths), seq=16, seed=seed)
    assert again.members.tolist() == rows.members.tolist()


def test_rejects_packing_for_unsupported_models() -> None:
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    )
    with pytest.raises(ModelError, match=r"--pack: Bloom.* takes no position_ids"):
        check_packs(bloom)
    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)
    )
    with pytest.raises(ModelError, match="train without --pack"):
        check_packs(mamba)
    llama = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILY_CONFIGS["llama"]))
    llama.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="flash_attention_2 attention, which is not given a mask"):
        check_packs(llama)


def test_detects_model_that_drops_positions(tmp_path) -> None:
    """OPT takes position_ids and makes its mask without them: examples would see each other."""
    model = save_model(tmp_path / "model", FAMILY_CONFIGS["opt"])
    ids = torch.tensor([[5, 6, 7, 10, 11, 12, 13], [50, 60, 70, 10, 11, 12, 13]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, 7)
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert not torch.allclose(out[0, 3:], out[1, 3:])
    for attention in ("sdpa", "eager"):  # without a mask, and with one for whole rows
        built = build_model(tmp_path / "model", dtype=torch.float32)
        built.set_attn_implementation(attention)
        with pytest.raises(ModelError, match="mask without looking at position_ids"):
            check_packs(built)
