"""`lohan train` end to end: from text and a tokenizer to a folder that plain transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lohan.config import load_config
from lohan.data import open_dataset
from lohan.device import accelerator, choose
from lohan.engine import attach as api
from lohan.engine.buffers import HostPool
from lohan.errors import ConfigError
from lohan.model.machine import Drive, Profile
from lohan.tools import plan_run
from lohan.train import inputs, trainer
from lohan.train.run_folder import read_rows
from lohan.util.units import format_bytes
from tests.support.training_runs import (
    MODEL_WORDS,
    TEXT_ROWS,
    RecordingDisplay,
    assert_refused,
    trained_in_memory,
    word_model_fixture,  # noqa: F401 - a fixture
    write_rows,
)

KEYS = {"step", "loss", "lr", "tokens", "step_s", "tokens_per_s", "rss_bytes"}


ANSWERS = [
    {
        "prompt": " ".join(MODEL_WORDS[3 + (i + j) % 9] for j in range(2 + i % 4)),
        "completion": " cat sat",
    }
    for i in range(9)
]


@pytest.mark.parametrize(("kind", "rows"), [("text", TEXT_ROWS), ("answers", ANSWERS)])
def test_trains_and_exports_a_model_from_a_text_file(kind, rows, lohan, model, tmp_path):
    data, out = write_rows(tmp_path / "data.jsonl", rows), tmp_path / "run"
    ended = lohan(
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        "--host",
        "64MiB",
        "--steps",
        5,
        "--batch",
        4,
        "--micro-batch",
        3,
        "--seq",
        16,
        "--lr",
        "1e-3",
        "--schedule",
        "linear",
        "--warmup",
        2,
        "--weight-decay",
        0.1,
    )
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines] == [1, 2, 3, 4, 5]
    dataset = open_dataset(out / "data", seed=0)
    for row in lines:
        assert row.keys() >= KEYS
        assert row["tokens"] == dataset.batch(row["step"] - 1, 4)["input_ids"].numel()
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
        assert row["rss_bytes"] > 2**20
    assert [row["lr"] for row in lines[:2]] == pytest.approx([5e-4, 1e-3])
    assert lines[-1]["lr"] == pytest.approx(1e-3 / 3)
    trained = dataset.summary.trained_tokens
    assert (trained < dataset.summary.tokens / 2) is (kind == "answers")

    tuned = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "model")
    ids = tokenizer("the cat sat on a mat", return_tensors="pt").input_ids
    wanted = trained_in_memory(model, out, 5, 4)
    untrained = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        assert torch.allclose(tuned(ids).logits, wanted(ids).logits, atol=1e-4)
        assert not torch.allclose(untrained(ids).logits, wanted(ids).logits, atol=1e-2)


def test_plain_text_file(lohan, model, tmp_path):
    (tmp_path / "book.txt").write_text("the cat sat on a red mat . " * 60)
    ended = lohan(
        "train",
        "--model",
        model,
        "--data",
        tmp_path / "book.txt",
        "--out",
        tmp_path / "run",
        "--host",
        "64MiB",
        "--epochs",
        1,
        "--batch",
        4,
        "--seq",
        16,
        "--lr",
        "3e-3",
    )
    assert ended.code == 0, ended.err
    losses = [json.loads(x)["loss"] for x in (tmp_path / "run/metrics.jsonl").open()]
    dataset = open_dataset(tmp_path / "run" / "data", seed=0)
    assert len(losses) == dataset.steps_for(1.0, 4) > 3
    assert losses[-1] < losses[0]


def test_bf16_several_drives_and_export(lohan, model, tmp_path):
    """`lohan export` gives the bytes of RUN/model; another dtype is the rounded fp32 master."""
    data, out = write_rows(tmp_path / "data.jsonl", TEXT_ROWS), tmp_path / "run"
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    ended = lohan(
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        "--host",
        "64MiB",
        "--ssd",
        drives[0],
        "--ssd",
        drives[1],
        "--steps",
        3,
        "--batch",
        2,
        "--seq",
        16,
        "--dtype",
        "bf16",
        "--lr",
        "1e-4",
    )
    assert ended.code == 0, ended.err
    assert all(sum(f.stat().st_size for f in d.rglob("slot-*.bin")) > 10_000 for d in drives)
    assert not (out / "store").exists()
    assert lohan("export", out, "--out", tmp_path / "again").code == 0
    exported, again = (
        {f.name: f.read_bytes() for f in folder.iterdir()}
        for folder in (out / "model", tmp_path / "again")
    )
    assert again.pop(".lohan-exported") != exported.pop(".lohan-exported")  # whose folder it is
    assert again == exported
    assert lohan("export", out, "--out", tmp_path / "wide", "--dtype", "fp32").code == 0
    narrow = load_file(out / "model" / "model.safetensors")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {t.dtype for t in narrow.values()} == {torch.bfloat16}
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    assert any(not torch.equal(wide[name], narrow[name].float()) for name in wide)
    again = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert lohan("store", "rm", out, "--yes").code == 0
    assert [*drives[0].iterdir(), *drives[1].iterdir()] == []


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--device", "cuda"], "--device: "), (["--host", "500TiB"], "host is 500.00 TiB, this mach")],
    ids=["device", "host"],
)
def test_rejects_missing_device_before_reading_data(
    options,
    message,
    dry,
    lohan,
    model,
    tmp_path,
    monkeypatch,
):
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the data was read first")

    def none_found() -> str:
        raise ConfigError("--device: torch finds no accelerator on this machine")

    monkeypatch.setattr(choose, "available_type", none_found)
    monkeypatch.setattr(accelerator, "available_type", none_found)
    for place in (trainer, plan_run):
        monkeypatch.setattr(place, "open_inputs", read)
    data = write_rows(tmp_path / "data.jsonl", TEXT_ROWS)
    ended = lohan(
        "train", "--model", model, "--data", data, "--out", tmp_path / "run", *options, *dry
    )
    assert_refused(ended, message)
    assert not (tmp_path / "run").exists()


def test_run_without_export_can_be_exported_later(lohan, model, tmp_path):
    data, out = write_rows(tmp_path / "data.jsonl", TEXT_ROWS), tmp_path / "run"
    given = ["train", "--model", model, "--data", data, "--out", out, "--host", "64MiB"]
    ended = lohan(*given, "--steps", 1, "--batch", 2, "--seq", 16, "--no-export")
    assert ended.code == 0, ended.err
    assert not (out / "model").exists()
    assert lohan("export", out, "--out", tmp_path / "model").code == 0


def test_pools_stay_within_plan_and_budget(model, tmp_path, monkeypatch):
    """The peak of the pool is at most the total of the printed ledger."""
    sessions, pools, written = [], [], []

    class Kept(HostPool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append(self)

    def attach(*args, **kwargs):
        sessions.append(api.attach(*args, **kwargs))
        written.append(sessions[-1].counters.bytes_written)
        return sessions[-1]

    monkeypatch.setattr("lohan.engine.executor.HostPool", Kept)
    monkeypatch.setattr(inputs, "attach", attach)
    overrides = {
        "model": model,
        "data": write_rows(tmp_path / "data.jsonl", TEXT_ROWS),
        "out": tmp_path / "run",
        "budget.host": "1MiB",
        "train.steps": 2,
        "train.batch": 2,
        "train.seq": 16,
        "output.export": False,
    }
    shown = RecordingDisplay()
    assert trainer.train(load_config(None, overrides=overrides), shown).step == 2
    (session,), (pool,) = sessions, pools
    assert 0 < pool.peak_bytes <= session.plan.tier_bytes("host") <= pool.budget_bytes == 2**20
    per_step = (session.counters.bytes_written - written[0]) // 2
    reported = next(line for line in shown.notes if "written per step" in line)
    assert reported == f"{format_bytes(per_step)} written per step"
    assert not any("wear" in line or "rated life" in line for line in shown.notes)  # it is nothing
    printed = [line for line in shown.notes if line.startswith(("host ", "ssd "))]
    for entry in session.plan.ledger:
        assert any(entry.owner in line and format_bytes(entry.bytes) in line for line in printed)


def test_a_run_on_a_known_machine_says_what_would_write_less(model, tmp_path, monkeypatch):
    """At its start, and in its journal."""
    drive = Drive(name="d", read=1e9, write=1e9)
    machine = Profile(
        name="m", device="cpu", compute=((1.0, 1e9),), host_bytes=2**30, adam=1e7, drives=(drive,)
    )
    worn = replace(drive, endurance_bytes=1e6, usd=100.0)
    monkeypatch.setattr(inputs, "cached_profile_of", lambda *given: machine)
    monkeypatch.setattr(trainer, "drives_at", lambda places: [worn])
    overrides = {
        "model": model,
        "data": write_rows(tmp_path / "data.jsonl", TEXT_ROWS),
        "out": tmp_path / "run",
        "budget.host": "1MiB",
        "train.steps": 1,
        "train.batch": 2,
        "train.seq": 16,
        "output.export": False,
        "budget.commit_every": "step",
    }
    shown = RecordingDisplay()
    trainer.train(load_config(None, overrides=overrides), shown)
    assert any(line.startswith("with --moments int8 ") for line in shown.notes)
    assert any("the rated life of the drive is" in line for line in shown.notes)
    assert any(line.startswith("wear is at 600 TB and 80 USD") for line in shown.notes)
    start = next(read_rows(tmp_path / "run" / "journal.jsonl"))
    assert "--moments int8" in [other["option"] for other in start["instead"]]
