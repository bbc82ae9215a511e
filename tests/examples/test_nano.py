"""The package has the same bits as examples/nano_lohan.py.

The example runs one action after another, with the state in plain files.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import lohan
from tests.support.model_folders import save_tokenizer
from tests.support.models import GROUPED_SIZES, assert_same, save_model

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "nano_lohan.py"
STEPS, BATCH, SEQ, VOCAB = 4, 6, 48, 1200  # more tokens than a slice of the head has
ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
# The embedding has more than one section of a sum of squares, and not whole ones.
# Weights are large, so that gradients are clipped.
SIZES = {**GROUPED_SIZES, "vocab_size": VOCAB, "initializer_range": 0.3}
Losses = dict[int, float]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def nano() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("nano_lohan", SOURCE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["nano_lohan"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["nano_lohan"]


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("nano") / str(request.param)
    save_model(place, LlamaConfig(**SIZES, tie_word_embeddings=request.param == "tied"))
    return place


def batch_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)


def weights_of(folder: Path) -> Weights:
    collected: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        collected |= load_file(file)
    return collected


def run_package(folder: Path, place: Path, *, clip: float) -> tuple[Losses, Weights]:
    model, losses = lohan.load(folder).train(), {}
    budget = lohan.Budget(host="64MiB", ssd=[place])
    with lohan.attach(
        model, optimizer=lohan.AdamW(**ADAMW), budget=budget, overlap=False, clip=clip
    ) as session:
        for step in range(STEPS):
            ids = batch_of(step)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses[step + 1] = loss.item()
        session.export(place / "model")
    return losses, weights_of(place / "model")


def run_nano(
    nano: Any, folder: Path, place: Path, *, clip: float, steps: int = STEPS, batch: int = BATCH
) -> tuple[Losses, Weights]:
    losses: Losses = {}
    nano.train(
        folder,
        lambda step: batch_of(step)[:batch],
        place,
        steps=steps,
        settings=nano.Settings(**ADAMW, clip=clip),
        report=losses.__setitem__,
    )
    return losses, weights_of(place / "model")


class PowerCut(BaseException):
    """A simulated power cut, derived from BaseException so that no code handles it."""


def cut_power(monkeypatch: pytest.MonkeyPatch, boundary: int) -> list[str]:
    """Count the calls that make files durable, before and after each, and stop at `boundary`."""
    crossed: list[str] = []

    def cross(name: str) -> None:
        crossed.append(name)
        if len(crossed) == boundary:
            raise PowerCut(name)

    def watch(name: str) -> None:
        original = getattr(os, name)

        def watched(*args: Any) -> None:
            cross(name)
            original(*args)
            cross(f"{name} done")

        monkeypatch.setattr(os, name, watched)

    watch("fsync")
    watch("replace")
    return crossed


@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipped", "unclipped"])
def test_has_the_bits_of_the_package(nano, folder, clip, tmp_path) -> None:
    losses, weights = run_nano(nano, folder, tmp_path / "nano", clip=clip)
    expected_losses, expected = run_package(folder, tmp_path / "package", clip=clip)
    assert losses == expected_losses
    assert_same(weights, expected)
    before = weights_of(folder)
    assert all(not torch.equal(weights[name], before[name]) for name in weights)
    interrupted = tmp_path / "interrupted"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(PowerCut):
        cut_power(monkeypatch, 40)
        run_nano(nano, folder, interrupted, clip=clip)
    assert 0 < nano.Store.open(interrupted / "state").step < STEPS
    resumed_losses, resumed = run_nano(nano, folder, interrupted, clip=clip)
    assert resumed_losses.items() <= expected_losses.items()
    assert_same(resumed, expected)


def test_clipping_changes_the_result(nano, folder, tmp_path) -> None:
    """Or the test above would compare one case twice."""
    one = run_nano(nano, folder, tmp_path / "one", clip=1.0, steps=2)[1]
    other = run_nano(nano, folder, tmp_path / "other", clip=0.0, steps=2)[1]
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_power_cut_anywhere_leaves_a_whole_step(nano, folder, tmp_path) -> None:
    """A power cut at any boundary of a step leaves the previous step or the new one, complete.

    A resumed run ends with the bits of an uninterrupted one.
    """
    begun, run = tmp_path / "begun", {"clip": 1.0, "steps": 2, "batch": 1}
    run_nano(nano, folder, begun, clip=1.0, steps=1, batch=1)
    expected = run_nano(nano, folder, shutil.copytree(begun, tmp_path / "whole"), **run)[1]
    collected = set()
    for boundary in itertools.count(1):
        place = shutil.copytree(begun, tmp_path / f"cut-{boundary}")
        with pytest.MonkeyPatch.context() as monkeypatch, suppress(PowerCut):
            crossed = cut_power(monkeypatch, boundary)
            run_nano(nano, folder, place, **run)
        if len(crossed) < boundary:
            break
        step = nano.Store.open(place / "state").step
        assert step == (2 if "replace done" in crossed else 1), crossed
        collected.add(step)
        assert_same(run_nano(nano, folder, place, **run)[1], expected)
    assert collected == {1, 2} and boundary > 16


def test_a_run_that_died_before_its_first_commit_starts_again(
    nano, folder, tmp_path, monkeypatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(PowerCut):
        cut_power(patched, 5)
        run_nano(nano, folder, tmp_path / "run", clip=1.0, steps=1)
    assert not nano.Store.exists(tmp_path / "run" / "state")
    again = run_nano(nano, folder, tmp_path / "run", clip=1.0, steps=1)
    assert_same(again[1], run_nano(nano, folder, tmp_path / "whole", clip=1.0, steps=1)[1])


@pytest.mark.parametrize("file", ["model.layers.1.b", "manifest"])
def test_a_damaged_byte_is_noticed(nano, folder, file, tmp_path) -> None:
    run_nano(nano, folder, tmp_path, clip=0.0, steps=1)
    path = tmp_path / "state" / file
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(SystemExit, match=rf"{re.escape(file)}\b.* damaged"):
        run_nano(nano, folder, tmp_path, clip=0.0, steps=2)


def test_command_trains_and_exports(nano, tmp_path, capsys) -> None:
    """The loss falls on a repetitive text, and transformers loads the result."""
    model = tmp_path / "my-model"
    save_model(model, LlamaConfig(**{**GROUPED_SIZES, "vocab_size": 264}))
    save_tokenizer(model)
    (tmp_path / "text.txt").write_text("the sea is wide, the sea is deep. " * 20)
    words = [str(model), str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    options = ["--seq", "32", "--lr", "3e-3"]
    nano.main([*words, *options, "--steps", "3"])
    nano.main([*words, *options, "--steps", "6"])
    lines = re.findall(r"step (\d+): loss ([\d.]+)", capsys.readouterr().out)
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4, 5, 6]
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.2
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert_same(weights_of(tmp_path / "run" / "model"), dict(tuned.state_dict()))


@pytest.mark.slow
def test_killed_process_resumes(tmp_path) -> None:
    """A process killed by SIGKILL at any time resumes."""
    model, text = tmp_path / "my-model", tmp_path / "text.txt"
    save_model(model, LlamaConfig(**{**GROUPED_SIZES, "vocab_size": 264}))
    save_tokenizer(model)
    text.write_text("the sea is wide, the sea is deep. " * 20)

    def start(out: str) -> subprocess.Popen[str]:
        words = [sys.executable, SOURCE, model, text, "--steps", "30", "--out", tmp_path / out]
        return subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)

    victim = start("killed")
    assert victim.stdout is not None
    assert next(line for line in victim.stdout if line.startswith("step 3:"))
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    for out in ("killed", "whole"):
        process = start(out)
        assert process.communicate()[0] and process.returncode == 0
    assert_same(weights_of(tmp_path / "killed" / "model"), weights_of(tmp_path / "whole" / "model"))
