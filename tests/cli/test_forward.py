"""Generation and evaluation from a store equal plain transformers, within the budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lohan as lohan_package
from lohan.config import load_config
from lohan.data import Encoder, prepare
from lohan.engine.buffers import HostPool
from lohan.errors import BudgetError
from lohan.store.store import Store
from lohan.train.evaluation import evaluate
from lohan.train.generation import Sampling, encode_prompts, generate, read_prompts
from lohan.train.language import CausalLM
from lohan.train.streaming import Shape, _temporary, open_stream, source_of
from lohan.train.trainer import train
from tests.support.model_folders import WORD_TOKENS, generated_in_memory, write_word_model
from tests.support.training_runs import RecordingDisplay, assert_refused, modification_times

TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
PROMPTS = ["w1 w2 w3", "w9", "w20 w21 w5 w5 w40 w7"]


def answers(folder: Path, prompts: list[str], sampling: Sampling, **budget: str):
    encoder = Encoder(folder)
    ids = encode_prompts(encoder, prompts)
    longest = max(map(len, ids))
    shape = Shape(len(ids), longest, longest + sampling.max_new_tokens)
    limits = lohan_package.Budget(host="1MiB", ssd=[folder.parent], **budget)
    device = "emulated" if budget else "cpu"
    with open_stream(source_of(folder), shape, limits, device=device) as session:
        return generate(session.model, encoder, ids, sampling)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma2", "opt", "neox"])
def test_greedy_answers_are_those_of_transformers(kind, tmp_path):
    folder = write_word_model(tmp_path / "model", kind)
    got = answers(folder, PROMPTS, Sampling(max_new_tokens=12))
    assert got == generated_in_memory(folder, PROMPTS, max_new_tokens=12, do_sample=False)
    assert any(got) and [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_greedy_answers_through_a_device_with_its_own_memory(kind, tmp_path):
    folder = write_word_model(tmp_path / "model", kind)
    got = answers(folder, PROMPTS, Sampling(max_new_tokens=12), device="400KiB")
    assert got == generated_in_memory(folder, PROMPTS, max_new_tokens=12, do_sample=False)
    with pytest.raises(BudgetError, match=r"device budget too small.* raise --device-memory to"):
        answers(folder, PROMPTS, Sampling(), device="40KiB")


def test_chosen_answers_depend_on_the_seed_only(tmp_path):
    folder = write_word_model(tmp_path / "model", "llama")
    how = Sampling(max_new_tokens=10, temperature=1.5, top_p=0.9, seed=7)
    state = torch.get_rng_state()
    got = answers(folder, PROMPTS, how)
    assert torch.equal(torch.get_rng_state(), state)
    assert got == generated_in_memory(
        folder,
        PROMPTS,
        max_new_tokens=10,
        do_sample=True,
        temperature=1.5,
        top_p=0.9,
        top_k=0,
        seed=7,
    )
    assert got != answers(folder, PROMPTS, Sampling(**{**how.__dict__, "seed": 8}))


def test_prompts_go_through_the_chat_template(tmp_path):
    folder = write_word_model(tmp_path / "model", "llama", template=TEMPLATE)
    ids = encode_prompts(Encoder(folder), PROMPTS[:1])
    assert [WORD_TOKENS[i] for i in ids[0]] == ["<user>", "w1", "w2", "w3", "<bot>"]
    got = answers(folder, PROMPTS, Sampling(max_new_tokens=6))
    assert got == generated_in_memory(folder, PROMPTS, max_new_tokens=6, do_sample=False)


def test_prompt_once_then_one_pass_a_token(tmp_path, monkeypatch):
    """The prompt is processed once, and then every pass has one token.

    The budget holds, and what does not fit in memory is read in every pass.
    """
    folder = write_word_model(tmp_path / "model", "llama")
    pools, widths = [], []

    class Kept(HostPool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pools.append(self)

    monkeypatch.setattr("lohan.engine.executor.HostPool", Kept)
    encoder = Encoder(folder)
    ids = encode_prompts(encoder, PROMPTS)
    limits = lohan_package.Budget(host="120KiB", ssd=[tmp_path])
    with open_stream(source_of(folder), Shape(3, 6, 13), limits) as session:
        assert session.plan.weight_slots == 2 and not session.plan.host_cached_weights
        session.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda module, args: widths.append(args[0].shape[1])
        )
        before = session.counters.bytes_read
        generate(session.model, encoder, ids, Sampling(max_new_tokens=7))
        read = session.counters.bytes_read - before
        assert session.counters.bytes_written == 0 or session.step == 0
        moving = [
            group.numel * 4
            for group in session.context.blocks.groups
            if not group.resident and group.key not in session.plan.host_cached_weights
        ]
    assert widths[0] == 6 and set(widths[1:]) == {1} and len(widths) <= 7
    assert len(widths) * sum(moving) * 0.5 < read <= (len(widths) + 1) * sum(moving)
    assert 0 < pools[0].peak_bytes <= 200 * 2**10


def test_a_run_answers_as_its_exported_folder(lohan, tmp_path):
    folder = write_word_model(tmp_path / "model", "qwen3")
    rows = [{"text": " ".join(f"w{(i * j) % 40}" for j in range(1, 9))} for i in range(9)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    given = {
        "model": folder,
        "data": data,
        "out": tmp_path / "run",
        "budget.host": "8MiB",
        "train.steps": 3,
        "train.batch": 3,
        "train.seq": 16,
        "train.lr": 1e-2,
        "train.dtype": "bf16",
    }
    train(load_config(None, overrides=given), RecordingDisplay())
    run, exported = tmp_path / "run", tmp_path / "run" / "model"
    want = generated_in_memory(exported, PROMPTS, max_new_tokens=9, do_sample=False)
    requested = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    before = modification_times(run / "store")
    ended = lohan("generate", run, *requested, "--max-new-tokens", 9, "--host", "300KiB", "--json")
    assert ended.code == 0, ended.err
    assert [pair["text"] for pair in json.loads(ended.out)] == want
    ended = lohan("generate", run, *requested[:2], "--max-new-tokens", 9, "--host", "300KiB")
    alone = generated_in_memory(exported, PROMPTS[:1], max_new_tokens=9, do_sample=False)
    assert ended.code == 0 and ended.out.strip() == alone[0].strip()
    after = modification_times(run / "store")
    aside = ("lock", "scratch.bin")  # room for gradients, made again with every opening
    assert [k for k in before if not k.endswith(aside) and after.get(k) != before[k]] == []

    ended = lohan("eval", run, "--data", data, "--host", "300KiB", "--seq", 16, "--json")
    assert ended.code == 0, ended.err
    net = AutoModelForCausalLM.from_pretrained(exported, dtype="auto").eval()
    dataset = prepare(data, model_dir=folder, cache_dir=tmp_path / "tokens", seq=16)
    result = evaluate(net, dataset, batch=8, task=CausalLM())
    assert result is not None
    assert json.loads(ended.out)["loss"] == pytest.approx(result.loss, rel=1e-3)
    assert json.loads(ended.out)["tokens"] == result.tokens == dataset.summary.trained_tokens
    ended = lohan("eval", exported, "--data", data, "--host", "300KiB", "--ssd", tmp_path)
    assert ended.code == 0 and "perplexity" in ended.out
    assert not list(tmp_path.glob("lohan-weights-*"))


def test_weights_of_a_folder_take_no_state(tmp_path):
    folder = write_word_model(tmp_path / "model", "llama")
    limits = lohan_package.Budget(host="1MiB", ssd=[tmp_path])
    with open_stream(source_of(folder), Shape(1, 8), limits) as session:
        groups = session.context.blocks.groups
        assert session.store.layout.disk_slot_bytes(0) == sum(group.numel for group in groups) * 4
        place = session.store.dirs[0]
        with pytest.raises(Exception, match="in use"):
            Store.open(place)
    assert not place.exists()


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--prompt", "w1", "--host", "10KiB"], r"needs .*KiB, --host allows 10\.00 KiB.*raise"),
        (["--prompt", "w1", "--top-p", "0"], r"--top-p: got 0, wants a share above 0"),
        (["--prompt", "w1", "--dtype", "int8"], r"--dtype: unknown 'int8'"),
    ],
)
def test_rejects_wrong_options(lohan, tmp_path, args, pattern):
    folder = write_word_model(tmp_path / "model", "llama")
    assert_refused(lohan("generate", folder, *args, "--ssd", tmp_path), pattern)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_nothing(lohan, tmp_path, monkeypatch, number):
    """Stopped while tokens are made: the temporary weights go."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    folder = write_word_model(tmp_path / "model", "llama")
    seen = []

    def stop(*args, **kwargs):
        seen.extend(tmp_path.glob("lohan-weights-*/store/*"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr("lohan.train.generation.generate", stop)
    ended = lohan("generate", folder, "--prompt", "w1", "--ssd", tmp_path, "--host", "1MiB")
    assert ended.code == 130 and "Traceback" not in ended.err and seen
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_rejects_folder_that_is_neither_run_nor_model(lohan, tmp_path):
    assert_refused(
        lohan("generate", tmp_path, "--prompt", "x"), r"neither a run .* nor a model folder"
    )
    assert_refused(
        lohan("eval", tmp_path, "--data", tmp_path / "x"), r"neither a run .* nor a model"
    )


def test_prompts_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo words\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three"}\n"four"\n')
    (tmp_path / "c.json").write_text('[{"text": "five"}]')
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.json")]
    assert read_prompts(["zero", *files]) == ["zero", "one", "two words", "three", "four", "five"]
    (tmp_path / "d.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(Exception, match=r"d\.jsonl: not a file of prompts"):
        read_prompts([str(tmp_path / "d.jsonl")])


def test_weights_of_a_killed_process_are_removed_by_the_next(tmp_path):
    """Other folders stay, and so does that of a process that still runs."""
    folder = write_word_model(tmp_path / "model", "llama")
    code = (
        "import os; from pathlib import Path; from lohan.train.streaming import _temporary\n"
        f"with _temporary({str(tmp_path)!r}) as store:\n"
        "    store.mkdir(); (store / 'slot-a.bin').write_text('weights'); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == 9 and len(list(tmp_path.glob("lohan-weights-*"))) == 1
    (tmp_path / "lohan-weights-mine").mkdir()
    (tmp_path / "lohan-weights-mine" / "file").write_text("not LoHan's")
    with _temporary(tmp_path) as running:
        answers(folder, PROMPTS[:1], Sampling(max_new_tokens=1))
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"model", "lohan-weights-mine", running.parent.name}
