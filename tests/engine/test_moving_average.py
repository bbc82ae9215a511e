"""The moving average of the weights is updated once per step and kept on SSD.

It is the same however a run is cut, stopped or overlapped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lohan
from lohan.checkpoint.store_io import store_reader
from lohan.errors import ConfigError, StoreError
from lohan.model.state import state_format_of
from lohan.planner.memory import MemoryModel
from tests.support.architectures import architecture_batches, architecture_model
from tests.support.delayed_runs import PlanTuning, tune_plans
from tests.support.models import batches, loss_of, lr, master_weights, small_model
from tests.support.training_runs import (
    TINY_CONFIG,
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
)


@pytest.fixture
def cli(lohan):
    """Return the command line under a name that the package does not have."""
    return lohan


DECAY = 0.9
BUDGET = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(**more) -> lohan.AdamW:
    return lohan.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **{"ema": DECAY, **more})


def average(session: lohan.Session) -> dict[str, torch.Tensor]:
    session.commit()
    read = store_reader(session.store, ema=True)
    return {
        tensor.name: read(tensor.name, 0, tensor.numel)
        for group in session.executor.blocks.groups
        for tensor in group.tensors
    }


def run(net, steps, place: Path, *, optimizer=None, resume=False, host="64MiB", **options):
    """Return the average after the steps, and the one computed from the weights of every step."""
    budget = lohan.Budget(host=host, ssd=[place])
    expected: dict[str, torch.Tensor] = {}
    with lohan.attach(
        net, optimizer=optimizer or adamw(), budget=budget, resume=resume, **options
    ) as session:
        expected = {n: w.reshape(-1) for n, w in master_weights(session).items()}
        for batch in steps:
            loss_of(net, batch).backward()
            for name, weights in master_weights(session).items():
                moved = expected[name] * DECAY + weights.reshape(-1) * (1 - DECAY)
                expected[name] = moved
        return average(session), expected


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_moving_average_follows_the_weights_of_every_step(mode, tmp_path):
    steps = batches(5, batch=2, seq=16)
    result, expected = run(small_model("llama", dtype=BUDGET[mode]), steps, tmp_path)
    assert result.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.allclose(result[name], wanted, atol=1e-7, rtol=1e-6), name


def test_moving_average_does_not_affect_training(tmp_path):
    steps = batches(3, batch=2, seq=16)
    plain = {}
    for place, decay in (("with", DECAY), ("without", 0.0)):
        net = small_model("llama")
        budget = lohan.Budget(host="64MiB", ssd=[tmp_path / place])
        with lohan.attach(net, optimizer=lohan.SGD(lr=1e-2, ema=decay), budget=budget) as session:
            for batch in steps:
                loss_of(net, batch).backward()
            plain[place] = master_weights(session)
    assert all(torch.equal(plain["with"][n], w) for n, w in plain["without"].items())


VARIANTS = {
    "serial": {"overlap": False, "update_mode": "serial"},
    "clipped": {"clip": 1e9},
    "other chunks": {},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_bit_depends_on_overlap_or_chunks(name, tmp_path, monkeypatch):
    steps, options = batches(4, batch=2, seq=16), dict(VARIANTS[name])
    usual, _ = run(small_model("llama"), steps, tmp_path / "usual")
    if name == "other chunks":
        monkeypatch.setattr("lohan.engine.buffers.AVERAGED_PARAMETERS", 1000)
        tune_plans(monkeypatch, PlanTuning())
    result, _ = run(small_model("llama"), steps, tmp_path / "other", **options)
    assert all(torch.equal(result[n], usual[n]) for n in usual)


def test_resumed_run_has_the_same_moving_average(tmp_path):
    steps = batches(5, batch=2, seq=16)
    whole, _ = run(small_model("llama"), steps, tmp_path / "whole")
    run(small_model("llama"), steps[:2], tmp_path / "parts")
    parts, _ = run(small_model("llama"), steps[2:], tmp_path / "parts", resume=True)
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    with pytest.raises(StoreError, match=r"averaged weights, this run is for .*ema=DECAY"):
        run(small_model("llama"), [], tmp_path / "parts", optimizer=adamw(ema=0.0), resume=True)


def test_experts_and_tensors_without_gradients_move_too(tmp_path):
    """Weights without a gradient stay, but their average still approaches them."""
    net = architecture_model("mixtral")
    result, expected = run(net, architecture_batches("mixtral", 3), tmp_path)
    assert all(torch.allclose(result[n], w, atol=1e-7, rtol=1e-6) for n, w in expected.items())


def test_plan_adds_four_bytes_per_parameter_for_the_moving_average(tmp_path):
    """Four bytes per parameter more, of every chunk that is read, written and held."""
    plans = {}
    for name, decay in (("with", DECAY), ("without", 0.0)):
        net = small_model("llama")
        budget = lohan.Budget(host="64MiB", ssd=[tmp_path / name])
        optimizer = adamw(ema=decay)
        with lohan.attach(net, optimizer=optimizer, budget=budget) as session:
            plans[name] = session.plan
            blocks = session.context.blocks
            memory = MemoryModel(blocks, "fp32", None, None, kind=optimizer.kind)
            assert memory.state_format == state_format_of("fp32", optimizer.kind)
            for batch in batches(2, batch=2, seq=16):
                before = session.store.counters
                loss_of(net, batch).backward()
                session.flush()
            moved = session.store.counters.bytes_written - before.bytes_written
            plans[f"{name} written"] = moved
    more = plans["with written"] - plans["without written"]
    assert 4 * blocks.parameters <= more < 5 * blocks.parameters
    ledgers = [plans[name].tier_bytes("ssd") for name in ("with", "without")]
    assert ledgers[0] - ledgers[1] >= 2 * 4 * blocks.parameters  # two generations


def test_the_command_line(cli, model, data, tmp_path):
    out = tmp_path / "run"
    words = (
        "--model",
        model,
        "--data",
        data,
        "--host",
        "64MiB",
        "--seq",
        16,
        "--batch",
        2,
        "--steps",
        3,
        "--lr",
        "1e-2",
        "--schedule",
        "constant",
    )
    ended = cli("train", *words, "--out", out, "--ema", 0.5)
    assert ended.code == 0 and "averaged weights: " in ended.out, ended
    again = cli("export", out, "--ema", "--out", tmp_path / "averaged")
    assert again.code == 0 and "averaged weights after step 3" in again.out, again
    tuned, averaged, exported = (
        load_file(folder / "model.safetensors")
        for folder in (out / "model", tmp_path / "averaged", out / "ema")
    )
    assert all(torch.equal(averaged[n], exported[n]) for n in tuned)
    assert any(not torch.equal(averaged[n], tuned[n]) for n in tuned)
    config = json.loads((out / "ema" / "config.json").read_text())
    assert config["hidden_size"] == TINY_CONFIG.hidden_size
    plan = cli("plan", "--model", model, "--host", "64MiB", "--ema", 0.5)
    assert plan.code == 0 and "averaged weights" in plan.out, plan
    assert cli("train", *words, "--out", tmp_path / "plain").code == 0
    refused = cli("export", tmp_path / "plain", "--ema", "--out", tmp_path / "none")
    assert refused.code == 2 and "holds no averaged weights" in refused.err, refused


def test_rejects_decay_out_of_range():
    with pytest.raises(ConfigError, match=r"AdamW ema is 1.0; it must lie in \[0, 1\)"):
        lohan.AdamW(ema=1.0)
